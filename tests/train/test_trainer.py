"""The whole trainer on the embedded data set: golden losses, ZeRO stages, exact resume, and what it leaves on disk."""

import contextlib
import dataclasses
import errno
import json
import os
import shutil
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from infcl.checkpoint import write as checkpoint_writer
from infcl.report import read_metrics
from infcl.report.records import read_records
from infcl.train import saves
from tests.lib.entry import golden
from tests.lib.ranks import run_ranks
from tests.lib.training import demo_config, fit, rejection, run_losses

FIRST = 8  # steps of the golden curve where stages, losses and compilers differ: the warm-up's five, and more


@pytest.mark.first(1)
@pytest.mark.parametrize("captions", ["on", "off"])
def test_twenty_steps_match_the_golden_curve(demo_folder, tmp_path, captions):
    losses = run_losses(1, demo_config(demo_folder, tmp_path, pack_captions=captions))
    assert losses == pytest.approx(golden(), rel=2e-3)
    assert losses[-1] < losses[0] - 0.5
    shares = {record["text_share"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl", "train")}
    assert shares == {1.0} if captions == "off" else max(shares) < 0.8


CHECKPOINTED = {"grad_checkpointing": True}
COMPILED = {"accum_freq": 4, "batch_size": 8, "compile_blocks": "on", "resident_micro_batches": "2"} | CHECKPOINTED
slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("zero1", {}),  # other ranks and micro-batches: the same losses up to the order of fp32 sums
        ("zero3", CHECKPOINTED),
        ("zero3_offload", CHECKPOINTED),
        ("zero1", {"loss": "open_clip"}),
        # of the slow ones tests/engine/test_engine.py has steps, tests/loss/test_losses.py the losses
        *(slow(preset, CHECKPOINTED) for preset in ("zero0", "zero2")),
        *(slow("zero1", {"loss": loss}) for loss in ("clip", "disco")),
        *(slow(preset, COMPILED) for preset in ("zero1", "zero3")),  # compiling takes a minute
    ],
)
def test_two_ranks_follow_the_golden_curve_in_every_way_to_train(demo_folder, tmp_path, preset, changes):
    flags = {"batch_size": 16, "deepspeed_config": f"ds_configs/{preset}.json"} | changes
    assert run_losses(2, demo_config(demo_folder, tmp_path, **flags), FIRST) == pytest.approx(golden(FIRST), rel=2e-3)


@pytest.mark.long
def test_siglip_trains_with_its_bias(demo_folder, tmp_path):
    """From scale 10 and bias -10 the first loss is a fixed number; two ranks must give what one gives."""
    flags = {"loss": "siglip", "steps": FIRST}
    losses = run_losses(2, demo_config(demo_folder, tmp_path / "two", batch_size=16, **flags))
    assert losses == pytest.approx(run_losses(1, demo_config(demo_folder, tmp_path / "one", **flags)), rel=2e-3)
    assert losses[-1] < 0.9 * losses[0]


def test_a_run_with_siglips_bias_continues_with_clips_loss(demo_folder, tmp_path):
    first = demo_config(demo_folder, tmp_path, batch_size=8, steps=1, loss="siglip", name="first")
    run_ranks(fit, 1, first)
    model = str(tmp_path / "first" / "model_config.json")
    second = dataclasses.replace(first, loss="inf_cl", name="second", model=model, pretrained=str(tmp_path / "first"))
    assert len(run_losses(1, second)) == 1
    assert "init_logit_bias" not in json.loads((tmp_path / "second" / "model_config.json").read_text())


def fit_with_lost_saves(rank, world_size, config, lost):
    """Saves of the steps `lost` fail on the last rank -> what ended the run."""
    write = checkpoint_writer._write_tensors

    def lose(path, *content):
        if rank == world_size - 1 and int(path.parent.name.split("_")[1].split(".")[0]) in lost:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        return write(path, *content)

    with mock.patch.object(checkpoint_writer, "_write_tensors", lose), mock.patch.object(saves, "MAX_FAILED_SAVES", 2):
        try:
            fit(rank, world_size, config)
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("ranks", "steps", "lost", "kept"),
    [  # in the last step saves are waited for: the run is evaluated and exported
        (1, 4, {1, 2, 3}, [4]),
        (1, 12, {2, 3, 4}, [1]),
        (2, 8, {2, 4, 5, 6}, [1, 3]),
    ],
)
def test_three_saves_that_fail_in_a_row_end_the_run_on_every_rank(demo_folder, tmp_path, ranks, steps, lost, kept):
    """They are counted before the next is begun. Two in a row, twice, do not end it, nor do those at the end."""
    flags = {"save_every_n_steps": 1, "accum_freq": 1, "warmup": 0, "keep_checkpoints": 0}
    config, run = demo_config(demo_folder, tmp_path, batch_size=4, steps=steps, **flags), tmp_path / "run"
    for ended in run_ranks(fit_with_lost_saves, ranks, config, lost):
        assert run.joinpath("summary.json").is_file() == (ended == "") == (steps == 4)
        if ended:
            assert ended.startswith("3 checkpoints in a row could not be written to") and "more than 2" in ended
            assert f"rank {ranks - 1}: No such device" in ended or ranks == 1
            assert ended.endswith(f"--resume latest continues from step_{kept[-1]:08d}")
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["latest", *(f"step_{step:08d}" for step in kept)]
    if ranks == 2:
        resumed = dataclasses.replace(config, resume="latest")
        assert run_ranks(fit_with_lost_saves, 2, resumed, {4, 5, 7, 8}) == ["", ""]
        assert json.loads((run / "summary.json").read_text())["failed_saves"] >= 4


def failed_export(rank, world_size, config, fault):
    """What a rank hears when rank 0 cannot export."""

    def export_model(*arguments, **options):
        raise KeyError("logit_scale")

    def full_weights(*arguments, **options):
        return {"logit_scale": torch.ones(1), "visual.proj": torch.tensor([1.0, torch.nan])} if rank == 0 else {}

    faults = {"export": ("results.export_model", export_model), "diverged": ("trainer.full_weights", full_weights)}
    name, broken = faults[fault]
    with pytest.MonkeyPatch.context() as patch:  # this process runs other tests too
        patch.setattr(f"infcl.train.{name}", broken)
        with pytest.raises(RuntimeError) as failure:
            fit(rank, world_size, config)
    return str(failure.value)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("export", "KeyError: 'logit_scale'"),
        ("diverged", "training has diverged: 1 weights are not finite, visual.proj first"),
    ],
)
def test_a_failure_to_export_ends_every_rank_and_reports_what_it_was(demo_folder, tmp_path, fault, cause):
    messages = run_ranks(failed_export, 2, demo_config(demo_folder, tmp_path, steps=1, warmup=0, batch_size=4), fault)
    assert messages[0] == messages[1] and "could not be written" in messages[0], messages
    assert cause in messages[0] and "step_00000001" in messages[0]
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_rejected_resume_leaves_the_run_as_it_was(demo_folder, tmp_path):
    config = demo_config(demo_folder, tmp_path, steps=3, save_every_n_steps=1)
    run_ranks(fit, 1, config, 2)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    other = dataclasses.replace(config, resume="latest", force_context_length=24, lr=1.0)
    message = run_ranks(rejection, 1, other)[0]
    assert "positional_embedding has shape" in message and "give the --model and --tokenizer of the run" in message
    assert {path: path.read_bytes() for path in before} == before


def test_a_resume_into_epochs_of_another_length_is_rejected(demo_folder, tmp_path):
    """Step 3 is in the second epoch of 128 samples, in the first of 256: samples would be left out or repeated."""
    config = demo_config(demo_folder, tmp_path, steps=9, train_num_samples=128, save_every_n_steps=1)
    run_ranks(fit, 1, config, 3)
    longer = dataclasses.replace(config, resume="latest", train_num_samples=256)
    message = run_ranks(rejection, 1, longer)[0]
    assert "epoch 1, step 0; an epoch has 4 steps now: give the --train-num-samples of the run" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "ViT-Z-99"}, "no model 'ViT-Z-99'"),
        ({"matryoshka_widths": [8, 65]}, "--matryoshka-widths 8 65: 65 is above the 64 dimensions"),
        (
            {"matryoshka_widths": [8, 16], "matryoshka_weights": [1.0]},
            "--matryoshka-weights 1 do not fit --matryoshka-widths 8 16",
        ),
        ({"resume": "/no/such/checkpoint"}, "no checkpoint of this trainer (there is no such folder)"),
        ({"logs": "/dev/null/runs"}, "/dev/null/runs/run cannot be written (Not a directory)"),
    ],
)
def test_what_cannot_work_is_rejected_by_every_rank(demo_folder, tmp_path, changes, message):
    messages = run_ranks(rejection, 2, dataclasses.replace(demo_config(demo_folder, tmp_path), **changes))
    assert message in messages[0]
    assert messages[0] == messages[1]


def evaluations(rank, world_size, config):
    """The evaluations in metrics.jsonl after a run that ends in its zero-shot evaluation of step 1, and after two more
    that continue from there."""
    from infcl.train.trainer import Trainer

    def run_task(trainer, name):
        if name in fails:
            raise KeyboardInterrupt
        trainer.metrics.evaluation(name, trainer.step, trainer.samples_seen, {})

    kept, fails = [], {"zero_shot"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_run_task", run_task)
        patch.setattr(Trainer, "_finish", lambda trainer: {})
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt) if fails else contextlib.nullcontext():
                fit(rank, world_size, config)
            fails.clear()
            shutil.rmtree(Path(config.logs) / config.name / "checkpoints" / "step_00000002", ignore_errors=True)
            records = read_records(Path(config.logs) / config.name / "metrics.jsonl")
            kept.append([(r["kind"], r["step"]) for r in records if r["kind"] != "train"])
    return kept


def test_an_evaluation_that_a_run_ended_before_is_made_up_for_once(demo_folder, tmp_path):
    flags = {"train_num_samples": 32, "batch_size": 16, "steps": 2, "save_frequency": 1, "resume": "latest"}
    flags |= {"zeroshot_frequency": 1}
    data = {"val_data": str(demo_folder / "val"), "zeroshot_data": str(demo_folder / "zeroshot")}
    first, second, third = run_ranks(evaluations, 1, demo_config(demo_folder, tmp_path, **flags, **data))[0]
    assert first == [("retrieval", 1)]
    assert second == third == [("retrieval", 1), ("zero_shot", 1)]
