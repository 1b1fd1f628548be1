"""Groups in the Triton kernels: pass ids to a launch, and find the entries of a tile that share an id.

A kernel takes GROUPED (0: no ids, 1 or 2 kinds) as a constant, so unused branches are not compiled. It loads ids where
it compares them, because ids loaded before a loop would occupy registers.
"""

import triton
import triton.language as tl
from torch import Tensor

from infcl.kernels.torch_tile import Groups


def ids_of(groups: Groups | None, placeholder: Tensor) -> tuple[Tensor, int, Tensor, int]:
    """Return row ids, their stride between kinds, column ids and their stride, in the argument order of `same_ids`."""
    if groups is None:
        return placeholder, 0, placeholder, 0
    assert groups.rows.stride(1) == groups.columns.stride(1) == 1, "ids of one kind are neighbours"
    return groups.rows, groups.rows.stride(0), groups.columns, groups.columns.stride(0)


@triton.jit
def same_ids(
    row_ids_ptr,  # i32 [kinds, r], read
    row_stride,
    col_ids_ptr,  # i32 [kinds, c], read
    col_stride,
    rows,  # i32 [m], indices
    columns,  # i32 [n]
    num_rows,
    num_columns,
    KINDS: tl.constexpr,
):
    """Return `(row_ids[:, rows, None] == col_ids[:, None, columns]).any(0)`, bool [m, n], False past the edges.

    Kernels call this again instead of keeping the result, which would not fit into the registers.
    """
    same = same_kind(row_ids_ptr, col_ids_ptr, rows, columns, num_rows, num_columns)
    if KINDS == 2:
        same |= same_kind(row_ids_ptr + row_stride, col_ids_ptr + col_stride, rows, columns, num_rows, num_columns)
    return same


@triton.jit
def same_kind(row_ids_ptr, col_ids_ptr, rows, columns, num_rows, num_columns):
    """Return `same_ids` of one kind, bool [m, n]."""
    row_ids = tl.load(row_ids_ptr + rows, mask=rows < num_rows, other=-2)
    col_ids = tl.load(col_ids_ptr + columns, mask=columns < num_columns, other=-3)
    return row_ids[:, None] == col_ids[None, :]
