"""benchmarks.largest_batch finds the largest batch that fits, in few trials; an abridged step ends like a whole one."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks.abridged import AbridgedTrainer
from benchmarks.largest_batch import Trial, _parser, main, search, trial_flags
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


def test_the_bracket_is_shown_when_the_trials_are_spent(capsys):
    run(100_000, start=96_000, unit=64, trials=5, tolerance=0.01)
    assert re.search(r"5 trials are spent: [\d,]+ pairs fit, [\d,]+ do not fit", capsys.readouterr().out)
    run(100_000, start=64_000, unit=64)
    assert "spent" not in capsys.readouterr().out


def test_checkpointing_is_asked_for_unless_it_is_not_wanted(tmp_path):
    flags = trial_flags(_parser().parse_args(["--gpus", "2"]), 4096, tmp_path / "a.csv")
    assert "--grad-checkpointing" in flags and flags[flags.index("--accum-freq") + 1] == "8"
    assert "--grad-checkpointing" not in trial_flags(_parser().parse_args(["--no-checkpointing"]), 4096, tmp_path)


class Failing:
    """Of a trial that prints `output` and ends without a row."""

    def __init__(self, output: str):
        self.communicate, self.poll = lambda timeout: (output, None), lambda: 1


@pytest.mark.parametrize(
    "output",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        "ValueError: a\nKeyError: b\nKeyError: c: 1\n[rank1]: torch.OutOfMemoryError: CUDA out of memory.\nsignal 15",
    ],
)
def test_memory_that_runs_out_means_that_a_batch_does_not_fit(output, monkeypatch, tmp_path):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: Failing(output))
    assert main(["--at", "4096", "8192", "--csv", str(tmp_path / "a.csv")]) == 0
    (row,) = read(tmp_path / "a.csv")  # the larger one is not tried
    assert row["fits"] == "0" and "OutOfMemoryError" in row["said"]


@pytest.mark.parametrize("flags", [["--at", "4096"], ["--start", "4096"]])
def test_any_other_failure_ends_the_command_with_its_reason(flags, monkeypatch, tmp_path):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: Failing("ValueError: no such preset: zero9"))
    with pytest.raises(
        SystemExit, match="4,096 pairs.* another reason than memory: ValueError: no such preset"
    ) as ended:
        main([*flags, "--csv", str(tmp_path / "a.csv")])
    assert isinstance(ended.value.code, str)  # printed, and exit code 1
    assert read(tmp_path / "a.csv") == []


@pytest.mark.parametrize("bias", [None, -10.0])
def test_stand_ins_have_the_models_scalars(bias):
    config = SimpleNamespace(embed_dim=8, init_logit_bias=bias)
    trainer = SimpleNamespace(parallel=SimpleNamespace(device="cpu"), model_config=config)
    features = AbridgedTrainer._stand_in(trainer, {"texts": [0, 1, 2]})
    assert features["image_features"].shape == features["text_features"].shape == (3, 8)
    assert ("logit_bias" in features) == (bias is not None)


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
