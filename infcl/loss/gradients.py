"""Gradients of a loss for rows and columns in one pass around the ring; the loss supplies the computation of a tile.

In: this rank's rows and columns, dS at their matches, a function that adds one tile's contribution. Out: gradients.
Rows stay. Each block of columns travels with its gradient, and every rank adds the contribution of its rows.
Communication: W - 1 hops of the columns and what travels with them, W hops of the gradients in float32.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from infcl.kernels.tile import Gradients
from infcl.loss.inputs import Setup


def ring_gradients(
    add_tile: Callable[[int, Tensor, list[Tensor], Gradients], object],
    rows: Tensor,
    columns: Tensor,
    setup: Setup,
    *,
    slopes: Tensor,
    cosines: Tensor,
    travelling: Sequence[Tensor] = (),
) -> Gradients:
    """Compute `dS @ all_columns` for own rows, `dS.T @ all_rows` for own columns, and <dS, logits / scale>.

    Args:
        add_tile: called as add_tile(hop, block of columns, tensors that travelled with it, gradients); adds the
            block's contribution, without the matches. At hop 0 the block is this rank's own.
        rows, columns: [r, D] and [c, D], in the tile's operand dtype.
        setup: of the call. A side that needs no gradient (locked tower) costs no matmul or hop.
        slopes, cosines: [r], dS at the matches and their logits / scale.
        travelling: tensors that travel with the columns.

    Returns:
        Gradients of rows [r, D], of columns [c, D] (None if not needed), and of the scale, summed over this rank's rows
        (0-dim), all in slopes' dtype.
    """
    ring, matches = setup.ring(), setup.matches
    rows_need, columns_need = setup.needs
    d_scale, d_rows = (slopes * cosines).sum(), None
    if rows_need:
        partners = columns[: len(rows)] if matches is None else columns[matches]
        d_rows = torch.mul(slopes[:, None], partners)
    for hop, (block, *its) in ring.blocks(columns, *travelling):
        d_block = ring.part("d_columns", block, slopes.dtype) if columns_need else None
        if d_block is not None and hop == 0 and matches is None:
            torch.mul(slopes[:, None], rows, out=d_block[: len(rows)])
            d_block[len(rows) :].zero_()
        elif d_block is not None:
            d_block.zero_()
            if hop == 0 and matches is not None:
                add_rows(d_block, matches, slopes[:, None] * rows)
        add_tile(hop, block, its, Gradients(d_rows, d_block, d_scale))
        if d_block is not None:
            ring.carry("d_columns", hop, d_block, Tensor.add_)
        del d_block  # frees it before the next one is allocated
    return Gradients(d_rows, ring.home("d_columns", Tensor.add_) if columns_need else None, d_scale)


def match_cosines(rows: Tensor, columns: Tensor, setup: Setup) -> Tensor:
    """Return <row, its match>, [r], in float32 or wider."""
    return setup.tile.row_dots(rows, columns[: len(rows)] if setup.matches is None else columns[setup.matches])


def add_rows(total: Tensor, indices: Tensor, rows: Tensor) -> None:
    """Compute `total.index_add_(0, indices, rows)` in a fixed order, also for repeated indices.

    On a GPU index_add_ uses atomics, while index_put_ sorts. On a CPU it is index_put_ whose threads change the order.
    """
    if total.is_cuda:
        total.index_put_((indices,), rows, accumulate=True)
    else:
        total.index_add_(0, indices, rows)
