"""NT-Xent over the ring equals the dense float64 loss."""

import pytest

from tests.lib.loss_oracle import relative_error
from tests.lib.pair_losses import NT_XENT, Case, assert_equal, evaluate, reference
from tests.lib.ranks import run_ranks

TOLERANCE = 2e-5


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_views_over_the_ring_give_the_dense_float64_loss(world_size):
    per_rank = run_ranks(evaluate, world_size, NT_XENT) if world_size > 1 else [evaluate(0, 1, NT_XENT)]
    assert_equal(per_rank, NT_XENT, TOLERANCE)


def test_the_loss_of_separated_views_is_precise():
    case = Case(20, None, 256, 100.0, "apart")
    (result,), exact = evaluate(0, 1, [case]), reference(case, 1)
    assert 0 < exact[0] < 1e-4
    for value, expected in zip(result, exact):
        assert relative_error(value, expected) < 1e-3


def test_views_are_exact_over_a_two_level_ring():
    assert_equal(run_ranks(evaluate, 4, NT_XENT, ring="two-level", ranks_per_node=2), NT_XENT, TOLERANCE)
