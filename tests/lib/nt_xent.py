"""NT-Xent by the ring and by a dense float64 reference, for cases of odd sizes."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from infcl import nt_xent_loss
from tests.lib.loss_oracle import features, means_over_ranks, relative_error

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
