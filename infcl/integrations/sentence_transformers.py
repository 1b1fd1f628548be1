"""Loss for SentenceTransformerTrainer: (Cached)MultipleNegativesRankingLoss over the ring.

    from infcl.integrations.sentence_transformers import RingMultipleNegativesRankingLoss

    loss = RingMultipleNegativesRankingLoss(model, mini_batch_size=64)
    trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=dataset, loss=loss)

The inputs are the columns anchor, positive and any number of hard negatives. Each anchor is compared with the documents
of all ranks. sentence-transformers' own gradient cache encodes the mini-batches. `info_nce_loss` computes the loss of
their embeddings; its memory is linear in the batch, and it needs no all-gather. Tested with sentence-transformers 6.2.

The second encoding of a mini-batch runs in the backward, with the autocast of the first one. Otherwise a loop with
`autocast` around the forward only would encode again in float32, and the gradients would be of other embeddings than
those in the loss.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal

import torch
import torch.distributed as dist
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from sentence_transformers.util import cos_sim, dot_score
from torch import Tensor
from torch.nn.functional import normalize

from infcl.loss.info_nce import info_nce_loss
from infcl.loss.inputs import RingOptions

Direction = Literal["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"]


class RingMultipleNegativesRankingLoss(CachedMultipleNegativesRankingLoss):
    """`CachedMultipleNegativesRankingLoss(..., gather_across_devices=True)` for batches of any size.

    Args:
        model: the model, which the trainer replaces with its wrapped one. One process, or DistributedDataParallel.
        scale: factor of the similarities, 1 / temperature.
        similarity_fct: cos_sim or dot_score.
        mini_batch_size: rows per encoding. All ranks need the same number of rows (accelerate's default).
        mini_batch_num_tokens: tokens per encoding, instead of rows.
        symmetric: average this loss with that of the positives over all ranks' anchors; the base class's
            directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction".
        directions: further columns of the anchors' softmax, as in the base class: "query_to_query" adds all other
            anchors, "doc_to_doc" compares the positive with all documents of other anchors (at about four times the
            cost). Not with symmetric.
        margin: leave out a column whose similarity exceeds the positive's by more than this; None: none.
        loss_options: fields of infcl.RingOptions. The matmuls run in autocast's dtype, as in the base class, unless
            tile_dtype is given.

    Raises:
        ValueError: similarity_fct is neither cos_sim nor dot_score, or the directions are not among those above.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        scale: float = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = cos_sim,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        *,
        symmetric: bool = False,
        directions: tuple[Direction, ...] = ("query_to_doc",),
        margin: float | None = None,
        **loss_options: Any,
    ):
        if similarity_fct not in (cos_sim, dot_score):
            raise ValueError(f"similarity_fct {similarity_fct}: the ring computes cos_sim and dot_score")
        further = set(directions) - {"query_to_doc"}
        if "query_to_doc" not in directions or further - {"query_to_query", "doc_to_doc"} or (symmetric and further):
            raise ValueError(
                f"directions {directions}, symmetric={symmetric}: give query_to_doc, alone or with query_to_query and "
                "doc_to_doc, or symmetric=True"
            )
        super().__init__(
            model,
            scale,
            similarity_fct,
            mini_batch_size,
            mini_batch_num_tokens,
            gather_across_devices=True,
            directions=("query_to_doc", "doc_to_query") if symmetric else directions,
            partition_mode="per_direction" if symmetric else "joint",
        )
        self.symmetric, self.margin, self.loss_options = symmetric, margin, loss_options

    def embed_minibatch(self, *args: Any, **options: Any) -> tuple[Tensor, Any]:
        """Return the embeddings [m, D] of a mini-batch, and in the first pass the state for the second one."""
        embeddings, random_state = super().embed_minibatch(*args, **options)
        return embeddings, random_state and _FirstPass(random_state, embeddings.device.type)

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """Return this rank's loss. The mean over ranks is the global loss.

        Args:
            reps: per column, the embeddings [m, D] of this rank's mini-batches.
            labels: unused.
            with_backward: also compute the gradients, and return a detached loss.
        """
        anchors, *documents = (self._features(torch.cat(column)) for column in reps)
        group = dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
        ring = RingOptions(**{"tile_dtype": _autocast_dtype(anchors.device)} | self.loss_options)
        own = torch.arange(len(anchors), device=anchors.device)
        options: dict[str, Any] = {"group": group, "options": ring, "margin": self.margin}
        if len(self.directions) > 1 and not self.symmetric:
            rows, columns, ids = self._rows_and_columns(anchors, documents, 0 if group is None else dist.get_rank())
            loss = info_nce_loss(rows, columns, own, self.scale, document_ids=ids, duplicates="mask", **options)
        else:
            loss = info_nce_loss(anchors, torch.cat(documents), own, self.scale, **options)
        if self.symmetric:
            loss = (loss + info_nce_loss(documents[0], anchors, own, self.scale, **options)) / 2
        if with_backward:
            loss.backward()
            loss = loss.detach()
        return loss

    def _rows_and_columns(self, anchors: Tensor, documents: list[Tensor], rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows, columns and ids of a loss that has all directions as columns.

        Columns with a row's id are left out: the anchor itself, and the row's own documents against its positive. With
        "doc_to_doc" a row is (anchor, positive); a column (x, 0) is compared with the anchor, (0, x) with the positive.
        """
        count, device = len(anchors), anchors.device
        own = torch.arange(rank * count, (rank + 1) * count, device=device)
        negatives = count * (len(documents) - 1)
        ids = [own, -1 - rank * negatives - torch.arange(negatives, device=device)]
        rows, columns = anchors, torch.cat(documents)
        if "query_to_query" in self.directions:
            columns, ids = torch.cat([columns, anchors]), [*ids, own]
        if "doc_to_doc" in self.directions:
            nothing = torch.zeros_like(anchors)
            halves = [torch.cat([nothing, document], 1) for document in documents]
            columns = torch.cat([torch.cat([columns, torch.zeros_like(columns)], 1), *halves])
            rows, ids = torch.cat([anchors, documents[0]], 1), [*ids, own.repeat(len(documents))]
        return rows, columns, torch.cat(ids)

    def _features(self, embeddings: Tensor) -> Tensor:
        if self.similarity_fct is dot_score:
            return embeddings
        return normalize(embeddings.to(torch.promote_types(embeddings.dtype, torch.float32)), dim=-1).to(embeddings)

    def get_config_dict(self) -> dict[str, Any]:
        """Return the options that the model card shows."""
        return super().get_config_dict() | {"symmetric": self.symmetric, "margin": self.margin} | self.loss_options


class _FirstPass:
    """Context for the second encoding of a mini-batch: random state and autocast of the first encoding."""

    def __init__(self, random_state: Any, device_type: str):
        self.random_state = random_state
        dtype, enabled = torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type)
        # The cache may hold casts of the first pass, which carry no gradient.
        self.autocast = torch.autocast(device_type, dtype, enabled, cache_enabled=False)

    def __enter__(self) -> None:
        self.contexts = ExitStack()
        self.contexts.enter_context(self.random_state)
        self.contexts.enter_context(self.autocast)

    def __exit__(self, *error: Any) -> None:
        self.contexts.close()


def _autocast_dtype(device: torch.device) -> str | None:
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    return names.get(torch.get_autocast_dtype(device.type)) if torch.is_autocast_enabled(device.type) else None
