"""One-directional InfoNCE over the same ring and tiles: dense retrieval, more documents than queries, hard negatives.

In: queries [q, D] and documents [d, D] of this rank, and which document answers each query. Out: the loss, and by
backward the gradients. Every query competes over the documents of all ranks:

    logits = scale * all_queries @ all_documents.T                              # [W q, W d], never formed
    loss = cross_entropy(logits, positives)                                     # positives as global indices

It is Inf-CL's loss in one direction. A positive is left out of the tiles, on the diagonal or by its number in this
rank's block, and joins in float32. With document ids, documents that have the id of a query's positive are left out for
it, or are positives like it (loss/duplicates).
Queries (rows) stay, documents (columns) travel: forward W - 1 hops of d*D operands, backward the same and W hops of d*D
float32 gradients. No column statistics travel. Per-rank averages as in loss/inf_cl.
Source: DPR, arXiv 2004.04906, section 3.2 (in-batch negatives and one hard negative a query).
"""

import torch
import torch.distributed as dist
from torch import Tensor

from infcl.loss import inf_cl
from infcl.loss.duplicates import check_ids, find_duplicates
from infcl.loss.inputs import RingOptions, check_features, outside_graphs, scalar_like, set_up


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
    compared = check_features("info_nce", queries, documents, ("queries", "documents"))
    wrong = _check_positives(positives, queries, documents)
    compared["place of positives (1: inside)"] = not wrong
    compared |= check_ids("info_nce", len(documents), {"document_ids": document_ids}, duplicates)
    setup = set_up("info_nce", (queries, documents), group, RingOptions(**options), compared=compared, wrong=wrong)
    scale, found = scalar_like(queries, logit_scale), None
    if document_ids is not None:
        ids = document_ids.to(queries.device)
        found = find_duplicates([ids[positives]], [ids], queries.device, duplicates)
    in_order = torch.equal(positives, torch.arange(len(positives), device=positives.device))
    matches = None if in_order else positives
    return inf_cl.differentiable(queries, documents, scale, setup, duplicates=found, matches=matches, both=False)


def _check_positives(positives: Tensor, queries: Tensor, documents: Tensor) -> str:
    """Return what is wrong with positives outside this rank's block, or "". ValueError for a wrong form."""
    if positives.device != queries.device:
        devices = f"{queries.device}, {documents.device}, {positives.device}"
        raise ValueError(f"info_nce needs queries, documents and positives on one device; got {devices}")
    if positives.shape != queries.shape[:1] or positives.dtype != torch.int64:
        raise ValueError(
            f"info_nce needs one int64 positive per query, [{len(queries)}]; "
            f"got {tuple(positives.shape)} of {positives.dtype}"
        )
    low, high = int(positives.min()), int(positives.max())
    if 0 <= low and high < len(documents):
        return ""
    return f"positives are in {low}..{high}; this rank's documents are 0..{len(documents) - 1}"
