"""False negatives, found by ids: repeated images, or several captions of one image.

In: int64 ids of this rank's samples. Out: `Duplicates`, which marks the duplicate entries in each block of columns.
Entry (i, j), i != j, is a duplicate if samples i and j have equal ids. Entry (i, i) is always a positive.

    "negative"   ids have no effect
    "mask"       duplicates are excluded from both softmaxes (sigmoid: from the sum)
    "positive"   duplicates are positives: a row's loss is the mean over its n positives P of their -log softmax,
                 lse_i - sum(logits[i, P]) / n; the same for columns (sigmoid: sign +1)

Source of "positive": SupCon, arXiv 2004.11362, Eq. 2 (L_out); UniCL, arXiv 2204.03610, Eq. 3.
Ids travel with the columns: 8 bytes per column. Tiles compare int32 numbers instead of ids: the index at which an id
first occurs in the sorted ids of the rows, or -1 if no row has it. Memory is O(r + c).

Sizes: r rows and c columns of a block.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from infcl.kernels import Tile
from infcl.kernels.tile import Groups

DUPLICATES = ("negative", "mask", "positive")


class Duplicates(NamedTuple):
    """Ids that mark duplicate entries of the logits, for this rank's rows and any rank's columns."""

    known: Tensor  # int64 [r], sorted ids of the rows
    rows: Tensor  # int32 [r], the rows' ids as numbers (indices in `known`)
    columns: Tensor  # int64 [c], ids of this rank's columns
    positive: bool

    def groups(self, ids: Tensor, weights: Tensor | None = None) -> Groups:
        """Return the tile's `groups` argument for a block of columns with these ids, int64 [c]."""
        indices = torch.searchsorted(self.known, ids).clamp_(max=len(self.known) - 1)
        numbers = indices.where(self.known[indices] == ids, -1)
        return Groups(self.rows, numbers.to(torch.int32), self.positive, weights)


def check_ids(
    name: str, count: int, ids: Tensor | None, ids_name: str, duplicates: str
) -> dict[str, int | torch.dtype]:
    """Return {name: number} that must be equal on all ranks.

    Raises:
        ValueError: unknown `duplicates`, missing ids, or ids of another shape or dtype.
    """
    if duplicates not in DUPLICATES:
        raise ValueError(f"{name}: duplicates is one of {DUPLICATES}, not {duplicates!r}")
    if ids is not None and (ids.shape != (count,) or ids.dtype != torch.int64):
        raise ValueError(f"{name}: {ids_name} must be int64 [{count}], one per row; got {tuple(ids.shape)} {ids.dtype}")
    if duplicates != "negative" and ids is None:
        raise ValueError(f"{name}: duplicates={duplicates!r} needs {ids_name}")
    return {f"duplicates={mode!r}": duplicates == mode for mode in ("mask", "positive")}


def find_duplicates(row_ids: Tensor, column_ids: Tensor, duplicates: str) -> Duplicates:
    """Number the ids of the rows.

    Args:
        row_ids, column_ids: int64 [r] and [c], on the features' device.
        duplicates: "mask" or "positive".
    """
    known = row_ids.sort().values
    numbers = torch.searchsorted(known, row_ids, out_int32=True)
    return Duplicates(known, numbers, column_ids, duplicates == "positive")


def sum_positives(groups: Groups, rows: Tensor, columns: Tensor, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
    """Count each row's positives in a block, and sum `rows @ columns.T` over them, by row and by column.

    All rows with one id have the same number of positives, so only the total over these rows matters. Each of them gets
    an equal share of it; the same for columns.

    Args:
        groups: numbers of the ids of the block.
        rows, columns: [r, D] and [c, D].
        tile: computes the sums.

    Returns:
        Counts int64 [r]; sums per row [r] and per column [c], float32 or wider.
    """
    row_numbers, col_numbers = groups.rows.long(), groups.columns.long()  # in [0, r) and in [-1, r)
    (row_order, row_counts), (col_order, col_counts) = (_by_number(n, len(rows)) for n in (row_numbers, col_numbers))
    totals = tile.products_of_sums(rows, columns, row_order, row_counts, col_order, col_counts)
    col_sums = (totals / col_counts)[col_numbers.clamp(min=0)].where(col_numbers >= 0, 0)
    return col_counts[row_numbers], (totals / row_counts)[row_numbers], col_sums


def _by_number(numbers: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return indices [n] that sort the numbers, -1 last, and how often each number occurs, [count]."""
    numbers = numbers.where(numbers >= 0, count)
    order = numbers.sort(stable=True).indices
    counts = torch.zeros(count + 1, dtype=torch.int64, device=numbers.device)
    return order, counts.index_add_(0, numbers, torch.ones_like(numbers))[:count]
