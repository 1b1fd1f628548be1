"""Steps whose numbers are not finite: skipped, explained, and at last the end of the run, with a checkpoint."""

import dataclasses
import json
import math
import os
from collections import Counter

import pytest

from tests.ranks import run_ranks
from tests.test_engine import steps_with_a_poisoned_one
from tests.test_trainer import demo_config


def poisoned_fit(rank, world_size, config, fault, steps, on_rank=0):
    """Train; in the given steps (from 1), micro-batch 1 of one rank goes wrong -> (sentences said, error or None)."""
    from infcl.parallel import init_parallel
    from infcl.train.run_folder import claim_run_folder
    from infcl.train.trainer import Trainer

    parallel = init_parallel("cpu")
    trainer = Trainer(config, parallel, claim_run_folder(config, parallel))
    encode, encodings, said = trainer.engine.encode, Counter(), []
    trainer.metrics.say = said.append

    def failing_encode(images, texts):
        output = encode(images, texts)
        encodings[trainer.step] += 1
        if rank == on_rank and trainer.step + 1 in steps and encodings[trainer.step] == 2:  # micro-batch 1 of 2
            if fault == "text features":
                output["text_features"] = output["text_features"].clone()
                output["text_features"][2] = math.nan
            elif fault == "image gradients":
                output["image_features"].register_hook(lambda gradient: gradient * math.inf)
        return output

    loss = trainer.sampled_loss.loss

    def failing_loss(*features):
        bad = fault == "loss" and rank == on_rank and trainer.step + 1 in steps
        return loss(*features) + (math.inf if bad else 0)  # its gradients are what they are

    trainer.engine.encode, trainer.sampled_loss.loss = failing_encode, failing_loss
    error = None
    try:
        trainer.fit()
    except RuntimeError as raised:
        error = str(raised)
    return said, error


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("text features", "rank 1, text tower, micro-batch 1: features of samples"),
        ("image gradients", "rank 1, image tower, micro-batch 1: gradients are not finite"),
        ("loss", "in no tower: the loss is inf"),
    ],
)
def test_a_skipped_step_is_explained_and_the_run_goes_on(demo_folder, tmp_path, fault, sentence):
    config = demo_config(demo_folder, tmp_path, batch_size=16, steps=5)
    said, error = run_ranks(poisoned_fit, 2, config, fault, {3}, 1)[0]
    assert error is None
    explained = [text for text in said if "was skipped" in text]
    assert len(explained) == 1 and explained[0].startswith("step 3 was skipped") and sentence in explained[0]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 5 and summary["skipped_steps"] == 1
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    with_loss = [record["step"] for record in records if "loss" in record]
    assert with_loss == ([1, 2, 3, 4, 5] if "gradients" in fault else [1, 2, 4, 5])


def test_too_many_skipped_steps_in_a_row_end_the_run_with_a_checkpoint(demo_folder, tmp_path):
    config = demo_config(demo_folder, tmp_path, steps=9, max_skipped_steps=2)
    said, error = run_ranks(poisoned_fit, 1, config, "text features", {2, 4, 5, 6, 7})[0]
    assert "3 steps in a row had gradients that are not finite, more than --max-skipped-steps 2" in error
    assert "--resume latest continues from step_00000006" in error and "text tower, micro-batch 1" in error
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text().strip() == "step_00000006"
    said, error = run_ranks(poisoned_fit, 1, dataclasses.replace(config, resume="latest"), "none", set())[0]
    assert error is None
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 9 and summary["skipped_steps"] == 4


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_offloaded_bf16_step_that_is_not_finite_leaves_no_sums_behind(tmp_path, stage):
    """The next step would be skipped too, and all that follow."""
    preset = tmp_path / "offload.json"
    preset.write_text(json.dumps({"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}}}))
    name = os.path.relpath(preset.with_suffix(""), "ds_configs")
    for applied, _, state, _ in run_ranks(steps_with_a_poisoned_one, 2, name, "bf16"):
        assert applied == [True, False, True] and all(value.isfinite().all() for value in state.values())
