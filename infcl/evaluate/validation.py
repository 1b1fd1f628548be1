"""The loss of a held-out set: that of --loss on full global batches over all ranks, as in training.

All negatives count, without a teacher and at full width. A contrastive loss depends on the batch size, so the loss of
micro-batches is not the loss that is trained. The loss is computed from the features of the retrieval evaluation.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from infcl.evaluate.features import gather_rows
from infcl.evaluate.retrieval import Features
from infcl.loss.contrastive import ContrastiveLoss
from infcl.loss.inputs import RingOptions
from infcl.parallel import mean_over


class ValidationLoss(NamedTuple):
    """Name, tile and precision of the loss, and the samples per rank of a global batch."""

    name: str = "inf_cl"
    tile: str = "auto"
    rank_batch_size: int = 64
    tile_dtype: str | None = None


@torch.no_grad()
def validation_loss(
    features: Features, plan: ValidationLoss, group: dist.ProcessGroup, scalars: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Compute the mean loss over full global batches of every image with its first caption. Collective.

    The remainder at the end is skipped. A set smaller than one global batch is one batch of all its samples. Every rank
    gathers it and computes its loss alone, because a ring needs equal numbers of samples.

    Args:
        features: this rank's encoded samples.
        scalars: logit_scale (log-space), logit_bias; f32 [1].

    Returns:
        val_loss, and val_loss_batch, the samples of a global batch.
    """
    first = torch.ones_like(features.owner, dtype=torch.bool)
    first[1:] = features.owner[1:] != features.owner[:-1]
    images, texts, ring, size = features.images, features.texts[first], group, plan.rank_batch_size  # [n, D]
    rows = torch.tensor([len(texts)], device=texts.device)
    dist.all_reduce(rows, op=dist.ReduceOp.MIN, group=group)
    if int(rows) < size:
        images, texts = gather_rows(images, group), gather_rows(texts, group)
        rows, size = torch.tensor([len(texts)]), len(texts)
        ring = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    loss = ContrastiveLoss(plan.name, group=ring, options=RingOptions(tile=plan.tile, tile_dtype=plan.tile_dtype))
    scale, bias = scalars["logit_scale"].float().exp(), scalars.get("logit_bias")
    total, batches = torch.zeros((), dtype=torch.float64, device=texts.device), int(rows) // size
    for start in range(0, batches * size, size):
        chunk = slice(start, start + size)
        total += loss(images[chunk], texts[chunk], scale, bias)
    values = {
        "val_loss": float(mean_over(group, total)) / batches,
        "val_loss_batch": size * dist.get_world_size(ring),
    }
    if ring is not group:
        dist.destroy_process_group(ring)
    return values
