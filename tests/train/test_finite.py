"""Steps whose numbers are not finite: skipped, explained, and at last the end of the run, with a checkpoint."""

import contextlib
import dataclasses
import io
import json
import math
from collections import Counter
from unittest import mock

import pytest
import torch

from infcl.convert.export import load_exported
from infcl.report import read_metrics
from infcl.train import finite
from infcl.train.finite import MAX_SKIPPED
from tests.lib.fp16 import fp16_allowed
from tests.lib.ranks import run_ranks
from tests.lib.training import demo_config, fit, new_trainer


def poisoned_fit(rank, world_size, config, faults: dict[int, str], on_rank=0, *, most=MAX_SKIPPED):
    """Train; in step N (from 1), micro-batch 1 of one rank has the fault faults[N] -> (lines said, error or None)."""
    trainer = new_trainer(config)
    encode, encodings, said = trainer.engine.encode, Counter(), []
    trainer.metrics.say = said.append

    def fault() -> str | None:
        return faults.get(trainer.step + 1) if rank == on_rank else None

    def failing_encode(**micro_batch):
        output = encode(**micro_batch)
        encodings[trainer.step] += 1
        if encodings[trainer.step] == 2:  # micro-batch 1 of 2
            kind = fault()
            if kind == "text features":
                output["text_features"] = output["text_features"].clone()
                output["text_features"][2] = math.nan
            elif kind in FACTORS:
                name, factor = FACTORS[kind]
                output[name].register_hook(lambda gradient: gradient * factor)
        return output

    loss = trainer.sampled_loss.loss

    def failing_loss(*features, **options):
        return loss(*features, **options) + (math.inf if fault() == "loss" else 0)  # its gradients are what they are

    trainer.engine.encode, trainer.sampled_loss.loss = failing_encode, failing_loss
    with mock.patch.object(finite, "MAX_SKIPPED", most), mock.patch("infcl.train.results.draw_loss_curve"):
        try:
            trainer.fit()
        except RuntimeError as raised:
            return said, str(raised)
    return said, None


FACTORS = {
    "image gradients": ("image_features", math.inf),
    "large image gradients": ("image_features", 1e25),  # finite, their squares are not
    "scale gradient": ("logit_scale", math.inf),
}
EXPLAINED = {
    "text features": "rank 1, text tower, micro-batch 1: features of samples",
    "image gradients": "rank 1, image tower, micro-batch 1: gradients are not finite",
    "large image gradients": "image tower: the norm of its gradients over all ranks is inf",
    "scale gradient": "in no tower alone",
    "loss": "in no tower: the loss is inf",
}


def test_a_skipped_step_is_explained_and_the_run_continues(demo_folder, tmp_path):
    faults = dict(enumerate(EXPLAINED, start=2))
    config = demo_config(demo_folder, tmp_path, batch_size=16, steps=7)
    said, error = run_ranks(poisoned_fit, 2, config, faults, 1)[0]
    assert error is None
    explained = [text for text in said if "was skipped" in text]
    assert len(explained) == len(faults) and not any("loss scale" in text for text in explained)  # that is fp16's
    for text, (step, fault) in zip(explained, faults.items()):
        assert text.startswith(f"step {step} was skipped") and EXPLAINED[fault] in text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 7 and summary["skipped_steps"] == 5
    records = read_metrics(tmp_path / "run" / "metrics.jsonl", "train")
    assert [record["step"] for record in records if "loss" in record] == [1, 3, 4, 5, 7]


def test_too_many_skipped_steps_in_a_row_end_the_run_with_a_checkpoint(demo_folder, tmp_path):
    """Started again it ends in its first step that is skipped, and of no such checkpoint an older one is removed."""
    often = {"save_every_n_steps": 3, "keep_checkpoints": 1}
    config = demo_config(demo_folder, tmp_path, steps=9, **often)
    said, error = run_ranks(poisoned_fit, 1, config, dict.fromkeys((2, 4, 5, 6, 7), "text features"), most=2)[0]
    assert "3 steps in a row had gradients that are not finite, more than 2; " in error
    assert "--resume latest continues from step_00000006" in error and "text tower, micro-batch 1" in error
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text().strip() == "step_00000006"
    again = dataclasses.replace(config, resume="latest")
    said, error = run_ranks(poisoned_fit, 1, again, {7: "text features"}, most=2)[0]
    assert "4 steps in a row" in error and "--resume latest continues from step_00000006" in error
    left = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert left == ["step_00000003", "step_00000006"]
    said, error = run_ranks(poisoned_fit, 1, again, {})[0]
    assert error is None
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 9 and summary["skipped_steps"] == 4


def test_a_run_whose_last_loss_is_not_finite_exports_nothing_and_does_not_when_started_again(demo_folder, tmp_path):
    config = demo_config(demo_folder, tmp_path, batch_size=16, steps=3, save_every_n_steps=2)
    for start in (config, dataclasses.replace(config, resume="latest")):
        said, error = run_ranks(poisoned_fit, 1, start, {3: "text features"})[0]
        assert error.startswith(
            "the last loss is nan: nothing is exported; --resume latest continues from step_00000002"
        )
    assert not (tmp_path / "run" / "summary.json").exists() and not (tmp_path / "run" / "export").exists()


def fit_in_fp16(rank, world_size, config, die_after=None):
    """-> what the rank printed."""
    with fp16_allowed(), contextlib.redirect_stdout(io.StringIO()) as printed:
        fit(rank, world_size, config, die_after)
    return printed.getvalue()


@pytest.mark.long
def test_a_run_in_fp16_skips_until_the_loss_scale_has_come_down_and_resumes_with_it(demo_folder, tmp_path):
    """A run killed during the skipped steps continues as the one that was not, to the last bit."""
    fp16 = {"enabled": True, "initial_scale_power": 18, "hysteresis": 1, "min_loss_scale": 1}
    (tmp_path / "p.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "fp16": fp16}))
    config = demo_config(
        demo_folder, tmp_path, batch_size=4, steps=10, lr=1e-4, warmup=1, precision="fp16",
        deepspeed_config=str(tmp_path / "p.json"), save_every_n_steps=2,
    )  # fmt: skip
    cut = dataclasses.replace(config, name="cut")
    said = run_ranks(fit_in_fp16, 2, config)[0]
    run_ranks(fit_in_fp16, 2, cut, 3)
    printed = run_ranks(fit_in_fp16, 2, dataclasses.replace(cut, resume="latest"))[0]
    assert "step_00000002 at step 2" in printed
    whole, resumed = (read_metrics(tmp_path / name / "metrics.jsonl", "train") for name in ("run", "cut"))
    compared = ("step", "loss", "loss_scale", "skipped_steps", "lr", "grad_norm", "samples_seen")
    assert [[r.get(name) for name in compared] for r in resumed] == [[r.get(name) for name in compared] for r in whole]
    counts = [record["skipped_steps"] for record in whole]
    skipped = [step for step, before, count in zip(range(1, 11), [0, *counts], counts) if count > before]
    assert skipped[:3] == [1, 2, 3] and counts[-1] == len(skipped) < 9  # before and behind the kill
    assert [record["loss_scale"] for record in whole] == [2.0 ** (18 - count) for count in counts]
    assert [record["step"] for record in whole if "grad_norm" not in record] == skipped
    for step in skipped:
        now = f"{2.0 ** (18 - counts[step - 1]):g}"
        assert f"step {step} was skipped, its gradients are not finite; loss scale now {now}:" in said
    first, second = (load_exported(tmp_path / name / "export")[0].state_dict() for name in ("run", "cut"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert json.loads((tmp_path / "cut" / "summary.json").read_text())["skipped_steps"] == len(skipped)
