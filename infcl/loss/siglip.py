"""SigLIP's pairwise sigmoid loss over the same ring and tiles as Inf-CL.

In: image and text features [b, D] of this rank, scale and bias. Out: the loss, and by backward the gradients.

    logits = scale * all_images @ all_texts.T + bias                          # [B, B], never formed
    loss = -logsigmoid(sign * logits).sum() / B                               # sign: 1 on the diagonal, -1 elsewhere

A pair's loss depends on nothing but its own logit, so no statistics travel: forward W - 1 hops of b*D operands,
backward the same and W hops of b*D float32 gradients. Per-rank averages as in loss/inf_cl.
Source: SigLIP, arXiv 2303.15343, Algorithm 1 (signs) and section 3.3 (the loss in blocks).
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from infcl.kernels import WORKSPACE_BYTES, Tile, select_tile
from infcl.loss.operands import (
    as_operand,
    check_features,
    inner_product,
    matched_gradient,
    not_compiled,
    refuse_double_backward,
    scalar_like,
    scaled,
)
from infcl.loss.ring import RingExchange, ring_maker


@not_compiled
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
    new_ring = ring_maker(group, ring=ring, ranks_per_node=ranks_per_node, overlap=ring_overlap)
    check_features("siglip", image_features, text_features, new_ring(), compare_ranks=compare_ranks)
    selected = select_tile(image_features, tile=tile, tile_dtype=tile_dtype)
    scale, bias = scalar_like(image_features, logit_scale), scalar_like(image_features, logit_bias)
    return _SigLip.apply(image_features, text_features, scale, bias, new_ring, selected, workspace_bytes)


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
) -> tuple[Tensor, Tensor, Tensor]:
    """`dS @ all_columns` for one's own rows, `dS.T @ all_rows` for one's own columns, [b, D], and <dS, logits / scale>.

    All float32 or wider; the last is 0-dim, the sum over one's own rows.
    """
    d_rows = matched_gradient(slopes, columns)
    d_scale = inner_product(rows, d_rows)
    for hop, (block,) in ring.blocks(columns):
        d_block = ring.part("d_columns", block, slopes.dtype)
        matched_gradient(slopes, rows, out=d_block) if hop == 0 else d_block.zero_()
        tile.sigmoid_backward(
            rows, block, scale, bias, d_rows, d_block, d_scale, masked=hop == 0, workspace_bytes=workspace_bytes
        )
        ring.carry("d_columns", hop, d_block, Tensor.add_)
        del d_block  # before memory for the next one is taken
    return d_rows, ring.home("d_columns", Tensor.add_), d_scale


class _SigLip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, image_features, text_features, scale, bias, new_ring, tile, workspace_bytes):
        rows, columns = as_operand(image_features, tile), as_operand(text_features, tile)
        with torch.autocast(rows.device.type, enabled=False):
            loss, slope, slopes = ring_forward(rows, columns, scale, bias, new_ring(), tile, workspace_bytes)
        ctx.save_for_backward(rows, columns, scale, bias, slope, slopes)
        ctx.new_ring, ctx.tile, ctx.workspace_bytes = new_ring, tile, workspace_bytes
        ctx.feature_dtype = image_features.dtype
        return loss / len(rows)

    @staticmethod
    def backward(ctx, d_loss):
        refuse_double_backward("siglip")
        rows, columns, scale, bias, slope, slopes = ctx.saved_tensors
        with torch.autocast(rows.device.type, enabled=False):
            d_rows, d_columns, d_scale = ring_backward(
                rows, columns, scale, bias, slopes, ctx.new_ring(), ctx.tile, ctx.workspace_bytes
            )
            factor = d_loss / len(rows)
            d_images = scaled(d_rows, factor * scale, ctx.feature_dtype)
            d_texts = scaled(d_columns, factor * scale, ctx.feature_dtype)
        return d_images, d_texts, factor * d_scale, factor * slope, None, None, None
