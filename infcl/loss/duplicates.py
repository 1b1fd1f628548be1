"""False negatives, found by ids: repeated images, or several captions of one image.

In: int64 ids of this rank's samples. Out: `Duplicates`, which marks the duplicate entries in each block of columns.
Sample i has an image id and a text id. Entry (i, j), i != j, is a duplicate if samples i and j have equal image ids or
equal text ids. If only one kind of ids is given, that kind decides. Entry (i, i) is always a positive.

    "negative"   ids have no effect
    "mask"       duplicates are excluded from both softmaxes (sigmoid: from the sum)
    "positive"   duplicates are positives: a row's loss is the mean over its n positives P of their -log softmax,
                 lse_i - sum(logits[i, P]) / n; the same for columns (sigmoid: sign +1)

Source of "positive": SupCon, arXiv 2004.11362, Eq. 2 (L_out); UniCL, arXiv 2204.03610, Eq. 3.
Ids travel with the columns: 8 bytes per column and kind. Tiles compare int32 numbers instead of ids: the index at
which an id first occurs in the sorted ids of the rows, or -1 if no row has it. Memory is O(r + c).

Sizes: r rows and c columns of a block, k kinds of ids.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from infcl.kernels import Tile
from infcl.kernels.torch_tile import SUMMED_DIMS, Groups, segment_sums

DUPLICATES = ("negative", "mask", "positive")


class Duplicates(NamedTuple):
    """Ids that mark duplicate entries of the logits, for this rank's rows and any rank's columns."""

    known: Tensor  # int64 [k, r], sorted ids of the rows
    rows: Tensor  # int32 [k, r], the rows' ids as numbers (indices in `known`)
    columns: Tensor  # int64 [k, c], ids of this rank's columns
    positive: bool

    def groups(self, ids: Tensor, column_weights: Tensor | None = None, *, row_weights: Tensor | None = None) -> Groups:
        """Return the tile's `groups` argument for a block of columns with these ids, int64 [k, c]."""
        numbers = torch.stack([_indices(*pair) for pair in zip(self.known, ids)]).to(torch.int32)
        return Groups(self.rows, numbers, self.positive, row_weights, column_weights)


def travelling(duplicates: Duplicates | None) -> list[Tensor]:
    """Return the tensors that travel around the ring with the columns."""
    return [] if duplicates is None else [duplicates.columns]


def check_ids(
    name: str, count: int, given: Mapping[str, Tensor | None], duplicates: str
) -> dict[str, int | torch.dtype]:
    """Return {name: number} that must be equal on all ranks.

    Raises:
        ValueError: unknown `duplicates`, missing ids, or ids of another shape or dtype.
    """
    if duplicates not in DUPLICATES:
        raise ValueError(f"{name}: duplicates is one of {DUPLICATES}, not {duplicates!r}")
    for what, ids in given.items():
        if ids is not None and (ids.shape != (count,) or ids.dtype != torch.int64):
            raise ValueError(f"{name}: {what} must be int64 [{count}], one per row; got {tuple(ids.shape)} {ids.dtype}")
    if duplicates != "negative" and not any(ids is not None for ids in given.values()):
        raise ValueError(f"{name}: duplicates={duplicates!r} needs {' or '.join(given)}")
    if duplicates == "negative":
        return {}
    return {**{what: ids is not None for what, ids in given.items()}, "duplicates='mask'": duplicates == "mask"}


def find_duplicates(row_ids: Sequence[Tensor], column_ids: Sequence[Tensor], duplicates: str) -> Duplicates | None:
    """Number the ids of the rows.

    Args:
        row_ids, column_ids: int64 [r] and [c] per kind, on the features' device.
        duplicates: "negative", "mask" or "positive".

    Returns:
        None for "negative".
    """
    if duplicates == "negative":
        return None
    rows, columns = torch.stack(tuple(row_ids)), torch.stack(tuple(column_ids))
    known = rows.sort(1).values
    return Duplicates(known, torch.searchsorted(known, rows, out_int32=True), columns, duplicates == "positive")


def sum_positives(groups: Groups, rows: Tensor, columns: Tensor, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
    """Count each row's positives in a block, and sum `rows @ columns.T` over them, by row and by column.

    With one kind of ids, all rows with one id have the same number of positives, so only the total over these rows
    matters. Each of them gets an equal share of it; the same for columns. With two kinds, each row and column gets its
    own sum.

    Args:
        groups: numbers of the ids of the block.
        rows, columns: [r, D] and [c, D].
        tile: for one kind of ids.

    Returns:
        Counts int64 [r]; sums per row [r] and per column [c], float32 or wider.
    """
    kinds = [(row.long(), column.long()) for row, column in zip(groups.rows, groups.columns)]
    if len(kinds) == 1:
        return _share_by_number(rows, columns, *kinds[0], tile)
    found = [_sum_by_number(rows, columns, *kind) for kind in (*kinds, _numbers_of_both(*kinds))]
    counts, row_sums, col_sums = (image + text - both for image, text, both in zip(*found))  # inclusion-exclusion
    return counts, row_sums, col_sums


def _numbers_of_both(images: tuple[Tensor, Tensor], texts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return numbers of rows and columns that are equal where both kinds of numbers are equal."""
    rows, columns = (a * len(images[0]) + b for a, b in zip(images, texts))
    columns = torch.where((images[1] < 0) | (texts[1] < 0), -1, columns)
    known = rows.sort().values
    return torch.searchsorted(known, rows), _indices(known, columns)


def _indices(known: Tensor, ids: Tensor) -> Tensor:
    """Return the first index of each id in the sorted `known`, or -1 if it is absent; int64."""
    indices = torch.searchsorted(known, ids).clamp_(max=len(known) - 1)
    return indices.where(known[indices] == ids, -1)


def _share_by_number(
    rows: Tensor, columns: Tensor, row_numbers: Tensor, col_numbers: Tensor, tile: Tile
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `sum_positives` for the only kind of ids; row_numbers int64 in [0, r), col_numbers in [-1, r)."""
    (row_order, row_counts), (col_order, col_counts) = (_by_number(n, len(rows)) for n in (row_numbers, col_numbers))
    totals = tile.products_of_sums(rows, columns, row_order, row_counts, col_order, col_counts)
    col_sums = (totals / col_counts)[col_numbers.clamp(min=0)].where(col_numbers >= 0, 0)
    return col_counts[row_numbers], (totals / row_counts)[row_numbers], col_sums


def _sum_by_number(
    rows: Tensor, columns: Tensor, row_numbers: Tensor, col_numbers: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `sum_positives` for one of two kinds, exactly for each row and column. O((r + c) D).

    Sums the features of each number first: sum_j x_i . y_j = x_i . (sum_j y_j). Sorting makes the order of sums fixed.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    (row_order, row_counts), (col_order, col_counts) = (_by_number(n, len(rows)) for n in (row_numbers, col_numbers))
    known, col_numbers = col_numbers >= 0, col_numbers.clamp(min=0)
    row_sums, col_sums = rows.new_zeros(len(rows), dtype=wide), rows.new_zeros(len(columns), dtype=wide)
    for start in range(0, rows.shape[1], SUMMED_DIMS):
        x, y = (side[:, start : start + SUMMED_DIMS] for side in (rows, columns))
        x_sums, y_sums = segment_sums(x, row_order, row_counts), segment_sums(y, col_order, col_counts)
        row_sums += (x * y_sums[row_numbers]).sum(1)
        col_sums += (y * x_sums[col_numbers]).sum(1)
    return col_counts[row_numbers], row_sums, col_sums.where(known, 0)


def _by_number(numbers: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return indices [n] that sort the numbers, -1 last, and how often each number occurs, [count]."""
    numbers = numbers.where(numbers >= 0, count)
    order = numbers.sort(stable=True).indices
    counts = torch.zeros(count + 1, dtype=torch.int64, device=numbers.device)
    return order, counts.index_add_(0, numbers, torch.ones_like(numbers))[:count]
