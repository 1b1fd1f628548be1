"""Checkpoints: written while training continues, rejected when they are not what was written, pruned as asked."""

import dataclasses
import errno
import json
import shutil
import signal
import threading
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from infcl.checkpoint.load import checkpoint_step, complete_checkpoints, consolidated_state_dict
from infcl.checkpoint.run_folder import RunFolder
from infcl.report.records import read_records
from tests.lib.engine_steps import engine_on_cpu
from tests.lib.manifests import trainer_state_of, writer_on
from tests.lib.ranks import run_ranks
from tests.lib.step_oracle import LR, ToyCLIP, global_batch
from tests.lib.training import demo_config, fit, new_trainer, rejection


def saved_while_a_step_is_made(rank, world_size, preset, folder):
    """(weights before the step, those of the checkpoint that was begun then, weights after it, states in the files)."""
    from infcl.checkpoint import write as checkpoint_writer
    from infcl.checkpoint.load import full_weights

    run, engine = RunFolder(folder), engine_on_cpu(ToyCLIP(), preset, grad_clip_norm=None)
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    writer = checkpoint_writer.CheckpointWriter(engine, run, engine.parallel, keep_last=0)
    before, stepped, write = full_weights(engine, keep=True), threading.Event(), checkpoint_writer._write_tensors

    def write_late(path, *content):
        assert stepped.wait(60)
        return write(path, *content)

    with mock.patch.object(checkpoint_writer, "_write_tensors", write_late):
        writer.begin(1, trainer_state_of(1))
        output = engine.encode(*global_batch(4, seed=rank))
        engine.backward((output["image_features"] * output["text_features"]).sum() + output["logit_scale"].sum(), True)
        engine.step(LR)
        stepped.set()
        writer.begin(2, trainer_state_of(2))
        writer.publish()
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["latest", "step_00000001", "step_00000002"]
    assert (run.checkpoints / "latest").read_text() == "step_00000002\n"
    path = complete_checkpoints(run)[1]
    states = load_file(path / f"state_{rank:05d}.safetensors")
    return before, consolidated_state_dict(path), full_weights(engine, keep=True), states


@pytest.mark.first(1)
@pytest.mark.parametrize("preset", ["zero0", "zero1", "zero3"])
def test_a_checkpoint_holds_what_there_was_when_it_was_begun_though_it_is_written_later(tmp_path, preset):
    for before, saved, after, states in run_ranks(saved_while_a_step_is_made, 2, preset, tmp_path):
        assert set(saved) == set(before) and all(torch.equal(saved[name], before[name]) for name in before)
        assert not all(torch.equal(after[name], before[name]) for name in before)
        moments = [value for key, value in states.items() if key.startswith("exp_avg")]
        assert moments and not any(value.any() for value in moments)


@pytest.fixture(scope="module")
def finished(demo_folder, tmp_path_factory):
    """A finished run of 3 steps with a checkpoint at each, and its config."""
    logs = tmp_path_factory.mktemp("runs")
    config = demo_config(demo_folder, logs, steps=3, batch_size=16, save_every_n_steps=1)
    run_ranks(fit, 2, config)
    return RunFolder(logs / "run"), config


def stopped_while_the_last_is_written(rank, world_size, config) -> str:
    from infcl.train.saves import Stopped

    trainer = new_trainer(config)
    finish = trainer.saves.finish

    def finish_late():
        trainer.signals.noted += [signal.SIGUSR1] * (rank == 1)
        return finish()

    trainer.saves.finish = finish_late
    with pytest.raises(Stopped) as stopped:
        trainer.fit()
    return str(stopped.value)


def test_a_signal_behind_the_last_step_leaves_evaluation_and_export_to_the_next_start(demo_folder, tmp_path):
    config = demo_config(demo_folder, tmp_path, steps=2, batch_size=16)
    assert run_ranks(stopped_while_the_last_is_written, 2, config) == ["SIGUSR1 received"] * 2
    assert complete_checkpoints(RunFolder(tmp_path / "run")) and not (tmp_path / "run" / "summary.json").exists()
    run_ranks(fit, 2, dataclasses.replace(config, resume="latest"))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2


def finished_on_a_full_disk(rank, world_size, config):
    trainer = new_trainer(config)
    trainer.signals.noted += [signal.SIGUSR1] * (rank == 1)
    trainer.saves.after_step = lambda *_, **__: None  # the signal comes behind it
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch("infcl.checkpoint.write._write_tensors", side_effect=full):
        return trainer.fit()["steps"]


def test_what_could_not_be_saved_is_exported_though_a_signal_came(demo_folder, tmp_path):
    """The trained model was lost: no checkpoint, and the export left to a start that had nothing to begin from."""
    config = demo_config(demo_folder, tmp_path, steps=2, batch_size=16)
    assert run_ranks(finished_on_a_full_disk, 2, config) == [2, 2]
    run = RunFolder(tmp_path / "run")
    assert not complete_checkpoints(run) and run.summary.is_file() and any(run.export.iterdir())


def test_a_damaged_checkpoint_is_rejected_by_all_ranks(finished, tmp_path):
    """The second rank reads the file."""
    run, config = finished
    copy = tmp_path / "step_00000003"
    shutil.copytree(complete_checkpoints(run)[0], copy)
    file = copy / "state_00001.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    messages = run_ranks(rejection, 2, dataclasses.replace(config, resume=str(copy), logs=str(tmp_path)))
    assert f"--resume {copy}: state_00001.safetensors has another checksum" in messages[0] == messages[1]


def test_a_run_does_not_go_back_under_its_later_checkpoints(finished):
    """They would count as its newest: kept instead of what it writes then, and taken by the next --resume latest."""
    run, config = finished
    before = [path.stat().st_ino for path in sorted(run.root.rglob("*"))]
    back = dataclasses.replace(config, resume=str(run.checkpoints / "step_00000001"))
    messages = run_ranks(rejection, 2, back)
    assert "continued from there, to step_00000003" in messages[0] and "step_00000002, step_00000003" in messages[0]
    assert messages[0] == messages[1]
    assert [path.stat().st_ino for path in sorted(run.root.rglob("*"))] == before
    elsewhere = run_ranks(fit, 2, dataclasses.replace(back, name="elsewhere"))[0]
    assert sorted(elsewhere) == [2, 3]


def test_a_run_that_began_from_anothers_checkpoint_goes_on_from_its_own(finished):
    """Or it would write below checkpoints that count as newer, which are kept in place of what it writes then."""
    run, config = finished
    began = dataclasses.replace(config, resume=str(run.checkpoints / "step_00000001"), name="began", keep_checkpoints=1)
    own = RunFolder(run.root.parent / "began")
    run_ranks(fit, 2, began, 3)
    left = own.checkpoints / "step_00000077.partial"  # by a kill
    left.mkdir()
    other = dataclasses.replace(began, resume=str(run.checkpoints / "step_00000002"))
    assert "checkpoints of its own, up to step_00000002" in run_ranks(rejection, 2, other)[1]
    assert left.exists()
    run_ranks(fit, 2, began)  # the same command again
    assert [record["step"] for record in read_records(own.metrics)] == [2, 3, 3], "step 2 is not done again"
    assert [checkpoint_step(path) for path in complete_checkpoints(own)] == [3] and not left.exists()

    own.summary.unlink()
    shutil.rmtree(own.checkpoints)
    latest = dataclasses.replace(began, resume="latest")
    assert f"began from {began.resume} and has no checkpoint yet" in run_ranks(rejection, 2, latest)[0]


def add_checkpoints(run, *steps):
    for step in steps:
        folder = run.checkpoints / f"step_{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "infcl.json").write_text("{}")


@pytest.mark.parametrize(("keep_last", "left"), [(0, range(9, 0, -1)), (2, [9, 8]), (1, [9]), (10, range(9, 0, -1))])
def test_pruning_keeps_the_last_ones(tmp_path, keep_last, left):
    """Copies by other names are no checkpoints of the run, and stay."""
    run = RunFolder(tmp_path)
    add_checkpoints(run, *range(1, 10))
    copies = [run.checkpoints / name for name in ("step_best", "step_00000001_best", "step_00000010.bak")]
    for copy in copies:
        shutil.copytree(run.checkpoints / "step_00000001", copy)
    writer_on(run, keep_last=keep_last).prune(run.checkpoints / "step_00000009")
    assert [checkpoint_step(path) for path in complete_checkpoints(run)] == list(left)
    assert all((copy / "infcl.json").is_file() for copy in copies)


def test_pruning_after_a_damaged_newer_checkpoint_keeps_what_the_run_went_on_to(tmp_path):
    """Steps 6 and 8 are damaged: the run continues from 4 and writes 8 again."""
    run, left = RunFolder(tmp_path), []
    writer = writer_on(run, keep_last=1)
    add_checkpoints(run, 1, 4, 6, 8)
    writer.continue_from(run.checkpoints / "step_00000004", 4)
    for step in (5, 7, 8):
        add_checkpoints(run, step)
        writer.prune(run.checkpoints / f"step_{step:08d}")
        left.append([checkpoint_step(path) for path in complete_checkpoints(run)])
    assert left == [[8, 6, 5], [8, 7], [8]]
