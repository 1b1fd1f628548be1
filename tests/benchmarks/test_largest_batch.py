"""benchmarks.largest_batch finds the largest batch that fits, in few trials; an abridged step ends like a whole one."""

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.clock import hardware
from benchmarks.largest_batch import Trial, _parser, main, search
from benchmarks.rows import append, read
from benchmarks.step import config_of
from benchmarks.trials import COLUMNS, KEY, AbridgedTrainer, Trials, flags_of, warmed_up
from infcl.checkpoint.run_folder import claim_run_folder
from infcl.loss import contrastive
from infcl.parallel import init_parallel
from infcl.report import read_metrics
from infcl.train.build import resolve_inputs
from infcl.train.trainer import Trainer
from tests.lib.ranks import run_ranks


def run(true_limit: int, *, start: int, unit: int, tolerance: float = 0.05, limit: int = 1 << 40, trials: int = 20):
    tried = []

    def trial(batch: int) -> Trial:
        assert batch % unit == 0 and 0 < batch <= limit and batch not in tried
        tried.append(batch)
        return Trial(batch, 1.0 if batch <= true_limit else None)

    best, said = search(trial, start, unit, tolerance=tolerance, limit=limit, trials=trials)
    return best, tried, said


@pytest.mark.parametrize("start", [1024, 64_000, 99_968, 100_032, 106_240, 800_000])
def test_the_answer_fits_and_is_within_the_tolerance_of_what_does_not(start):
    best, tried, _ = run(100_000, start=start, unit=64)
    smallest_failure = min(batch for batch in tried if batch > 100_000)
    assert best == max(batch for batch in tried if batch <= 100_000)
    assert best < smallest_failure <= best * 1.05 + 64


def test_a_good_start_takes_three_trials():
    assert len(run(103_000, start=100_032, unit=64)[1]) <= 3


def test_the_search_ends_at_the_limit_at_the_trials_and_where_nothing_fits():
    assert run(10**9, start=6400, unit=64, limit=10_000)[0] == 9984
    assert len(run(10**9, start=64, unit=64, trials=3)[1]) == 3
    assert run(0, start=6400, unit=64)[0] == 0


def test_the_bracket_is_said_when_the_trials_are_spent():
    *_, said = run(100_000, start=96_000, unit=64, trials=5, tolerance=0.01)
    assert re.search(r"5 trials are spent: [\d,]+ pairs fit, [\d,]+ do not fit", said)
    assert run(100_000, start=64_000, unit=64)[2] == ""


def test_checkpointing_is_asked_for_unless_it_is_not_wanted():
    flags = lambda *words: flags_of(_parser().parse_args(words), [])  # noqa: E731
    assert "--grad-checkpointing" in flags("--gpus", "2")
    assert "--grad-checkpointing" not in flags("--no-checkpointing")


class Launched:
    """In place of the processes: writes what they would; one entry of `scripts` for each launch.

    (key and peak of each trial with a row, key of the one under way or None, what goes to stderr)
    """

    def __init__(self, monkeypatch, *scripts):
        self.scripts, self.launches = list(scripts), 0
        self.others = subprocess.Popen
        monkeypatch.setattr(subprocess, "Popen", self)

    def __call__(self, command, stderr=None, **more):
        if "--rows" not in command:
            return self.others(command, stderr=stderr, **more)
        rows = Path(command[command.index("--rows") + 1])
        done, begun, output = self.scripts[self.launches]
        self.launches += 1
        for key, peak in done:
            append(rows, [key | {"fits": 1, "peak_gib": peak}], COLUMNS)
        if begun is not None:
            rows.with_name("begun.json").write_text(json.dumps(begun))
        stderr.write(output)
        stderr.flush()
        failed = int(begun is not None or bool(output))
        return SimpleNamespace(returncode=failed, poll=lambda: failed, wait=lambda timeout: failed)


def key_of(batch: int, loss: str = "inf_cl") -> dict:
    return dict.fromkeys(KEY, 1) | {"loss": loss, "pixels": "gpu", "global_batch": batch}


@pytest.mark.parametrize(
    "output",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        "ValueError: a\nKeyError: b\nKeyError: c: 1\n[rank1]: torch.OutOfMemoryError: CUDA out of memory.\nsignal 15",
    ],
)
def test_memory_that_runs_out_amid_a_step_means_that_a_batch_does_not_fit_and_the_others_follow(
    output, monkeypatch, tmp_path
):
    launched = Launched(
        monkeypatch,
        ([(key_of(4096), 1.0)], key_of(8192), output),
        ([(key_of(4096, "clip"), 2.0), (key_of(8192, "clip"), 3.0)], None, ""),
    )
    path = tmp_path / "a.csv"
    assert main(["--at", "4096", "8192", "--loss", "inf_cl", "clip", "--csv", str(path)]) == 0
    rows = read(path)
    assert launched.launches == 2
    assert [(row["loss"], row["global_batch"], row["fits"]) for row in rows] == [
        ("inf_cl", 4096, 1),
        ("inf_cl", 8192, 0),
        ("clip", 4096, 1),
        ("clip", 8192, 1),
    ]
    assert "OutOfMemoryError" in rows[1]["said"] and rows[1]["commit"] == hardware(None)["commit"]


def test_no_processes_are_started_for_an_answer_that_is_known(monkeypatch, capsys):
    """The last trial of a search ended during its step."""
    launched = Launched(monkeypatch, ([(key_of(4096), 1.0)], key_of(4352), "torch.OutOfMemoryError: CUDA"))
    assert main(["--first", "4096"]) == 0 and launched.launches == 1
    assert "inf_cl, pixels gpu: at most 4,096 pairs fit" in capsys.readouterr().out


def test_what_was_measured_before_another_failure_is_kept(monkeypatch, tmp_path):
    Launched(monkeypatch, ([(key_of(4096), 1.0)], key_of(8192), "ValueError: no such preset: zero9"))
    with pytest.raises(
        SystemExit, match="8,192 pairs.* another reason than memory: ValueError: no such preset"
    ) as ended:
        main(["--at", "4096", "8192", "--csv", str(tmp_path / "a.csv")])
    assert isinstance(ended.value.code, str)  # printed, and exit code 1
    assert [row["global_batch"] for row in read(tmp_path / "a.csv")] == [4096]


def test_a_model_that_does_not_fit_itself_is_told_from_a_batch(monkeypatch):
    Launched(monkeypatch, ([], None, "torch.OutOfMemoryError: CUDA out of memory."))
    with pytest.raises(SystemExit, match="before the first trial: torch.OutOfMemoryError"):
        main(["--first", "4096"])


def test_batches_and_losses_that_cannot_be_tried_are_rejected():
    with pytest.raises(SystemExit, match="--at 100 is no multiple of 2 GPUs x --batch-size 256"):
        main(["--gpus", "2", "--at", "100"])
    with pytest.raises(SystemExit, match="siglip"):
        main(["--loss", "siglip", "inf_cl", "--at", "512"])


PLAN = (("clip", "host", 64), ("clip", "gpu", 512), ("inf_cl", "host", 512), ("clip", "gpu", 512))


def trials_on_this_rank(rank: int, world_size: int, folder: str, rows: str) -> list[tuple[dict, int, int]]:
    """(row, micro-batches, of them kept) of PLAN's trials; memory "runs out" in the dense loss of over 100 pairs."""
    arguments = ["--model", "demo", "--gpus", str(world_size), "--batch-size", "16", "--precision", "fp32"]
    options = _parser().parse_args([*arguments, "--loss", "clip", "inf_cl"])
    found, dense = [], contrastive._LOSSES["clip"]

    def short_of_memory(images, *others, **more):
        if len(images) > 100:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much")
        return dense(images, *others, **more)

    contrastive._LOSSES["clip"] = short_of_memory
    try:
        flags = ["--device", "cpu", "--pixel-cache-gb", "0"]
        trainer = warmed_up(options, flags, init_parallel("cpu"), Path(folder))
        trials = Trials(trainer, options, Path(rows))
        for trial in PLAN:
            row = trials(*trial)
            found.append((row, trainer.batch.num_micro_batches, len(trainer.pixels.kept)))
        trainer.metrics.close()
    finally:
        contrastive._LOSSES["clip"] = dense
    return found


@pytest.mark.slow
def test_one_engine_takes_batch_after_batch_also_behind_one_that_did_not_fit(tmp_path):
    path = tmp_path / "rows.csv"
    first, second = run_ranks(trials_on_this_rank, 2, str(tmp_path), str(path))
    assert [row["fits"] for row, *_ in first] == [row["fits"] for row, *_ in second] == [1, 0, 1, 0]
    assert [counts for _, *counts in first] == [[2, 0], [16, 15], [16, 0], [16, 15]]
    rows = read(path)
    assert [(row["loss"], row["pixels"], row["global_batch"]) for row in rows] == list(PLAN)
    assert "out of memory" in rows[1]["said"] and not (tmp_path / "begun.json").exists()
    seconds = [row["step_seconds"] for row in rows if row["fits"] == 1]
    assert len(set(seconds)) == 2  # each trial's own
    (tmp_path / "again").mkdir()
    again = run_ranks(trials_on_this_rank, 2, str(tmp_path / "again"), str(path))
    assert repr(read(path)) == repr(rows) and repr(again[0][0][0]) == repr(
        rows[0]
    )  # new processes run no trial that has a row


@pytest.mark.parametrize("bias", [None, -10.0])
def test_stand_ins_have_the_models_scalars(bias):
    config = SimpleNamespace(embed_dim=8, init_logit_bias=bias)
    trainer = SimpleNamespace(parallel=SimpleNamespace(device="cpu"), model_config=config)
    for texts in ({"texts": torch.zeros(3, 9)}, {"texts": torch.zeros(2, 16), "text_ends": torch.zeros(3)}):
        features = AbridgedTrainer._stand_in(trainer, texts)
        assert features["image_features"].shape == features["text_features"].shape == (3, 8)
        assert ("logit_bias" in features) == (bias is not None)


def loss_of_steps(rank: int, world_size: int, folder: str, micro_batches: int, abridged: bool) -> float:
    """Of the third step."""
    flags = ["--model", "demo", "--device", "cpu", "--precision", "fp32", "--batch-size", "8", "--lr", "1e-3"]
    config = config_of("1", {}, 3, [*flags, "--accum-freq", str(micro_batches)], Path(folder))
    parallel = init_parallel("cpu")
    inputs = resolve_inputs(config, parallel)
    trainer = (AbridgedTrainer if abridged else Trainer)(inputs, parallel, claim_run_folder(config, parallel))
    trainer._train()
    trainer.metrics.close()
    return read_metrics(trainer.run.metrics, "train")[-1]["loss"]


def test_an_abridged_step_that_leaves_nothing_out_is_a_whole_one(tmp_path):
    """With four micro-batches all are at an end of the pass; with twelve some are not, and the loss is another."""
    losses = {}
    for micro_batches in (4, 12):
        for abridged in (False, True):
            folder = tmp_path / f"{micro_batches}{abridged}"
            folder.mkdir()
            (losses[micro_batches, abridged],) = run_ranks(loss_of_steps, 1, str(folder), micro_batches, abridged)
    assert losses[4, True] == losses[4, False]
    assert losses[12, True] != losses[12, False]
