"""The two trips around the ring of a loss with softmaxes: statistics of the logits, then gradients by dS.

In: rows and columns of this rank. Rows stay, columns travel; with them their ids, in the second trip their LSE as well.
Out: statistics of own rows and, of a loss in both directions, of own columns; gradients of both.

Shapes: rows [r, D], columns [c, D]; m matches, which are min(r, c) on the diagonal or one per row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from infcl.kernels import Groups, Tile
from infcl.kernels.lse import merge_lse
from infcl.loss.duplicates import Duplicates, sum_positives, travelling
from infcl.loss.gradients import ring_gradients, row_products
from infcl.loss.ring import RingExchange


class Statistics(NamedTuple):
    """Of own rows over all ranks' columns and, in both directions, of own columns: [1, r] or [2, b]; f32 or wider."""

    others: Tensor  # LSE without this rank's matches
    matched: Tensor  # [m], the logits of the matches
    weights: Tensor | None = None  # [r], 1 / number of positives, by row and by column alike; None: no duplicates are
    means: Tensor | None = None  # the means of the positives' logits


def softmax_statistics(
    rows: Tensor,
    columns: Tensor,
    scale: Tensor,
    ring: RingExchange,
    tile: Tile,
    workspace_bytes: int,
    *,
    both: bool,
    matches: Tensor | None = None,
    duplicates: Duplicates | None = None,
) -> Statistics:
    """Make the first trip.

    both: of columns too, which costs W hops of 4 bytes per column (with positives 8). matches: as of ring_gradients.
    """
    totals: tuple[Tensor, Tensor] | None = None  # how many positives each row has, and the sum over them
    for hop, (block, *ids) in ring.blocks(columns, *travelling(duplicates)):
        groups = None if duplicates is None else duplicates.groups(*ids)
        left_out = None if groups is None or groups.positive else groups
        if hop == 0 and matches is not None and left_out is None:
            left_out = _entries_of(matches, len(columns))
        row_part, column_part, own_matched = tile.softmax_forward(
            rows, block, scale, masked=hop == 0 and matches is None, workspace_bytes=workspace_bytes, groups=left_out
        )
        if hop == 0:
            row_others = row_part
            matched = own_matched if matches is None else row_products(rows, columns[matches]) * scale
        else:
            merge_lse(row_others, row_part)
        if both:
            ring.carry("col_lse", hop, column_part, merge_lse)
        if groups is not None and groups.positive:
            counts, sums, column_sums = sum_positives(groups, rows, block)
            totals = (counts, sums) if totals is None else (totals[0] + counts, totals[1] + sums)
            if both:
                ring.carry("col_positives", hop, column_sums, Tensor.add_)
    others = torch.stack([row_others, *([ring.home("col_lse", merge_lse)] if both else [])])
    if totals is None:
        return Statistics(others, matched)
    counts, sums = totals
    weights = 1 / counts.to(matched.dtype)
    sums = torch.stack([sums, *([ring.home("col_positives", Tensor.add_)] if both else [])])
    return Statistics(others, matched, weights, scale * sums * weights)


def softmax_gradients(
    rows: Tensor,
    columns: Tensor,
    scale: Tensor,
    lse: Tensor,
    slopes: Tensor,
    ring: RingExchange,
    tile: Tile,
    workspace_bytes: int,
    *,
    matches: Tensor | None = None,
    duplicates: Duplicates | None = None,
    weights: Tensor | None = None,
    needs: Sequence[bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """`ring_gradients` with dS of torch_tile.softmax_backward, and `slopes` at the matches.

    lse: of rows and, of a loss in both directions, of columns. weights: of positives, as softmax_statistics returned
    them; then given matches are among the positives that the tiles have, and their slopes are 0.
    """
    row_lse, *column_lse = lse
    own = None if matches is None else _entries_of(matches, len(columns))

    def add_tile(hop: int, block: Tensor, its: Sequence[Tensor], *gradients: Tensor | None) -> None:
        block_lse, ids = (its[0], its[1:]) if column_lse else (None, its)  # ids, and weights of positives
        groups = None if duplicates is None else duplicates.groups(*ids, row_weights=weights)
        tile.softmax_backward(
            rows, block, scale, row_lse, block_lse, *gradients, masked=hop == 0 and own is None,
            workspace_bytes=workspace_bytes, groups=own if hop == 0 and groups is None else groups,
        )  # fmt: skip

    with_columns = [*column_lse, *travelling(duplicates), *([] if weights is None or not column_lse else [weights])]
    return ring_gradients(
        add_tile, rows, columns, slopes, ring, matches=matches, with_columns=with_columns, needs=needs
    )


def _entries_of(matches: Tensor, count: int) -> Groups:
    """Each row's match among so many columns, for a tile to leave out."""
    return Groups(matches.to(torch.int32)[None], torch.arange(count, dtype=torch.int32, device=matches.device)[None])
