"""The two trips around the ring of a loss with softmaxes: statistics of the logits, then gradients by dS.

In: rows and columns of this rank. Rows stay, columns travel; with them their ids, in the second trip their LSE as well.
Out: statistics of own rows and, of a loss in both directions, of own columns; gradients of both.

Shapes: rows [r, D], columns [c, D], m = min(r, c).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from infcl.kernels import Tile
from infcl.kernels.lse import merge_lse
from infcl.loss.duplicates import Duplicates, sum_positives, travelling
from infcl.loss.gradients import ring_gradients
from infcl.loss.ring import RingExchange


class Statistics(NamedTuple):
    """Of own rows over all ranks' columns [r] or, in both directions, of own rows and columns [2, b]; f32 or wider."""

    others: Tensor  # [r] or [2, b], LSE without the matched entries (i, i) of this rank
    matched: Tensor  # [m], the logits of these entries
    weights: Tensor | None = None  # [r], 1 / number of positives, by row and by column alike; None: no duplicates are
    means: Tensor | None = None  # [r] or [2, b], the means of the positives' logits


def softmax_statistics(
    rows: Tensor,
    columns: Tensor,
    scale: Tensor,
    ring: RingExchange,
    tile: Tile,
    workspace_bytes: int,
    *,
    both: bool,
    duplicates: Duplicates | None = None,
) -> Statistics:
    """both: of columns too, which costs W hops of 4 bytes per column (with positives 8)."""
    totals: tuple[Tensor, Tensor] | None = None  # how many positives each row has, and the sum over them
    for hop, (block, *ids) in ring.blocks(columns, *travelling(duplicates)):
        groups = None if duplicates is None else duplicates.groups(*ids)
        left_out = None if groups is None or groups.positive else groups
        row_part, column_part, own_matched = tile.softmax_forward(
            rows, block, scale, masked=hop == 0, workspace_bytes=workspace_bytes, groups=left_out
        )
        if hop == 0:
            row_others, matched = row_part, own_matched
        else:
            merge_lse(row_others, row_part)
        if both:
            ring.carry("col_lse", hop, column_part, merge_lse)
        if groups is not None and groups.positive:
            counts, sums, column_sums = sum_positives(groups, rows, block)
            totals = (counts, sums) if totals is None else (totals[0] + counts, totals[1] + sums)
            if both:
                ring.carry("col_positives", hop, column_sums, Tensor.add_)
    others = torch.stack([row_others, ring.home("col_lse", merge_lse)]) if both else row_others
    if totals is None:
        return Statistics(others, matched)
    counts, sums = totals
    weights = 1 / counts.to(matched.dtype)
    if both:
        sums = torch.stack([sums, ring.home("col_positives", Tensor.add_)])
    return Statistics(others, matched, weights, scale * sums * weights)


def softmax_gradients(
    rows: Tensor,
    columns: Tensor,
    scale: Tensor,
    row_lse: Tensor,
    column_lse: Tensor | None,
    slopes: Tensor,
    ring: RingExchange,
    tile: Tile,
    workspace_bytes: int,
    *,
    duplicates: Duplicates | None = None,
    weights: Tensor | None = None,
    needs: Sequence[bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """`ring_gradients` with dS of torch_tile.softmax_backward, and `slopes` at the matched entries.

    column_lse: None: the loss of the rows alone. weights: of positives, as softmax_statistics returned them.
    """

    def add_tile(hop: int, block: Tensor, its: Sequence[Tensor], *gradients: Tensor | None) -> None:
        block_lse, ids = (None, its) if column_lse is None else (its[0], its[1:])  # ids, and weights of positives
        groups = None if duplicates is None else duplicates.groups(*ids, row_weights=weights)
        tile.softmax_backward(
            rows, block, scale, row_lse, block_lse, *gradients,
            masked=hop == 0, workspace_bytes=workspace_bytes, groups=groups,
        )  # fmt: skip

    with_columns = travelling(duplicates)
    if column_lse is not None:
        with_columns = [column_lse, *with_columns, *([] if weights is None else [weights])]
    return ring_gradients(add_tile, rows, columns, slopes, ring, with_columns=with_columns, needs=needs)
