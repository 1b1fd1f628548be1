"""Both sides' gradients of a loss over rows and columns: one pass around the ring, whatever the loss makes of a tile.

In: rows and columns of this rank, dS at their matches, and how a tile's part of the gradients is added. Out: gradients.
Rows stay. Columns travel, and with each block its gradient, to which every rank adds its rows' part: W - 1 hops of what
travels, W hops of the gradients in float32.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from infcl.loss.ring import RingExchange

_PIECE = 16384  # rows whose [rows, D] float32 temporary is made at a time


def ring_gradients(
    add_tile: Callable[..., None],
    rows: Tensor,
    columns: Tensor,
    slopes: Tensor,
    ring: RingExchange,
    *,
    matches: Tensor | None = None,
    with_columns: Sequence[Tensor] = (),
    needs: Sequence[bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Compute `dS @ all_columns` for own rows, `dS.T @ all_rows` for own columns, and <dS, logits / scale>.

    Args:
        add_tile: called as add_tile(hop, block, what travelled with it, d_rows, d_block, d_scale); adds a block's part
            to the last three tensors. At hop 0 the block is this rank's own, whose matches are left out. A gradient
            that is not needed is None.
        slopes: [m]: dS at the matches of the first m rows.
        matches: int64 [m], the column of this rank that matches each row; None: row i matches column i.
        with_columns: what travels with the columns.
        needs: of rows, of columns. A side without (a locked tower) costs no matmul and no message.

    Returns:
        [r, D], [c, D] and 0-dim, all in slopes' dtype; the last is the sum over this rank's rows.
    """
    rows_need, columns_need = needs
    d_rows, d_scale = _of_matched(rows, columns if matches is None else columns[matches], slopes, rows_need)
    for hop, (block, *its) in ring.blocks(columns, *with_columns):
        d_block = None
        if columns_need:
            d_block = ring.part("d_columns", block, slopes.dtype)
            if hop > 0:
                d_block.zero_()
            elif matches is None:
                _set_to_matched(d_block, slopes, rows)
            else:
                add_rows(d_block.zero_(), matches, slopes[:, None] * rows)
        add_tile(hop, block, its, d_rows, d_block, d_scale)
        if d_block is not None:
            ring.carry("d_columns", hop, d_block, Tensor.add_)
        del d_block  # before memory for the next one is taken
    return d_rows, ring.home("d_columns", Tensor.add_) if columns_need else None, d_scale


def scaled_sides(gradients: Sequence[Tensor | None], factor: Tensor, sides: Sequence[Tensor]) -> list[Tensor | None]:
    """`(gradient * factor).to(side.dtype)` of each gradient in one pass, in place where the dtype stays."""
    outs = [
        g if g is None or g.dtype == side.dtype else torch.empty_like(g, dtype=side.dtype)
        for g, side in zip(gradients, sides)
    ]
    return [None if g is None else torch.mul(g, factor, out=out) for g, out in zip(gradients, outs)]


def _inner_product(features: Tensor, gradient: Tensor) -> Tensor:
    """`(features * gradient).sum()` in the gradient's dtype, 0-dim, without a [b, D] temporary."""
    pieces = zip(features.split(_PIECE), gradient.split(_PIECE))
    total, *others = [(a * b).sum() for a, b in pieces]
    for part in others:
        total += part
    return total


def row_products(left: Tensor, right: Tensor) -> Tensor:
    """`(left * right).sum(1)`, [b], in float32 or wider, without a [b, D] temporary."""
    wide = torch.promote_types(left.dtype, torch.float32)
    pieces = zip(left.split(_PIECE), right.split(_PIECE))
    return torch.cat([torch.mul(a.to(wide), b).sum(1) for a, b in pieces])


def _of_matched(rows: Tensor, partners: Tensor, slopes: Tensor, need: bool) -> tuple[Tensor | None, Tensor]:
    """The matched pairs' part of the rows' gradient, None without need of it, and of <dS, logits / scale>."""
    d_rows = torch.empty_like(rows, dtype=slopes.dtype)
    _set_to_matched(d_rows, slopes, partners)
    return d_rows if need else None, _inner_product(rows, d_rows)


def add_rows(total: Tensor, places: Tensor, rows: Tensor) -> None:
    """`total.index_add_(0, places, rows)`, in a fixed order where places come several times.

    On a GPU index_add_ has atomics; index_put_ sorts there. On a CPU it is the other way round: index_put_ has threads.
    """
    if total.is_cuda:
        total.index_put_((places,), rows, accumulate=True)
    else:
        total.index_add_(0, places, rows)


def _set_to_matched(gradient: Tensor, slopes: Tensor, partners: Tensor) -> None:
    """`slopes[:, None] * partners`, the matched pairs' part of a gradient; 0 in the rows after them."""
    count = len(slopes)
    torch.mul(slopes[:, None], partners[:count], out=gradient[:count])
    if count < len(gradient):
        gradient[count:].zero_()
