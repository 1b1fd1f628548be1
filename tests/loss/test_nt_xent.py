"""NT-Xent from half of the matrix equals the dense float64 loss over the whole one."""

import math
import statistics
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from infcl import inf_cl_loss, nt_xent_loss
from infcl.kernels import select_tile
from infcl.loss.nt_xent import ring_backward, ring_forward
from infcl.loss.ring import RingExchange
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
def test_half_of_the_matrix_gives_the_dense_float64_loss(world_size):
    assert_equal(run_ranks(evaluate, world_size, CASES) if world_size > 1 else [evaluate(0, 1, CASES)], CASES)


def test_what_is_left_where_views_are_told_apart_is_precise_too():
    case = (20, 256, 100.0, "apart")
    (result,), truth = evaluate(0, 1, [case]), _oracle(case, 1)
    assert 0 < truth[0] < 1e-4
    for value, expected in zip(result, truth):
        assert relative_error(value, expected) < 1e-3


def test_half_of_the_tiles_and_the_leaves_are_computed():
    views = torch.cat(features("random", 2000, 24))
    whole, areas = len(views) ** 2, []
    tile = select_tile(views)
    counting = tile._replace(
        softmax_forward=lambda r, c, *a, **k: (areas.append(len(r) * len(c)), tile.softmax_forward(r, c, *a, **k))[1],
        softmax_backward=lambda r, c, *a, **k: (areas.append(len(r) * len(c)), tile.softmax_backward(r, c, *a, **k))[1],
    )
    scale = torch.tensor(10.0)
    losses, matched = ring_forward(views, scale, RingExchange(None, reach=0), counting, 2**20)
    ring_backward(views, scale, losses, matched, RingExchange(None, reach=0), counting, 2**20)
    assert 0.5 * 2 * whole < sum(areas) < 0.54 * 2 * whole


@pytest.mark.slow
def test_symmetry_saves_at_least_1_6_times():
    first, second = (f.requires_grad_() for f in features("random", 2048, 256))
    views = torch.cat([first, second]).detach().requires_grad_()

    def seconds(call):
        times = []
        for _ in range(5):
            start = time.process_time()
            call().backward()
            times.append(time.process_time() - start)
        return statistics.median(times)

    whole, half = seconds(lambda: inf_cl_loss(views, views, 10.0)), seconds(lambda: nt_xent_loss(first, second, 10.0))
    print(f"all tiles {whole:.3f} s, half of them {half:.3f} s: {whole / half:.2f}x")
    assert whole / half > 1.6
