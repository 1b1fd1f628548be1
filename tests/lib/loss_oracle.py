"""Reference losses: single-process float64, written from the formulas, differentiated by autograd.

Also the features of tests, and the evaluation of a loss on each rank's share of a global batch.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from infcl.loss.contrastive import ContrastiveLoss

FEATURES = ("random", "aligned", "equal", "near", "zero", "opposite", "long", "apart")


class Evaluation(NamedTuple):
    loss: Tensor
    d_images: Tensor
    d_texts: Tensor
    d_scale: Tensor
    d_bias: Tensor


class Case(NamedTuple):
    """A loss and the features of a global batch of `rows` pairs."""

    name: str
    rows: int
    dim: int
    scale: float
    kind: str = "random"
    dtype: torch.dtype = torch.float32
    bias: float = 0.0
    workspace_bytes: int = 4 * 7 * 4 * 4  # chunks of about 5 x 5: many uneven ones


def features(
    kind: str, rows: int, dim: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return image and text features [rows, dim], rounded to `dtype`, also for the reference."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n):
        return F.normalize(torch.randn(n, dim, generator=generator, dtype=torch.float64), dim=1)

    images, texts = draw(rows), draw(rows)
    if kind == "aligned":  # matched pairs have cosine 1
        texts = images.clone()
    elif kind == "equal":  # all rows and columns are one vector
        images = texts = draw(1).expand(rows, dim)
    elif kind == "apart":  # separated pairs: with 256 features and a scale of 100, a loss of about 1e-8
        texts = F.normalize(0.4 * images + 0.9 * texts, dim=1)
    elif kind == "training":  # as in mid-training: with 768 features and a scale of 100, a loss of about 2
        texts = F.normalize(0.14 * images + texts, dim=1)
    elif kind == "near":  # near-duplicates
        images = texts = draw(1) + 1e-4 * draw(rows)
    elif kind == "zero":  # some rows and columns are zero
        images, texts = images.clone(), texts.clone()
        images[::3], texts[1::4] = 0, 0
    elif kind == "opposite":  # all logits of some rows are far below the others
        texts = F.normalize(draw(1) + 0.01 * draw(rows), dim=1)
        images = texts * torch.where(torch.arange(rows) % 3 == 0, -1.0, 1.0).double()[:, None]
    elif kind == "long":  # far from normalised
        images, texts = 300 * images, 300 * texts
    return images.to(dtype).clone(), texts.to(dtype).clone()


def oracle(case: Case, rounded: Callable[[Tensor], Tensor] = torch.clone) -> Evaluation:
    """Evaluate the reference. `rounded` is applied to the features first, as a tile with lower precision does."""
    images, texts = (rounded(side) for side in features(case.kind, case.rows, case.dim, case.dtype))
    images, texts = images.double().requires_grad_(), texts.double().requires_grad_()
    scale = torch.tensor(case.scale, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(case.bias, dtype=torch.float64, requires_grad=True)
    logits = scale * images @ texts.T + bias
    if case.name == "siglip":
        sign = 2 * torch.eye(case.rows, dtype=torch.float64) - 1
        loss = -F.logsigmoid(sign * logits).sum() / case.rows
    else:
        labels = torch.arange(case.rows)
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    loss.backward()
    return Evaluation(loss.detach(), images.grad, texts.grad, scale.grad, bias.grad)


def evaluate(case: Case, rank: int = 0, world_size: int = 1, device: str = "cpu", **options) -> Evaluation:
    """Evaluate the loss under test on this rank's rows of the case's global batch."""
    rows = case.rows // world_size
    mine = slice(rank * rows, (rank + 1) * rows)
    images, texts = (f[mine].to(device).requires_grad_() for f in features(case.kind, case.rows, case.dim, case.dtype))
    scalar = {"dtype": torch.promote_types(case.dtype, torch.float32), "device": device, "requires_grad": True}
    scale, bias = torch.tensor(case.scale, **scalar), torch.tensor(case.bias, **scalar)
    group = dist.group.WORLD if world_size > 1 else None
    loss = ContrastiveLoss(case.name, group=group, **{"workspace_bytes": case.workspace_bytes, **options})
    value = loss(images, texts, scale, bias)
    value.backward()
    d_bias = torch.zeros(()) if bias.grad is None else bias.grad.cpu()
    return Evaluation(value.detach().cpu(), images.grad.cpu(), texts.grad.cpu(), scale.grad.cpu(), d_bias)


def evaluate_on_rank(rank: int, world_size: int, cases: list[Case], options: dict) -> list[Evaluation]:
    return [evaluate(case, rank, world_size, **options) for case in cases]


def means_over_ranks(per_rank: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Average the ranks' results as data parallelism does. Each row of features is on one rank only."""
    return [
        torch.stack(values).mean() if values[0].ndim == 0 else torch.cat(values) / len(values)
        for values in zip(*per_rank)
    ]


def averaged(per_rank: Sequence[Evaluation]) -> Evaluation:
    return Evaluation(*means_over_ranks(per_rank))


def relative_error(value: Tensor, reference: Tensor, floor: float = 0.0) -> float:
    """Return ||value - reference|| / max(||reference||, floor)."""
    return float((value.double() - reference).norm() / reference.norm().clamp(min=max(floor, 1e-300)))
