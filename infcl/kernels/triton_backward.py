"""Gradients of one pair of feature blocks on a GPU: torch_tile's softmax_backward and sigmoid_gradients.

In: features, and their statistics over the whole batch. Out: dS @ columns, dS.T @ rows and <dS, rows @ columns.T> (the
scale's gradient), added to float32 accumulators.

A fused matmul computes dS for one chunk at a time, [chunk, chunk] in the operands' dtype in a bounded workspace. Its
epilogue computes in float32 and rounds once; cuBLAS then multiplies dS with the features. For D >= 512 this is faster
than a [128, D] float32 accumulator on the chip. The scale's gradient is summed before the rounding, because late in
training the contributions of matches and other entries nearly cancel.

A single exponential is enough for both directions if all LSE are within 80 (in log2) of each other:

    exp(logits - row_lse) + exp(logits - col_lse) = exp(logits - row_lse) * (1 + exp(row_lse - m) * exp(m - col_lse))

With m in the middle of the LSE no factor overflows. If the first exponential underflows (below 2^-126), the second is
below 2^-46. Otherwise, or if the LSE are so large that the rounding of the logits matters, the kernel uses two clamped
exponentials. Only the GPU knows which case applies, so both kernels are launched and one returns at once. (Two branches
in one kernel would share registers and slow the first one by 10%.)

The sigmoid and some uses of ids need more registers: the epilogue then runs on two halves of the tile, to avoid
spills.

dS is in [0, 1] and about 1/B on average, which float16 cannot represent precisely for large batches B. For float16 dS
is stored times 2^15; this costs nothing and is exact.

6 r c D flops; the workspace is written once and read twice.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from infcl.kernels.tile import Blocks, Gradients, Teacher
from infcl.kernels.triton_exp2 import exp2, log2_1p, reciprocal, shared_exp2
from infcl.kernels.triton_launch import (
    LOG2E,
    aligned,
    chunk_shape,
    counted,
    ids_and_limits,
    launch,
    launch_options,
    leaves_out,
    load_limits,
    multiprocessors,
    same_ids,
    walked_dim,
)
from infcl.kernels.triton_statistics import middle

# Block shapes and launch options by operand size in bytes; GROUP row blocks are processed together, for the L2 cache.
_LAUNCH = {
    2: {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "GROUP": 32, "num_warps": 8, "num_stages": 3},
    4: {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "GROUP": 8, "num_warps": 4, "num_stages": 3},
}


def softmax_backward(blocks: Blocks, row_lse: Tensor, col_lse: Tensor | None, gradients: Gradients) -> None:
    """Compute torch_tile.softmax_backward for rows and columns in bf16, fp16 or f32; the gradients are f32.

    For the loss of the rows only, col_lse is inf, so the columns' exponentials vanish, and the result is doubled.
    """
    shift, count = middle(row_lse, row_lse if col_lse is None else col_lse), 1
    if col_lse is None:
        col_lse, count = torch.full_like(blocks.columns[:, 0], math.inf, dtype=row_lse.dtype), 2
    sums = _accumulate(blocks, row_lse, col_lse, shift, gradients, count)
    gradients.scale.add_(sums[0], alpha=count)


def sigmoid_gradients(blocks: Blocks, bias: Tensor, gradients: Gradients) -> tuple[Tensor, Tensor]:
    """Compute torch_tile.sigmoid_gradients."""
    sums = _accumulate(blocks, None, None, bias, gradients)
    gradients.scale.add_(sums[0])
    return (sums[1] * math.log(2)).float(), sums[2].float()


def distill_gradients(
    blocks: Blocks, row_lse: Tensor, col_lse: Tensor, teacher: Teacher, gradients: Gradients
) -> Tensor:
    """Compute torch_tile.distill_gradients."""
    sums = _accumulate(blocks, row_lse, col_lse, middle(row_lse, col_lse), gradients, teacher=teacher)
    gradients.scale.add_(sums[0])
    return (sums[1] * teacher.blocks.scale - sums[2] * blocks.scale).float()


def _accumulate(
    blocks: Blocks,
    row_lse: Tensor | None,
    col_lse: Tensor | None,
    shift: Tensor,
    gradients: Gradients,
    count: int = 1,
    teacher: Teacher | None = None,
) -> Tensor:
    """Compute dS and its matmuls chunk by chunk. With LSE: softmax, `shift` is their middle; else sigmoid with a bias.

    The teacher's probabilities of a chunk are written in f32 first, so that dS is rounded once, as their difference.

    Returns:
        f64 [3]: <dS, rows @ columns.T>; for the sigmoid also the sums of the losses and of dS; with a teacher also the
        inner products of its probabilities with its own cosines and with the student's.
    """
    rows, columns = blocks.rows, blocks.columns
    options = launch_options(_LAUNCH, blocks)
    gain = 2.0**15 if rows.dtype == torch.float16 else 1.0
    bytes_per_entry = rows.dtype.itemsize + (0 if teacher is None else 4)
    processors = multiprocessors(rows.device)
    height, width = chunk_shape(
        len(rows), len(columns), rows.shape[1], blocks.workspace_bytes // bytes_per_entry, processors
    )
    workspace = rows.new_empty(height, width)
    sums = rows.new_zeros(3, processors, dtype=torch.float64)
    run = partial(_d_logits, options=options, row_lse=row_lse, col_lse=col_lse, shift=shift, sums=sums)
    if teacher is not None:
        wanted, of_teacher = rows.new_empty(height, width, dtype=torch.float32), torch.zeros_like(sums)
        lse = teacher.row_lse, teacher.col_lse
        teacher_run = partial(
            _d_logits, options=options, row_lse=lse[0], col_lse=lse[1], shift=middle(*lse), sums=of_teacher
        )
        teacher = teacher._replace(blocks=_with_operands(teacher.blocks))
    operands = _with_operands(blocks)
    with _float32_products(blocks.tf32) if rows.dtype == torch.float32 else nullcontext():
        for i in range(0, len(rows), height):
            row_slice = slice(i, min(i + height, len(rows)))
            for j in range(0, len(columns), width):
                column_slice = slice(j, min(j + width, len(columns)))
                d_logits, p = workspace[: row_slice.stop - i, : column_slice.stop - j], None
                if teacher is not None:
                    p = wanted[: len(d_logits), : d_logits.shape[1]]
                    teacher_run(teacher.blocks, row_slice, column_slice, p)
                run(operands, row_slice, column_slice, d_logits, gain=gain, count=count, wanted=p)
                if gradients.rows is not None:
                    _add_product(gradients.rows[row_slice], d_logits, columns[column_slice], 1 / gain)
                if gradients.columns is not None:
                    _add_product(gradients.columns[column_slice], d_logits.T, rows[row_slice], 1 / gain)
    if teacher is not None:
        sums[1] = of_teacher[0]
    return sums.sum(1)


def _with_operands(blocks: Blocks) -> Blocks:
    """Return the blocks with features that tensor descriptors can read."""
    return blocks._replace(rows=aligned(blocks.rows), columns=aligned(blocks.columns))


def _d_logits(
    blocks: Blocks,
    rows: slice,
    columns: slice,
    out: Tensor,
    *,
    options: dict,
    row_lse: Tensor | None,
    col_lse: Tensor | None,
    shift: Tensor,
    sums: Tensor,
    gain: float = 1.0,
    count: int = 1,
    wanted: Tensor | None = None,
) -> None:
    """Write dS of some rows and columns of a block pair to `out`, times `gain` and `count`; less `wanted`, f32."""
    scale, (num_rows, num_columns), sigmoid = blocks.scale, out.shape, row_lse is None
    groups = None if blocks.groups is None else blocks.groups.part(rows, columns)
    limits = None if blocks.limits is None else blocks.limits.part(rows, columns)
    halves = _in_halves(sigmoid, blocks) or wanted is not None or out.dtype.itemsize > blocks.rows.dtype.itemsize
    m, n, k = options["BLOCK_M"], options["BLOCK_N"], options["BLOCK_K"]
    tiles = triton.cdiv(num_rows, m) * triton.cdiv(num_columns, n)
    given = (
        TensorDescriptor.from_tensor(blocks.rows[rows], [m, k]),
        TensorDescriptor.from_tensor(blocks.columns[columns], [n, k]),
        TensorDescriptor.from_tensor(out, [m, n // (1 + halves)]),
        scale,
        shift,
        scale if row_lse is None else row_lse[rows],
        scale if col_lse is None else col_lse[columns],
        sums,
        *ids_and_limits(groups, limits, scale),
        scale if groups is None or groups.weights is None else groups.weights / count,
        scale if wanted is None else TensorDescriptor.from_tensor(wanted, [m, n // 2]),
        num_rows,
        num_columns,
        rows.start - columns.start,
        sums.shape[1],
    )
    for single in (True,) if sigmoid else (True, False):
        launch(
            _d_logits_kernel,
            min(tiles, sums.shape[1]),
            *given,
            DIM=walked_dim(blocks.rows, options),
            MASKED=blocks.masked and rows.start < columns.stop and columns.start < rows.stop,
            EDGE=num_rows % m + num_columns % n > 0,
            SIGMOID=sigmoid,
            SINGLE=single,
            SHARED=shared_exp2(blocks.rows),
            GAIN=count * gain,
            **leaves_out(blocks),
            TEACHER=wanted is not None,
            HALVES=halves,
            **(options if wanted is None else options | {"num_stages": 2}),  # wanted takes 64 KiB of shared memory
        )


def _in_halves(sigmoid: bool, blocks: Blocks) -> bool:
    """Return whether a full tile's epilogue would spill registers (tests/kernels/test_registers.py)."""
    return sigmoid or (blocks.groups is not None and (blocks.groups.positive or blocks.limits is not None))


@triton.jit(do_not_specialize=["num_rows", "num_columns", "offset", "programs"])
def _d_logits_kernel(
    rows_desc,  # [r, D] operand type, read
    columns_desc,  # [c, D] operand type, read
    d_logits_desc,  # [r, c] operand type, written, times GAIN
    scale_ptr,  # f32, read
    shift_ptr,  # f32: the bias (sigmoid) or the middle of the LSE in log2 (softmax; NaN: two exponentials), read
    row_lse_ptr,  # f32 [r], read unless SIGMOID
    col_lse_ptr,  # f32 [c], read unless SIGMOID
    sums_ptr,  # f64 [3, programs], added to: <dS, cosines>; if SIGMOID losses (log2), dS; if TEACHER -, <wanted, cos>
    row_ids_ptr,  # i32 [r], read if GROUPED
    col_ids_ptr,  # i32 [c], read if GROUPED
    row_limits_ptr,  # f32 [r], read if LIMITED
    col_limits_ptr,  # f32 [c], read if LIMITED
    weights_ptr,  # f32 [r], read if POSITIVE unless SIGMOID: subtracted from dS at a positive
    wanted_desc,  # f32 [r, c], read if TEACHER: subtracted from dS
    num_rows,
    num_columns,
    offset,  # entry (i, i + offset) is masked
    programs,  # maximum number of programs of any launch
    DIM: tl.constexpr,
    MASKED: tl.constexpr,  # exclude the entries (i, i + offset)
    EDGE: tl.constexpr,  # the last blocks are partial
    SIGMOID: tl.constexpr,
    SINGLE: tl.constexpr,  # one exponential, runs if shift is not NaN; else two exponentials, runs if shift is NaN
    SHARED: tl.constexpr,  # passed to triton_exp2's functions
    GAIN: tl.constexpr,
    GROUPED: tl.constexpr,  # passed to `counted`, with the next two
    POSITIVE: tl.constexpr,
    LIMITED: tl.constexpr,
    TEACHER: tl.constexpr,  # subtract the probabilities of a teacher
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    HALVES: tl.constexpr,  # the epilogue runs on two halves of the tile
    PRECISION: tl.constexpr,
):
    """Compute `((logits - row_lse).exp() + (logits - col_lse).exp()) / 2` or `sigmoid(logits + bias)`; apply groups.

    Persistent grid: program p computes tiles p, p + (programs of this launch), ...
    """
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    column_tiles = tl.cdiv(num_columns, BLOCK_N)
    scale2 = tl.load(scale_ptr).to(tl.float32) * LOG2E
    shift = tl.load(shift_ptr).to(tl.float32)
    if not SIGMOID:
        if (shift == shift) != SINGLE:
            return
    # Each thread keeps its own partial sum until the end: [warps, 8, 4].
    inner = tl.zeros([BLOCK_M // 16, 8, 4], tl.float32)
    if SIGMOID:
        loss_sums = tl.zeros([BLOCK_M // 16, 8, 4], tl.float32)
    if SIGMOID or TEACHER:
        slope_sums = tl.zeros([BLOCK_M // 16, 8, 4], tl.float32)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True):
        group = tile // (GROUP * column_tiles)
        group_rows = tl.minimum(row_tiles - group * GROUP, GROUP)
        within = tile - group * GROUP * column_tiles
        first_row = (group * GROUP + within % group_rows) * BLOCK_M
        first_column = (within // group_rows) * BLOCK_N
        logits = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, DIM, BLOCK_K):
            a = rows_desc.load([first_row, k])
            b = columns_desc.load([first_column, k])
            logits = tl.dot(a, b.T, logits, input_precision=PRECISION)
        rows = first_row + tl.arange(0, BLOCK_M)
        if HALVES:  # one after another, because the full epilogue does not fit into the registers
            parts = tl.split(tl.permute(tl.reshape(logits, [BLOCK_M, 2, BLOCK_N // 2]), [0, 2, 1]))
        else:
            parts = (logits,)
        WIDTH: tl.constexpr = BLOCK_N // (2 if HALVES else 1)
        for half in tl.static_range(2 if HALVES else 1):
            logits = parts[half]
            left = first_column + half * WIDTH
            columns = left + tl.arange(0, WIDTH)
            row_limits = load_limits(row_limits_ptr, rows, num_rows, LIMITED)
            col_limits = load_limits(col_limits_ptr, columns, num_columns, LIMITED)
            if SIGMOID:
                signed = logits * scale2 + shift * LOG2E  # in log2
                signed, for_columns = counted(
                    signed, signed, logits, row_ids_ptr, col_ids_ptr, row_limits, col_limits,
                    rows, columns, num_rows, num_columns, float("-inf"), GROUPED, POSITIVE, LIMITED,
                )  # fmt: skip
                if LIMITED:
                    signed = tl.minimum(signed, for_columns)
                if POSITIVE:
                    same = same_ids(row_ids_ptr, col_ids_ptr, rows, columns, num_rows, num_columns)
                    signed = tl.where(same, -signed, signed)
                small = tl.exp2(-tl.abs(signed))  # in (0, 1]
                losses = tl.maximum(signed, 0.0) + log2_1p(small)  # in log2
                share = reciprocal(1.0 + small, SHARED)
                d_logits = tl.where(signed >= 0, share, small * share)
                if POSITIVE:
                    same = same_ids(row_ids_ptr, col_ids_ptr, rows, columns, num_rows, num_columns)
                    d_logits = tl.where(same, -d_logits, d_logits)
            else:
                row_lse = tl.load(row_lse_ptr + rows, mask=rows < num_rows, other=0.0) * LOG2E
                col_lse = tl.load(col_lse_ptr + columns, mask=columns < num_columns, other=0.0) * LOG2E
                if SINGLE:
                    row_factor = 0.5 * tl.exp2(row_lse - shift)
                    col_factor = tl.exp2(shift - col_lse)
                    exponents = logits * scale2 - row_lse[:, None]
                    if LIMITED:  # of entries that a row leaves out, finite; of those that a column counts, below 80
                        exponents = tl.minimum(exponents, 96.0)
                    d_logits = exp2(exponents, SHARED)
                    both = row_factor[:, None] * col_factor[None, :]
                    if LIMITED:
                        d_rows, d_columns = 0.5, both
                    else:
                        d_logits *= 0.5 + both
                else:
                    d_rows = 0.5 * tl.exp2(tl.minimum(logits * scale2 - row_lse[:, None], 0.0))
                    d_columns = 0.5 * tl.exp2(tl.minimum(logits * scale2 - col_lse[None, :], 0.0))
                    d_logits = 1.0 if LIMITED else d_rows + d_columns
                if not LIMITED:  # a row and its columns leave out the same entries
                    d_rows, d_columns = d_logits, d_logits
                d_rows, d_columns = counted(
                    d_rows, d_columns, logits, row_ids_ptr, col_ids_ptr, row_limits, col_limits,
                    rows, columns, num_rows, num_columns, 0.0, GROUPED, POSITIVE, LIMITED,
                )  # fmt: skip
                d_logits = d_logits * (d_rows + d_columns) if LIMITED else d_rows
                if POSITIVE:
                    same = same_ids(row_ids_ptr, col_ids_ptr, rows, columns, num_rows, num_columns)
                    weights = tl.load(weights_ptr + rows, mask=rows < num_rows, other=0.0)
                    d_logits = tl.where(same, d_logits - weights[:, None], d_logits)
            if EDGE:  # logits past the edges are zero, which may be far above an LSE
                if (first_row + BLOCK_M > num_rows) | (left + WIDTH > num_columns):
                    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
                    d_logits = tl.where(inside, d_logits, 0.0)
                    if SIGMOID:
                        losses = tl.where(inside, losses, 0.0)
            if MASKED:
                away = left - first_row - offset
                if (away > -WIDTH) & (away < BLOCK_M):
                    own = tl.arange(0, BLOCK_M)[:, None] == away + tl.arange(0, WIDTH)[None, :]
                    d_logits = tl.where(own, 0.0, d_logits)
                    if SIGMOID:
                        losses = tl.where(own, 0.0, losses)
            if TEACHER:
                wanted = wanted_desc.load([first_row, left])
                slope_sums += _sum_per_thread(wanted * logits)
                d_logits -= wanted
            inner += _sum_per_thread(d_logits * logits)
            if SIGMOID:
                loss_sums += _sum_per_thread(losses)
                slope_sums += _sum_per_thread(d_logits)
            d_logits_desc.store([first_row, left], (d_logits * GAIN).to(d_logits_desc.dtype))
    sum_ptr = sums_ptr + tl.program_id(0)
    _add_sum(sum_ptr, inner)
    if SIGMOID:
        _add_sum(sum_ptr + programs, loss_sums)
    if SIGMOID or TEACHER:
        _add_sum(sum_ptr + 2 * programs, slope_sums)


@triton.jit
def _sum_per_thread(tile):
    """Sum the elements that one thread of a tensor-core tile has: [BLOCK_M, BLOCK_N] -> [BLOCK_M / 16, 8, 4]."""
    M: tl.constexpr = tile.shape[0]
    N: tl.constexpr = tile.shape[1]
    return tl.sum(tl.sum(tl.sum(tl.reshape(tile, [M // 16, 2, 8, N // 8, 4, 2]), 5), 3), 1)


@triton.jit
def _add_sum(sum_ptr, sums):
    """Compute `*sum_ptr += sums.sum()` in float64."""
    total = tl.sum(tl.sum(tl.sum(sums, 2), 1), 0)
    tl.store(sum_ptr, tl.load(sum_ptr) + total.to(tl.float64))


def _add_product(total: Tensor, left: Tensor, right: Tensor, factor: float) -> None:
    """Compute `total += factor * left @ right` with a float32 accumulator for every operand dtype."""
    if left.dtype == total.dtype:
        total.addmm_(left, right, alpha=factor)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, alpha=factor, out=total)
    else:  # Triton's interpreter works on CPU tensors, where addmm has no out_dtype
        total.addmm_(left.to(total.dtype), right.to(total.dtype), alpha=factor)


@contextmanager
def _float32_products(tf32: bool) -> Iterator[None]:
    """Run cuBLAS's float32 matmuls in the tile's precision, independent of the process's setting."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
