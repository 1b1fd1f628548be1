"""CLIP's symmetric contrastive loss, exact at any batch size, in one ring pass each for forward and backward.

In: image and text features [b, D] of this rank, the multiplicative logit scale. Out: the loss; backward gives the
gradients. The global batch has B = W * b samples over the W ranks of a process group.

    logits = scale * all_images @ all_texts.T                                           # [B, B], never formed
    loss = (cross_entropy(logits, arange(B)) + cross_entropy(logits.T, arange(B))) / 2

Read downwards: inf_cl_loss (public) -> _InfCL (autograd) -> ring_forward, ring_backward -> a tile (infcl/kernels).

Images (rows) stay. Texts (columns) travel with their column statistics, so each logit tile serves both directions:
8 B^2 D flops for forward and backward together (1 + 3 matmuls).
Forward: W - 1 hops of b*D operands, W hops of b float32. Backward: W - 1 hops of b*D operands and b float32, W hops of
b*D float32 gradients. There is no all-gather of features and no tensor of size b x b.

Row i has a matched logit s, and the log-sum-exp (LSE) o over all other logits: the tiles exclude matches. Then

    cross entropy    log(exp(o) + exp(s)) - s = softplus(o - s)                 # l >= 0 in spite of rounding
    LSE of all       s + l
    dS at the match  exp(s) / (exp(o) + exp(s)) - 1 = expm1(-l)

l is a float32 function of the difference o - s. Late in training the match dominates the LSE of all, and subtracting
one from the other would cancel. The dominant entry of dS, at the match, is never rounded to half precision.

Gradient scaling: a rank's loss is the mean over its own rows and columns. The mean of the ranks' gradients is the
gradient of the global mean loss, for features and logit_scale. DDP, ZeRO and Megatron's data parallelism compute this
mean (open_clip: --local-loss --gather-with-grad).

Source: Inf-CL, arXiv 2410.17243, Algorithms 1-4, with the two passes over the tiles merged into one.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from infcl.kernels.tile import Gradients, Groups
from infcl.loss.duplicates import sum_positives
from infcl.loss.gradients import match_cosines, ring_gradients
from infcl.loss.inputs import (
    DEFAULT_OPTIONS,
    RingOptions,
    Setup,
    outside_graphs,
    reject_double_backward,
    scalar_like,
    set_up,
)


@outside_graphs
def inf_cl_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    *,
    group: dist.ProcessGroup | None = None,
    ids: Tensor | None = None,
    duplicates: str = "negative",
    margin: float | None = None,
    options: RingOptions = DEFAULT_OPTIONS,
) -> Tensor:
    """Compute the contrastive loss of the group's global batch.

    Args:
        image_features, text_features: [b, D]; row i of one matches row i of the other; usually L2-normalised.
        logit_scale: factor of the cosines (exp of the learned parameter, as in open_clip's ClipLoss); float or one
            element; differentiable.
        group: process group of the ring; None means a single process (rejected when torch.distributed runs several).
        ids: int64 [b], equal for samples with the same image (or the same text).
        duplicates: role of entries of different samples with an equal id: "negative" (ids are not used), "mask"
            (excluded) or "positive"; defined in infcl/loss/duplicates.py.
        margin: leave out likely false negatives: an entry leaves the softmax of a row (column) if its cosine exceeds
            that of the row's (column's) match by more than this; -2 to 2. The decision carries no gradient. Positives
            stay. None: keep all.
        options: such as infcl.RingOptions(tile_dtype="bf16").

    Returns:
        The loss, 0-dim, float32 (float64 for float64 matmuls). Autocast does not affect it, double backward is not
        supported, and torch.compile breaks the graph here.

    Raises:
        ValueError: shapes differ between ranks (raised on every rank), or group is missing.
    """
    setup = set_up(
        "inf_cl", image_features, text_features, group, options, ids=ids, duplicates=duplicates, margin=margin
    )
    return InfCL.apply(image_features, text_features, scalar_like(image_features, logit_scale), setup)


class InfCL(torch.autograd.Function):
    """The loss of inputs that are already checked: rows [r, D], columns [c, D], scale 0-dim."""

    @staticmethod
    def forward(ctx, row_features, column_features, scale, setup: Setup):
        with torch.autocast(row_features.device.type, enabled=False):
            rows, columns = setup.operands(row_features, column_features)
            losses, cosines, positives = ring_forward(rows, columns, scale, setup)
        excess, weights = (None, None) if positives is None else positives
        ctx.save_for_backward(row_features, column_features, scale, losses, cosines, weights, setup.matches)
        ctx.setup = setup._replace(matches=None)
        return (losses if excess is None else losses + excess).mean()

    @staticmethod
    def backward(ctx, d_loss):
        reject_double_backward("inf_cl")
        row_features, column_features, scale, losses, cosines, weights, matches = ctx.saved_tensors
        setup: Setup = ctx.setup._replace(matches=matches, needs=ctx.needs_input_grad[:2])
        with torch.autocast(row_features.device.type, enabled=False):
            rows, columns = setup.operands(row_features, column_features)
            *sides, d_scale = ring_backward(rows, columns, scale, losses, cosines, setup, weights)
            factor, features = d_loss / len(rows), (row_features, column_features)
            sides = [None if g is None else _scaled(g, factor * scale, f.dtype) for g, f in zip(sides, features)]
        return *sides, factor * d_scale, None


def ring_forward(
    rows: Tensor, columns: Tensor, scale: Tensor, setup: Setup
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Return the cross entropies of own rows and columns over the group's global batch.

    Rows stay, columns travel with their ids. The column statistics cost W hops of 4 bytes per column (8 if duplicates
    are positives).

    Returns:
        losses: [2, b], or [1, r] for rows only; float32 or wider.
        cosines: matched logits / scale, [b].
        positives: None, or if duplicates are positives (excess, weights). excess [2, b] is the term that the other
            positives add to the losses; weights [b] is 1 / number of positives, equal for row i and column i.
    """
    matches, ring = setup.matches, setup.ring()
    cosines = None if setup.margin is None else match_cosines(rows, columns, setup)  # else last, where memory is free
    totals: tuple[Tensor, Tensor] | None = None  # number of positives of each row, sum of their cosines
    for hop, (block, *its) in ring.blocks(columns, *setup.travelling(cosines)):
        groups, limits = setup.entries(block, its, cosines)
        keeps_positives = groups is not None and groups.positive
        excluded = None if keeps_positives and limits is None else groups
        if hop == 0 and matches is not None and (groups is None or keeps_positives):
            excluded = _entries_of(matches, len(columns))
        row_part, column_part = setup.tile.softmax_forward(setup.blocks(rows, block, scale, hop, excluded, limits))
        if hop == 0:
            row_others = row_part
        else:
            merge_lse(row_others, row_part)
        if setup.both:
            ring.carry("col_lse", hop, column_part, merge_lse)
        if groups is not None and groups.positive:
            counts, sums, column_sums = sum_positives(groups, rows, block, setup.tile)
            totals = (counts, sums) if totals is None else (totals[0] + counts, totals[1] + sums)
            if setup.both:
                ring.carry("col_positives", hop, column_sums, Tensor.add_)
    cosines = match_cosines(rows, columns, setup) if cosines is None else cosines
    others = torch.stack([row_others, *([ring.home("col_lse", merge_lse)] if setup.both else [])])
    losses = cross_entropies(others, cosines * scale)
    if totals is None:
        return losses, cosines, None
    counts, sums = totals
    weights = 1 / counts.to(cosines.dtype)
    sums = torch.stack([sums, *([ring.home("col_positives", Tensor.add_)] if setup.both else [])])
    excess = scale * (cosines - sums * weights)
    return losses, cosines, (excess.where(weights < 1, 0.0), weights)


def ring_backward(
    rows: Tensor,
    columns: Tensor,
    scale: Tensor,
    losses: Tensor,
    cosines: Tensor,
    setup: Setup,
    weights: Tensor | None = None,
) -> Gradients:
    """Return `ring_gradients` of half the sum of the losses of both directions, or of the sum of the rows' losses.

    losses, cosines and weights come from ring_forward. Columns travel with their LSE and ids.
    """
    matches, both = setup.matches, setup.both
    row_lse, *column_lse = losses + cosines * scale
    slopes = torch.expm1(-losses).mean(0)
    if weights is not None:  # the match is one of several positives; explicit `matches` are handled by the tiles
        slopes = slopes + 1 - weights if matches is None else torch.zeros_like(slopes)

    def add_tile(hop: int, block: Tensor, its: list[Tensor], gradients: Gradients) -> None:
        block_lse, its = (its[0], its[1:]) if both else (None, its)
        groups, limits = setup.entries(block, its, cosines, weights)
        if groups is None and matches is not None and hop == 0:
            groups = _entries_of(matches, len(columns))
        blocks = setup.blocks(rows, block, scale, hop, groups, limits)
        setup.tile.softmax_backward(blocks, row_lse, block_lse, gradients)

    with_columns = [*column_lse, *setup.travelling(cosines)]
    return ring_gradients(add_tile, rows, columns, setup, slopes=slopes, cosines=cosines, travelling=with_columns)


def merge_lse(total: Tensor, part: Tensor) -> Tensor:
    """Compute `log(exp(total) + exp(part))` in place in `total`, and return it; both float32 or wider, of one shape.

    It never overflows and is never below either input. -inf (an empty part) is the neutral element (Inf-CL, Eq. 4, with
    the initial value -inf that it needs).
    """
    return torch.logaddexp(total, part, out=total)


def cross_entropies(others_lse: Tensor, matched: Tensor) -> Tensor:
    """Return the losses l >= 0, of the shape of `others_lse`; NaN where a matched logit is not finite.

    Args:
        others_lse: LSE over all logits except the match, [b] or [2, b], float32 or wider.
        matched: matched logits, [b].
    """
    difference = torch.sub(others_lse, matched).add_(matched, alpha=0)
    return F.softplus(difference, threshold=50)


def _entries_of(matches: Tensor, count: int) -> Groups:
    """Return each row's match among `count` columns as `groups` that a tile excludes."""
    return Groups(matches.to(torch.int32), torch.arange(count, dtype=torch.int32, device=matches.device))


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `(gradient * factor).to(dtype)`; in place where the dtype does not change."""
    out = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    return torch.mul(gradient, factor, out=out)
