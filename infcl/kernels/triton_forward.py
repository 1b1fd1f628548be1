"""Statistics of one pair of feature blocks on a GPU: torch_tile.softmax_forward as a fused matmul.

In: r row features and c column features. Out: row and column LSE of their logits, which exist only in registers. The
kernel writes one partial sum per row and column block, and per column and split of the rows.

    logits = scale * rows @ columns.T                                               # [r, c], never formed
    exp2(log2(e) * logits - reference) summed over rows and over columns

Rows and columns have the same reference, so a single exponential is enough for both. The reference is 96 (in log2)
below the Cauchy-Schwarz bound on the logits: sums of up to 2^30 terms cannot overflow, and sums of at least 2^-76 lose
nothing to underflow. A smaller sum is possible only if all logits of a row or column are far below the bound (with
normalised features and scale 100, if no cosine exceeds -0.19). An online softmax then computes that row or column
again, so the accuracy does not depend on the bound.

Sizes: r rows, c columns, D features. There are no atomics: all sums have a fixed order and are bitwise reproducible.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from infcl.kernels.tile import Blocks
from infcl.kernels.triton_launch import (
    LOG2E,
    aligned,
    counted,
    ids_and_limits,
    launch,
    launch_options,
    leaves_out,
    load_limits,
    multiprocessors,
    row_splits,
    walked_dim,
)
from infcl.kernels.triton_statistics import finish, reference, squared_norms

# Block shapes and launch options by operand size in bytes.
_LAUNCH = {
    2: {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3},
    4: {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3},
}
_LIMITED_LAUNCH = {"BLOCK_M": 256, "BLOCK_N": 128}  # half precision: the limits of 128 columns stay in registers
_REPAIR_LAUNCH = {
    2: {"BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3},
    4: {"BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3},
}


def softmax_forward(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Compute torch_tile.softmax_forward for rows and columns in bf16, fp16 or f32; results are f32."""
    rows, columns, scale = blocks[:3]
    shift = reference(*squared_norms(rows, columns), scale)
    row_lse, col_lse = finish(*_tile_sums(blocks, shift), shift)
    _repair(blocks, row_lse, col_lse)
    return row_lse, col_lse


def _tile_sums(blocks: Blocks, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Return partial sums over the tiles: of rows [m, r] and of columns [n, c].

    Columns are processed in chunks. The partial sums of a chunk, [column blocks, r] and [splits, columns], each fit
    into the workspace, or have one block or split. With several chunks they are summed after each one: m = n = 1.
    """
    rows, columns = blocks.rows, blocks.columns
    options = launch_options(_LAUNCH, blocks)
    if blocks.limits is not None and rows.dtype.itemsize == 2:
        options |= _LIMITED_LAUNCH
    row_operand, column_operand = aligned(rows), aligned(columns)
    num_rows, num_columns = len(rows), len(columns)
    row_tiles, column_tiles = triton.cdiv(num_rows, options["BLOCK_M"]), triton.cdiv(num_columns, options["BLOCK_N"])
    chunk_tiles = max(1, min(column_tiles, blocks.workspace_bytes // (4 * num_rows)))
    chunks = triton.cdiv(column_tiles, chunk_tiles)
    width = min(num_columns, chunk_tiles * options["BLOCK_N"])
    splits = row_splits(
        row_tiles, chunk_tiles, multiprocessors(rows.device), most=max(1, blocks.workspace_bytes // (4 * width))
    )
    row_partial = rows.new_empty(chunk_tiles, num_rows, dtype=torch.float32)
    col_partial = rows.new_empty(splits, width, dtype=torch.float32)
    row_sums, col_sums = row_partial, col_partial
    if chunks > 1:
        row_sums = rows.new_zeros(1, num_rows, dtype=torch.float64)  # thousands of chunks are added one by one
        col_sums = rows.new_empty(1, num_columns, dtype=torch.float32)
    rows_desc = TensorDescriptor.from_tensor(row_operand, [options["BLOCK_M"], options["BLOCK_K"]])
    columns_desc = TensorDescriptor.from_tensor(column_operand, [options["BLOCK_N"], options["BLOCK_K"]])
    for first in range(0, column_tiles, chunk_tiles):
        tiles = min(chunk_tiles, column_tiles - first)
        launch(
            _tile_sums_kernel,
            tiles * splits,
            rows_desc, columns_desc, blocks.scale, reference, row_partial, col_partial,
            *ids_and_limits(blocks.groups, blocks.limits, blocks.scale),
            num_rows, num_columns, width, first, splits, triton.cdiv(row_tiles, splits),
            DIM=walked_dim(row_operand, options), MASKED=blocks.masked, EDGE=num_columns % options["BLOCK_N"] != 0,
            **leaves_out(blocks), **options,
        )  # fmt: skip
        if chunks > 1:
            row_sums += row_partial[:tiles].sum(0)
            done = col_sums[0, first * options["BLOCK_N"] :][:width]
            torch.sum(col_partial[:, : len(done)], 0, out=done)
    return row_sums.float(), col_sums


@triton.jit(do_not_specialize=["num_rows", "num_columns", "chunk_columns", "first_block", "splits", "split_tiles"])
def _tile_sums_kernel(
    rows_desc,  # [r, D] operand type, read
    columns_desc,  # [c, D] operand type, read
    scale_ptr,  # f32, read
    reference_ptr,  # f32, read
    row_partial_ptr,  # f32 [column blocks of this launch, r], written
    col_partial_ptr,  # f32 [splits, columns of this launch], written
    row_ids_ptr,  # i32 [r], read if GROUPED
    col_ids_ptr,  # i32 [c], read if GROUPED
    row_limits_ptr,  # f32 [r], read if LIMITED
    col_limits_ptr,  # f32 [c], read if LIMITED
    num_rows,
    num_columns,
    chunk_columns,  # stride of the columns' partial sums
    first_block,  # first column block of this launch
    splits,
    split_tiles,  # row tiles per split
    DIM: tl.constexpr,
    MASKED: tl.constexpr,  # exclude the entries (i, i)
    EDGE: tl.constexpr,  # the last column block is partial
    GROUPED: tl.constexpr,  # passed to `counted`, with the next two
    POSITIVE: tl.constexpr,
    LIMITED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Process one column block with one split of the rows. Neighbouring programs share a column block (L2 cache)."""
    block = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    first_column = (first_block + block) * BLOCK_N
    columns = first_column + tl.arange(0, BLOCK_N)
    scale = tl.load(scale_ptr).to(tl.float32)
    reference = tl.load(reference_ptr).to(tl.float32)
    row_partial_ptr += block.to(tl.int64) * num_rows
    # Each thread keeps its own partial column sums: row = 128 a + 16 b + 8 c + d, a and c in one thread's registers.
    HEIGHT: tl.constexpr = BLOCK_M // 128 if BLOCK_M > 128 else 1
    WARPS: tl.constexpr = BLOCK_M // 16 // HEIGHT
    col_sums = tl.zeros([WARPS, 8, BLOCK_N], tl.float32)
    col_limits = load_limits(col_limits_ptr, columns, num_columns, LIMITED)
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    first, end = split * split_tiles, tl.minimum((split + 1) * split_tiles, row_tiles)
    if MASKED and LIMITED:  # tiles before, on and after the diagonal: the mask, even unused, would spill registers
        low = tl.minimum(tl.maximum(first_column // BLOCK_M, first), end)
        high = tl.minimum(tl.maximum(tl.cdiv(first_column + BLOCK_N, BLOCK_M), first), end)
        edges = (first, low, high, end)
    else:
        edges = (first, end)
    PARTS: tl.constexpr = 3 if MASKED and LIMITED else 1
    for part in tl.static_range(PARTS):
        for tile in tl.range(edges[part], edges[part + 1], flatten=True):
            logits = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for k in range(0, DIM, BLOCK_K):
                a = rows_desc.load([tile * BLOCK_M, k])
                b = columns_desc.load([first_column, k])
                logits = tl.dot(a, b.T, logits, input_precision=PRECISION)
            rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
            # Short chains of additions, so that the sums overlap with the exponentials.
            row_reference = tl.where(rows < num_rows, reference, float("inf"))
            terms = tl.exp2(logits * (scale * LOG2E) - row_reference[:, None])
            if EDGE:
                if first_column + BLOCK_N > num_columns:
                    within = (tl.arange(0, BLOCK_N) < num_columns - first_column)[None, :]
                    terms = tl.where(within, terms, 0.0)
            if MASKED and (PARTS == 1 or part == 1):
                away = first_column - tile * BLOCK_M
                if (away > -BLOCK_N) & (away < BLOCK_M):  # without it column numbers stay in registers
                    own = tl.arange(0, BLOCK_M)[:, None] == away + tl.arange(0, BLOCK_N)[None, :]
                    terms = tl.where(own, 0.0, terms)
            for_rows, for_columns = counted(
                terms, terms, logits, row_ids_ptr, col_ids_ptr,
                load_limits(row_limits_ptr, rows, num_rows, LIMITED), col_limits,
                rows, columns, num_rows, num_columns, 0.0, GROUPED, POSITIVE, LIMITED,
            )  # fmt: skip
            row_sums = tl.sum(tl.sum(tl.reshape(for_rows, [BLOCK_M, BLOCK_N // 8, 8]), 1), 1)
            tl.store(row_partial_ptr + rows, row_sums, mask=rows < num_rows)
            col_sums += tl.sum(tl.sum(tl.reshape(for_columns, [HEIGHT, WARPS, 2, 8, BLOCK_N]), 2), 0)
    total = tl.sum(tl.sum(col_sums, 1), 0)
    col_partial_ptr += split.to(tl.int64) * chunk_columns + block * BLOCK_N
    tl.store(col_partial_ptr + tl.arange(0, BLOCK_N), total, mask=columns < num_columns)


def _repair(blocks: Blocks, row_lse: Tensor, col_lse: Tensor) -> None:
    """Replace LSE that are NaN, in place, by an online softmax. Programs without a NaN return at once.

    This is rare, so the kernel is simple rather than fast, and its launch is cheap: one, without tensor descriptors.
    """
    rows, columns = blocks.rows, blocks.columns
    options = launch_options(_REPAIR_LAUNCH, blocks)
    programs = [triton.cdiv(len(side), options["BLOCK_N"]) for side in (rows, columns)]
    launch(
        _repair_kernel,
        sum(programs),
        rows, columns, blocks.scale, row_lse, col_lse,
        *ids_and_limits(blocks.groups, blocks.limits, blocks.scale),
        rows.stride(0), columns.stride(0), len(rows), len(columns), programs[0],
        **leaves_out(blocks),
        DIM=rows.shape[1],
        MASKED=blocks.masked,
        **options,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_columns", "row_programs"])
def _repair_kernel(
    rows_ptr,  # [r, D] operand type, read
    columns_ptr,  # [c, D] operand type, read
    scale_ptr,  # f32, read
    row_lse_ptr,  # f32 [r], read, written where NaN
    col_lse_ptr,  # f32 [c], read, written where NaN
    row_ids_ptr,  # i32 [r], read if GROUPED
    col_ids_ptr,  # i32 [c], read if GROUPED
    row_limits_ptr,  # f32 [r], read if LIMITED
    col_limits_ptr,  # f32 [c], read if LIMITED
    row_stride,
    col_stride,
    num_rows,
    num_columns,
    row_programs,  # programs for rows; the others are for columns
    GROUPED: tl.constexpr,  # passed to `counted`, with the next two
    POSITIVE: tl.constexpr,
    LIMITED: tl.constexpr,
    DIM: tl.constexpr,
    MASKED: tl.constexpr,  # exclude the entries (i, i)
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute `where(lse.isnan(), logits.logsumexp(1), lse)` for BLOCK_N rows or columns, with exclusions."""
    scale2 = tl.load(scale_ptr).to(tl.float32) * LOG2E
    program = tl.program_id(0)
    if program < row_programs:
        _repair_block(
            rows_ptr, columns_ptr, scale2, row_lse_ptr, row_ids_ptr, col_ids_ptr, row_limits_ptr, col_limits_ptr,
            row_stride, col_stride, num_rows, num_columns, program,
            GROUPED, POSITIVE, LIMITED, DIM, MASKED, BLOCK_N, BLOCK_K, PRECISION,
        )  # fmt: skip
    else:
        _repair_block(
            columns_ptr, rows_ptr, scale2, col_lse_ptr, col_ids_ptr, row_ids_ptr, col_limits_ptr, row_limits_ptr,
            col_stride, row_stride, num_columns, num_rows, program - row_programs,
            GROUPED, POSITIVE, LIMITED, DIM, MASKED, BLOCK_N, BLOCK_K, PRECISION,
        )  # fmt: skip


@triton.jit
def _repair_block(
    own_ptr, other_ptr, scale2, lse_ptr, own_ids_ptr, other_ids_ptr, own_limits_ptr, other_limits_ptr,
    own_stride, other_stride, num_own, num_other, block,
    GROUPED: tl.constexpr, POSITIVE: tl.constexpr, LIMITED: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    own = block * BLOCK_N + tl.arange(0, BLOCK_N)
    lse = tl.load(lse_ptr + own, mask=own < num_own, other=0.0)
    unknown = lse != lse
    if tl.max(unknown.to(tl.int32), 0) > 0:
        own_limits = load_limits(own_limits_ptr, own, num_own, LIMITED)
        maxima = tl.full([BLOCK_N], float("-inf"), tl.float32)
        sums = tl.zeros([BLOCK_N], tl.float32)
        for first in range(0, num_other, BLOCK_N):
            other = first + tl.arange(0, BLOCK_N)
            cosines = tl.zeros([BLOCK_N, BLOCK_N], tl.float32)
            for k in range(0, DIM, BLOCK_K):
                a = _features(own_ptr, own, own_stride, num_own, k, DIM, BLOCK_K)
                b = _features(other_ptr, other, other_stride, num_other, k, DIM, BLOCK_K)
                cosines = tl.dot(a, b.T, cosines, input_precision=PRECISION)
            logits = tl.where((other < num_other)[None, :], cosines * scale2, float("-inf"))
            if MASKED:
                logits = tl.where(own[:, None] == other[None, :], float("-inf"), logits)
            logits, _ = counted(
                logits, logits, cosines, own_ids_ptr, other_ids_ptr,
                own_limits, load_limits(other_limits_ptr, other, num_other, LIMITED),
                own, other, num_own, num_other, float("-inf"), GROUPED, POSITIVE, LIMITED,
            )  # fmt: skip
            new_maxima = tl.maximum(maxima, tl.max(logits, 1))
            shift = tl.where(new_maxima == float("-inf"), 0.0, new_maxima)  # -inf: only excluded entries so far
            sums = sums * tl.exp2(maxima - shift) + tl.sum(tl.exp2(logits - shift[:, None]), 1)
            maxima = new_maxima
        tl.store(lse_ptr + own, (maxima + tl.log2(sums)) / LOG2E, mask=unknown & (own < num_own))


@triton.jit
def _features(features_ptr, rows, stride, num_rows, k, DIM: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the features k .. k + BLOCK_K of some rows, operand type [BLOCK_N, BLOCK_K], 0 past the edges."""
    dims = k + tl.arange(0, BLOCK_K)
    inside = (rows < num_rows)[:, None] & (dims < DIM)[None, :]
    return tl.load(features_ptr + rows.to(tl.int64)[:, None] * stride + dims[None, :], mask=inside, other=0.0)
