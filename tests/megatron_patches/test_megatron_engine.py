"""Steps of tensor-parallel towers under DeepSpeed equal single-process float64 ones, in every ZeRO stage."""

import contextlib
import json
import math
from unittest import mock

import pytest
import torch

from infcl.config import BatchPlan
from tests.lib.fp16 import fp16_allowed
from tests.lib.ranks import run_ranks
from tests.lib.step_oracle import worst_error, worst_update_error
from tests.lib.tensor_parallel import LR, global_batch, layout, new_model, oracle, settings, train_steps

STEPS = 3


OPTIONS = [  # (T, D, preset, flags)
    (2, 2, "zero1", {"pack_captions": "on"}),
    (4, 1, "zero3", {"pack_captions": "on"}),
    pytest.param(2, 1, "zero3", {"compile_blocks": "on"}, marks=pytest.mark.slow),
    pytest.param(2, 2, "zero1", {"compile_blocks": "on", "pack_captions": "on"}, marks=pytest.mark.slow),
    pytest.param(2, 2, "zero0", {"compile_blocks": "on", "grad_checkpointing": True}, marks=pytest.mark.slow),
]


def steps_of(rank, world_size, size, preset, flags):
    from infcl.checkpoint.load import full_weights

    config = settings(preset, size, **flags)
    with precision_allowed(config), mock.patch("infcl.train.compile.ALIGNED", 1):  # these sizes are no multiples of 8
        options = {"activation_checkpointing": config.grad_checkpointing}
        engine, *values = train_steps(layout(size), config, STEPS, **options)
    return *values, full_weights(engine, keep=True)


CASES = [(2, 1, "zero3"), *((2, 2, f"zero{stage}") for stage in range(4)), (4, 1, "zero0")]


@pytest.mark.first(1)
@pytest.mark.parametrize(("size", "copies", "preset"), CASES)
def test_three_steps_equal_the_single_process_ones(size, copies, preset):
    check(run_ranks(steps_of, size * copies, size, preset, {}), copies)


@pytest.mark.first(1)
@pytest.mark.parametrize(("size", "copies", "preset", "flags"), OPTIONS)
def test_packed_and_compiled_steps_equal_them_too(size, copies, preset, flags):
    seconds = 480 if "compile_blocks" in flags else 120  # each rank compiles the graphs of two towers
    check(run_ranks(steps_of, size * copies, size, preset, flags, timeout=seconds), copies)


@pytest.mark.first(1)
@pytest.mark.parametrize(("preset", "precision"), [("zero1", "bf16"), ("zero3", "bf16"), ("zero1", "amp_bf16")])
def test_steps_in_bf16_follow_within_its_rounding(preset, precision):
    """FP32 master weights start unrounded; activations are rounded to 8 bits, in parts and in sums of parts.
    Each step's rounding moves the parameters that the next one starts from. Seen: 5.2e-2 of a parameter's
    update; of the first norm 5e-3, under autocast 2.5e-2 (1.1e-2 without tensor parallelism)."""
    losses, norms, _, state = run_ranks(steps_of, 4, 2, preset, {"precision": precision})[0]
    expected_losses, expected_norms, _, expected_state = oracle(2, STEPS)
    assert losses == pytest.approx(expected_losses, rel=2e-2)
    assert norms[0] == pytest.approx(expected_norms[0], rel=2e-2 if precision == "bf16" else 5e-2)
    assert norms == pytest.approx(expected_norms, rel=0.15)
    assert worst_error(state, expected_state) < 5e-2
    assert worst_update_error(state, expected_state, new_model().state_dict()) < 0.11


def precision_allowed(config):
    return fp16_allowed() if config.precision == "fp16" else contextlib.nullcontext()


def fp16_flags(path, stage: int) -> dict[str, str]:
    """A scale that the first steps do not overflow."""
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    path.write_text(json.dumps({"zero_optimization": {"stage": stage}, "fp16": fp16}))
    return {"precision": "fp16", "deepspeed_config": str(path)}


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 3])
def test_fp16_parameters_follow_within_their_rounding(stage, tmp_path):
    """The norms, and so the clip, are those of gradients that no loss scale multiplies. Seen: 7e-3, 8e-3 of a norm
    and of a parameter's update."""
    expected_losses, expected_norms, expected_tower_norms, expected_state = oracle(2, STEPS)
    flags = fp16_flags(tmp_path / "preset.json", stage)
    for losses, norms, tower_norms, state in run_ranks(steps_of, 4, 2, "", flags):
        assert losses == pytest.approx(expected_losses, rel=2e-3)
        assert norms == pytest.approx(expected_norms, rel=2e-2)
        for got, wanted in zip(tower_norms, expected_tower_norms):
            assert got == pytest.approx(wanted, rel=2e-2)
        assert worst_error(state, expected_state) < 2e-2
        assert worst_update_error(state, expected_state, new_model().state_dict()) < 1.6e-2


POISONED = {1: "visual.ln_pre.weight", 3: "logit_scale"}  # step -> a whole parameter


def steps_of_which_two_are_poisoned(rank, world_size, size, preset, flags):
    """Five steps; in two the gradient of a whole parameter is not a number on tensor-parallel rank 1 of the first copy
    -> whether each was applied, counters, the weights that this rank holds of whole parameters."""
    from infcl.train.build import split_model
    from tests.lib.specs import engine_of

    parallel, config = layout(size), settings(preset, size, **flags)
    model, now, applied = new_model(), [], []
    split_model(model, parallel)
    for name, parameter in model.named_parameters():
        if name in POISONED.values():
            parameter.register_hook(lambda gradient, name=name: gradient * (math.nan if name in now else 1))
    with precision_allowed(config):
        engine = engine_of(model, config, parallel, BatchPlan(parallel.dp_size, 1, 4))
        engine.train()
        for step in range(5):
            now[:] = [POISONED.get(step)] if parallel.tp_rank == 1 and parallel.dp_rank == 0 else []
            output = engine.encode(*global_batch(4, seed=10 * step + parallel.dp_rank))
            engine.backward(sum(value.float().flatten()[::3].sum() for value in output.values()), is_last=True)
            applied.append(engine.step(LR))
            assert engine.norms[:2].isfinite().all() and engine.norms[2].isfinite() == applied[-1]
    whole = {name: p for name, p in engine.state.parameters() if not hasattr(p, "tensor_parallel_split")}
    assert set(POISONED.values()) <= set(whole)
    return applied, engine.counters(), {name: engine.state.read(p).clone() for name, p in whole.items()}


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("preset", "precision"),
    [("zero1", "bf16"), ("zero0", "fp32"), ("zero3_offload", "fp32"), ("zero3", "bf16"), (1, "fp16"), (3, "fp16")],
)
def test_what_is_not_finite_on_a_later_tensor_parallel_rank_skips_the_step_on_all(preset, precision, tmp_path):
    """A norm counts a whole parameter on tensor-parallel rank 0 only."""
    flags = fp16_flags(tmp_path / "preset.json", preset) if precision == "fp16" else {"precision": precision}
    results = run_ranks(steps_of_which_two_are_poisoned, 4, 2, preset, flags)
    for applied, counters, weights in results:
        assert applied == [True, False, True, False, True]
        assert counters["optimizer_step"] == 3 and counters["skipped_steps"] == 2
        assert precision != "fp16" or counters["cur_scale"] == 2**6
        for name, value in weights.items():
            assert value.isfinite().all() and torch.equal(value, results[0][2][name]), name


def check(results, copies):
    expected_losses, expected_norms, expected_tower_norms, expected_state = oracle(copies, STEPS)
    for losses, norms, tower_norms, state in results:
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        assert norms == pytest.approx(expected_norms, rel=1e-5)
        for got, wanted in zip(tower_norms, expected_tower_norms):
            assert got == pytest.approx(wanted, rel=1e-5)
        assert worst_error(state, expected_state) < 1e-5
