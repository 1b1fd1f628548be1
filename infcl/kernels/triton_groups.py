"""Groups in the Triton kernels: which entries of a tile share an id, and how launches pass that.

A kernel takes GROUPED (0: no ids, 1 or 2 kinds of them) as a constant, so what is not asked for is not compiled. It
loads ids where it compares them: kept from before a loop they would fill its registers.
"""

import triton
import triton.language as tl
from torch import Tensor

from infcl.kernels.groups import Groups


def ids_of(groups: Groups | None, placeholder: Tensor) -> tuple[Tensor, int, Tensor, int]:
    """(row ids, elements between kinds, column ids, elements between kinds), in the order of `same_ids`."""
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
    """Bool [m, n]: `(row_ids[:, rows, None] == col_ids[:, None, columns]).any(0)`, False past the edges.

    Called again where the result is needed again: kept from before, it would not fit into the registers.
    """
    same = same_kind(row_ids_ptr, col_ids_ptr, rows, columns, num_rows, num_columns)
    if KINDS == 2:
        same |= same_kind(row_ids_ptr + row_stride, col_ids_ptr + col_stride, rows, columns, num_rows, num_columns)
    return same


@triton.jit
def same_kind(row_ids_ptr, col_ids_ptr, rows, columns, num_rows, num_columns):
    """Bool [m, n], of one kind."""
    row_ids = tl.load(row_ids_ptr + rows, mask=rows < num_rows, other=-2)
    col_ids = tl.load(col_ids_ptr + columns, mask=columns < num_columns, other=-3)
    return row_ids[:, None] == col_ids[None, :]
