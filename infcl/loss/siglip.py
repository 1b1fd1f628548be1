"""SigLIP's pairwise sigmoid loss over the same ring and tiles as Inf-CL, in one pass around the ring.

In: image and text features [b, D] of this rank, scale and bias. Out: the loss; backward gives the gradients.

    logits = scale * all_images @ all_texts.T + bias                          # [B, B], never formed
    loss = -logsigmoid(sign * logits).sum() / B                               # sign: 1 on the diagonal, -1 elsewhere

The loss of an entry depends only on its own logit, so the forward computes the gradients too. This costs 3 matmuls
(6 B^2 D flops), W - 1 hops of b*D operands and W hops of b*D float32. The backward only multiplies the gradients by the
incoming gradient; until then 2 b*D float32 are kept. A side that needs no gradient costs no matmul.
Gradient scaling as in loss/inf_cl.
Source: SigLIP, arXiv 2303.15343, Algorithm 1 (signs) and section 3.3 (the loss in blocks).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from infcl.kernels.tile import Gradients
from infcl.loss.gradients import match_cosines, ring_gradients
from infcl.loss.inputs import (
    DEFAULT_OPTIONS,
    RingOptions,
    Setup,
    outside_graphs,
    reject_double_backward,
    scalar_like,
    set_up,
)


@outside_graphs
def siglip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float,
    *,
    group: dist.ProcessGroup | None = None,
    ids: Tensor | None = None,
    duplicates: str = "negative",
    margin: float | None = None,
    options: RingOptions = DEFAULT_OPTIONS,
) -> Tensor:
    """Compute the sigmoid loss of the group's global batch.

    Args:
        image_features, text_features, logit_scale, group, ids, options: as in `inf_cl_loss`.
        logit_bias: added to the scaled cosines; float or one element; differentiable.
        duplicates: entries of different samples with an equal id have the sign -1 ("negative") or +1 ("positive"), or
            are excluded ("mask"); defined in infcl/loss/duplicates.py.
        margin: leave an entry out of the sum if its cosine exceeds that of the row's or the column's match by more
            than this; see `inf_cl_loss`.

    Returns:
        The sum of the losses over this rank's rows and all columns, divided by b; 0-dim, float32 (float64 for float64
        matmuls). Double backward is not supported.

    Raises:
        ValueError: shapes differ between ranks (raised on every rank), or group is missing.
    """
    setup = set_up(
        "siglip", image_features, text_features, group, options, ids=ids, duplicates=duplicates, margin=margin
    )
    scale, bias = scalar_like(image_features, logit_scale), scalar_like(image_features, logit_bias, "logit_bias")
    return _SigLip.apply(image_features, text_features, scale, bias, setup)


class _SigLip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, image_features, text_features, scale, bias, setup: Setup):
        with torch.autocast(image_features.device.type, enabled=False):
            rows, columns = setup.operands(image_features, text_features)
            loss, gradients, d_bias = ring_loss_and_gradients(rows, columns, scale, bias, setup)
        ctx.save_for_backward(scale, *gradients, d_bias)
        ctx.dtypes, ctx.rows = (image_features.dtype, text_features.dtype), len(rows)
        return loss / len(rows)

    @staticmethod
    def backward(ctx, d_loss):
        reject_double_backward("siglip")
        scale, *sides, d_scale, d_bias = ctx.saved_tensors
        factor = d_loss / ctx.rows
        # Not in place: with retain_graph another backward pass reads the gradients again.
        sides = [
            None if side is None else torch.mul(side, factor * scale, out=torch.empty_like(side, dtype=dtype))
            for side, dtype in zip(sides, ctx.dtypes)
        ]
        return *sides, factor * d_scale, factor * d_bias, None


def ring_loss_and_gradients(
    rows: Tensor, columns: Tensor, scale: Tensor, bias: Tensor, setup: Setup
) -> tuple[Tensor, Gradients, Tensor]:
    """Return the sum of the losses of own rows and all columns, its `ring_gradients`, and the bias's gradient."""
    cosines = match_cosines(rows, columns, setup)
    matched = cosines * scale + bias
    slopes = -torch.sigmoid(-matched)
    loss, d_bias = -F.logsigmoid(matched).sum(), slopes.sum()

    def add_tile(hop: int, block: Tensor, its: list[Tensor], gradients: Gradients) -> None:
        blocks = setup.blocks(rows, block, scale, hop, *setup.entries(block, its, cosines))
        part, slope = setup.tile.sigmoid_gradients(blocks, bias, gradients)
        loss.add_(part)
        d_bias.add_(slope)

    gradients = ring_gradients(
        add_tile, rows, columns, setup, slopes=slopes, cosines=cosines, travelling=setup.travelling(cosines)
    )
    return loss, gradients, d_bias
