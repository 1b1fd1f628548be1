"""One-directional InfoNCE over the same ring and tiles: dense retrieval, more documents than queries, hard negatives.

In: queries [q, D] and documents [d, D] of this rank, and the index of the document that answers each query. Out: the
loss; backward gives the gradients. Every query is compared with the documents of all ranks:

    logits = scale * all_queries @ all_documents.T                              # [W q, W d], never formed
    loss = cross_entropy(logits, positives)                                     # positives as global indices

This is Inf-CL's loss in one direction. The tiles exclude a query's positive (on the diagonal, or by its index in this
rank's block); the loss adds it in float32. With document ids, other documents with the id of a query's positive are
excluded for this query, or are positives too (loss/duplicates).
Queries (rows) stay, documents (columns) travel: forward W - 1 hops of d*D operands, backward the same and W hops of d*D
float32 gradients. No column statistics travel. Gradient scaling as in loss/inf_cl.
Source: DPR, arXiv 2004.04906, section 3.2 (in-batch negatives and one hard negative per query).
"""

import torch
import torch.distributed as dist
from torch import Tensor

from infcl.loss.inf_cl import InfCL
from infcl.loss.inputs import DEFAULT_OPTIONS, RingOptions, outside_graphs, scalar_like, set_up


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
    margin: float | None = None,
    options: RingOptions = DEFAULT_OPTIONS,
) -> Tensor:
    """Compute the mean over this rank's queries of the cross entropy against all ranks' documents.

    Args:
        queries, documents: [q, D] and [d, D]; q and d are the same on all ranks.
        positives: int64 [q], index of each query's document among this rank's documents; queries may share a document.
            All other documents, of this rank and of the others, are negatives.
        logit_scale, group: as in `inf_cl_loss`.
        document_ids: int64 [d], equal for documents that answer the same queries. Hard negatives need ids of
            their own: one with the id of its query's positive is no negative.
        duplicates: role of other documents with the id of a query's positive: "negative" (ids are not used), "mask"
            (excluded) or "positive"; defined in infcl/loss/duplicates.py.
        margin: leave out a document if its cosine with the query exceeds the positive's by more than this; see
            `inf_cl_loss`.
        options: as in `inf_cl_loss`. The host waits for the GPU even with compare_ranks=False, to check the
            positives.

    Returns:
        The loss, 0-dim, float32 or wider. Double backward is not supported.

    Raises:
        ValueError: invalid positives or ids, or sizes that differ between ranks (raised on every rank).
    """
    invalid = _check_positives(positives, queries, documents)
    in_order = not invalid and torch.equal(positives, torch.arange(len(positives), device=positives.device))
    if margin is not None and duplicates == "positive" and not in_order:
        raise ValueError(f"info_nce: margin {margin} with duplicates='positive' needs the positives 0, 1, 2, ...")
    setup = set_up(
        "info_nce", queries, documents, group, options, sizes=("queries", "documents"),
        ids=document_ids, ids_name="document_ids", duplicates=duplicates, margin=margin,
        matches=None if in_order else positives, both=False, invalid=invalid,
    )  # fmt: skip
    return InfCL.apply(queries, documents, scalar_like(queries, logit_scale), setup)


def _check_positives(positives: Tensor, queries: Tensor, documents: Tensor) -> str:
    """Return a message if positives are out of range, else "". Raise ValueError for a wrong device, shape or dtype."""
    if positives.device != queries.device:
        devices = f"{queries.device}, {documents.device}, {positives.device}"
        raise ValueError(f"info_nce needs queries, documents and positives on one device; got {devices}")
    if positives.shape != queries.shape[:1] or positives.dtype != torch.int64:
        raise ValueError(
            f"info_nce needs one int64 positive per query, [{len(queries)}]; "
            f"got {tuple(positives.shape)} of {positives.dtype}"
        )
    if bool(((positives >= 0) & (positives < len(documents))).all()):
        return ""
    low, high = positives.min(), positives.max()
    return f"positives are in {low}..{high}; this rank's documents are 0..{len(documents) - 1}"
