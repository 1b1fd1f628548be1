"""One-directional InfoNCE over the same ring and tiles: dense retrieval, more documents than queries, hard negatives.

In: queries [q, D] and documents [d, D] of this rank, and which document answers each query. Out: the loss, and by
backward the gradients. Every query competes over the documents of all ranks:

    logits = scale * all_queries @ all_documents.T                              # [W q, W d], never formed
    loss = cross_entropy(logits, positives)                                     # positives as global indices

Queries (rows) stay, documents (columns) travel: forward W - 1 hops of d*D operands, backward the same and W hops of d*D
float32 gradients. No column statistics travel. Per-rank averages as in loss/inf_cl.
Source: DPR, arXiv 2004.04906, section 3.2 (in-batch negatives and one hard negative a query).
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from infcl.kernels import Tile
from infcl.kernels.lse import cross_entropies, merge_lse
from infcl.loss.gradients import inner_product, ring_gradients, scaled
from infcl.loss.inputs import RingOptions, Setup, outside_graphs, refuse_double_backward, scalar_like, set_up
from infcl.loss.ring import RingExchange


@outside_graphs
def info_nce_loss(
    queries: Tensor,
    documents: Tensor,
    positives: Tensor,
    logit_scale: Tensor | float,
    *,
    group: dist.ProcessGroup | None = None,
    **options,
) -> Tensor:
    """Compute the mean over this rank's queries of the cross entropy against all ranks' documents.

    Args:
        queries, documents: [q, D] and [d, D]; q and d are the same on all ranks.
        positives: int64 [q], the index among this rank's own documents of the one that answers each query; several
            queries may share one. All other documents, of this rank and of the others, are negatives.
        logit_scale, group, **options: as of `inf_cl_loss`; the host waits for the GPU without compare_ranks too, since
            it looks at the positives.

    Returns:
        0-dim, float32 or wider. Cannot be differentiated twice.

    Raises:
        ValueError: with the numbers, on every rank where sizes differ.
    """
    compared, wrong = _check(queries, documents, positives)
    setup = set_up("info_nce", (queries, documents), group, RingOptions(**options), compared=compared, wrong=wrong)
    return _InfoNCE.apply(queries, documents, positives, scalar_like(queries, logit_scale), setup)


class _InfoNCE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, queries, documents, positives, scale, setup: Setup):
        order = _positives_first(positives, len(documents))
        with torch.autocast(queries.device.type, enabled=False):
            rows, columns = setup.operands(queries, documents)
            columns = columns[order]
            row_lse, losses = ring_forward(rows, columns, scale, *setup.of_a_pass())
            slopes = torch.expm1(-losses)
            places, misplaced = _places(order, positives)
            place, wide = places[misplaced], losses.dtype
            logits = torch.linalg.vecdot(rows[misplaced].to(wide), columns[place].to(wide)) * scale.to(wide)
        wrong = misplaced[misplaced < len(slopes)]
        slopes[wrong] = torch.exp(-losses[wrong])  # a negative: its probability
        # The positive's logit is one of those summed; its own rounding may differ by an ulp.
        shared = (row_lse[misplaced] - logits).clamp_(min=0)
        losses = torch.cat([losses, losses.new_zeros(len(rows) - len(losses))]).index_copy_(0, misplaced, shared)
        ctx.save_for_backward(queries, documents, positives, scale, row_lse, slopes, order)
        ctx.setup = setup
        return losses.mean()

    @staticmethod
    def backward(ctx, d_loss):
        refuse_double_backward("info_nce")
        queries, documents, positives, scale, row_lse, slopes, order = ctx.saved_tensors
        setup: Setup = ctx.setup
        places, misplaced = _places(order, positives)
        place = places[misplaced]
        with torch.autocast(queries.device.type, enabled=False):
            rows, columns = setup.operands(queries, documents)
            columns = columns[order]
            d_rows, d_columns, d_scale = ring_backward(
                rows, columns, scale, row_lse, slopes, *setup.of_a_pass(), needs=ctx.needs_input_grad[:2]
            )
        some_queries, their_documents = rows[misplaced].to(slopes.dtype), columns[place].to(slopes.dtype)
        if len(misplaced):
            d_scale -= inner_product(some_queries, their_documents)
        factor, d_queries, d_documents = d_loss / len(rows), None, None
        if d_rows is not None:
            d_rows.index_add_(0, misplaced, their_documents, alpha=-1)
            d_queries = scaled(d_rows, factor * scale, queries.dtype)
        if d_columns is not None:
            _subtract_rows(d_columns, place, some_queries)
            d_documents = torch.empty_like(d_columns, dtype=documents.dtype)
            d_documents[order] = scaled(d_columns, factor * scale, documents.dtype)
        return d_queries, d_documents, None, factor * d_scale, None


def ring_forward(
    rows: Tensor, columns: Tensor, scale: Tensor, ring: RingExchange, tile: Tile, workspace_bytes: int
) -> tuple[Tensor, Tensor]:
    """Row LSE [q], and the losses [min(q, d)] if document i answers query i."""
    for hop, (block,) in ring.blocks(columns):
        part, _, own_matched = tile.softmax_forward(
            rows, block, scale, masked=hop == 0, workspace_bytes=workspace_bytes
        )
        if hop == 0:
            row_lse, matched = part, own_matched
        else:
            merge_lse(row_lse, part)
    losses = cross_entropies(row_lse[: len(matched)], matched)
    torch.add(losses, matched, out=row_lse[: len(matched)])
    return row_lse, losses


def ring_backward(
    rows: Tensor,
    columns: Tensor,
    scale: Tensor,
    row_lse: Tensor,
    slopes: Tensor,
    ring: RingExchange,
    tile: Tile,
    workspace_bytes: int,
    needs: Sequence[bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """`ring_gradients` with dS = exp(logits - row_lse), and the slopes on the diagonal of one's own block."""

    def add_tile(hop: int, block: Tensor, *gradients: Tensor | None) -> None:
        tile.softmax_backward(
            rows, block, scale, row_lse, None, *gradients, masked=hop == 0, workspace_bytes=workspace_bytes
        )

    return ring_gradients(add_tile, rows, columns, slopes, ring, needs=needs)


def _positives_first(positives: Tensor, count: int) -> Tensor:
    """An order of the documents, [count], with query i's positive in place i, for as many queries as can be.

    So most positives lie on the diagonal, which the tile leaves out. One that several queries share can stand in one
    place only: for the others, the misplaced, document i is a negative and the positive is one of those summed.
    """
    queries = torch.arange(len(positives), device=positives.device)
    first_user = torch.full((count,), len(positives), device=positives.device)
    first_user.scatter_reduce_(0, positives, queries, "amin")
    placed = (first_user[positives] == queries) & (queries < count)
    order = torch.full((count,), -1, device=positives.device)
    order[queries[placed]] = positives[placed]
    free = torch.ones(count, dtype=torch.bool, device=positives.device)
    free[positives[placed]] = False
    order[order < 0] = free.nonzero().squeeze(1)
    return order


def _places(order: Tensor, positives: Tensor) -> tuple[Tensor, Tensor]:
    """Where in this order each query's positive stands, [q], and the queries for which that is not their own place."""
    place_of = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    places = place_of[positives]
    return places, (places != torch.arange(len(positives), device=order.device)).nonzero().squeeze(1)


def _subtract_rows(total: Tensor, places: Tensor, rows: Tensor) -> None:
    """`total.index_add_(0, places, rows, alpha=-1)`, in a fixed order where places come several times.

    On a GPU index_add_ has atomics; index_put_ sorts there. On a CPU it is the other way round: index_put_ has threads.
    """
    if total.is_cuda:
        total.index_put_((places,), -rows, accumulate=True)
    else:
        total.index_add_(0, places, rows, alpha=-1)


def _check(queries: Tensor, documents: Tensor, positives: Tensor) -> tuple[dict[str, int], str]:
    """({what: number} that all ranks must have alike, what is wrong with this rank's positives or "")."""
    shapes = tuple(queries.shape), tuple(documents.shape)
    if queries.ndim != 2 or documents.ndim != 2 or shapes[0][1] != shapes[1][1] or 0 in (*shapes[0], *shapes[1]):
        raise ValueError(f"info_nce needs queries [q, D] and documents [d, D], not empty; got {shapes}")
    if queries.dtype != documents.dtype or not queries.is_floating_point():
        raise ValueError(f"info_nce needs floating point features of one dtype; got {queries.dtype}, {documents.dtype}")
    if not queries.device == documents.device == positives.device:
        devices = f"{queries.device}, {documents.device}, {positives.device}"
        raise ValueError(f"info_nce needs queries, documents and positives on one device; got {devices}")
    if positives.shape != queries.shape[:1] or positives.dtype != torch.int64:
        raise ValueError(
            f"info_nce needs one int64 positive per query, [{len(queries)}]; "
            f"got {tuple(positives.shape)} of {positives.dtype}"
        )
    low, high = int(positives.min()), int(positives.max())
    inside = 0 <= low and high < len(documents)
    compared = {"queries": shapes[0][0], "documents": shapes[1][0]}
    compared |= {"feature dimensions": shapes[0][1], "place of positives (1: inside)": inside}
    wrong = f"positives lie in {low}..{high}; this rank's documents are 0..{len(documents) - 1}"
    return compared, "" if inside else wrong
