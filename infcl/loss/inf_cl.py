"""CLIP's symmetric contrastive loss, exact at any batch size, in one ring pass per direction of autograd.

In: image and text features [b, D] of this rank, the multiplicative logit scale. Out: the loss, and by backward the
gradients. The global batch is B = W * b pairs over the W ranks of a process group.

    logits = scale * all_images @ all_texts.T                                           # [B, B], never formed
    loss = (cross_entropy(logits, arange(B)) + cross_entropy(logits.T, arange(B))) / 2

Images (rows) stay; texts (columns) travel with their column statistics, so each logit tile serves both directions:
8 B^2 D flops for forward and backward together (1 + 3 matrix products).
Forward: W - 1 hops of b*D operands, W hops of b float32. Backward: W - 1 hops of b*D operands and b float32, W hops of
b*D float32 gradients. No all-gather of features, nothing of size b x b.

Averages: a rank's loss is the mean over its own rows and columns, and its gradients are such that the mean over the
group is the gradient of the global mean loss, for features and logit_scale alike; this is what DDP, ZeRO and
Megatron's data parallelism compute (open_clip's --local-loss --gather-with-grad).

Source: Inf-CL, arXiv 2410.17243, Algorithms 1-4, with the two passes over the tiles folded into one.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from infcl.kernels import WORKSPACE_BYTES, Tile
from infcl.kernels.lse import cross_entropies, merge_lse
from infcl.loss import graphed, tiled
from infcl.loss.gradients import ring_gradients
from infcl.loss.operands import check_features, scaled_sides
from infcl.loss.ring import RingExchange, check_rank


def inf_cl_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    *,
    group: dist.ProcessGroup | None = None,
    tile: str = "auto",
    tile_dtype: str | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
    ring: str = "auto",
    ranks_per_node: int | None = None,
    ring_overlap: str = "on",
    compare_ranks: bool = True,
    cuda_graph: bool = True,
) -> Tensor:
    """The contrastive loss of the group's global batch; 0-dim, float32 (float64 for float64 products).

    image_features, text_features: [b, D], row i of one matches row i of the other; usually L2-normalised.
    logit_scale: multiplies the cosines (exp of the learned parameter, as open_clip's ClipLoss takes it); float or one
        element; gradient flows to it.
    group: where the ring runs; None means this process alone (refused when torch.distributed runs several ranks).
    tile: "triton" (GPU), "torch" (anywhere), "auto". tile_dtype: "bf16" | "fp16" | "tf32" | "fp32" | "fp64", see
        kernels.select_tile; None follows the features.
    workspace_bytes: bound of the temporary memory beside O(b * D).
    ring: "flat", "two-level" (a ring within each node inside a ring of nodes), or "auto": two-level where the group
        lies on several nodes of ranks_per_node ranks each. ring_overlap: "off" waits for every message where it is
        sent, so that the gain can be measured. Exact in any case; loss/ring has the schedule and cost.
    compare_ranks: whether to compare the ranks' shapes, for which the host waits for the GPU. False only where all
        ranks are known to have the same: unequal ones would then hang or mix up rows.
    cuda_graph: on one GPU alone, replay small batches as a CUDA graph (loss/graphed says which, and what memory it
        keeps), where issuing the step would take longer than computing it; not in a caller that torch.compile compiles.

    Raises ValueError, on every rank, for unequal shapes or a missing group. Not affected by autocast; cannot be
    differentiated twice.
    """
    options = tiled.Options(group, tile, tile_dtype, workspace_bytes, ring, ranks_per_node, ring_overlap, compare_ranks)
    eager = partial(_replayed, tile_dtype) if cuda_graph else None
    return tiled.loss(_INF_CL, options, (image_features, text_features), (logit_scale,), eager)


class InfCLLoss(nn.Module):
    """`inf_cl_loss` as a module, made and called like open_clip's ClipLoss.

    Either `group` says where the ring runs, or open_clip's arguments do: world_size > 1 means torch.distributed's
    WORLD, of which they must be rank and size. The averages are those of local_loss=True, gather_with_grad=True;
    gather_with_grad=False at world_size > 1 is refused, since it asks for other gradients than the exact ones (without
    local_loss features' gradients 1 / world_size of them; with it, without the other ranks' terms). local_loss=False
    differs in what a rank reports, not in what data parallelism averages: accepted. cache_labels has nothing to cache.

    A logit_bias is accepted and changes nothing: a constant added to all logits cancels in both softmaxes. The options
    behind the `*` are those of `inf_cl_loss`.
    """

    def __init__(
        self,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
        *,
        group: dist.ProcessGroup | None = None,
        tile: str = "auto",
        tile_dtype: str | None = None,
        workspace_bytes: int = WORKSPACE_BYTES,
        ring: str = "auto",
        ranks_per_node: int | None = None,
        ring_overlap: str = "on",
        compare_ranks: bool = True,
        cuda_graph: bool = True,
    ):
        super().__init__()
        if use_horovod:
            raise ValueError("use_horovod=True: the ring runs over torch.distributed only")
        if world_size > 1 and not gather_with_grad:
            raise ValueError(
                f"world_size {world_size} with gather_with_grad=False asks for gradients that are not the exact ones; "
                "pass local_loss=True, gather_with_grad=True"
            )
        self.over_all = (world_size > 1 or rank > 0) and group is None  # not the group itself: that cannot be copied
        if world_size > 1 or rank > 0:
            check_rank(rank, world_size, group)
        self.options: dict[str, Any] = {
            "group": group,
            "tile": tile,
            "tile_dtype": tile_dtype,
            "workspace_bytes": workspace_bytes,
        }
        self.options |= {"ring": ring, "ranks_per_node": ranks_per_node, "ring_overlap": ring_overlap}
        self.options |= {"compare_ranks": compare_ranks, "cuda_graph": cuda_graph}

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """The loss of `inf_cl_loss`, with output_dict as {"contrastive_loss": it}."""
        options = self.options | ({"group": dist.group.WORLD} if self.over_all else {})
        loss = inf_cl_loss(image_features, text_features, logit_scale, **options)
        return {"contrastive_loss": loss} if output_dict else loss


def ring_forward(
    rows: Tensor, columns: Tensor, scale: Tensor, ring: RingExchange, tile: Tile, workspace_bytes: int
) -> tuple[Tensor, Tensor]:
    """Losses of one's own rows and columns over the group's global batch, [2, b], and their matched logits, [b]."""
    for hop, (block,) in ring.blocks(columns):
        row_part, col_part, own_matched = tile.softmax_forward(
            rows, block, scale, masked=hop == 0, workspace_bytes=workspace_bytes
        )
        if hop == 0:
            row_others, matched = row_part, own_matched
        else:
            merge_lse(row_others, row_part)
        ring.carry("col_lse", hop, col_part, merge_lse)
    others = torch.stack([row_others, ring.home("col_lse", merge_lse)])
    return cross_entropies(others, matched), matched


def ring_backward(
    rows: Tensor,
    columns: Tensor,
    scale: Tensor,
    losses: Tensor,
    matched: Tensor,
    ring: RingExchange,
    tile: Tile,
    workspace_bytes: int,
    needs: Sequence[bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """`ring_gradients` of half the sum of all losses, of rows and columns. losses, matched: of ring_forward."""
    row_lse, col_lse = losses + matched
    slopes = torch.expm1(-losses).mean(0)

    def add_tile(block: Tensor, block_lse: Tensor, *gradients: Tensor | None, masked: bool) -> None:
        tile.softmax_backward(
            rows, block, scale, row_lse, block_lse, *gradients, masked=masked, workspace_bytes=workspace_bytes
        )

    return ring_gradients(add_tile, rows, columns, slopes, ring, with_columns=(col_lse,), needs=needs)


def _check(*features: Tensor):
    return check_features("inf_cl", *features), ""


def _forward(means: tiled.Means, image_features: Tensor, text_features: Tensor, scale: Tensor):
    rows, columns = means.operands(image_features, text_features)
    losses, matched = ring_forward(rows, columns, scale, *means.of_a_pass())
    return losses.mean(), (losses, matched)


def _backward(means: tiled.Means, d_loss: Tensor, inputs, statistics, needs):
    *sides, scale = inputs
    losses, matched = statistics
    rows, columns = means.operands(*sides)
    *gradients, d_scale = ring_backward(rows, columns, scale, losses, matched, *means.of_a_pass(), needs[:2])
    factor = d_loss / len(rows)
    return *scaled_sides(gradients, factor * scale, sides), factor * d_scale


def _statistics(image_features, text_features, scale):
    rows = len(image_features)
    return [((2, rows), None), ((rows,), None)]


_INF_CL = tiled.register(tiled.Maths("inf_cl", _check, _forward, _backward, _statistics))


def _replayed(
    tile_dtype: str | None, means: tiled.Means, image_features: Tensor, text_features: Tensor, scale: Tensor
) -> Tensor:
    """The loss as a CUDA graph, where that is worth it and can be; else by autograd."""
    inputs = image_features, text_features, scale
    if graphed.worthwhile(inputs, means.new_ring(), means.tile, means.workspace_bytes):
        options = means.tile.operand_dtype, tile_dtype, means.workspace_bytes
        recorded = graphed.find(partial(_loss_and_gradients, means), inputs, options)
        if recorded is not None:
            return graphed.replay(recorded, inputs)
    return tiled.differentiable(_INF_CL, means, *inputs)


def _loss_and_gradients(
    means: tiled.Means, image_features: Tensor, text_features: Tensor, scale: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """The loss, and its gradients in float32, at once: what graphed.py records."""
    rows, columns = means.operands(image_features, text_features)
    losses, matched = ring_forward(rows, columns, scale, *means.of_a_pass())
    d_rows, d_columns, d_scale = ring_backward(rows, columns, scale, losses, matched, *means.of_a_pass())
    assert d_rows is not None and d_columns is not None, "both are needed unless said otherwise"
    factor = scale / len(rows)
    return losses.mean(), (d_rows * factor, d_columns * factor, d_scale / len(rows))
