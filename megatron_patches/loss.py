"""The loss over all ranks: tensor-parallel ranks hold the same features, so each takes 1 / T of the pairs.

In: image features [b, D] and text features [b, D] or, of several texts per image, [t b, D], equal on the T ranks of a
tensor-parallel group. Out: the loss, equal there too, and by backward gradients [b, D] that are equal there. The ring
of the inner loss runs over all W = T x D ranks with b / T pairs each, so nothing is computed twice.

Averages: the inner loss has gradients whose mean over its W ranks is exact. Here the loss is the mean over the
group of the inner ones, which hands 1 / T of the gradient to each; the gathered features' gradients, and the sum of the
scalars', then have the exact value as the data-parallel group's mean, which is what DeepSpeed takes.
"""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import nn

from infcl.loss.contrastive import ContrastiveLoss
from infcl.loss.ring import RingExchange


class TensorParallelLoss(nn.Module):
    """`inner`, whose group has all ranks, called like it.

    Cost in addition to the inner loss: one all-gather of [b, D] f32 per side in the backward, within the group.
    ValueError, on all ranks, when b is not the same on all of them or does not divide by T. Rows are compared when the
    inner loss compares them: with fixed_shape in the first call only.
    """

    def __init__(self, inner: ContrastiveLoss, tp_group: dist.ProcessGroup):
        super().__init__()
        self.inner, self.tp_group = inner, tp_group
        self._compared = False

    def forward(
        self,
        image_features: torch.Tensor,
        text_features: torch.Tensor,
        logit_scale: torch.Tensor,
        logit_bias: torch.Tensor | None = None,
        *,
        image_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        size, rows = dist.get_world_size(self.tp_group), {"images": len(image_features), "texts": len(text_features)}
        if not (self.inner.fixed_shape and self._compared):  # a rank that refused alone would leave others in the ring
            ring = RingExchange(self.inner.group)
            ring.require_equal("a loss over tensor-parallel ranks", rows, image_features.device)
            self._compared = True
        for what, count in rows.items():
            if count % size:
                raise ValueError(f"{count} {what} do not divide among {size} tensor-parallel ranks")
        own = [scatter_to_sequence_parallel_region(x, group=self.tp_group) for x in (image_features, text_features)]
        scalars = [x if x is None else self._shared(x) for x in (logit_scale, logit_bias)]
        ids = None if image_ids is None else image_ids.chunk(size)[dist.get_rank(self.tp_group)]
        loss = self.inner(*own, *scalars, image_ids=ids)
        return reduce_from_tensor_model_parallel_region(loss, group=self.tp_group) / size

    def _shared(self, scalar: torch.Tensor) -> torch.Tensor:
        return copy_to_tensor_model_parallel_region(scalar, group=self.tp_group)
