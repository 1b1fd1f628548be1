"""SigLIP's pairwise sigmoid loss over the same ring and tiles as Inf-CL.

In: image and text features [b, D] of this rank, scale and bias. Out: the loss, and by backward the gradients.

    logits = scale * all_images @ all_texts.T + bias                          # [B, B], never formed
    loss = -logsigmoid(sign * logits).sum() / B                               # sign: 1 on the diagonal, -1 elsewhere

A pair's loss depends on nothing but its own logit, so no statistics travel: forward W - 1 hops of b*D operands,
backward the same and W hops of b*D float32 gradients. Per-rank averages as in loss/inf_cl.
Source: SigLIP, arXiv 2303.15343, Algorithm 1 (signs) and section 3.3 (the loss in blocks).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from infcl.kernels import WORKSPACE_BYTES, Tile
from infcl.loss import tiled
from infcl.loss.gradients import ring_gradients
from infcl.loss.operands import check_features, scaled_sides
from infcl.loss.ring import RingExchange, check_rank


def siglip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float,
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
    """The sigmoid loss of the group's global batch; arguments as in `inf_cl_loss`, gradient flows to logit_bias too."""
    options = tiled.Options(group, tile, tile_dtype, workspace_bytes, ring, ranks_per_node, ring_overlap, compare_ranks)
    return tiled.loss(_SIGLIP, options, (image_features, text_features), (logit_scale, logit_bias))


class SigLipLoss(nn.Module):
    """`siglip_loss` as a module, made and called like open_clip's SigLipLoss.

    Args:
        cache_labels: accepted; there are no labels to cache.
        rank, world_size: open_clip's arguments; world_size > 1 means torch.distributed's WORLD.
        dist_impl: accepted; the columns always travel around the ring.
        group: process group of the ring, instead of rank and world_size.
        **options: those of `siglip_loss`.

    Raises:
        ValueError: rank and world_size are not those of the process group.
    """

    def __init__(
        self,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        dist_impl: str | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ):
        super().__init__()
        self.over_all = (world_size > 1 or rank > 0) and group is None  # not the group itself: that cannot be copied
        if world_size > 1 or rank > 0:
            check_rank(rank, world_size, group)
        self.group, self.options = group, options

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """Return the loss, 0-dim float32, or {"contrastive_loss": loss}.

        Args:
            image_features, text_features: this rank's [b, D], L2-normalised.
            logit_scale: the multiplicative scale, after exp().
            logit_bias: added to each logit.
        """
        group = dist.group.WORLD if self.over_all else self.group
        loss = siglip_loss(image_features, text_features, logit_scale, logit_bias, group=group, **self.options)
        return {"contrastive_loss": loss} if output_dict else loss


def ring_forward(
    rows: Tensor, columns: Tensor, scale: Tensor, bias: Tensor, ring: RingExchange, tile: Tile, workspace_bytes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of the losses and of dS (the bias gradient) over one's own rows, 0-dim, and dS at the matches, [b]."""
    loss: Any = 0
    slope: Any = 0
    slopes: Any = None
    for hop, (block,) in ring.blocks(columns):
        row_loss, row_slope, matched = tile.sigmoid_forward(
            rows, block, scale, bias, masked=hop == 0, workspace_bytes=workspace_bytes
        )
        if hop == 0:
            slopes = -torch.sigmoid(-matched)
            row_loss, row_slope = row_loss - F.logsigmoid(matched), row_slope + slopes
        loss, slope = loss + row_loss.sum(), slope + row_slope.sum()
    return loss, slope, slopes


def ring_backward(
    rows: Tensor,
    columns: Tensor,
    scale: Tensor,
    bias: Tensor,
    slopes: Tensor,
    ring: RingExchange,
    tile: Tile,
    workspace_bytes: int,
    needs: Sequence[bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """`ring_gradients` of the sum of all losses. slopes: of ring_forward."""

    def add_tile(block: Tensor, *gradients: Tensor | None, masked: bool) -> None:
        tile.sigmoid_backward(rows, block, scale, bias, *gradients, masked=masked, workspace_bytes=workspace_bytes)

    return ring_gradients(add_tile, rows, columns, slopes, ring, needs=needs)


def _check(*features: Tensor):
    return check_features("siglip", *features), ""


def _forward(means: tiled.Means, image_features: Tensor, text_features: Tensor, scale: Tensor, bias: Tensor):
    rows, columns = means.operands(image_features, text_features)
    loss, slope, slopes = ring_forward(rows, columns, scale, bias, *means.of_a_pass())
    return loss / len(rows), (slope, slopes)


def _backward(means: tiled.Means, d_loss: Tensor, inputs, statistics, needs):
    *sides, scale, bias = inputs
    slope, slopes = statistics
    rows, columns = means.operands(*sides)
    *gradients, d_scale = ring_backward(rows, columns, scale, bias, slopes, *means.of_a_pass(), needs[:2])
    factor = d_loss / len(rows)
    return *scaled_sides(gradients, factor * scale, sides), factor * d_scale, factor * slope


def _statistics(image_features, *_):
    return [((), None), ((len(image_features),), None)]


_SIGLIP = tiled.register(tiled.Maths("siglip", _check, _forward, _backward, _statistics))
