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

from collections.abc import Callable, Mapping, Sequence
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

    Args:
        rows, columns: [r, D] and [c, D].

    Returns:
        int64 [r]; [r] and [c] in float32 or wider.
    """
    kinds = [(row.long(), column.long()) for row, column in zip(groups.rows, groups.columns)]
    found = [_sum_by_number(rows, columns, *kind) for kind in kinds]
    if len(kinds) == 1:
        return found[0]
    found.append(_sum_by_number(rows, columns, *_numbers_of_both(*kinds)))
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
    rows: Tensor, columns: Tensor, row_numbers: Tensor, col_numbers: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As sum_positives, of one kind, with numbers int64: row_numbers in [0, r), col_numbers in [-1, r). O((r + c) D).

    By the sum of features of each number: x_i . sum of its y_j. Sums in a fixed order: equal numbers are neighbours.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    known, col_numbers = (col_numbers >= 0).to(wide), col_numbers.clamp(min=0)
    counts = torch.zeros_like(row_numbers).index_add_(0, col_numbers, known.long())[row_numbers]
    row_sums, col_sums = rows.new_zeros(len(rows), dtype=wide), rows.new_zeros(len(columns), dtype=wide)
    add_rows, add_columns = _summing(row_numbers, len(rows)), _summing(col_numbers, len(rows))
    for start in range(0, rows.shape[1], _DIMS):
        x, y = (side[:, start : start + _DIMS].to(wide) for side in (rows, columns))
        y = y * known[:, None]
        row_sums += (x * add_columns(y)[row_numbers]).sum(1)
        col_sums += (y * add_rows(x)[col_numbers]).sum(1)
    return counts, row_sums, col_sums


def _summing(numbers: Tensor, count: int) -> Callable[[Tensor], Tensor]:
    """A function: features [n, d] -> their sums by number [count, d], in a fixed order."""
    order = numbers.sort(stable=True).indices
    lengths = torch.zeros(count, dtype=torch.int64, device=numbers.device)
    lengths.index_add_(0, numbers, torch.ones_like(numbers))
    return lambda features: torch.segment_reduce(features[order], "sum", lengths=lengths, unsafe=True)
