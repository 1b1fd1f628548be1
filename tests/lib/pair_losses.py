"""InfoNCE and NT-Xent by the ring and by dense float64 references, for cases of odd sizes."""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from infcl import info_nce_loss, nt_xent_loss
from tests.lib.loss_oracle import features, means_over_ranks, relative_error


class Case(NamedTuple):
    """A global batch of InfoNCE (queries and documents), or of NT-Xent (two views).

    Attributes:
        rows: queries per rank, or samples per rank.
        documents: documents per rank; None for NT-Xent.
        kind: how positives are drawn ("distinct", "shared"), or NT-Xent's kind of features.
    """

    rows: int
    documents: int | None
    dim: int
    scale: float
    kind: str


INFO_NCE = [
    Case(7, 23, 24, 20.0, "distinct"),
    Case(9, 13, 40, 100.0, "shared"),
    Case(11, 5, 24, 10.0, "shared"),  # more queries than documents
    Case(1, 1, 24, 5.0, "distinct"),
]
NT_XENT = [
    Case(11, None, 24, 10.0, "random"),
    Case(1, None, 24, 10.0, "random"),
    Case(7, None, 40, 100.0, "random"),
    Case(6, None, 24, 20.0, "equal"),
    Case(9, None, 24, 50.0, "aligned"),
]


def global_batch(case: Case, world_size: int):
    """Return both sides of the global batch, and the positives [W, q] among a rank's own documents (NT-Xent: None)."""
    rows, documents, dim, _, kind = case
    if documents is None:
        return *features(kind, rows * world_size, dim), None
    generator = torch.Generator().manual_seed(rows)
    sides = [F.normalize(torch.randn(n * world_size, dim, generator=generator), dim=1) for n in (rows, documents)]
    if kind == "distinct":
        positives = [torch.randperm(documents, generator=generator)[:rows] for _ in range(world_size)]
    else:
        positives = [torch.randint(0, documents, (rows,), generator=generator) for _ in range(world_size)]
    return *sides, torch.stack(positives)


def evaluate(rank, world_size, cases, device="cpu", **options):
    """Return [[loss, gradients of this rank's rows on both sides, gradient of the scale], ...] of the cases."""
    results = []
    options = {"group": dist.group.WORLD if world_size > 1 else None, "workspace_bytes": 448, **options}
    for case in cases:
        *sides, positives = global_batch(case, world_size)
        own = [side.chunk(world_size)[rank].clone().to(device).requires_grad_() for side in sides]
        scale = torch.tensor(case.scale, device=device, requires_grad=True)
        if positives is None:
            loss = nt_xent_loss(*own, scale, **options)
        else:
            loss = info_nce_loss(*own, positives[rank].to(device), scale, **options)
        loss.backward()
        results.append([value.cpu() for value in (loss.detach(), *(side.grad for side in own), scale.grad)])
    return results


def reference(case: Case, world_size: int):
    """Return the dense loss in float64 and its gradients: of both sides and of the scale."""
    *sides, positives = global_batch(case, world_size)
    first, second = (side.double().requires_grad_() for side in sides)
    scale = torch.tensor(case.scale, dtype=torch.float64, requires_grad=True)
    if positives is None:
        views = torch.cat([first, second])
        own = torch.eye(len(views), dtype=torch.bool)
        logits = (scale * views @ views.T).masked_fill(own, -math.inf)
        labels = torch.arange(len(views)).roll(len(first))
    else:
        logits = scale * first @ second.T
        labels = (positives + torch.arange(world_size)[:, None] * case.documents).flatten()
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    return loss.detach(), first.grad, second.grad, scale.grad


def assert_equal(per_rank, cases, tolerance):
    """Compare the average of the ranks' results with the reference."""
    world_size = len(per_rank)
    for case, results in zip(cases, zip(*per_rank)):
        floors = (0.1,) * 4
        if case.documents is None:
            largest = case.scale / (case.rows * world_size) ** 0.5  # gradients vanish at perfect matches
            floors = (1.0, largest, largest, 1.0)
        for value, expected, floor in zip(means_over_ranks(results), reference(case, world_size), floors):
            assert relative_error(value, expected, floor) < tolerance, case
