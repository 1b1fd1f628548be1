"""Statistics of one pair of feature blocks on a GPU: torch_tile's forward functions as fused matmuls.

In: r row features and c column features. Out: softmax statistics (row and column LSE) or sigmoid sums. The logits exist
only in registers. The kernel writes one partial sum per row and column block, and per column and split of the rows.

    logits = scale * rows @ columns.T                                               # [r, c], never formed
    softmax: exp2(log2(e) * logits - reference) summed over rows and over columns
    sigmoid: softplus(logits + bias) summed over columns

Rows and columns have the same reference, so a single exponential is enough for both. The reference is 96 (in log2)
below the Cauchy-Schwarz bound on the logits: sums cannot overflow, and sums of at least 2^-76 lose nothing to
underflow. A smaller sum is possible only if all logits of a row or column are far below the bound (with normalised
features and scale 100, if no cosine exceeds -0.19). An online softmax then computes that row or column again, so the
accuracy does not depend on the bound.

Sizes: r rows, c columns, D features. There are no atomics: all sums have a fixed order and are bitwise reproducible.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from infcl.kernels.torch_tile import Groups
from infcl.kernels.triton_exp2 import log2_1p
from infcl.kernels.triton_groups import ids_of, same_ids, same_kind
from infcl.kernels.triton_launch import aligned, launch_options, multiprocessors, row_splits, walked_dim
from infcl.kernels.triton_repair import repair
from infcl.kernels.triton_statistics import LOG2E, finish, reference, squares

# Block shapes and launch options by operand size in bytes.
_LAUNCH = {
    2: {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3},
    4: {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3},
}


def softmax_forward(
    rows: Tensor,
    columns: Tensor,
    scale: Tensor,
    *,
    masked: bool,
    workspace_bytes: int,
    groups: Groups | None = None,
    tf32: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute torch_tile.softmax_forward for rows and columns in bf16, fp16 or f32; results are f32."""
    row_square, col_square, matched = squares(rows, columns, scale)
    shift = reference(row_square, col_square, scale)
    row_sums, col_sums = _tile_sums(
        rows, columns, scale, shift, workspace_bytes, tf32=tf32, sigmoid=False, masked=masked, groups=groups
    )
    row_lse, col_lse = finish(row_sums, col_sums, shift)
    repair(row_lse, col_lse, rows, columns, scale, tf32=tf32, masked=masked, groups=groups)
    return row_lse, col_lse, matched[: min(len(rows), len(columns))] if masked else None


def sigmoid_forward(
    rows: Tensor,
    columns: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    masked: bool,
    workspace_bytes: int,
    groups: Groups | None = None,
    tf32: bool = False,
) -> Tensor:
    """Compute torch_tile.sigmoid_forward."""
    losses, _ = _tile_sums(
        rows, columns, scale, bias, workspace_bytes, tf32=tf32, sigmoid=True, masked=masked, groups=groups
    )
    return losses.sum() * math.log(2)


def _tile_sums(
    rows: Tensor,
    columns: Tensor,
    scale: Tensor,
    shift: Tensor,
    workspace_bytes: int,
    *,
    tf32: bool,
    sigmoid: bool,
    masked: bool,
    groups: Groups | None,
) -> tuple[Tensor, Tensor]:
    """Return partial sums over the tiles: of rows [m, r] (sigmoid: in log2), and for the softmax of columns [n, c].

    Columns are processed in chunks whose partial sums [column blocks, r] fit into the workspace. m is the number of
    column blocks or, if there are several chunks, of chunks.
    """
    launch = launch_options(_LAUNCH, rows, tf32)
    row_operand, column_operand = aligned(rows), aligned(columns)
    num_rows, num_columns = len(rows), len(columns)
    row_tiles, column_tiles = triton.cdiv(num_rows, launch["BLOCK_M"]), triton.cdiv(num_columns, launch["BLOCK_N"])
    chunk_tiles = max(1, min(column_tiles, workspace_bytes // (4 * num_rows)))
    chunks = triton.cdiv(column_tiles, chunk_tiles)
    splits = row_splits(row_tiles, chunk_tiles, multiprocessors(rows.device))
    row_partial = rows.new_empty(chunk_tiles, num_rows, dtype=torch.float32)
    chunk_sums = rows.new_empty(chunks, num_rows, dtype=torch.float32) if chunks > 1 else None
    col_partial = rows.new_empty(0 if sigmoid else splits, num_columns, dtype=torch.float32)
    rows_desc = TensorDescriptor.from_tensor(row_operand, [launch["BLOCK_M"], launch["BLOCK_K"]])
    columns_desc = TensorDescriptor.from_tensor(column_operand, [launch["BLOCK_N"], launch["BLOCK_K"]])
    for first in range(0, column_tiles, chunk_tiles):
        tiles = min(chunk_tiles, column_tiles - first)
        _tile_sums_kernel[(tiles * splits,)](
            rows_desc,
            columns_desc,
            scale,
            shift,
            row_partial,
            col_partial,
            *ids_of(groups, scale),
            num_rows,
            num_columns,
            first,
            splits,
            triton.cdiv(row_tiles, splits),
            DIM=walked_dim(row_operand, launch),
            SIGMOID=sigmoid,
            MASKED=masked,
            EDGE=num_columns % launch["BLOCK_N"] != 0,
            GROUPED=0 if groups is None else len(groups.rows),
            POSITIVE=groups is not None and groups.positive,
            **launch,
        )
        if chunk_sums is not None:
            torch.sum(row_partial[:tiles], 0, out=chunk_sums[first // chunk_tiles])
    return row_partial if chunk_sums is None else chunk_sums, col_partial


@triton.jit(
    do_not_specialize=["row_stride", "col_stride", "num_rows", "num_columns", "first_block", "splits", "split_tiles"]
)
def _tile_sums_kernel(
    rows_desc,  # [r, D] operand type, read
    columns_desc,  # [c, D] operand type, read
    scale_ptr,  # f32, read
    shift_ptr,  # f32: the reference (softmax) or the bias (sigmoid), read
    row_partial_ptr,  # f32 [column blocks of this launch, r], written
    col_partial_ptr,  # f32 [splits, c], written unless SIGMOID
    row_ids_ptr,  # i32 [GROUPED, r], read
    row_stride,  # elements between kinds of ids
    col_ids_ptr,  # i32 [GROUPED, c], read
    col_stride,
    num_rows,
    num_columns,
    first_block,  # first column block of this launch
    splits,
    split_tiles,  # row tiles per split
    DIM: tl.constexpr,
    SIGMOID: tl.constexpr,
    MASKED: tl.constexpr,  # exclude the entries (i, i)
    EDGE: tl.constexpr,  # the last column block is partial
    GROUPED: tl.constexpr,  # number of kinds of ids; entries that share one are excluded
    POSITIVE: tl.constexpr,  # or, if set, have the sign +1 (SIGMOID)
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
    shift = tl.load(shift_ptr).to(tl.float32)
    row_partial_ptr += block.to(tl.int64) * num_rows
    # Each thread keeps its own partial column sums: row = 16 a + 8 b + c with b in one thread's registers.
    col_sums = tl.zeros([BLOCK_M // 16, 8, BLOCK_N], tl.float32)
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    for tile in tl.range(split * split_tiles, tl.minimum((split + 1) * split_tiles, row_tiles), flatten=True):
        logits = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, DIM, BLOCK_K):
            a = rows_desc.load([tile * BLOCK_M, k])
            b = columns_desc.load([first_column, k])
            logits = tl.dot(a, b.T, logits, input_precision=PRECISION)
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        if SIGMOID:
            logits = (logits * scale + shift) * LOG2E  # in log2
            if GROUPED > 0:
                same = same_ids(
                    row_ids_ptr, row_stride, col_ids_ptr, col_stride, rows, columns, num_rows, num_columns, GROUPED
                )
                logits = tl.where(same, -logits if POSITIVE else float("-inf"), logits)
            small = tl.exp2(-tl.abs(logits))  # in (0, 1]
            losses = tl.maximum(logits, 0.0) + log2_1p(small)
            if EDGE:
                if first_column + BLOCK_N > num_columns:
                    within = (tl.arange(0, BLOCK_N) < num_columns - first_column)[None, :]
                    losses = tl.where(within, losses, 0.0)
            if MASKED:
                away = first_column - tile * BLOCK_M
                if (away > -BLOCK_N) & (away < BLOCK_M):
                    own = tl.arange(0, BLOCK_M)[:, None] == away + tl.arange(0, BLOCK_N)[None, :]
                    losses = tl.where(own, 0.0, losses)
            tl.store(row_partial_ptr + rows, tl.sum(losses, 1), mask=rows < num_rows)
        else:
            # Short chains of additions, so that the sums overlap with the exponentials.
            row_shift = tl.where(rows < num_rows, shift, float("inf"))
            terms = tl.exp2(logits * (scale * LOG2E) - row_shift[:, None])
            for kind in tl.static_range(GROUPED):  # one after the other: both together do not fit into the registers
                row_ids, col_ids = row_ids_ptr + kind * row_stride, col_ids_ptr + kind * col_stride
                same = same_kind(row_ids, col_ids, rows, columns, num_rows, num_columns)
                terms = tl.where(same, 0.0, terms)
            if EDGE:
                if first_column + BLOCK_N > num_columns:
                    within = (tl.arange(0, BLOCK_N) < num_columns - first_column)[None, :]
                    terms = tl.where(within, terms, 0.0)
            if MASKED:
                away = first_column - tile * BLOCK_M
                if (away > -BLOCK_N) & (away < BLOCK_M):  # without it column numbers stay in registers
                    own = tl.arange(0, BLOCK_M)[:, None] == away + tl.arange(0, BLOCK_N)[None, :]
                    terms = tl.where(own, 0.0, terms)
            row_sums = tl.sum(tl.sum(tl.reshape(terms, [BLOCK_M, BLOCK_N // 8, 8]), 1), 1)
            tl.store(row_partial_ptr + rows, row_sums, mask=rows < num_rows)
            col_sums += tl.sum(tl.reshape(terms, [BLOCK_M // 16, 2, 8, BLOCK_N]), 1)
    if not SIGMOID:
        total = tl.sum(tl.sum(col_sums, 1), 0)
        tl.store(col_partial_ptr + split.to(tl.int64) * num_columns + columns, total, mask=columns < num_columns)
