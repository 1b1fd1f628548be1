"""benchmarks.largest_batch tries which batches fit; an abridged step ends like a full one."""

from pathlib import Path

import pytest

from benchmarks import largest_batch
from benchmarks.largest_batch import RESULT, AbridgedTrainer, main
from benchmarks.rows import read
from benchmarks.step import config_of
from infcl.checkpoint.run_folder import claim_run_folder
from infcl.parallel import init_parallel
from infcl.report import read_metrics
from infcl.train.build import resolve_inputs
from infcl.train.trainer import Trainer
from tests.lib.ranks import run_ranks


def test_exhausted_memory_means_that_a_batch_does_not_fit_and_other_losses_follow(monkeypatch, tmp_path):
    def run(command, seconds):
        loss, _, batch = command[-3:]
        if (loss, batch) == ("inf_cl", "8192"):
            return "exit code 1", "KeyError: c: 1\n[rank1]: torch.OutOfMemoryError: CUDA out of memory.\nsignal 15"
        return "", RESULT + '{"peak_gib": 1.0}'

    monkeypatch.setattr(largest_batch, "run", run)
    path = tmp_path / "a.csv"
    assert main(["--at", "4096", "8192", "16384", "--loss", "inf_cl", "clip", "--csv", str(path)]) == 0
    rows = read(path)
    assert [(row["loss"], row["global_batch"], row["fits"]) for row in rows] == [
        ("inf_cl", 4096, 1),
        ("inf_cl", 8192, 0),
        *(("clip", batch, 1) for batch in (4096, 8192, 16384)),
    ]
    assert "OutOfMemoryError" in rows[1]["said"]


@pytest.mark.long
def test_a_trial_runs_in_processes_of_its_own(tmp_path):
    flags = ["--model", "demo", "--device", "cpu", "--precision", "fp32", "--batch-size", "8", "--at", "32"]
    assert main([*flags, "--csv", str(tmp_path / "a.csv")]) == 0
    (row,) = read(tmp_path / "a.csv")
    assert row["fits"] == 1 and row["step_seconds"] > row["seconds_loss"] > 0


def loss_of_steps(rank: int, world_size: int, folder: str, micro_batches: int, abridged: bool) -> float:
    """Return the loss of the third step."""
    flags = ["--model", "demo", "--device", "cpu", "--precision", "fp32", "--batch-size", "8", "--lr", "1e-3"]
    config = config_of("1", {}, 3, [*flags, "--accum-freq", str(micro_batches)], Path(folder))
    parallel = init_parallel("cpu")
    inputs = resolve_inputs(config, parallel)
    trainer = (AbridgedTrainer if abridged else Trainer)(inputs, parallel, claim_run_folder(config, parallel))
    trainer._train()
    trainer.metrics.close()
    return read_metrics(trainer.run.metrics, "train")[-1]["loss"]


@pytest.mark.long
def test_an_abridged_step_without_stand_ins_equals_a_full_one(tmp_path):
    """With four micro-batches all are at an end of the pass; with twelve some are not, and the loss differs."""
    losses = {}
    for micro_batches in (4, 12):
        for abridged in (False, True):
            folder = tmp_path / f"{micro_batches}{abridged}"
            folder.mkdir()
            (losses[micro_batches, abridged],) = run_ranks(loss_of_steps, 1, str(folder), micro_batches, abridged)
    assert losses[4, True] == losses[4, False]
    assert losses[12, True] != losses[12, False]
