"""A run's folder: not overwritten unasked, used by one run at a time; messages for a run that starts elsewhere."""

import contextlib
import dataclasses
import json
import socket
import subprocess

import psutil
import pytest

from infcl.checkpoint.run_folder import RunFolder
from infcl.config import TrainConfig
from tests.lib.ranks import rejected, run_ranks
from tests.lib.training import demo_config, fit, new_trainer, rejection, said


def test_a_run_folder_is_never_trained_over_unasked(demo_folder, tmp_path):
    config = demo_config(demo_folder, tmp_path, steps=2)
    run_ranks(fit, 1, config, 1)
    assert "unfinished run: --resume latest" in run_ranks(rejection, 1, config)[0]
    config = dataclasses.replace(config, keep_checkpoints=2)
    said_first = run_ranks(said, 1, dataclasses.replace(config, resume="latest"))[0]
    assert "flags that differ from the run's: keep_checkpoints 3 there, 2 now" in said_first
    other = dataclasses.replace(config, lr=2e-3)
    rejected = run_ranks(rejection, 1, other)[0]
    assert (
        "other flags (lr 0.001 there, 0.002 now)" in rejected and "checkpoints/STEP to continue from there" in rejected
    )
    inside = str(next((tmp_path / "run" / "checkpoints").glob("step_*")))
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for changes in ({"model": "nope"}, {"batch_size": 4096}, {"resume": inside}):  # it rewrites nothing
        assert run_ranks(rejection, 1, dataclasses.replace(other, **changes))[0]
        assert {path: path.read_bytes() for path in before} == before
    from_there = dataclasses.replace(config, name="from there", resume=inside, wd=0.1, image_mean=[0.5] * 3)
    printed = run_ranks(said, 1, from_there)[0]
    assert "image_mean [] there, [0.5, 0.5, 0.5] now; wd 0.05 there, 0.1 now; model_config.json: the towers" in printed
    shorter = dataclasses.replace(config, name="shorter", resume=inside, steps=1)
    assert "is of step 2, the flags end the run at 1" in run_ranks(rejection, 1, shorter)[0]
    own = str(tmp_path / "run" / "tokenizer.model")
    summary = tmp_path / "run" / "summary.json"
    finished = json.loads(summary.read_text())
    summary.unlink()  # as after an export that failed: nothing is left to train, and the checkpoint is still the run's
    run_ranks(fit, 1, dataclasses.replace(config, resume="latest", tokenizer=own))  # its own copy of the same
    assert json.loads(summary.read_text())["paths"] == finished["paths"]


def opened(rank, world_size, config):
    """What a rank hears that would train in the folder; it does not."""
    from infcl.checkpoint.run_folder import claim_run_folder
    from infcl.parallel import init_parallel

    parallel = init_parallel("cpu")
    return rejected(lambda: claim_run_folder(config, parallel).open(config, "{}", parallel))


def claimed(rank, world_size, config) -> bool:
    """What a rank takes the folder for; a file system shows rank 1 other files."""
    from unittest import mock

    from infcl.checkpoint.run_folder import claim_run_folder
    from infcl.parallel import init_parallel

    parallel = init_parallel("cpu")
    with mock.patch("pathlib.Path.is_file", lambda path: False) if rank == 1 else contextlib.nullcontext():
        run = claim_run_folder(config, parallel)
    return run.is_finished


def test_what_a_folder_holds_is_what_rank_0_sees(demo_folder, tmp_path):
    """Ranks that took it for different things waited for each other."""
    config = demo_config(demo_folder, tmp_path, resume="latest")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(config.to_json())
    assert run_ranks(claimed, 2, config) == [False] * 2
    (tmp_path / "run" / "summary.json").write_text("{}")
    changes = {"workers": 5, "pixel_cache_gb": "1", "device": "cpu", "dist_timeout": 9.0, "profile": 3, "resume": None}
    changes |= {"log_every_n_steps": 7, "report_to": "all", "debug": True, "skip_memory_check": True}
    for repeated in (config, dataclasses.replace(config, **changes)):
        assert run_ranks(claimed, 2, repeated) == [True] * 2


def test_two_processes_do_not_train_in_one_folder(demo_folder, tmp_path):
    config = demo_config(demo_folder, tmp_path, resume="latest")
    running = tmp_path / "run" / "running.json"
    assert run_ranks(opened, 1, config) == [None]
    holder = json.loads(running.read_text())["pid"]
    rejected = run_ranks(opened, 2, config)
    assert f"is being trained by process {holder} of this host" in rejected[0] and rejected[0] == rejected[1]
    assert run_ranks(opened, 1, config) == [None]  # the same process again
    process = subprocess.Popen(["sleep", "60"])
    gone = {"host": socket.gethostname(), "pid": process.pid, "created": psutil.Process(process.pid).create_time()}
    running.write_text(json.dumps(gone | {"created": gone["created"] - 100}))  # a number that is used again
    assert run_ranks(opened, 2, config) == [None, None]
    running.write_text(json.dumps(gone))
    assert str(process.pid) in run_ranks(opened, 1, config)[0]
    process.kill(), process.wait()
    assert run_ranks(opened, 1, config) == [None]
    running.write_text("{")  # a full disk's
    assert run_ranks(opened, 2, config) == [None, None]


def robbed(rank, world_size, config):
    """Messages of the ranks of a run whose folder a process of another host takes during step 2."""
    from infcl.checkpoint.run_folder import FolderTaken

    trainer = new_trainer(config)
    train_step = trainer.train_step

    def step(micro_batches):
        done = train_step(micro_batches)
        if trainer.step == 2 and rank == 0:
            trainer.run.running.write_text(json.dumps({"host": "other", "pid": 7, "created": 1.0}))
        return done

    trainer.train_step = step
    with pytest.raises(FolderTaken) as taken:
        trainer.fit()
    return str(taken.value)


def test_a_run_whose_folder_another_host_has_taken_ends_at_its_next_checkpoint(demo_folder, tmp_path):
    config = demo_config(demo_folder, tmp_path, steps=9, save_every_n_steps=3, batch_size=16)
    said = run_ranks(robbed, 2, config)
    assert "process 7 of other trains in" in said[0] and said[0] == said[1]
    run = RunFolder(tmp_path / "run")
    assert run.taken_by() == "process 7 of other" and not list(run.checkpoints.glob("step_????????"))


def test_checkpoints_are_not_pruned_through_a_link(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path)
    assert "checkpoints is a symbolic link" in run_ranks(opened, 2, TrainConfig(logs=str(tmp_path), name="run"))[1]


HERE = {"host": socket.gethostname(), "pid": 1, "created": psutil.Process(1).create_time()}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[" * 100_000,
        "{}",
        *(json.dumps(HERE | change) for change in ({"pid": 0}, {"pid": 2**70}, {"created": "x"})),
    ],
)
def test_a_damaged_running_json_is_that_of_no_process(content, tmp_path):
    run = RunFolder(tmp_path)
    run.running.write_text(content)
    run.require_free()
    assert run.taken_by() is None


@pytest.mark.parametrize("content", ["[]", '{"lr": "x"}', '{"aug_cfg": []}', "[" * 100_000, ""])
def test_a_damaged_config_is_no_flags_for_a_resume_and_one_line_for_an_evaluation(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    run = RunFolder(tmp_path)
    assert run.flags() == {} and run.other_flags(TrainConfig()) == ["config.json there is damaged"]
    with pytest.raises(ValueError, match=r"config\.json: ") as wrong:
        run.config()
    assert "\n" not in str(wrong.value)
    (tmp_path / "config.json").write_text('{"lr": 1, "flag_of_an_older_commit": 7}')
    assert run.config() == TrainConfig(lr=1.0)
