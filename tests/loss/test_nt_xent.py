"""NT-Xent over the ring equals the dense float64 loss."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from infcl import nt_xent_loss
from tests.lib.loss_oracle import features, means_over_ranks, relative_error
from tests.lib.ranks import run_ranks

# (samples per rank, D, scale, kind of features)
CASES = [
    (11, 24, 10.0, "random"),
    (1, 24, 10.0, "random"),
    (7, 40, 100.0, "random"),
    (6, 24, 20.0, "equal"),
    (9, 24, 50.0, "aligned"),
]


def evaluate(rank, world_size, cases, device="cpu", **options):
    results = []
    for samples, dim, scale, kind in cases:
        views = features(kind, samples * world_size, dim)
        first, second = (v.chunk(world_size)[rank].clone().to(device).requires_grad_() for v in views)
        scale = torch.tensor(scale, device=device, requires_grad=True)
        group = dist.group.WORLD if world_size > 1 else None
        loss = nt_xent_loss(first, second, scale, group=group, **{"workspace_bytes": 448, **options})
        loss.backward()
        results.append([value.cpu() for value in (loss.detach(), first.grad, second.grad, scale.grad)])
    return results


def _oracle(case, world_size):
    samples, dim, scale, kind = case
    first, second = (v.double().requires_grad_() for v in features(kind, samples * world_size, dim))
    scale = torch.tensor(scale, dtype=torch.float64, requires_grad=True)
    views = torch.cat([first, second])
    own = torch.eye(len(views), dtype=torch.bool)
    logits = (scale * views @ views.T).masked_fill(own, -math.inf)
    loss = F.cross_entropy(logits, torch.arange(len(views)).roll(len(first)))
    loss.backward()
    return loss.detach(), first.grad, second.grad, scale.grad


def assert_equal(per_rank, cases, tolerance=2e-5):
    world_size = len(per_rank)
    for case, results in zip(cases, zip(*per_rank)):
        truths = _oracle(case, world_size)
        largest = case[2] / (case[0] * world_size) ** 0.5  # gradients vanish at perfect matches
        for value, truth, floor in zip(means_over_ranks(results), truths, (1.0, largest, largest, 1.0)):
            assert relative_error(value, truth, floor) < tolerance, case


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
