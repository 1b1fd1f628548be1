"""Gradients of a loss for rows and columns in one pass around the ring; the loss supplies the computation of a tile.

In: this rank's rows and columns, dS at their matches, a function that adds one tile's contribution. Out: gradients.
Rows stay. Each block of columns travels with its gradient, and every rank adds the contribution of its rows.
Communication: W - 1 hops of the columns and what travels with them, W hops of the gradients in float32.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from infcl.loss.ring import RingExchange

_CHUNK = 16384  # rows per [rows, D] float32 temporary


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
        add_tile: called as add_tile(hop, block, tensors that travelled with it, d_rows, d_block, d_scale). It adds the
            block's contribution to the last three. At hop 0 the block is this rank's own; the tile excludes the
            matches. A gradient that is not needed is None.
        rows, columns: [r, D] and [c, D], in the tile's operand dtype.
        slopes: [m], dS at the matches of the first m rows.
        ring: a new ring for this pass.
        matches: int64 [m], the column of this rank that matches each row; None: row i matches column i.
        with_columns: tensors that travel with the columns.
        needs: whether rows and columns need a gradient. A side that needs none (locked tower) costs no matmul or hop.

    Returns:
        Gradients of rows [r, D], of columns [c, D], and <dS, logits / scale> summed over this rank's rows (0-dim), all
        in slopes' dtype.
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
        del d_block  # frees it before the next one is allocated
    return d_rows, ring.home("d_columns", Tensor.add_) if columns_need else None, d_scale


def scaled_sides(gradients: Sequence[Tensor | None], factor: Tensor, sides: Sequence[Tensor]) -> list[Tensor | None]:
    """Return `(gradient * factor).to(side.dtype)` for each gradient; in place where the dtype does not change."""
    outs = [
        g if g is None or g.dtype == side.dtype else torch.empty_like(g, dtype=side.dtype)
        for g, side in zip(gradients, sides)
    ]
    return [None if g is None else torch.mul(g, factor, out=out) for g, out in zip(gradients, outs)]


def _inner_product(features: Tensor, gradient: Tensor) -> Tensor:
    """Return `(features * gradient).sum()` in the gradient's dtype, 0-dim, without a [b, D] temporary."""
    chunks = zip(features.split(_CHUNK), gradient.split(_CHUNK))
    total, *others = [(a * b).sum() for a, b in chunks]
    for part in others:
        total += part
    return total


def row_products(left: Tensor, right: Tensor) -> Tensor:
    """Return `(left * right).sum(1)`, [b], in float32 or wider, without a [b, D] temporary."""
    wide = torch.promote_types(left.dtype, torch.float32)
    chunks = zip(left.split(_CHUNK), right.split(_CHUNK))
    return torch.cat([torch.mul(a.to(wide), b).sum(1) for a, b in chunks])


def _of_matched(rows: Tensor, partners: Tensor, slopes: Tensor, need: bool) -> tuple[Tensor | None, Tensor]:
    """Return the matches' contributions to the rows' gradient (None if not needed) and to <dS, logits / scale>."""
    d_rows = torch.empty_like(rows, dtype=slopes.dtype)
    _set_to_matched(d_rows, slopes, partners)
    return d_rows if need else None, _inner_product(rows, d_rows)


def add_rows(total: Tensor, indices: Tensor, rows: Tensor) -> None:
    """Compute `total.index_add_(0, indices, rows)` in a fixed order, also for repeated indices.

    On a GPU index_add_ uses atomics, while index_put_ sorts. On a CPU it is index_put_ whose threads change the order.
    """
    if total.is_cuda:
        total.index_put_((indices,), rows, accumulate=True)
    else:
        total.index_add_(0, indices, rows)


def _set_to_matched(gradient: Tensor, slopes: Tensor, partners: Tensor) -> None:
    """Set a gradient to `slopes[:, None] * partners`, the matches' contribution, and later rows to 0."""
    count = len(slopes)
    torch.mul(slopes[:, None], partners[:count], out=gradient[:count])
    if count < len(gradient):
        gradient[count:].zero_()
