"""Groups in the Triton kernels: pass ids to a launch, find the entries of a tile that share an id, sum positives.

A kernel takes GROUPED (0: no ids, 1 or 2 kinds) as a constant, so unused branches are not compiled. It loads ids where
it compares them, because ids loaded before a loop would occupy registers.
"""

import torch
import torch.nn.functional as F
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


def products_of_sums(
    rows: Tensor, columns: Tensor, row_order: Tensor, row_counts: Tensor, col_order: Tensor, col_counts: Tensor
) -> Tensor:
    """Compute torch_tile.products_of_sums, without the float32 copies: 1.1 of 47 ms for 65,536 rows on one H200."""
    starts = [F.pad(counts.cumsum(0), (1, 0)) for counts in (row_counts, col_counts)]
    totals = rows.new_empty(len(row_counts), dtype=torch.float32)
    _products_of_sums_kernel[(len(row_counts),)](
        rows,
        columns,
        row_order,
        col_order,
        *starts,
        totals,
        rows.stride(0),
        columns.stride(0),
        rows.shape[1],
        BLOCK_D=256,
        MEMBERS=8,
        num_warps=2,
    )
    return totals


@triton.jit(do_not_specialize=["row_stride", "col_stride", "dim"])
def _products_of_sums_kernel(
    rows_ptr,  # [r, D] operand type, read
    columns_ptr,  # [c, D] operand type, read
    row_order_ptr,  # i64 [r], read
    col_order_ptr,  # i64 [c], read
    row_starts_ptr,  # i64 [groups + 1], read: first member of each group in the order
    col_starts_ptr,  # i64 [groups + 1], read
    totals_ptr,  # f32 [groups], written
    row_stride,
    col_stride,
    dim,
    BLOCK_D: tl.constexpr,
    MEMBERS: tl.constexpr,  # members loaded at a time
):
    """Process one group per program; members are added in their order."""
    group = tl.program_id(0)
    total = 0.0
    for start in range(0, dim, BLOCK_D):
        dims = start + tl.arange(0, BLOCK_D)
        row_sums = _sum_of_members(rows_ptr, row_order_ptr, row_starts_ptr + group, row_stride, dims, dim, MEMBERS)
        col_sums = _sum_of_members(columns_ptr, col_order_ptr, col_starts_ptr + group, col_stride, dims, dim, MEMBERS)
        total += tl.sum(row_sums * col_sums, 0)
    tl.store(totals_ptr + group, total)


@triton.jit
def _sum_of_members(features_ptr, order_ptr, start_ptr, stride, dims, dim, MEMBERS: tl.constexpr):
    """Return the sum of a group's features at `dims`, f32 [BLOCK_D]."""
    first, end = tl.load(start_ptr), tl.load(start_ptr + 1)
    sums = tl.zeros([dims.shape[0]], tl.float32)
    for start in range(first, end, MEMBERS):
        members = start + tl.arange(0, MEMBERS)
        at = tl.load(order_ptr + members, mask=members < end, other=0) * stride
        inside = (members < end)[:, None] & (dims < dim)[None, :]
        sums += tl.sum(tl.load(features_ptr + at[:, None] + dims[None, :], mask=inside, other=0.0).to(tl.float32), 0)
    return sums
