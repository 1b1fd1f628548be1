"""benchmarks.largest_batch finds the largest batch that fits, in few trials; an abridged step ends like a whole one."""

import subprocess
import sys

import pytest

from benchmarks.largest_batch import Trial, search
from benchmarks.rows import read


def run(true_limit: int, *, start: int, unit: int, tolerance: float = 0.05, limit: int = 1 << 40, trials: int = 20):
    tried = []

    def trial(batch: int) -> Trial:
        assert batch % unit == 0 and 0 < batch <= limit and batch not in tried
        tried.append(batch)
        return Trial(batch, 1.0 if batch <= true_limit else None)

    return search(trial, start, unit, tolerance=tolerance, limit=limit, trials=trials), tried


@pytest.mark.parametrize("start", [1024, 64_000, 99_968, 100_032, 106_240, 800_000])
def test_the_answer_fits_and_is_within_the_tolerance_of_what_does_not(start):
    best, tried = run(100_000, start=start, unit=64)
    smallest_failure = min(batch for batch in tried if batch > 100_000)
    assert best == max(batch for batch in tried if batch <= 100_000)
    assert best < smallest_failure <= best * 1.05 + 64


def test_a_good_start_takes_three_trials():
    assert len(run(103_000, start=100_032, unit=64)[1]) <= 3


def test_the_search_ends_at_the_limit_at_the_trials_and_where_nothing_fits():
    assert run(10**9, start=6400, unit=64, limit=10_000)[0] == 9984
    assert len(run(10**9, start=64, unit=64, trials=3)[1]) == 3
    assert run(0, start=6400, unit=64)[0] == 0


@pytest.mark.slow
def test_an_abridged_step_that_leaves_nothing_out_is_a_whole_one(tmp_path):
    """With four micro-batches all are at an end of the pass; with twelve some are not, and the loss is another."""
    losses = {}
    for micro_batches in (4, 12):
        for abridged in ([], ["--abridged"]):
            path = tmp_path / f"{micro_batches}{len(abridged)}.csv"
            flags = ["--model", "demo", "--device", "cpu", "--precision", "fp32", "--batch-size", "8", "--lr", "1e-3"]
            flags += ["--accum-freq", str(micro_batches), "--measured-steps", "3", "--warm-up-steps", "0"]
            subprocess.run([sys.executable, "-m", "benchmarks.step", *flags, "--csv", path, *abridged], check=True)
            losses[micro_batches, bool(abridged)] = float(read(path)[0]["loss"])
    assert losses[4, True] == losses[4, False]
    assert losses[12, True] != losses[12, False]
