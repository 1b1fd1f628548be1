"""Pairs that are no true negatives, by ids: the same image twice, several captions of one image.

In: int64 ids of this rank's samples. Out: `Duplicates`, which says of each block of columns which entries coincide.
Sample i has an image id and a text id. Image i and text j, i != j, coincide if the image ids of i and j are equal or
their text ids are; with one kind of ids, that kind decides. Pair (i, i) is always a positive.

    "negative"   ids change nothing
    "mask"       coinciding pairs are left out of both softmaxes (sigmoid: of the sum)
    "positive"   they are positives: a row's loss is the mean over its n positives P of their -log softmax,
                 lse_i - sum(logits[i, P]) / n; columns alike (sigmoid: the sign +1)

Source of "positive": SupCon, arXiv 2004.11362, Eq. 2 (L_out); UniCL, arXiv 2204.03610, Eq. 3.
Ids travel with the columns: 8 bytes per column and kind. Tiles compare int32 numbers in their place: where an id is
first among the sorted ids of the rows, or -1 if no row has it. All memory is O(r + c).

Sizes: r rows and c columns of a block, k kinds of ids.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from infcl.kernels import Groups

DUPLICATES = ("negative", "mask", "positive")
_DIMS = 256  # feature dimensions whose float32 sums exist at a time


class Duplicates(NamedTuple):
    """Which entries of the logits coincide, for the rows of this rank and the columns of any rank."""

    known: Tensor  # int64 [k, r], sorted ids of the rows
    rows: Tensor  # int32 [k, r], numbers of the rows' ids
    columns: Tensor  # int64 [k, c], ids of this rank's columns
    positive: bool

    def groups(self, ids: Tensor, column_weights: Tensor | None = None, *, row_weights: Tensor | None = None) -> Groups:
        """What a tile takes. ids: those of the block's columns."""
        numbers = torch.stack([_places(*pair) for pair in zip(self.known, ids)]).to(torch.int32)
        return Groups(self.rows, numbers, self.positive, row_weights, column_weights)


def travelling(duplicates: Duplicates | None) -> list[Tensor]:
    """What goes round the ring with the columns."""
    return [] if duplicates is None else [duplicates.columns]


def check_ids(name: str, rows: int, given: Mapping[str, Tensor | None], duplicates: str) -> dict[str, int]:
    """{what: number} that all ranks must have alike. ValueError for ids that do not fit."""
    if duplicates not in DUPLICATES:
        raise ValueError(f"{name}: duplicates is one of {DUPLICATES}, not {duplicates!r}")
    for what, ids in given.items():
        if ids is not None and (ids.shape != (rows,) or ids.dtype != torch.int64):
            raise ValueError(f"{name}: {what} must be int64 [{rows}], one per row; got {tuple(ids.shape)} {ids.dtype}")
    if duplicates != "negative" and not any(ids is not None for ids in given.values()):
        raise ValueError(f"{name}: duplicates={duplicates!r} needs {' or '.join(given)}")
    if duplicates == "negative":
        return {}
    return {**{what: ids is not None for what, ids in given.items()}, "duplicates='mask'": duplicates == "mask"}


def find_duplicates(
    row_ids: Sequence[Tensor | None], column_ids: Sequence[Tensor | None], device: torch.device, duplicates: str
) -> Duplicates | None:
    """Number the ids of the rows. Of each kind int64 [r] and [c]; None where ids change nothing."""
    if duplicates == "negative":
        return None
    rows, columns = (
        torch.stack([one.to(device) for one in kinds if one is not None]) for kinds in (row_ids, column_ids)
    )
    known = rows.sort(1).values
    return Duplicates(known, torch.searchsorted(known, rows, out_int32=True), columns, duplicates == "positive")


def sum_positives(groups: Groups, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count each row's positives in a block, and sum `rows @ columns.T` over them, by row and by column.

    With one kind of ids, rows with an id have as many positives, so only the sum over them counts: each gets an equal
    share of it, and so do columns. With two kinds the sums are each row's and column's own.

    Args:
        rows, columns: [r, D] and [c, D].

    Returns:
        int64 [r]; [r] and [c] in float32 or wider.
    """
    kinds = [(row.long(), column.long()) for row, column in zip(groups.rows, groups.columns)]
    if len(kinds) == 1:
        return _sum_by_number(rows, columns, *kinds[0], shared=True)
    found = [_sum_by_number(rows, columns, *kind) for kind in (*kinds, _numbers_of_both(*kinds))]
    counts, row_sums, col_sums = (image + text - both for image, text, both in zip(*found))  # those of both count once
    return counts, row_sums, col_sums


def _numbers_of_both(images: tuple[Tensor, Tensor], texts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Numbers of rows and columns that are equal where those of both kinds are."""
    rows, columns = (a * len(images[0]) + b for a, b in zip(images, texts))
    columns = torch.where((images[1] < 0) | (texts[1] < 0), -1, columns)
    known = rows.sort().values
    return torch.searchsorted(known, rows), _places(known, columns)


def _places(known: Tensor, ids: Tensor) -> Tensor:
    """Where each id is first in `known`, which is sorted; -1 where it is not. int64, as `ids`."""
    places = torch.searchsorted(known, ids).clamp_(max=len(known) - 1)
    return places.where(known[places] == ids, -1)


def _sum_by_number(
    rows: Tensor, columns: Tensor, row_numbers: Tensor, col_numbers: Tensor, *, shared: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """As sum_positives, of one kind, with numbers int64: row_numbers in [0, r), col_numbers in [-1, r). O((r + c) D).

    By the sum of features of each number: x_i . sum of its y_j. Sums in a fixed order: equal numbers are neighbours.
    """
    wide, known = torch.promote_types(rows.dtype, torch.float32), col_numbers >= 0
    (row_order, row_counts), (col_order, col_counts) = (_by_number(n, len(rows)) for n in (row_numbers, col_numbers))
    col_numbers = col_numbers.clamp(min=0)
    row_sums, col_sums = rows.new_zeros(len(rows), dtype=wide), rows.new_zeros(len(columns), dtype=wide)
    for start in range(0, rows.shape[1], _DIMS):
        x, y = (side[:, start : start + _DIMS] for side in (rows, columns))
        x_sums, y_sums = _segment_sums(x, row_order, row_counts, wide), _segment_sums(y, col_order, col_counts, wide)
        if shared:
            row_sums += torch.linalg.vecdot(x_sums, y_sums)  # by number
        else:
            row_sums += (x * y_sums[row_numbers]).sum(1)
            col_sums += (y * x_sums[col_numbers]).sum(1)
    if shared:
        row_sums, col_sums = (row_sums / row_counts)[row_numbers], (row_sums / col_counts)[col_numbers]
    return col_counts[row_numbers], row_sums, col_sums.where(known, 0)


def _by_number(numbers: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """An order in which equal numbers are neighbours, [n], -1 at the end, and how many there are of each [count]."""
    numbers = numbers.where(numbers >= 0, count)
    order = numbers.sort(stable=True).indices
    counts = torch.zeros(count + 1, dtype=torch.int64, device=numbers.device)
    return order, counts.index_add_(0, numbers, torch.ones_like(numbers))[:count]


def _segment_sums(features: Tensor, order: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums of the features [n, d] of each number, [count, d]."""
    return torch.segment_reduce(features[order].to(dtype), "sum", lengths=counts, unsafe=True)
