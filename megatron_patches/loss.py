"""The loss over all ranks. Tensor-parallel ranks hold the same features, so each computes 1 / T of the samples.

In: image features [b, D] and text features [b, D] (with several texts per image [t b, D]), equal on the T ranks of a
tensor-parallel group. Out: the loss, equal on these ranks, and gradients [b, D], equal on these ranks. The ring of the
inner loss runs over all W = T x D ranks with b / T samples each, so nothing is computed twice.

Gradient scaling: the mean over the W ranks of the inner loss's gradients is exact. This loss is the mean of the inner
losses of the tensor-parallel group, so that each rank gets 1 / T of the gradient. The backward gathers the features'
gradients and sums the scalars'. Their mean over the data-parallel group, which DeepSpeed computes, is then exact.
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
from infcl.parallel import require_equal


class TensorParallelLoss(nn.Module):
    """The loss `inner`, whose group has all ranks, on features that tensor-parallel ranks share. Called like `inner`.

    Cost in addition to the inner loss: one all-gather of [b, D] f32 per side in the backward, within the group.

    Args:
        inner: the loss over all ranks. With its fixed_shape, row counts are compared in the first call only.
        tp_group: this rank's tensor-parallel group.

    Raises:
        ValueError: b differs between ranks or is not a multiple of T. Calls raise it on all ranks.
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
        ids: torch.Tensor | None = None,
        teacher: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    ) -> torch.Tensor:
        size, rows = dist.get_world_size(self.tp_group), {"images": len(image_features), "texts": len(text_features)}
        if not (self.inner.fixed_shape and self._compared):  # if one rank raised alone, the others would hang
            require_equal(self.inner.group, "a loss over tensor-parallel ranks", rows, image_features.device)
            self._compared = True
        for what, count in rows.items():
            if count % size:
                raise ValueError(f"{count} {what} do not divide among {size} tensor-parallel ranks")
        own = [scatter_to_sequence_parallel_region(x, group=self.tp_group) for x in (image_features, text_features)]
        scalars = [
            x if x is None else copy_to_tensor_model_parallel_region(x, group=self.tp_group)
            for x in (logit_scale, logit_bias)
        ]
        rank = dist.get_rank(self.tp_group)
        ids = None if ids is None else ids.chunk(size)[rank]
        if teacher is not None:
            images, texts, scale = teacher
            teacher = images.chunk(size)[rank], texts.chunk(size)[rank], scale
        loss = self.inner(*own, *scalars, ids=ids, teacher=teacher)
        return reduce_from_tensor_model_parallel_region(loss, group=self.tp_group) / size
