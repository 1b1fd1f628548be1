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

from infcl.kernels import WORKSPACE_BYTES, Tile
from infcl.kernels.lse import cross_entropies, merge_lse
from infcl.loss import tiled
from infcl.loss.gradients import ring_gradients
from infcl.loss.operands import inner_product, scaled
from infcl.loss.ring import RingExchange


def info_nce_loss(
    queries: Tensor,
    documents: Tensor,
    positives: Tensor,
    logit_scale: Tensor | float,
    *,
    group: dist.ProcessGroup | None = None,
    tile: str = "auto",
    tile_dtype: str | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
    ring: str = "auto",
    ranks_per_node: int | None = None,
    ring_overlap: str = "on",
    compare_ranks: bool = True,
) -> Tensor:
    """Mean over this rank's queries of the cross entropy against all ranks' documents; 0-dim, float32 or wider.

    queries [q, D], documents [d, D]: q and d are the same on all ranks. positives int64 [q]: the index among this
    rank's own documents of the one that answers each query; several queries may share one. All other documents, of this
    rank and of the others, are negatives. The options are those of `inf_cl_loss`; the host waits for the GPU without
    compare_ranks too, since it looks at the positives.

    Raises ValueError, on every rank where sizes differ, with the numbers. Cannot be differentiated twice.
    """
    options = tiled.Options(group, tile, tile_dtype, workspace_bytes, ring, ranks_per_node, ring_overlap, compare_ranks)
    return tiled.loss(_INFO_NCE, options, (queries, documents, positives), (logit_scale,))


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

    def add_tile(block: Tensor, *gradients: Tensor | None, masked: bool) -> None:
        tile.softmax_backward(
            rows, block, scale, row_lse, None, *gradients, masked=masked, workspace_bytes=workspace_bytes
        )

    return ring_gradients(add_tile, rows, columns, slopes, ring, needs=needs)


def _forward(means: tiled.Means, queries: Tensor, documents: Tensor, positives: Tensor, scale: Tensor):
    order = _positives_first(positives, len(documents))
    rows, columns = means.operands(queries, documents)
    columns = columns[order]
    row_lse, losses = ring_forward(rows, columns, scale, *means.of_a_pass())
    slopes = torch.expm1(-losses)
    places, misplaced = _places(order, positives)
    place, wide = places[misplaced], losses.dtype
    logits = torch.linalg.vecdot(rows[misplaced].to(wide), columns[place].to(wide)) * scale.to(wide)
    wrong = misplaced[misplaced < len(slopes)]
    slopes[wrong] = torch.exp(-losses[wrong])  # a negative: its probability
    # The positive's logit is one of those summed; its own rounding may differ by an ulp.
    shared = (row_lse[misplaced] - logits).clamp_(min=0)
    losses = torch.cat([losses, losses.new_zeros(len(rows) - len(losses))]).index_copy_(0, misplaced, shared)
    return losses.mean(), (row_lse, slopes, order)


def _backward(means: tiled.Means, d_loss: Tensor, inputs, statistics, needs):
    queries, documents, positives, scale = inputs
    row_lse, slopes, order = statistics
    places, misplaced = _places(order, positives)
    place = places[misplaced]
    rows, columns = means.operands(queries, documents)
    columns = columns[order]
    d_rows, d_columns, d_scale = ring_backward(rows, columns, scale, row_lse, slopes, *means.of_a_pass(), needs[:2])
    some_queries, their_documents = rows[misplaced].to(slopes.dtype), columns[place].to(slopes.dtype)
    d_scale -= inner_product(some_queries, their_documents)
    factor, d_queries, d_documents = d_loss / len(rows), None, None
    if d_rows is not None:
        d_rows.index_add_(0, misplaced, their_documents, alpha=-1)
        d_queries = scaled(d_rows, factor * scale, queries.dtype)
    if d_columns is not None:
        _subtract_rows(d_columns, place, some_queries)
        d_documents = torch.empty_like(d_columns, dtype=documents.dtype)
        d_documents[order] = scaled(d_columns, factor * scale, documents.dtype)
    return d_queries, d_documents, None, factor * d_scale


def _statistics(queries, documents, *_):
    rows, columns = len(queries), len(documents)
    return [((rows,), None), ((min(rows, columns),), None), ((columns,), torch.int64)]


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


def _check(queries: Tensor, documents: Tensor, positives: Tensor):
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
    compared: tiled.Comparable = {"queries": shapes[0][0], "documents": shapes[1][0]}
    compared |= {"feature dimensions": shapes[0][1], "place of positives (1: inside)": inside}
    wrong = f"positives lie in {low}..{high}; this rank's documents are 0..{len(documents) - 1}"
    return compared, "" if inside else wrong


_INFO_NCE = tiled.register(tiled.Maths("info_nce", _check, _forward, _backward, _statistics, waits=True))
