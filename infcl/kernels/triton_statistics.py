"""Small kernels around the tiles: statistics of rows and columns before and after the matmuls.

In: features or statistics of length n. Out: dot products of rows, the reference of the forward tile's exponentials, LSE
from its sums, the middle for the backward tile's exponentials, and sums over positives. Each kernel replaces a dozen
library calls by one launch and reads its input once; together 0.65 ms of 2.3 at 4,096 samples and 1 ms of 45 at 65,536.
The two kernels that reduce to one number run as a single program (4 bytes per row).
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from infcl.kernels.triton_launch import LOG2E, launch

_HEADROOM = tl.constexpr(96.0)  # sums of up to 2^30 terms of at most 2^96 stay below 2^127
_SMALLEST_SUM = tl.constexpr(2.0**-76)  # terms that underflow (below 2^-126) are at most 2^-50 of it
_WINDOW = tl.constexpr(80.0)  # largest spread of the LSE, in log2, for which one exponential is exact
_LARGEST = tl.constexpr(2.0**12)  # largest LSE, in log2, whose rounding leaves a probability at most 1 + 2^-11


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """Compute `(a * b).sum(1)` of [n, D] and [n, D], f32 [n]."""
    return _row_dots((a, b))[0]


def squared_norms(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `(rows * rows).sum(1)` and `(columns * columns).sum(1)`, f32 [r] and [c], in one launch."""
    row_square, col_square = _row_dots((rows, rows), (columns, columns))
    return row_square, col_square


def _row_dots(*pairs: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Compute `row_dots` of one or two pairs, which may differ in n."""
    (a, b), (c, d), block = pairs[0], pairs[-1], 8
    results = [pair[0].new_empty(len(pair[0]), dtype=torch.float32) for pair in pairs]
    programs = [triton.cdiv(len(result), block) for result in results]
    launch(
        _row_dots_kernel,
        sum(programs),
        a, b, results[0], len(a), a.stride(0), b.stride(0), c, d, results[-1], len(c), c.stride(0), d.stride(0),
        programs[0], DIM=a.shape[1], BLOCK=block, BLOCK_K=min(1024, triton.next_power_of_2(a.shape[1])), num_warps=4,
    )  # fmt: skip
    return results


@triton.jit(do_not_specialize=["count", "second_count", "programs"])
def _row_dots_kernel(
    a_ptr,  # [n, D] operand type, read
    b_ptr,  # [n, D] operand type, read
    result_ptr,  # f32 [n], written
    count,
    a_stride,
    b_stride,
    c_ptr,  # the same of a second pair, [m, D]
    d_ptr,
    second_result_ptr,
    second_count,
    c_stride,
    d_stride,
    programs,  # of the first pair
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    program = tl.program_id(0)
    if program < programs:
        _block_of_dots(a_ptr, b_ptr, result_ptr, count, a_stride, b_stride, program, DIM, BLOCK, BLOCK_K)
    else:
        program -= programs
        _block_of_dots(c_ptr, d_ptr, second_result_ptr, second_count, c_stride, d_stride, program, DIM, BLOCK, BLOCK_K)


@triton.jit
def _block_of_dots(
    a_ptr, b_ptr, result_ptr, count, a_stride, b_stride, program,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    index = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in range(0, DIM, BLOCK_K):
        feature = k + tl.arange(0, BLOCK_K)
        within = (feature < DIM)[None, :] & (index < count)[:, None]
        a = tl.load(a_ptr + index[:, None] * a_stride + feature[None, :], mask=within, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + index[:, None] * b_stride + feature[None, :], mask=within, other=0.0).to(tl.float32)
        total += tl.sum(a * b, 1)
    tl.store(result_ptr + index, total, mask=index < count)


def reference(row_square: Tensor, col_square: Tensor, scale: Tensor) -> Tensor:
    """Compute `log2(e) * abs(scale) * sqrt(row_square.max()) * sqrt(col_square.max()) - 96`, f32 0-dim."""
    result = row_square.new_empty(())
    sizes = len(row_square), len(col_square)
    launch(_reference_kernel, 1, row_square, col_square, scale, result, *sizes, BLOCK=8192, num_warps=16)
    return result


@triton.jit(do_not_specialize=["num_rows", "num_columns"])
def _reference_kernel(
    row_square_ptr,  # f32 [r], read
    col_square_ptr,  # f32 [c], read
    scale_ptr,  # f32, read
    result_ptr,  # f32, written
    num_rows,
    num_columns,
    BLOCK: tl.constexpr,
):
    bound = tl.sqrt(_largest(row_square_ptr, num_rows, BLOCK)) * tl.sqrt(_largest(col_square_ptr, num_columns, BLOCK))
    tl.store(result_ptr, bound * tl.abs(tl.load(scale_ptr).to(tl.float32)) * LOG2E - _HEADROOM)


@triton.jit
def _largest(values_ptr, count, BLOCK: tl.constexpr):
    """Return the largest of `count` values >= 0."""
    high = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        high = tl.maximum(high, tl.load(values_ptr + index, mask=index < count, other=0.0))
    return tl.max(high, 0)


def finish(row_partial: Tensor, col_partial: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `(partial.sum(0).log2() + reference) / log2(e)` for row_partial [m, r] and col_partial [n, c].

    Returns:
        LSE of rows and columns, f32 [r] and [c]; NaN where a sum is too small to be accurate, or not finite.
    """
    num_rows, num_columns, block = row_partial.shape[1], col_partial.shape[1], 128
    row_lse, col_lse = row_partial.new_empty(num_rows), col_partial.new_empty(num_columns)
    launch(
        _finish_kernel,
        triton.cdiv(num_rows, block) + triton.cdiv(num_columns, block),
        row_partial, col_partial, reference, row_lse, col_lse,
        len(row_partial), len(col_partial), num_rows, num_columns, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return row_lse, col_lse


@triton.jit(do_not_specialize=["row_parts", "col_parts", "num_rows", "num_columns"])
def _finish_kernel(
    row_partial_ptr,  # f32 [row_parts, r], read
    col_partial_ptr,  # f32 [col_parts, c], read
    reference_ptr,  # f32, read
    row_lse_ptr,  # f32 [r], written
    col_lse_ptr,  # f32 [c], written
    row_parts,
    col_parts,
    num_rows,
    num_columns,
    BLOCK: tl.constexpr,
):
    row_blocks = tl.cdiv(num_rows, BLOCK)
    block = tl.program_id(0)
    if block < row_blocks:
        _finish_block(row_partial_ptr, reference_ptr, row_lse_ptr, block, row_parts, num_rows, BLOCK)
    else:
        block -= row_blocks
        _finish_block(col_partial_ptr, reference_ptr, col_lse_ptr, block, col_parts, num_columns, BLOCK)


@triton.jit
def _finish_block(partial_ptr, reference_ptr, lse_ptr, block, parts, count, BLOCK: tl.constexpr):
    PARTS: tl.constexpr = 32
    index = block * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([PARTS, BLOCK], tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        offsets = part.to(tl.int64)[:, None] * count + index[None, :]
        total += tl.load(partial_ptr + offsets, mask=(part < parts)[:, None] & (index < count)[None, :], other=0.0)
    sums = tl.sum(total, 0)
    lse = (tl.log2(sums) + tl.load(reference_ptr)) / LOG2E
    trusted = (sums >= _SMALLEST_SUM) & (sums < float("inf"))
    tl.store(lse_ptr + index, tl.where(trusted, lse, float("nan")), mask=index < count)


def middle(row_lse: Tensor, col_lse: Tensor) -> Tensor:
    """Return the middle of all LSE in log2, f32 0-dim; NaN if their spread or size rules out a single exponential."""
    result = row_lse.new_empty(())
    launch(_middle_kernel, 1, row_lse, col_lse, result, len(row_lse), len(col_lse), BLOCK=8192, num_warps=16)
    return result


@triton.jit(do_not_specialize=["num_rows", "num_columns"])
def _middle_kernel(
    row_lse_ptr,  # f32 [r], read
    col_lse_ptr,  # f32 [c], read
    result_ptr,  # f32, written
    num_rows,
    num_columns,
    BLOCK: tl.constexpr,
):
    first = tl.load(row_lse_ptr)
    low = tl.zeros([BLOCK], tl.float32) + first
    high = low
    for start in range(0, num_rows, BLOCK):
        index = start + tl.arange(0, BLOCK)
        lse = tl.load(row_lse_ptr + index, mask=index < num_rows, other=0.0)
        low = tl.where(index < num_rows, tl.minimum(low, lse), low)
        high = tl.where(index < num_rows, tl.maximum(high, lse), high)
    for start in range(0, num_columns, BLOCK):
        index = start + tl.arange(0, BLOCK)
        lse = tl.load(col_lse_ptr + index, mask=index < num_columns, other=0.0)
        low = tl.where(index < num_columns, tl.minimum(low, lse), low)
        high = tl.where(index < num_columns, tl.maximum(high, lse), high)
    lowest = tl.min(low, 0) * LOG2E
    highest = tl.max(high, 0) * LOG2E
    exact = (highest - lowest <= _WINDOW) & (highest <= _LARGEST) & (lowest >= -_LARGEST)
    tl.store(result_ptr, tl.where(exact, 0.5 * (lowest + highest), float("nan")))


def products_of_sums(
    rows: Tensor, columns: Tensor, row_order: Tensor, row_counts: Tensor, col_order: Tensor, col_counts: Tensor
) -> Tensor:
    """Compute torch_tile.products_of_sums, without the float32 copies: 1.1 of 47 ms for 65,536 rows on one H200."""
    starts = [F.pad(counts.cumsum(0), (1, 0)) for counts in (row_counts, col_counts)]
    totals = rows.new_empty(len(row_counts), dtype=torch.float32)
    launch(
        _products_of_sums_kernel,
        len(row_counts),
        rows, columns, row_order, col_order, *starts, totals, rows.stride(0), columns.stride(0), rows.shape[1],
        BLOCK_D=256, MEMBERS=8, num_warps=2,
    )  # fmt: skip
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
