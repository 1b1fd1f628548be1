"""Steps of tensor-parallel towers under DeepSpeed equal single-process float64 ones, in every ZeRO stage."""

from unittest import mock

import pytest

from tests.ranks import run_ranks
from tests.tensor_parallel import LAYOUTS, layout, oracle, settings, train_steps

STEPS = 3


OPTIONS = [  # (T, D, preset, flags)
    (2, 2, "zero1", {"sequence_parallel": True}),
    (4, 1, "zero3", {"sequence_parallel": True}),
    pytest.param(2, 1, "zero3", {"sequence_parallel": True, "compile_blocks": "on"}, marks=pytest.mark.slow),
    pytest.param(2, 1, "zero1", {"compile_blocks": "on"}, marks=pytest.mark.slow),
    pytest.param(2, 2, "zero2", {"compile_blocks": "on"}, marks=pytest.mark.slow),
    pytest.param(2, 2, "zero0", {"compile_blocks": "on", "grad_checkpointing": True}, marks=pytest.mark.slow),
]


def steps_of(rank, world_size, size, preset, flags):
    from infcl.train.checkpoint import full_weights
    from megatron_patches import halves

    halves.LEAST_ELEMENTS = 1
    with mock.patch("infcl.train.compiled.ALIGNED", 1):  # these towers' sizes are no multiples of 8; CPUs do not mind
        config = settings(preset, size, **flags)
        options = {"activation_checkpointing": config.grad_checkpointing}
        engine, *values = train_steps(layout(size), config, STEPS, **options)
    return *values, full_weights(engine, keep=True)


QUICK = {(2, 2): (0, 1, 2, 3), (2, 1): (0, 3), (4, 1): (1, 2), (1, 2): (1,)}  # the others take as long again
CASES = [
    pytest.param(*ranks, f"zero{stage}", marks=() if stage in QUICK[ranks] else pytest.mark.slow)
    for ranks in LAYOUTS
    for stage in range(4)
]


@pytest.mark.parametrize(("size", "copies", "preset"), CASES)
def test_three_steps_equal_the_single_process_ones(size, copies, preset):
    check(run_ranks(steps_of, size * copies, size, preset, {}), copies)


@pytest.mark.parametrize(("size", "copies", "preset", "flags"), OPTIONS)
def test_sequence_parallel_and_compiled_steps_equal_them_too(size, copies, preset, flags):
    check(run_ranks(steps_of, size * copies, size, preset, flags), copies)


def test_bf16_parameters_follow_within_their_rounding():
    """Masters start unrounded; activations are rounded to 8 bits, in parts and in sums of parts, and each step's
    rounding moves the parameters that the next one starts from."""
    losses, norms, _, state = run_ranks(steps_of, 4, 2, "zero2_bf16", {"precision": "bf16"})[0]
    expected_losses, expected_norms, _, expected_state = oracle(2, STEPS)
    assert losses == pytest.approx(expected_losses, rel=2e-2)
    assert norms[0] == pytest.approx(expected_norms[0], rel=2e-2)
    assert norms == pytest.approx(expected_norms, rel=0.15)
    for name, reference in expected_state.items():
        if not name.endswith("in_proj_bias"):
            assert float((state[name].double() - reference).norm() / reference.norm()) < 5e-2, name


def check(results, copies):
    expected_losses, expected_norms, expected_tower_norms, expected_state = oracle(copies, STEPS)
    for losses, norms, tower_norms, state in results:
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        assert norms == pytest.approx(expected_norms, rel=1e-5)
        for got, wanted in zip(tower_norms, expected_tower_norms):
            assert got == pytest.approx(wanted, rel=1e-5)
        assert set(state) == set(expected_state)
        for name, value in state.items():
            reference = expected_state[name]
            assert float((value.double() - reference).norm() / reference.norm()) < 1e-5, name
