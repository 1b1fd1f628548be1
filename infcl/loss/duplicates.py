"""Pairs that are no true negatives, by ids: the same image twice, several captions of one image.

In: int64 ids of this rank's samples. Out: `Duplicates`, which says of each block of columns which entries coincide.
Sample i has an image id and a text id. Image i and text j, i != j, coincide if the image ids of i and j are equal or
their text ids are; with one kind of ids, that kind decides. Pair (i, i) is always a positive.

    "negative"   ids change nothing
    "mask"       coinciding pairs are left out of both softmaxes (sigmoid: of the sum)
    "positive"   they are positives: a row's loss is the mean over its n positives P of their -log softmax,
                 lse_i - sum(logits[i, P]) / n; columns alike (sigmoid: the sign +1)

Source of "positive": SupCon, arXiv 2004.11362, Eq. 2 (L_out); UniCL, arXiv 2204.03610, Eq. 3.
Cost: one all-gather of the ids; 4 to 12 bytes per sample of the global batch on every rank. Rank r's samples are rows
and columns alike, so nothing more travels round the ring than a [b] float32 sum of "positive".

Sizes: b samples of this rank, B = W * b of all, k kinds of ids.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from infcl.kernels import Groups

DUPLICATES = ("negative", "mask", "positive")
_DIMS = 256  # feature dimensions whose float32 sums exist at a time


class Duplicates(NamedTuple):
    """Which entries of the [B, B] logits coincide, for the rows of this rank and the columns of each rank."""

    rows: Tensor  # int32 [k, b]
    columns: Sequence[Tensor | None]  # of each rank int32 [k, b]; None: nothing coincides with its columns
    row_weights: Tensor | None = None  # f32 or wider [b], 1 / number of positives; None: leave coinciding pairs out
    column_weights: Sequence[Tensor] = ()  # of each rank [b]
    signs: tuple[int, ...] = (1,)  # of the kinds in a sum over positives; the tiles take the first kinds, of sign 1

    @property
    def positive(self) -> bool:
        return self.row_weights is not None

    def groups(self, owner: int) -> Groups | None:
        """For the tile of this rank's rows and the columns of rank `owner`."""
        columns, kinds = self.columns[owner], self.signs.count(1)
        if columns is None:
            return None
        if self.row_weights is None:
            return Groups(self.rows[:kinds], columns[:kinds])
        return Groups(self.rows[:kinds], columns[:kinds], self.row_weights, self.column_weights[owner])

    def left_out(self, owner: int) -> Groups | None:
        """The entries without a place in a softmax's denominator."""
        return None if self.positive else self.groups(owner)

    def positive_sums(self, owner: int, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of rows @ columns.T over the positives, of each row and of each column, [b] in float32 or wider.

        An entry that coincides by both kinds counts once: sums by image, plus by text, less by both.
        """
        column_ids = self.columns[owner]
        assert column_ids is not None, "positives have ids on all ranks"
        parts = [_sums_by_id(rows, columns, *ids) for ids in zip(self.rows, column_ids)]
        of_rows, of_columns = (sum(sign * part for sign, part in zip(self.signs, side)) for side in zip(*parts))
        return of_rows, of_columns


def check_ids(
    name: str, rows: int, image_ids: Tensor | None, text_ids: Tensor | None, duplicates: str
) -> tuple[list[Tensor], dict[str, int]]:
    """The ids to use, and {what: number} that all ranks must have alike. ValueError for ids that do not fit."""
    if duplicates not in DUPLICATES:
        raise ValueError(f"{name}: duplicates is one of {DUPLICATES}, not {duplicates!r}")
    given = {"image_ids": image_ids, "text_ids": text_ids}
    for what, ids in given.items():
        if ids is not None and (ids.shape != (rows,) or ids.dtype != torch.int64):
            raise ValueError(f"{name}: {what} must be int64 [{rows}], one per row; got {tuple(ids.shape)} {ids.dtype}")
    if duplicates == "negative":
        return [], {}
    ids = [one for one in given.values() if one is not None]
    if not ids:
        raise ValueError(f"{name}: duplicates={duplicates!r} needs image_ids, text_ids, or both")
    flags = {what: int(one is not None) for what, one in given.items()}
    return ids, flags | {"duplicates": DUPLICATES.index(duplicates)}


def find_duplicates(
    ids: Sequence[Tensor], like: Tensor, group: dist.ProcessGroup | None, duplicates: str
) -> Duplicates | None:
    """Number the ids of all ranks. like: features, for the device and the weights' dtype; None without ids."""
    if not ids:
        return None
    own = torch.stack([one.to(like.device) for one in ids])  # [k, b]
    world_size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    everyone = own.new_empty(world_size * len(own), own.shape[1])
    if world_size == 1:
        everyone.copy_(own)
    else:
        dist.all_gather_into_tensor(everyone, own, group=group)
    kinds = everyone.view(world_size, len(own), -1).transpose(0, 1).flatten(1)  # [k, B]
    numbered, signs = [_numbered(kind) for kind in kinds], (1,) * len(own)
    if duplicates == "positive" and len(own) == 2:
        numbered.append(_numbered(numbered[0] * kinds.shape[1] + numbered[1]))
        signs = (1, 1, -1)
    blocks = torch.stack(numbered).to(torch.int32).view(len(numbered), world_size, -1).transpose(0, 1).contiguous()
    found = Duplicates(blocks[rank], tuple(blocks), signs=signs)
    if duplicates == "mask":
        return found
    counts = torch.stack([sign * _counts(kind) for sign, kind in zip(signs, numbered)]).sum(0)  # [B], at least 1
    weights = 1 / counts.to(torch.promote_types(like.dtype, torch.float32)).view(world_size, -1)
    return found._replace(row_weights=weights[rank], column_weights=tuple(weights))


def own_views(samples: int, like: Tensor, rank: int, world_size: int) -> Duplicates:
    """NT-Xent's: rows are first and second views [2b], columns second and first ones; own entries are left out."""
    rows = torch.arange(2 * samples, dtype=torch.int32, device=like.device)[None]
    columns: list[Tensor | None] = [None] * world_size
    columns[rank] = rows.roll(samples, 1)
    return Duplicates(rows, columns)


def _numbered(ids: Tensor) -> Tensor:
    """Numbers 0, 1, ... in place of ids, equal where the ids are; int64 [B]."""
    ordered, order = ids.sort()
    steps = torch.zeros_like(ids)
    steps[1:] = ordered[1:] != ordered[:-1]
    return torch.empty_like(ids).scatter_(0, order, steps.cumsum(0))


def _counts(numbers: Tensor) -> Tensor:
    """Of each sample, how many have its number; int64 [B]."""
    return torch.zeros_like(numbers).scatter_add_(0, numbers, torch.ones_like(numbers))[numbers]


def _sums_by_id(rows: Tensor, columns: Tensor, row_ids: Tensor, col_ids: Tensor) -> tuple[Tensor, Tensor]:
    """`(same * (rows @ columns.T)).sum(1)`, and `.sum(0)`, for same = row_ids[:, None] == col_ids; O((r + c) D).

    By the sum of features of each id: x_i . sum of its y_j. Sums in a fixed order: rows of one id are neighbours.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    ordered = row_ids.sort().values
    row_place = torch.searchsorted(ordered, row_ids)  # of the first row with this id, in the order of ids
    col_place = torch.searchsorted(ordered, col_ids).clamp_(max=len(ordered) - 1)
    known = (ordered[col_place] == col_ids).to(wide)
    row_sums, col_sums = rows.new_zeros(len(rows), dtype=wide), rows.new_zeros(len(columns), dtype=wide)
    add_rows, add_columns = _summing(row_place, len(rows)), _summing(col_place, len(rows))
    for start in range(0, rows.shape[1], _DIMS):
        x, y = (side[:, start : start + _DIMS].to(wide) for side in (rows, columns))
        y = y * known[:, None]
        row_sums += (x * add_columns(y)[row_place]).sum(1)
        col_sums += (y * add_rows(x)[col_place]).sum(1)
    return row_sums, col_sums


def _summing(places: Tensor, count: int):
    """A function: features [n, d] -> their sums by place [count, d], in a fixed order."""
    order = places.sort(stable=True).indices
    lengths = torch.zeros(count, dtype=torch.int64, device=places.device)
    lengths.scatter_add_(0, places, torch.ones_like(places))
    return lambda features: torch.segment_reduce(features[order], "sum", lengths=lengths, unsafe=True)
