"""benchmarks.accuracy asks the trainer for what it compares; many trainings run, fail and end as they should."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.accuracy import _parser, batch_trainings, loss_trainings, read_result, thin_curve
from benchmarks.processes import Machine, Training, train_all
from infcl.config import make_parser


def options(*flags: str):
    return _parser().parse_args(["--out", "out", "--work", "work", *flags])


def flags_of(training: Training):
    return make_parser().parse_args(training.flags)


def test_trainings_of_one_seed_differ_in_the_loss_alone_and_one_in_its_products():
    trainings = loss_trainings(options("--study", "losses", "--seeds", "2", "--ranks", "2"), Path("data"))
    assert len(trainings) == 12 and len({training.name for training in trainings}) == 12
    flags = [vars(flags_of(training)) for training in trainings if training.key["seed"] == 1]
    compared = [(flag["loss"], flag["tile_dtype"]) for flag in flags]
    as_the_dense_losses_multiply = {(loss, "fp32") for loss in ("clip", "open_clip", "disco", "inf_cl", "siglip")}
    assert set(compared) == as_the_dense_losses_multiply | {("inf_cl", "bf16")}
    same = {"loss": "", "tile_dtype": ""}
    assert all(flag | same == flags[0] | same for flag in flags)
    assert flags[0]["batch_size"] * flags[0]["accum_freq"] * 2 == 256 and flags[0]["seed"] == 1


def test_batches_see_the_same_samples_at_the_learning_rate_that_the_row_says():
    chosen = options(
        "--study", "batch-size", "--seeds", "1", "--samples", "65536", "--micro-batch", "1024", "--lr", "1e-3"
    )
    trainings = batch_trainings(chosen, Path("data"))
    assert len(trainings) == 1 + 6 * 3
    for training in trainings:
        flags, batch = flags_of(training), training.key["global_batch"]
        assert flags.batch_size * flags.accum_freq == batch and flags.batch_size <= 1024
        assert flags.steps * batch == 65536 and flags.warmup_samples == 65536 // 14
        exponent = {"none": 0, "sqrt": 0.5, "linear": 1}[flags.lr_scaling]
        assert training.key["lr"] == pytest.approx(flags.lr * (batch / flags.lr_base_batch) ** exponent)


def test_curves_are_thinned_to_means_that_keep_the_last_sample():
    records = [{"loss": float(i), "samples_seen": 8 * (i + 1)} for i in range(101)] + [{"samples_seen": 816}]
    curve = thin_curve(records, points=10)
    assert len(curve) == 10 and curve[-1]["samples_seen"] == 808
    assert curve[0] == {"samples_seen": 88, "loss": 5.0}


def test_a_run_becomes_a_row(tmp_path):
    evaluation = {
        "zero_shot": {"top1": 0.5},
        "retrieval": dict.fromkeys(
            ("image_to_text_r1", "text_to_image_r1", "image_to_text_r5", "text_to_image_r5", "val_loss"), 0.25
        ),
    }
    summary = {"evaluation": evaluation, "train_seconds": 3.0, "steps": 40, "samples_seen": 320, "skipped_steps": 0}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    steps = [{"kind": "train", "step": i + 1, "samples_seen": 8 * i, "loss": float(i)} for i in range(40)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    row, curve = read_result(tmp_path)
    assert row["zero_shot_top1"] == 0.5 and row["text_to_image_r1"] == 0.25 and row["final_loss"] == 38.5
    assert len(curve) == 40


def test_trainings_run_side_by_side_and_what_fails_or_hangs_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(Machine, "command", lambda self, flags: [sys.executable, "-c", flags[0]])
    codes = {"good": "pass", "bad": "raise ValueError('seven')", "more": "pass", "last": "pass"}
    finished = []

    def run(time_out: float, **codes: str) -> list[str]:
        trainings = [Training(name, [code]) for name, code in codes.items()]
        return train_all(trainings, Machine(jobs=3, device="cpu"), tmp_path, took, time_out=time_out)

    def took(training: Training, folder: Path, seconds: float) -> None:
        finished.append((training.name, folder))

    assert run(120.0, **codes) == ["bad"]
    assert sorted(finished) == [(name, tmp_path / name) for name in ("good", "last", "more")]
    assert run(0.5, slow="import time; time.sleep(600)") == ["slow"] and len(finished) == 3
    assert "ValueError: seven" in (tmp_path / "bad.log").read_text()


def test_runs_share_out_the_gpus():
    machine = Machine(jobs=3, device="cuda", ranks=2, gpus=4)
    assert [machine.environment(slot)["CUDA_VISIBLE_DEVICES"] for slot in range(3)] == ["0,1", "2,3", "0,1"]
    assert "--nproc-per-node=2" in machine.command(["--logs", "x"])
    with pytest.raises(ValueError, match="4 ranks of a run need as many GPUs, there are 2"):
        Machine(jobs=1, device="cuda", ranks=4, gpus=2)
    assert Machine(jobs=1, device="cpu").command(["--logs", "x"])[1:] == ["pretrain_clip.py", "--logs", "x"]
