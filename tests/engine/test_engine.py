"""Steps through DeepSpeed equal those of one float64 process: one table of stages, ranks, precisions, and more."""

import contextlib
from typing import NamedTuple
from unittest import mock

import pytest
import torch

from infcl.engine.engine import Engine
from infcl.engine.patches import square_of
from tests.lib.engine_steps import (
    CEILING,
    CLIP,
    DECAY,
    MICRO_BATCH_SIZE,
    MICRO_BATCHES,
    START,
    STEPS,
    at_start,
    engine_on_cpu,
    engine_steps,
    expected,
    steps_with_a_poisoned_one,
)
from tests.lib.fp16 import fp16_allowed, fp16_preset
from tests.lib.ranks import run_ranks
from tests.lib.step_oracle import LR, ToyCLIP, global_batch, oracle_steps, worst_error, worst_update_error

BF16_UPDATE = 0.12  # of a parameter's update: twice the largest error that was seen (5.7e-2; six series of batches)


class Steps(NamedTuple):
    """How three steps are made. Their oracle knows the ranks and the dropout only."""

    preset: str
    precision: str = "fp32"
    ranks: int = 2
    resident: int = 1  # micro-batches that keep their graphs
    dropout: float = 0.0
    hosts: int = 1
    dropped: bool = False  # a graph is made and dropped before, as --resident-micro-batches auto measures one


PRESETS = ("zero0", "zero1", "zero2", "zero3", "zero3_offload")
IN_BF16 = [("zero1", "bf16"), ("zero2_bf16", "bf16"), ("zero3", "bf16"), ("zero3_offload", "bf16")]
IN_BF16 += [(f"zero{stage}", "amp_bf16") for stage in range(4)]
TABLE = [Steps(preset) for preset in PRESETS]
TABLE += [Steps(preset, ranks=3, resident=2, dropout=0.3) for preset in ("zero1", "zero3")]
TABLE += [Steps("zero2", hosts=2), Steps("zero3", resident=2, dropped=True)]  # across hosts it reduces in the backward
TABLE += [Steps(*case, resident=2, dropout=0.3) for case in IN_BF16[:2]]
TABLE += [Steps("zero1", "fp16", 2, 1, 0.3)]
# ---- the first look ends here ----
TABLE += [Steps(preset, ranks=1) for preset in PRESETS]
TABLE += [Steps(preset, ranks=3, resident=2, dropout=0.3) for preset in ("zero0", "zero2", "zero3_offload")]
TABLE += [Steps(preset, ranks=4, resident=3, dropout=0.3) for preset in ("zero1", "zero3")]
TABLE += [Steps("zero1", hosts=2), Steps("zero1", resident=2, dropped=True)]
TABLE += [Steps(*case, ranks=1) for case in IN_BF16[:4]]
TABLE += [Steps(*case, resident=2, dropout=0.3) for case in IN_BF16[2:]]
TABLE += [Steps(preset, "bf16", ranks=4) for preset in ("zero1", "zero2_bf16", "zero3_offload")]
TABLE += [Steps("zero1", "fp16", 1, 2), Steps("zero2", "fp16", 3, 1), Steps("zero3", "fp16", 2, 2)]
TABLE += [Steps("zero3_offload", "fp16", 4, 1, 0.3)]


def make_steps(rank, world_size, case: Steps, path: str):
    """What `engine_steps` returns, and whether DeepSpeed's optimizer reduces during each backward."""
    from infcl.parallel import Parallel

    overlaps: list[bool] = []
    backward = Engine.backward

    def noted(engine, *arguments):
        overlaps.append(getattr(engine.engine.optimizer, "overlap_comm", False))
        backward(engine, *arguments)

    changes = {"deepspeed_config": path} if path else {}
    with contextlib.ExitStack() as stack:
        if case.precision == "fp16":
            stack.enter_context(fp16_allowed())
        stack.enter_context(mock.patch.object(Parallel, "hosts", case.hosts))
        stack.enter_context(mock.patch.object(Engine, "backward", noted))
        steps = engine_steps(
            rank, world_size, case.preset, case.precision, case.resident, case.dropped, case.dropout, **changes
        )
    return steps, overlaps


@pytest.mark.first(12)
@pytest.mark.parametrize("case", TABLE, ids=lambda case: "-".join(map(str, case)))
def test_three_steps_equal_those_of_one_float64_process(case, tmp_path):
    """In half precision within its rounding: logits of +-90 carry the 2^-9 of bf16 activations into the loss, hence
    2e-2, and the 2^-11 of fp16 ones (seen: 2e-3 at most, of an update 5e-3)."""
    path = fp16_preset(tmp_path, case.preset) if case.precision == "fp16" else ""
    (got, overlaps) = run_ranks(make_steps, case.ranks, case, path)[0]
    losses, norms, _, state, steps = got
    expected_losses, expected_norms, expected_state = expected(case.ranks, dropout=case.dropout)
    if "bf16" in case.precision:
        follow_in_bf16(got, (expected_losses, expected_norms, expected_state))
    elif case.precision == "fp16":
        assert norms == pytest.approx(expected_norms, rel=5e-3)
        assert worst_error(state, expected_state) < 5e-3
        assert worst_update_error(state, expected_state, at_start()) < 6e-3
    else:
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        assert norms == pytest.approx(expected_norms, rel=1e-5)
        assert worst_error(state, expected_state) < 1e-5
        assert steps == STEPS
    assert case.hosts == 1 or (overlaps and all(overlaps))


def follow_in_bf16(got, wanted):
    losses, norms, scales, state, _ = got
    assert scales[0] == pytest.approx(START, abs=1e-6), "FP32 master weights must start from unrounded values"
    expected_losses, expected_norms, expected_state = wanted
    assert losses == pytest.approx(expected_losses, rel=2e-2)
    assert norms == pytest.approx(expected_norms, rel=2e-2)
    assert worst_error(state, expected_state) < 5e-2
    assert worst_update_error(state, expected_state, at_start()) < BF16_UPDATE


def misaligned_parameters(rank, world_size, preset):
    from infcl.models.clip import CLIP
    from infcl.models.config import load_model_config

    model = CLIP(load_model_config("demo").with_logit_bias(-10.0))
    engine_on_cpu(model, preset, precision="bf16")
    stored = {name: getattr(parameter, "ds_tensor", parameter) for name, parameter in model.named_parameters()}
    return [name for name, tensor in stored.items() if tensor.data_ptr() % 16 and not name.startswith("logit_")]


@pytest.mark.parametrize("preset", ["zero2", "zero3"])
def test_parameters_begin_at_multiples_of_16_bytes(preset):
    """Compiled kernels rely on it: with logit_scale before them in ZeRO's flat buffer they fail on a GPU."""
    assert run_ranks(misaligned_parameters, 1, preset)[0] == []


@pytest.mark.first(4)
@pytest.mark.parametrize("preset", ["zero0", "zero1", "zero2", "zero3", "zero3_offload", "zero1_bf16", "zero2_bf16"])
def test_a_step_that_is_not_finite_changes_nothing(preset, tmp_path):
    """The steps around it give what they give without it: no gradient of it stays behind, Adam does not count it."""
    precision = "bf16" if preset.endswith("bf16") else "fp32"
    results = run_ranks(steps_with_a_poisoned_one, 2, preset.replace("zero1_bf16", "zero1"), precision)
    applied, _, state, counters = results[0]
    assert applied == [True, False, True]
    assert results[1][1] == [MICRO_BATCH_SIZE + 2], "the row that did it is known to its rank"
    assert counters["optimizer_step"] == 2 and counters["global_steps"] == 3 and counters["skipped_steps"] == 1
    batches = [global_batch(2 * MICRO_BATCHES * MICRO_BATCH_SIZE, seed=step) for step in (0, 2)]
    _, _, expected_state = oracle_steps(
        batches, grad_clip_norm=CLIP, weight_decay=DECAY, max_logit_scale=CEILING, logit_scale=START
    )
    assert worst_error(state, expected_state) < (5e-2 if precision == "bf16" else 1e-5)
    if precision == "bf16":
        assert worst_update_error(state, expected_state, at_start()) < BF16_UPDATE


def accumulate_ones(rank, world_size, preset):
    """600 micro-batches, each with gradient 1 for logit_scale: what the engine accumulated."""
    options = {"precision": "bf16", "grad_clip_norm": None, "wd": 0.0}
    engine = engine_on_cpu(ToyCLIP(logit_scale=0.0), preset, 600, 1, **options)
    images, texts = global_batch(1)
    for index in range(600):
        output = engine.encode(images, texts)
        zero = 0 * (output["image_features"].sum() + output["text_features"].sum())
        engine.backward(output["logit_scale"].sum() + zero, index == 599)
    engine.step(LR)
    return float(engine.norms[2])


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("preset", "world_size"),
    [("zero1", 1), ("zero2_bf16", 2), ("zero3", 1), pytest.param("zero3_offload", 2, marks=pytest.mark.slow)],
)
def test_six_hundred_bf16_micro_batches_accumulate_without_loss(preset, world_size):
    """In bf16, DeepSpeed's default, they sum to 256."""
    assert run_ranks(accumulate_ones, world_size, preset)[0] == pytest.approx(600.0, rel=1e-6)


def test_the_square_of_many_numbers_is_exact_on_a_cpu():
    """In float32 a CPU's sum of 25 million squares is 0.3% off."""
    numbers = torch.randn(25_000_000, generator=torch.Generator().manual_seed(0))
    found = square_of([None, numbers, numbers[:0]], torch.device("cpu"))
    assert float(found) == pytest.approx(float(numbers.double().square().sum()), rel=1e-6)
