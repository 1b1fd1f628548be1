"""InfoNCE by the ring and by a dense float64 reference, for cases of odd sizes."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from infcl import info_nce_loss
from tests.lib.loss_oracle import means_over_ranks, relative_error

# (queries per rank, documents per rank, D, scale, how positives are drawn)
CASES = [
    (7, 23, 24, 20.0, "distinct"),
    (9, 13, 40, 100.0, "shared"),
    (11, 5, 24, 10.0, "shared"),  # more queries than documents
    (1, 1, 24, 5.0, "distinct"),
]


def _global_batch(case, world_size):
    queries, documents, dim, _, kind = case
    generator = torch.Generator().manual_seed(queries)

    def draw(rows):
        return F.normalize(torch.randn(rows * world_size, dim, generator=generator), dim=1)

    q, d = draw(queries), draw(documents)
    if kind == "distinct":
        rows = [torch.randperm(documents, generator=generator)[:queries] for _ in range(world_size)]
    else:
        rows = [torch.randint(0, documents, (queries,), generator=generator) for _ in range(world_size)]
    return q, d, torch.stack(rows)  # positives: [W, q], indices among a rank's own documents


def evaluate(rank, world_size, cases, device="cpu", **options):
    results = []
    for case in cases:
        q, d, positives = _global_batch(case, world_size)
        own_q = q.chunk(world_size)[rank].clone().to(device).requires_grad_()
        own_d = d.chunk(world_size)[rank].clone().to(device).requires_grad_()
        scale = torch.tensor(case[3], device=device, requires_grad=True)
        group = dist.group.WORLD if world_size > 1 else None
        bound = {"workspace_bytes": 448, **options}
        loss = info_nce_loss(own_q, own_d, positives[rank].to(device), scale, group=group, **bound)
        loss.backward()
        results.append([value.cpu() for value in (loss.detach(), own_q.grad, own_d.grad, scale.grad)])
    return results


def _oracle(case, world_size):
    q, d, positives = _global_batch(case, world_size)
    q, d = q.double().requires_grad_(), d.double().requires_grad_()
    scale = torch.tensor(case[3], dtype=torch.float64, requires_grad=True)
    labels = (positives + torch.arange(world_size)[:, None] * case[1]).flatten()
    loss = F.cross_entropy(scale * q @ d.T, labels)
    loss.backward()
    return loss.detach(), q.grad, d.grad, scale.grad


def assert_equal(per_rank, cases, tolerance=1e-5):
    world_size = len(per_rank)
    for case, results in zip(cases, zip(*per_rank)):
        for value, truth in zip(means_over_ranks(results), _oracle(case, world_size)):
            assert relative_error(value, truth, floor=0.1) < tolerance, case
