"""Small kernels around the tiles: statistics of rows and columns before and after the matmuls.

In: features or statistics of length n. Out: norms and matched logits, the reference of the forward tile's exponentials,
LSE from its sums, and the middle for the backward tile's exponentials. Each kernel replaces a dozen library calls by
one launch and reads its input once. The two kernels that reduce to one number run as a single program (4 bytes per
row).
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(math.log2(math.e))
_HEADROOM = tl.constexpr(96.0)  # sums of up to 2^30 terms of at most 2^96 stay below 2^127
_SMALLEST_SUM = tl.constexpr(2.0**-76)  # terms that underflow (below 2^-126) are at most 2^-50 of it
_WINDOW = tl.constexpr(80.0)  # largest spread of the LSE, in log2, for which one exponential is exact
_LARGEST = tl.constexpr(2.0**12)  # largest LSE, in log2, whose rounding leaves a probability at most 1 + 2^-11


def squares(rows: Tensor, columns: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `(rows**2).sum(1), (columns**2).sum(1), scale * (rows * columns).sum(1)`.

    Args:
        rows, columns, scale: [r, D], [c, D] and 0-dim.

    Returns:
        Three tensors, f32 [max(r, c)]; 0 past the end of the shorter input.
    """
    count, dim, block = max(len(rows), len(columns)), rows.shape[1], 8
    row_square, col_square = rows.new_empty(2, count, dtype=torch.float32)
    matched = rows.new_empty(count, dtype=torch.float32)  # separate memory: it outlives the others
    _squares_kernel[(triton.cdiv(count, block),)](
        rows,
        columns,
        scale,
        row_square,
        col_square,
        matched,
        len(rows),
        len(columns),
        DIM=dim,
        BLOCK=block,
        BLOCK_K=min(1024, triton.next_power_of_2(dim)),
        num_warps=4,
    )
    return row_square, col_square, matched


@triton.jit(do_not_specialize=["num_rows", "num_columns"])
def _squares_kernel(
    rows_ptr,  # [r, D] operand type, read
    columns_ptr,  # [c, D] operand type, read
    scale_ptr,  # f32, read
    row_square_ptr,  # f32 [max(r, c)], written
    col_square_ptr,  # f32 [max(r, c)], written
    matched_ptr,  # f32 [max(r, c)], written
    num_rows,
    num_columns,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row_square = tl.zeros([BLOCK], tl.float32)
    col_square = tl.zeros([BLOCK], tl.float32)
    product = tl.zeros([BLOCK], tl.float32)
    for k in range(0, DIM, BLOCK_K):
        feature = k + tl.arange(0, BLOCK_K)
        offsets = index[:, None] * DIM + feature[None, :]
        within = (feature < DIM)[None, :]
        row = tl.load(rows_ptr + offsets, mask=within & (index < num_rows)[:, None], other=0.0).to(tl.float32)
        column = tl.load(columns_ptr + offsets, mask=within & (index < num_columns)[:, None], other=0.0).to(tl.float32)
        row_square += tl.sum(row * row, 1)
        col_square += tl.sum(column * column, 1)
        product += tl.sum(row * column, 1)
    within = index < tl.maximum(num_rows, num_columns)
    tl.store(row_square_ptr + index, row_square, mask=within)
    tl.store(col_square_ptr + index, col_square, mask=within)
    tl.store(matched_ptr + index, product * tl.load(scale_ptr).to(tl.float32), mask=within)


def reference(row_square: Tensor, col_square: Tensor, scale: Tensor) -> Tensor:
    """Compute `log2(e) * abs(scale) * sqrt(row_square.max()) * sqrt(col_square.max()) - 96`, f32 0-dim."""
    result = row_square.new_empty(())
    _reference_kernel[(1,)](row_square, col_square, scale, result, len(row_square), BLOCK=8192, num_warps=16)
    return result


@triton.jit(do_not_specialize=["count"])
def _reference_kernel(
    row_square_ptr,  # f32 [n], read
    col_square_ptr,  # f32 [n], read
    scale_ptr,  # f32, read
    result_ptr,  # f32, written
    count,
    BLOCK: tl.constexpr,
):
    row_high = tl.zeros([BLOCK], tl.float32)
    col_high = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        row_high = tl.maximum(row_high, tl.load(row_square_ptr + index, mask=index < count, other=0.0))
        col_high = tl.maximum(col_high, tl.load(col_square_ptr + index, mask=index < count, other=0.0))
    bound = tl.sqrt(tl.max(row_high, 0)) * tl.sqrt(tl.max(col_high, 0))
    tl.store(result_ptr, bound * tl.abs(tl.load(scale_ptr).to(tl.float32)) * LOG2E - _HEADROOM)


def finish(row_partial: Tensor, col_partial: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `(partial.sum(0).log2() + reference) / log2(e)` for row_partial [m, r] and col_partial [n, c].

    Returns:
        LSE of rows and columns, f32 [r] and [c]; NaN where a sum is too small to be accurate, or not finite.
    """
    num_rows, num_columns, block = row_partial.shape[1], col_partial.shape[1], 128
    row_lse, col_lse = row_partial.new_empty(num_rows), col_partial.new_empty(num_columns)
    _finish_kernel[(triton.cdiv(num_rows, block) + triton.cdiv(num_columns, block),)](
        row_partial,
        col_partial,
        reference,
        row_lse,
        col_lse,
        len(row_partial),
        len(col_partial),
        num_rows,
        num_columns,
        BLOCK=block,
        num_warps=4,
    )
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
def _finish_block(
    partial_ptr,
    reference_ptr,
    lse_ptr,
    block,
    parts,
    count,
    BLOCK: tl.constexpr,
):
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
    _middle_kernel[(1,)](row_lse, col_lse, result, len(row_lse), len(col_lse), BLOCK=8192, num_warps=16)
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
