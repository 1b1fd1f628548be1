"""NT-Xent over the ring equals the dense float64 loss."""

import pytest

from tests.lib.loss_oracle import relative_error
from tests.lib.nt_xent import CASES, _oracle, assert_equal, evaluate
from tests.lib.ranks import run_ranks


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_views_over_the_ring_give_the_dense_float64_loss(world_size):
    assert_equal(run_ranks(evaluate, world_size, CASES) if world_size > 1 else [evaluate(0, 1, CASES)], CASES)


def test_what_is_left_where_views_are_told_apart_is_precise_too():
    case = (20, 256, 100.0, "apart")
    (result,), truth = evaluate(0, 1, [case]), _oracle(case, 1)
    assert 0 < truth[0] < 1e-4
    for value, expected in zip(result, truth):
        assert relative_error(value, expected) < 1e-3


def test_views_are_exact_over_a_two_level_ring():
    assert_equal(run_ranks(evaluate, 4, CASES, ring="two-level", ranks_per_node=2), CASES)
