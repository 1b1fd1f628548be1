"""A loss for SentenceTransformerTrainer: (Cached)MultipleNegativesRankingLoss over the ring.

    from infcl.integrations.sentence_transformers import RingMultipleNegativesRankingLoss

    loss = RingMultipleNegativesRankingLoss(model, mini_batch_size=64)
    trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=dataset, loss=loss)

In: the columns anchor, positive and any number of hard negatives. Every anchor competes over all ranks' documents.
sentence-transformers' own gradient cache encodes the mini-batches. The loss of their embeddings is `info_nce_loss`,
whose memory is linear in the batch and which gathers nothing. The second encoding of a mini-batch, which runs in the
backward, has the autocast of the first one; without it, a loop that has `autocast` around the forward alone gets
gradients in float32 of other embeddings than the loss saw. Tested with sentence-transformers 6.2.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from sentence_transformers.util import cos_sim, dot_score
from torch import Tensor
from torch.nn.functional import normalize

from infcl.loss.info_nce import info_nce_loss


class RingMultipleNegativesRankingLoss(CachedMultipleNegativesRankingLoss):
    """`CachedMultipleNegativesRankingLoss(..., gather_across_devices=True)` for batches of any size.

    Args:
        model: of which the trainer puts the wrapped one in its place. One process, or DistributedDataParallel.
        scale: factor of the similarities, 1 / temperature.
        similarity_fct: cos_sim or dot_score.
        mini_batch_size: rows that are encoded at once. All ranks have as many rows (accelerate's default).
        mini_batch_num_tokens: tokens that are encoded at once, instead of rows.
        symmetric: the mean of this loss and of the positives' over all ranks' anchors; directions=("query_to_doc",
            "doc_to_query"), partition_mode="per_direction" of the class above.
        loss_options: of `info_nce_loss`. Its matmuls run in autocast's dtype, like those of the class above, unless
            tile_dtype says otherwise.
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
        **loss_options: Any,
    ):
        if similarity_fct not in (cos_sim, dot_score):
            raise ValueError(f"similarity_fct {similarity_fct}: the ring computes cos_sim and dot_score")
        super().__init__(
            model,
            scale,
            similarity_fct,
            mini_batch_size,
            mini_batch_num_tokens,
            gather_across_devices=True,
            directions=("query_to_doc", "doc_to_query") if symmetric else ("query_to_doc",),
            partition_mode="per_direction" if symmetric else "joint",
        )
        self.symmetric, self.loss_options = symmetric, loss_options

    def embed_minibatch(self, *args: Any, **options: Any) -> tuple[Tensor, Any]:
        """The embeddings [m, D] of a mini-batch, and in the first pass the state that the second one takes up."""
        embeddings, random_state = super().embed_minibatch(*args, **options)
        return embeddings, random_state and _FirstPass(random_state, embeddings.device.type)

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """This rank's loss of its mini-batches' embeddings [m, D] per column; the mean over ranks is the global one."""
        anchors, *documents = (self._features(torch.cat(column)) for column in reps)
        group = dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
        options = {"group": group, "tile_dtype": _autocast_dtype(anchors.device)} | self.loss_options
        own = torch.arange(len(anchors), device=anchors.device)
        loss = info_nce_loss(anchors, torch.cat(documents), own, self.scale, **options)
        if self.symmetric:
            loss = (loss + info_nce_loss(documents[0], anchors, own, self.scale, **options)) / 2
        if with_backward:
            loss.backward()
            loss = loss.detach()
        return loss

    def _features(self, embeddings: Tensor) -> Tensor:
        if self.similarity_fct is dot_score:
            return embeddings
        return normalize(embeddings.to(torch.promote_types(embeddings.dtype, torch.float32)), dim=-1).to(embeddings)

    def get_config_dict(self) -> dict[str, Any]:
        """What the model card shows."""
        return super().get_config_dict() | {"symmetric": self.symmetric} | self.loss_options


class _FirstPass:
    """The random numbers and the autocast of a mini-batch's first encoding: a context around its second one."""

    def __init__(self, random_state: Any, device_type: str):
        self.random_state = random_state
        dtype, enabled = torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type)
        # The cache may hold casts of the first pass, through which no gradient flows.
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
