"""Both sides' gradients of a loss over rows and columns: one pass around the ring, whatever the loss makes of a tile.

In: rows and columns of this rank, dS at their matches, and how a tile's part of the gradients is added. Out: gradients.
Rows stay. Columns travel, and with each block its gradient, to which every rank adds its rows' part: W - 1 hops of what
travels, W hops of the gradients in float32.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from infcl.loss.operands import inner_product, matched_gradient
from infcl.loss.ring import RingExchange


def ring_gradients(
    add_tile: Callable[..., None],
    rows: Tensor,
    columns: Tensor,
    slopes: Tensor,
    ring: RingExchange,
    *,
    with_columns: Sequence[Tensor] = (),
    needs: Sequence[bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """`dS @ all_columns` for one's own rows, `dS.T @ all_rows` for one's own columns, and <dS, logits / scale>.

    [r, D], [c, D] and 0-dim, all in slopes' dtype; the last is the sum over one's own rows.
    slopes [m], m = min(r, c): dS at the matches, which are the first m rows with the first m columns of this rank.
    with_columns: what travels with the columns.
    add_tile(block, *what travelled with it, d_rows, d_block, d_scale, masked): adds a block's part to the last three
        tensors; masked: it is this rank's own, whose matches are left out. A gradient that is not needed is None.
    needs: of rows, of columns. A side without (a locked tower) costs no matrix product and no message.
    """
    rows_need, columns_need = needs
    d_rows, d_scale = _of_matched(rows, columns, slopes, rows_need)
    for hop, (block, *its) in ring.blocks(columns, *with_columns):
        d_block = None
        if columns_need:
            d_block = ring.part("d_columns", block, slopes.dtype)
            _set_to_matched(d_block, slopes, rows) if hop == 0 else d_block.zero_()
        add_tile(block, *its, d_rows, d_block, d_scale, masked=hop == 0)
        if d_block is not None:
            ring.carry("d_columns", hop, d_block, Tensor.add_)
        del d_block  # before memory for the next one is taken
    return d_rows, ring.home("d_columns", Tensor.add_) if columns_need else None, d_scale


def _of_matched(rows: Tensor, columns: Tensor, slopes: Tensor, need: bool) -> tuple[Tensor | None, Tensor]:
    """The matched pairs' part of the rows' gradient, None without need of it, and of <dS, logits / scale>."""
    d_rows = torch.empty_like(rows, dtype=slopes.dtype)
    _set_to_matched(d_rows, slopes, columns)
    return d_rows if need else None, inner_product(rows, d_rows)


def _set_to_matched(gradient: Tensor, slopes: Tensor, partners: Tensor) -> None:
    """The matched pairs' part of a gradient; 0 in the rows behind them."""
    count = len(slopes)
    matched_gradient(slopes, partners[:count], out=gradient[:count])
    if count < len(gradient):
        gradient[count:].zero_()
