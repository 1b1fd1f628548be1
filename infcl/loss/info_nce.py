"""One-directional InfoNCE over the same ring and tiles: dense retrieval, more documents than queries, hard negatives.

In: queries [q, D] and documents [d, D] of this rank, and which document answers each query. Out: the loss, and by
backward the gradients. Every query competes over the documents of all ranks:

    logits = scale * all_queries @ all_documents.T                              # [W q, W d], never formed
    loss = cross_entropy(logits, positives)                                     # positives as global indices

With document ids, documents that have the id of a query's positive are left out for it, or are positives like it
(loss/duplicates).
Queries (rows) stay, documents (columns) travel: forward W - 1 hops of d*D operands, backward the same and W hops of d*D
float32 gradients. No column statistics travel. Per-rank averages as in loss/inf_cl.
Source: DPR, arXiv 2004.04906, section 3.2 (in-batch negatives and one hard negative a query).
"""

import torch
import torch.distributed as dist
from torch import Tensor

from infcl.kernels.lse import cross_entropies
from infcl.loss.duplicates import Duplicates, check_ids, find_duplicates
from infcl.loss.gradients import inner_product, row_products, scaled
from infcl.loss.inputs import RingOptions, Setup, outside_graphs, refuse_double_backward, scalar_like, set_up
from infcl.loss.softmax import Statistics, softmax_gradients, softmax_statistics


@outside_graphs
def info_nce_loss(
    queries: Tensor,
    documents: Tensor,
    positives: Tensor,
    logit_scale: Tensor | float,
    *,
    group: dist.ProcessGroup | None = None,
    document_ids: Tensor | None = None,
    duplicates: str = "negative",
    **options,
) -> Tensor:
    """Compute the mean over this rank's queries of the cross entropy against all ranks' documents.

    Args:
        queries, documents: [q, D] and [d, D]; q and d are the same on all ranks.
        positives: int64 [q], the index among this rank's own documents of the one that answers each query; several
            queries may share one. All other documents, of this rank and of the others, are negatives.
        document_ids: int64 [d], equal for documents that answer the same queries.
        duplicates: what other documents with the id of a query's positive are to it: "negative", left out ("mask"), or
            "positive"; infcl/loss/duplicates.py defines it. With "negative" ids are not used.
        logit_scale, group, **options: as of `inf_cl_loss`; the host waits for the GPU without compare_ranks too, since
            it looks at the positives.

    Returns:
        0-dim, float32 or wider. Cannot be differentiated twice.

    Raises:
        ValueError: with the numbers, on every rank where sizes differ.
    """
    compared, wrong = _check(queries, documents, positives)
    compared |= check_ids("info_nce", len(documents), {"document_ids": document_ids}, duplicates)
    setup = set_up("info_nce", (queries, documents), group, RingOptions(**options), compared=compared, wrong=wrong)
    order = _positives_first(positives, len(documents))
    found = None
    if document_ids is not None:
        ids = document_ids.to(queries.device)
        found = find_duplicates([ids[positives]], [ids[order]], queries.device, duplicates)
    return _InfoNCE.apply(queries, documents, positives, order, scalar_like(queries, logit_scale), setup, found)


class _InfoNCE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, queries, documents, positives, order, scale, setup: Setup, duplicates):
        places, misplaced = _places(order, positives)
        with torch.autocast(queries.device.type, enabled=False):
            rows, columns = setup.operands(queries, documents)
            columns = columns[order]
            found = softmax_statistics(rows, columns, scale, *setup.of_a_pass(), both=False, duplicates=duplicates)
            logits = row_products(rows[misplaced], columns[places[misplaced]]) * scale
        losses, row_lse, slopes, dues = _of_positives(found, misplaced, logits, duplicates)
        ctx.save_for_backward(queries, documents, positives, order, scale, row_lse, slopes, dues, found.weights)
        ctx.setup, ctx.duplicates = setup, duplicates
        return losses.mean()

    @staticmethod
    def backward(ctx, d_loss):
        refuse_double_backward("info_nce")
        queries, documents, positives, order, scale, row_lse, slopes, dues, weights = ctx.saved_tensors
        setup: Setup = ctx.setup
        places, misplaced = _places(order, positives)
        place = places[misplaced]
        with torch.autocast(queries.device.type, enabled=False):
            rows, columns = setup.operands(queries, documents)
            columns = columns[order]
            options = {"duplicates": ctx.duplicates, "weights": weights, "needs": ctx.needs_input_grad[:2]}
            d_rows, d_columns, d_scale = softmax_gradients(
                rows, columns, scale, row_lse, None, slopes, *setup.of_a_pass(), **options
            )
        some_queries, their_documents = dues[:, None] * rows[misplaced], columns[place].to(dues.dtype)
        if len(misplaced):
            d_scale += inner_product(some_queries, their_documents)
        factor, d_queries, d_documents = d_loss / len(rows), None, None
        if d_rows is not None:
            d_rows.index_add_(0, misplaced, dues[:, None] * their_documents)
            d_queries = scaled(d_rows, factor * scale, queries.dtype)
        if d_columns is not None:
            _add_rows(d_columns, place, some_queries)
            d_documents = torch.empty_like(d_columns, dtype=documents.dtype)
            d_documents[order] = scaled(d_columns, factor * scale, documents.dtype)
        return d_queries, d_documents, None, None, factor * d_scale, None, None


def _of_positives(
    found: Statistics, misplaced: Tensor, logits: Tensor, duplicates: Duplicates | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses [q], LSE [q], dS in the queries' own places [min(q, d)], and what is missing from it at the misplaced.

    logits: of the misplaced with their positives, which are in other places of this rank's block.
    """
    row_others, matched, weights, means = found
    count, losses, row_lse = len(matched), torch.zeros_like(row_others), row_others.clone()
    losses[:count] = cross_entropies(row_others[:count], matched)
    row_lse[:count] = losses[:count] + matched
    wrong = torch.zeros_like(matched, dtype=torch.bool)  # in their own place is no document that was given as positive
    wrong[misplaced[misplaced < count]] = True
    slopes = torch.where(wrong, torch.exp(-losses[:count]), torch.expm1(-losses[:count]))
    same = torch.zeros_like(wrong)  # in their own place is a document like their positive
    if duplicates is not None:
        same = wrong & (duplicates.known[0][duplicates.rows[0, :count]] == duplicates.columns[0, :count])
    if duplicates is not None and not duplicates.positive:
        # Documents like the positive are left out, and the misplaced positives with them.
        row_lse[:count] = torch.where(same, row_others[:count], row_lse[:count])
        losses[misplaced] = cross_entropies(row_lse[misplaced], logits)
        row_lse[misplaced] = losses[misplaced] + logits
        slopes = torch.where(wrong, torch.exp(matched - row_lse[:count]).masked_fill(same, 0), slopes)
        return losses, row_lse, slopes, torch.expm1(-losses[misplaced])
    # The positive's logit is one of those summed; its own rounding may differ by an ulp.
    losses[misplaced] = (row_lse[misplaced] - logits).clamp_(min=0)
    if weights is None or means is None:
        return losses, row_lse, slopes, torch.full_like(logits, -1)
    own = torch.zeros_like(row_others)  # logits of the positives
    own[:count], own[misplaced] = matched, logits
    losses += torch.where(weights < 1, own - means, 0)
    slopes += (~wrong).to(slopes.dtype) - weights[:count] * (~wrong | same)
    return losses, row_lse, slopes, torch.zeros_like(logits)  # the tiles have what is in other places


def _positives_first(positives: Tensor, count: int) -> Tensor:
    """An order of the documents, [count], with query i's positive in place i, for as many queries as can be.

    So most positives lie on the diagonal, which the tile leaves out. One that several queries share can be in one
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
    """Return each query's positive's place in this order, [q], and the queries for which it is not their own."""
    place_of = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    places = place_of[positives]
    return places, (places != torch.arange(len(positives), device=order.device)).nonzero().squeeze(1)


def _add_rows(total: Tensor, places: Tensor, rows: Tensor) -> None:
    """`total.index_add_(0, places, rows)`, in a fixed order where places come several times.

    On a GPU index_add_ has atomics; index_put_ sorts there. On a CPU it is the other way round: index_put_ has threads.
    """
    if total.is_cuda:
        total.index_put_((places,), rows, accumulate=True)
    else:
        total.index_add_(0, places, rows)


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
