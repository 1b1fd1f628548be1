"""Reference losses: single-process float64, written from the formulas, differentiated by autograd.

Also the features of tests, and the evaluation of a loss on each rank's share of a global batch.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from infcl import InfCLLoss, RingOptions, inf_cl_loss, info_nce_loss, nt_xent_loss, siglip_loss
from infcl.loss.contrastive import ContrastiveLoss
from tests.lib.ranks import run_ranks

# the tiled losses as functions of two sides
LIBRARY = {
    "inf_cl": lambda a, b, **options: inf_cl_loss(a, b, 10.0, **options),
    "module": lambda a, b, group, **options: InfCLLoss(group=group, **options)(a, b, 10.0),
    "siglip": lambda a, b, **options: siglip_loss(a, b, 10.0, -3.0, **options),
    "info_nce": lambda a, b, **options: info_nce_loss(a, b, torch.arange(len(a)), 10.0, **options),
    "nt_xent": lambda a, b, **options: nt_xent_loss(a, b, 10.0, **options),
}
FEATURES = ("random", "aligned", "equal", "near", "zero", "opposite", "long", "apart")


class Evaluation(NamedTuple):
    loss: Tensor
    d_images: Tensor
    d_texts: Tensor
    d_scale: Tensor
    d_bias: Tensor


class Case(NamedTuple):
    """A loss and the features of a global batch of `rows` pairs."""

    name: str  # one of ContrastiveLoss, "info_nce" or "nt_xent"
    rows: int
    dim: int
    scale: float
    kind: str = "random"
    dtype: torch.dtype = torch.float32
    bias: float = 0.0
    workspace_bytes: int = 4 * 7 * 4 * 4  # chunks of about 5 x 5: many uneven ones
    columns: int = 0  # texts or documents, if they are not as many as the rows
    positives: str = "distinct"  # of info_nce: "distinct" or "shared"
    captions: int | None = None  # per image; further texts of an image are hard negatives
    duplicates: str = "negative"
    ids: str = "none"  # how ids are drawn
    negatives_have_ids: bool = False  # hard negatives, as well as images
    margin: float | None = None

    def on(self, world_size: int) -> "Case":
        """Return the case with as many rows and columns on every rank as this one has."""
        return self._replace(rows=self.rows * world_size, columns=self.columns * world_size)


class Batch(NamedTuple):
    images: Tensor
    texts: Tensor
    ids: Tensor  # of images; of info_nce: of the documents
    positives: Tensor  # [W, q] among a rank's own documents


def mean_kl(images, texts, scale, teacher_images, teacher_texts, teacher_scale):
    """MobileCLIP's loss of one teacher: KL(teacher || student), averaged over both directions."""
    logits, wanted = scale * images @ texts.T, teacher_scale * teacher_images @ teacher_texts.T
    return sum(
        F.kl_div(a.log_softmax(1), b.log_softmax(1), reduction="batchmean", log_target=True) / 2
        for a, b in ((logits, wanted), (logits.T, wanted.T))
    )


def features(
    kind: str, rows: int, dim: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return image and text features [rows, dim], rounded to `dtype`, also for the reference.

    "grid" is "random", which global_batch rounds to 128ths: cosines are exact in float32, so every computation decides
    alike which of them exceed a limit. Of random features, one of 2 million cosines is always too close to a limit.
    """
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


def draw_ids(how: str, count: int, generator: torch.Generator) -> Tensor:
    """Return int64 [count]; equal ids are anywhere, ids are of both signs and far apart."""
    sizes = {"none": [1], "pairs": [1, 2], "few": [1, 2, 5], "to 300": [1, 7, 300, 40], "one": [count]}[how]
    numbers = torch.arange(len(sizes) * count).repeat_interleave(torch.tensor(sizes * count))[:count]
    return (numbers - 3)[torch.randperm(count, generator=generator)] * (2**62 // count)


def global_batch(case: Case, world_size: int = 1) -> Batch:
    images, texts = features(case.kind, case.rows, case.dim, case.dtype)
    generator = torch.Generator().manual_seed(case.rows)
    if case.columns:
        texts = torch.randn(case.columns, case.dim, generator=generator, dtype=torch.float64)
        texts = F.normalize(texts, dim=1).to(case.dtype)
    if case.kind == "grid":
        images, texts = ((side.double() * 128).round().div(128).to(case.dtype) for side in (images, texts))
    queries, documents = case.rows // world_size, len(texts) // world_size
    if case.positives == "in order":
        positives = [torch.arange(queries)] * world_size
    elif case.positives == "distinct" and queries <= documents:
        positives = [torch.randperm(documents, generator=generator)[:queries] for _ in range(world_size)]
    else:
        positives = [torch.randint(0, documents, (queries,), generator=generator) for _ in range(world_size)]
    count = len(texts) if case.name == "info_nce" else case.rows
    each = 1 + len(texts) // case.rows - (case.captions or 1) if case.negatives_have_ids else 1
    ids = draw_ids(case.ids, count * each, generator)
    return Batch(images, texts, ids.view(count, each) if each > 1 else ids, torch.stack(positives))


def oracle(case: Case, rounded: Callable[[Tensor], Tensor] = torch.clone, world_size: int = 1) -> Evaluation:
    """Evaluate the reference. `rounded` is applied to the features first, as a tile with lower precision does."""
    batch = global_batch(case, world_size)
    images, texts = (rounded(side).double().requires_grad_() for side in batch[:2])
    scale = torch.tensor(case.scale, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(case.bias, dtype=torch.float64, requires_grad=True)
    loss = _dense(case, batch, images, texts, scale, bias)
    loss.backward()
    d_bias = torch.zeros(()) if bias.grad is None else bias.grad
    return Evaluation(loss.detach(), images.grad, texts.grad, scale.grad, d_bias)


def _dense(case: Case, batch: Batch, images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """The definitions: `own` are the entries of matches, `same` further ones that share an id."""
    if case.name == "nt_xent":
        views = torch.cat([images, texts])
        logits = (scale * views @ views.T).masked_fill(torch.eye(len(views), dtype=torch.bool), -math.inf)
        return F.cross_entropy(logits, torch.arange(len(views)).roll(len(images)))
    logits, each = scale * images @ texts.T, len(texts) // len(images) if case.captions else 1
    if case.name == "info_nce":
        world_size, rank_documents = len(batch.positives), len(texts) // len(batch.positives)
        labels = (batch.positives + torch.arange(world_size)[:, None] * rank_documents).flatten()
        own = F.one_hot(labels, len(texts)).bool()
        same = batch.ids[labels][:, None] == batch.ids
    else:
        image_of, is_caption = torch.arange(len(texts)) // each, torch.arange(len(texts)) % each < (case.captions or 1)
        own = (torch.arange(len(images))[:, None] == image_of) & is_caption
        if case.negatives_have_ids:
            column = (torch.arange(len(texts)) % each - (case.captions or 1) + 1).clamp(min=0)
            same = batch.ids[:, :1] == batch.ids[image_of, column]
        else:
            same = (batch.ids[:, None] == batch.ids[image_of]) & is_caption
    excluded, positive = same & ~own & (case.duplicates == "mask"), own | same & (case.duplicates == "positive")
    beyond_row = beyond_column = torch.zeros_like(own)
    if case.margin is not None:
        cosines = (images @ texts.T).detach()
        limit = case.margin + 4e-6  # ties stay
        first = cosines.gather(1, own.int().argmax(1, keepdim=True))  # of the row's match
        beyond_row = (cosines > first + limit) & ~positive
        beyond_column = (cosines > cosines.where(own, -9).amax(0) + limit) & ~positive & own.any(0)
    if case.name == "siglip":
        excluded = excluded | beyond_row | beyond_column
        losses = -F.logsigmoid(torch.where(positive, 1.0, -1.0) * (logits + bias))
        return losses.masked_fill(excluded, 0).sum() / len(images)
    rows = _softmax(logits.masked_fill(excluded | beyond_row, -math.inf), positive)
    if case.name == "info_nce":
        return rows
    columns = logits.masked_fill(excluded | beyond_column, -math.inf)
    return (rows + _softmax(columns.T[is_caption], positive.T[is_caption])) / 2


def _softmax(logits: Tensor, positive: Tensor) -> Tensor:
    return (logits.logsumexp(1) - logits.where(positive, 0).sum(1) / positive.sum(1)).mean()


def evaluate(case: Case, rank: int = 0, world_size: int = 1, device: str = "cpu", **options) -> Evaluation:
    """Evaluate the loss under test on this rank's rows of the case's global batch."""
    batch = global_batch(case, world_size)
    images, texts, ids = (side.chunk(world_size)[rank].clone().to(device) for side in batch[:3])
    images.requires_grad_(), texts.requires_grad_()
    scalar = {"dtype": torch.promote_types(case.dtype, torch.float32), "device": device, "requires_grad": True}
    scale, bias = torch.tensor(case.scale, **scalar), torch.tensor(case.bias, **scalar)
    group = dist.group.WORLD if world_size > 1 else None
    options = {"workspace_bytes": case.workspace_bytes, **options}
    options = {"group": group, "options": RingOptions(**options)}
    if case.name == "nt_xent":
        value = nt_xent_loss(images, texts, scale, **options)
    elif case.name == "info_nce":
        options |= {"document_ids": ids, "duplicates": case.duplicates, "margin": case.margin}
        value = info_nce_loss(images, texts, batch.positives[rank].to(device), scale, **options)
    else:
        loss = ContrastiveLoss(
            case.name, duplicates=case.duplicates, captions=case.captions, margin=case.margin, **options
        )
        value = loss(images, texts, scale, bias, ids=ids if case.duplicates != "negative" else None)
    value.backward()
    d_bias = torch.zeros(()) if bias.grad is None else bias.grad.cpu()
    return Evaluation(value.detach().cpu(), images.grad.cpu(), texts.grad.cpu(), scale.grad.cpu(), d_bias)


def over_ranks(cases: list[Case], world_size: int, **options) -> list[Evaluation]:
    """Evaluate global cases on `world_size` ranks; return their averages."""
    if world_size == 1:
        return [evaluate(case, **options) for case in cases]
    return [averaged(list(results)) for results in zip(*run_ranks(evaluate_on_rank, world_size, cases, options))]


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
