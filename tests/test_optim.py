"""Which parameters decay, and the schedules: open_clip's values, as a pure function of the step."""

import math

import pytest

from infcl.config import TrainConfig
from infcl.towers.clip import CLIP
from infcl.towers.config import load_model_config
from infcl.train.optim import learning_rate, parameter_groups

LR, WARMUP, TOTAL, PER_EPOCH = 1e-3, 10, 100, 20


def rate(step, **flags):
    config = TrainConfig(dataset_type="synthetic", train_num_samples=1, lr=LR, warmup=WARMUP, **flags)
    return learning_rate(config, step, TOTAL, PER_EPOCH)


def test_weight_decay_is_for_matrices_only():
    model = CLIP(load_model_config("demo"))
    decayed, others = parameter_groups(model, 0.2)
    names = {id(p): name for name, p in model.named_parameters()}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.2, 0.0)
    assert len(decayed["params"]) + len(others["params"]) == len(names)
    assert all(p.ndim >= 2 for p in decayed["params"])
    spared = {names[id(p)] for p in others["params"]}
    assert {"logit_scale", "positional_embedding", "visual.positional_embedding", "visual.class_embedding"} <= spared
    assert all("ln_" not in names[id(p)] and not names[id(p)].endswith("bias") for p in decayed["params"])


def test_frozen_parameters_are_in_no_group():
    model = CLIP(load_model_config("demo"))
    model.lock_image_tower()
    listed = {id(p) for group in parameter_groups(model, 0.1) for p in group["params"]}
    assert listed == {id(p) for p in model.parameters() if p.requires_grad}


def test_warm_up_is_linear_and_reaches_the_peak():
    assert [rate(step) for step in range(WARMUP)] == pytest.approx([LR * (s + 1) / WARMUP for s in range(WARMUP)])


@pytest.mark.parametrize("step", [10, 37, 99])
def test_cosine_falls_from_the_peak_to_zero(step):
    assert rate(step) == pytest.approx(LR * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (TOTAL - WARMUP))))


def test_constant_stays_and_cooldown_falls_over_the_last_epochs():
    assert rate(99, lr_scheduler="const") == LR
    cooldown = {"lr_scheduler": "const-cooldown", "epochs_cooldown": 2, "lr_cooldown_end": 1e-4}
    assert rate(59, **cooldown) == LR
    assert rate(60, **cooldown) == pytest.approx(LR)
    assert rate(80, **cooldown) == pytest.approx(1e-4 + 0.5 * (LR - 1e-4))
    assert rate(80, **cooldown, lr_cooldown_power=2.0) == pytest.approx(1e-4 + 0.25 * (LR - 1e-4))
