"""NT-Xent (SimCLR, SimCSE): all views against all views, self-similarity left out, half of the matrix computed.

In: two views [b, D] of this rank's samples. Out: the loss, and by backward the gradients. With z all 2 W b views:

    logits = scale * z @ z.T; logits.fill_diagonal_(-inf)                       # [2Wb, 2Wb], never formed
    loss = cross_entropy(logits, index of each view's other view)

The matrix is symmetric, so a tile that yields row and column statistics serves both triangles:

* between ranks: blocks go only W // 2 hops round the ring, then every unordered pair of ranks has met (for even W the
  last hop is shared by its two ranks, half of the rows each); statistics and gradients go home from there directly;
* within a rank: first x second is one rectangle with the matches on its diagonal; first x first and second x second are
  halved again and again, a rectangle each time, down to squares that are computed whole.

Gradient: d_z = (dS + dS.T) @ z, and dS + dS.T = exp(logits - lse[:, None]) + exp(logits - lse) is twice the dS of
CLIP's tiles; matches are left out of them and added as there (loss/lse).

16 W b^2 D flops per rank forward and backward, half of what all tiles need, and the squares that are computed whole: on
a GPU, where these have up to 8,192 rows, 0.53 of all tiles for 131,072 views, 0.625 for 32,768 and 0.75 below. Per pass
W // 2 hops of 2b*D operands; forward as many of 2b float32, backward of 2b*D float32. Flat ring. Averages as in
loss/inf_cl.
Source: SimCLR, arXiv 2002.05709, Eq. 1; scale is its 1 / temperature.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from infcl.kernels import WORKSPACE_BYTES, Tile
from infcl.kernels.lse import cross_entropies, merge_lse
from infcl.loss import tiled
from infcl.loss.operands import check_features, inner_product, matched_gradient, scaled
from infcl.loss.ring import RingExchange

# Rows of the largest square that is computed whole, by tile. On a GPU smaller ones would take longer to launch.
_LEAF = {"torch": 256, "triton": 8192}


def nt_xent_loss(
    first_views: Tensor,
    second_views: Tensor,
    logit_scale: Tensor | float,
    *,
    group: dist.ProcessGroup | None = None,
    tile: str = "auto",
    tile_dtype: str | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
    ring_overlap: str = "on",
    compare_ranks: bool = True,
) -> Tensor:
    """Mean over this rank's 2b views of the cross entropy against all ranks' views; 0-dim, float32 or wider.

    first_views, second_views: [b, D], row i of both is the same sample. The options are those of `inf_cl_loss`.
    """
    options = tiled.Options(group, tile, tile_dtype, workspace_bytes, "flat", None, ring_overlap, compare_ranks)
    return tiled.loss(_NT_XENT, options, (first_views, second_views), (logit_scale,))


def ring_forward(
    views: Tensor, scale: Tensor, ring: RingExchange, tile: Tile, workspace_bytes: int
) -> tuple[Tensor, Tensor]:
    """Losses of own first and second views over the group's, [2, b], and the logits of own matched views, [b]."""
    for hop, (block,) in ring.blocks(views):
        if hop == 0:
            first, second = views.chunk(2)
            lse = torch.cat([_self_lse(part, scale, tile, workspace_bytes) for part in (first, second)])
            row_part, col_part, matched = tile.softmax_forward(
                first, second, scale, masked=True, workspace_bytes=workspace_bytes
            )
            merge_lse(lse[: len(first)], row_part)
            merge_lse(lse[len(first) :], col_part)
            continue
        rows, columns = _share(hop, ring, len(views))
        row_part, col_part, _ = tile.softmax_forward(
            views[rows], block[columns], scale, masked=False, workspace_bytes=workspace_bytes
        )
        merge_lse(lse[rows], row_part)
        block_lse = torch.full_like(lse, -float("inf"))
        block_lse[columns] = col_part
        ring.carry("lse", hop, block_lse, merge_lse)
    others = lse if ring.reach == 0 else merge_lse(lse, ring.home("lse", merge_lse))
    return cross_entropies(others.view(2, -1), matched), matched


def ring_backward(
    views: Tensor,
    scale: Tensor,
    losses: Tensor,
    matched: Tensor,
    ring: RingExchange,
    tile: Tile,
    workspace_bytes: int,
) -> tuple[Tensor, Tensor]:
    """`(dS + dS.T) / 2 @ all_views` for one's own views, [2b, D], and <dS, logits / scale>, 0-dim; float32 or wider.

    The inner product counts what this rank computes, rectangles twice; the group's sum is that of the whole matrix.
    """
    lse = (losses + matched).view(-1)
    slopes = torch.expm1(-losses).mean(0)
    d_views = torch.empty_like(views, dtype=lse.dtype)
    for d_half, partners in zip(d_views.chunk(2), reversed(views.chunk(2))):
        matched_gradient(slopes, partners, out=d_half)
    d_scale = inner_product(views, d_views)
    d_rectangles = torch.zeros_like(d_scale)
    for hop, (block, block_lse) in ring.blocks(views, lse):
        if hop == 0:
            parts = [tensor.chunk(2) for tensor in (views, lse, d_views)]
            for own, own_lse, d_own in zip(*parts):
                _add_self_gradient(own, own_lse, d_own, d_scale, d_rectangles, scale, tile, workspace_bytes)
            (first, second), (first_lse, second_lse), (d_first, d_second) = parts
            tile.softmax_backward(
                first, second, scale, first_lse, second_lse, d_first, d_second, d_rectangles,
                masked=True, workspace_bytes=workspace_bytes,
            )  # fmt: skip
            continue
        rows, columns = _share(hop, ring, len(views))
        d_block = ring.part("d_views", block, lse.dtype).zero_()
        tile.softmax_backward(
            views[rows], block[columns], scale, lse[rows], block_lse[columns],
            d_views[rows], d_block[columns], d_rectangles,
            masked=False, workspace_bytes=workspace_bytes,
        )  # fmt: skip
        ring.carry("d_views", hop, d_block, Tensor.add_)
        del d_block  # before memory for the next one is taken
    if ring.reach > 0:
        d_views += ring.home("d_views", Tensor.add_)
    return d_views, d_scale + 2 * d_rectangles


def _check(*features: Tensor):
    return check_features("nt_xent", *features), ""


def _forward(means: tiled.Means, first_views: Tensor, second_views: Tensor, scale: Tensor):
    views = torch.cat([*means.operands(first_views, second_views)])  # [2b, D]
    losses, matched = ring_forward(views, scale, *means.of_a_pass())
    return losses.mean(), (losses, matched)


def _backward(means: tiled.Means, d_loss: Tensor, inputs, statistics, needs):
    first_views, second_views, scale = inputs
    losses, matched = statistics
    views = torch.cat([*means.operands(first_views, second_views)])
    d_views, d_scale = ring_backward(views, scale, losses, matched, *means.of_a_pass())
    factor = d_loss / len(views)
    d_views = scaled(d_views, 2 * factor * scale, first_views.dtype)
    return *d_views.chunk(2), factor * d_scale


def _statistics(first_views, *_):
    return [((2, len(first_views)), None), ((len(first_views),), None)]


_NT_XENT = tiled.register(
    tiled.Maths("nt_xent", _check, _forward, _backward, _statistics, reach=lambda world_size: world_size // 2)
)


def _share(hop: int, ring: RingExchange, count: int) -> tuple[slice, slice]:
    """This rank's part of its rectangle with the block of this hop: rows of its own, columns of the block.

    At the last hop of an even ring the owner holds this rank's block too: the lower of both takes the first half of its
    own rows, the higher one the second half of the lower one's as columns.
    """
    everything = slice(0, count)
    if 2 * hop < ring.world_size:
        return everything, everything
    if dist.get_rank(ring.group) < ring.owner(hop):
        return slice(0, count // 2), everything
    return everything, slice(count // 2, count)


def _self_lse(views: Tensor, scale: Tensor, tile: Tile, workspace_bytes: int) -> Tensor:
    """`(scale * views @ views.T).fill_diagonal_(-inf).logsumexp(1)`, [n]."""
    if len(views) <= _LEAF[tile.name]:
        return tile.softmax_forward(views, views, scale, masked=True, workspace_bytes=workspace_bytes)[0]
    upper, lower = views[: len(views) // 2], views[len(views) // 2 :]
    lse = torch.cat([_self_lse(part, scale, tile, workspace_bytes) for part in (upper, lower)])
    row_part, col_part, _ = tile.softmax_forward(upper, lower, scale, masked=False, workspace_bytes=workspace_bytes)
    merge_lse(lse[: len(upper)], row_part)
    merge_lse(lse[len(upper) :], col_part)
    return lse


def _add_self_gradient(
    views: Tensor,
    lse: Tensor,
    d_views: Tensor,
    d_squares: Tensor,
    d_rectangles: Tensor,
    scale: Tensor,
    tile: Tile,
    workspace_bytes: int,
) -> None:
    """`d_views += ((logits - lse[:, None]).exp() + (logits - lse).exp()) / 2 @ views`, the diagonal left out.

    d_squares, d_rectangles: inner products with the cosines, of squares and of one of two equal rectangles.
    """
    if len(views) <= _LEAF[tile.name]:
        tile.softmax_backward(
            views, views, scale, lse, lse, d_views, None, d_squares, masked=True, workspace_bytes=workspace_bytes
        )
        return
    half = len(views) // 2
    for part in (slice(0, half), slice(half, len(views))):
        _add_self_gradient(views[part], lse[part], d_views[part], d_squares, d_rectangles, scale, tile, workspace_bytes)
    tile.softmax_backward(
        views[:half],
        views[half:],
        scale,
        lse[:half],
        lse[half:],
        d_views[:half],
        d_views[half:],
        d_rectangles,
        masked=False,
        workspace_bytes=workspace_bytes,
    )
