"""What both Triton tiles share: operands for tensor descriptors, entries that are left out, the tiling of a block pair.

A kernel takes GROUPED (whether there are ids) and LIMITED (whether there are limits) as constants, so unused branches
are not compiled. It loads ids and limits where it compares them, because loaded before a loop they would occupy
registers.
"""

import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from infcl.kernels.tile import Blocks, Groups, Limits

LOG2E = tl.constexpr(math.log2(math.e))
_STEEP = tl.constexpr(2.0**60)  # times the difference of two cosines: 1 or more, if it is at least 2^-60
_HEIGHT, _WIDTH = 128, 256  # tile of half-precision features, in the kernels and in cuBLAS

_compiled: dict[tuple, Any] = {}


def launch(kernel: Any, programs: int, *arguments: Tensor | TensorDescriptor | int, **constants: Any) -> None:
    """Run `kernel[(programs,)](*arguments, **constants)` in less host time: 4 to 20 us instead of 25 to 100.

    Triton examines every argument and option in each call to find the compiled kernel. Here only the first call of a
    kind does so.

    Args:
        kernel: a @triton.jit function, whose constants come last.
        arguments: of all parameters that are not constants.
        constants: and launch options, such as num_warps.
    """
    if not isinstance(kernel, triton.JITFunction):  # Triton's interpreter
        kernel[(programs,)](*arguments, **constants)
        return
    device = triton.runtime.driver.active.get_current_device()
    key = kernel.fn, device, *constants.items(), *map(_kind, arguments)
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[(programs,)](*arguments, **constants)
    else:
        compiled[programs, 1, 1](*arguments, *(constants[name] for name in kernel.arg_names[len(arguments) :]))


def _kind(argument: Tensor | TensorDescriptor | int) -> tuple:
    """Return what Triton compiles a kernel for."""
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, argument < 2**31
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return argument.base.dtype, *argument.block_shape


def launch_options(table: dict[int, dict], blocks: Blocks) -> dict:
    """Return block shapes, warps, stages and the dot's precision for the features' dtype, from a kernel's table."""
    return table[blocks.rows.dtype.itemsize] | {"PRECISION": "tf32" if blocks.tf32 else "ieee"}


def aligned(features: Tensor) -> Tensor:
    """Align rows to 16 bytes, as tensor descriptors need: pad D with zeros, or copy."""
    padding = -features.shape[1] % (16 // features.dtype.itemsize)
    if padding:
        return F.pad(features, (0, padding))
    return features.clone() if features.data_ptr() % 16 else features


def walked_dim(features: Tensor, launch: dict) -> int:
    """Return D, but more than one BLOCK_K: Triton 3.6 cannot pipeline a loop of one step. Past D, loads give zeros."""
    return max(features.shape[1], launch["BLOCK_K"] + 1)


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def ids_and_limits(groups: Groups | None, limits: Limits | None, placeholder: Tensor) -> tuple[Tensor, ...]:
    """Return ids and limits of rows and columns, in the argument order of `counted`."""
    ids = (placeholder, placeholder) if groups is None else (groups.rows, groups.columns)
    tensors = *ids, *((placeholder, placeholder) if limits is None else limits)
    assert all(tensor.is_contiguous() for tensor in tensors), "kernels read ids and limits without a stride"
    return tensors


def leaves_out(blocks: Blocks) -> dict[str, bool]:
    """Return the constants of `counted` for a pair of blocks."""
    groups = blocks.groups
    positive = groups is not None and groups.positive
    return {"GROUPED": groups is not None, "POSITIVE": positive, "LIMITED": blocks.limits is not None}


@triton.jit
def counted(
    for_rows,  # f32 [m, n], values of the entries as they count for their rows
    for_columns,  # f32 [m, n], and for their columns
    cosines,  # f32 [m, n], without the factor scale
    row_ids_ptr,  # i32 [r], read if GROUPED
    col_ids_ptr,  # i32 [c], read if GROUPED
    row_limits,  # f32 [m], used if LIMITED
    col_limits,  # f32 [n], used if LIMITED
    rows,  # i32 [m], indices
    columns,  # i32 [n]
    num_rows,
    num_columns,
    NOTHING: tl.constexpr,  # value of an entry that is left out: 0, or -inf for logits
    GROUPED: tl.constexpr,  # leave out the entries whose row and column share an id
    POSITIVE: tl.constexpr,  # or, if set, keep them, because they are positives
    LIMITED: tl.constexpr,  # leave out the entries whose cosine is above the row's or the column's limit
):
    """Return both values without the entries that are left out, f32 [m, n] each.

    Every objective that leaves out entries, or changes their weights, is defined here and in torch_tile._Chunk.counted.
    If NOTHING is 0, values are finite: an entry above a limit is left out by a factor, which costs one instruction.
    """
    if GROUPED:
        same = same_ids(row_ids_ptr, col_ids_ptr, rows, columns, num_rows, num_columns)
        if not POSITIVE:
            for_rows = tl.where(same, NOTHING, for_rows)
            for_columns = tl.where(same, NOTHING, for_columns)
    if LIMITED and NOTHING == 0.0:  # 0 or 1 by one instruction, whose product the sum of the entries takes in
        row_counts = tl.clamp(row_limits[:, None] * _STEEP - cosines * _STEEP, 0.0, 1.0)
        col_counts = tl.clamp(col_limits[None, :] * _STEEP - cosines * _STEEP, 0.0, 1.0)
        if GROUPED and POSITIVE:
            row_counts = tl.where(same, 1.0, row_counts)
            col_counts = tl.where(same, 1.0, col_counts)
        for_rows = for_rows * row_counts
        for_columns = for_columns * col_counts
    elif LIMITED:
        beyond_row, beyond_column = cosines > row_limits[:, None], cosines > col_limits[None, :]
        if GROUPED and POSITIVE:
            beyond_row &= ~same
            beyond_column &= ~same
        for_rows = tl.where(beyond_row, NOTHING, for_rows)
        for_columns = tl.where(beyond_column, NOTHING, for_columns)
    return for_rows, for_columns


@triton.jit
def load_limits(limits_ptr, index, count, LIMITED: tl.constexpr):
    """Return the limits of some rows or columns, f32, if LIMITED."""
    if LIMITED:
        return tl.load(limits_ptr + index, mask=index < count, other=0.0)
    else:
        return 0.0


@triton.jit
def same_ids(
    row_ids_ptr,  # i32 [r], read
    col_ids_ptr,  # i32 [c], read
    rows,  # i32 [m], indices
    columns,  # i32 [n]
    num_rows,
    num_columns,
):
    """Return `row_ids[rows, None] == col_ids[columns]`, bool [m, n], False past the edges.

    Kernels call this again instead of keeping the result, which would not fit into the registers.
    """
    row_ids = tl.load(row_ids_ptr + rows, mask=rows < num_rows, other=-2)
    col_ids = tl.load(col_ids_ptr + columns, mask=columns < num_columns, other=-3)
    return row_ids[:, None] == col_ids[None, :]


# ---- forward: statistics ----


@cache
def row_splits(row_tiles: int, column_tiles: int, processors: int, most: int) -> int:
    """Return the number of programs that share a column block, at most `most`, enough to fill the GPU evenly.

    Prefers up to four if the cost is within 3%: fewer column blocks are then in use at a time and stay in the L2 cache.
    """

    def cost(splits: int) -> float:
        """Return the tiles on the longest chain of programs; the start of a program costs a third of a tile."""
        return triton.cdiv(column_tiles * splits, processors) * (triton.cdiv(row_tiles, splits) + 0.33)

    candidates = range(1, min(row_tiles, 2 * processors, most) + 1)
    best = min(candidates, key=cost)
    return max((s for s in candidates if s <= 4 and cost(s) <= 1.03 * cost(best)), default=best)


# ---- backward: dS and its two matmuls, a chunk at a time ----


@cache
def chunk_shape(num_rows: int, num_columns: int, dim: int, elements: int, processors: int) -> tuple[int, int]:
    """Return height and width of the workspace (multiples of 128 and 256) with the lowest cost.

    Candidates cut the blocks into equal chunks of at most `elements` entries, or 128 x 256 if none fits. They differ in
    how evenly their three matmuls fill the GPU.

    All three matmuls run in whole tiles, in waves of one tile per multiprocessor; a wave costs its depth. Computing dS
    costs 330 more per wave, the start and end of a chunk 4000.
    """

    def waves(rows: int, columns: int) -> int:
        return triton.cdiv(triton.cdiv(rows, _HEIGHT) * triton.cdiv(columns, _WIDTH), processors)

    def cost(shape: tuple[int, int]) -> int:
        height, width = shape
        chunk = waves(height, width) * (dim + 330) + waves(height, dim) * width + waves(width, dim) * height + 4000
        return triton.cdiv(num_rows, height) * triton.cdiv(num_columns, width) * chunk

    side = max(1, math.isqrt(elements))
    heights, widths = _even_sizes(num_rows, side, _HEIGHT), _even_sizes(num_columns, side, _WIDTH)
    shapes = [(height, width) for height in heights for width in widths if height * width <= elements]
    return min(shapes, key=cost, default=(_HEIGHT, _WIDTH))


def _even_sizes(length: int, side: int, multiple: int) -> list[int]:
    """Return sizes between 2/3 and 3/2 of `side` that cut a length into equal parts, rounded up to a multiple."""
    fewest, most = triton.cdiv(2 * length, 3 * side), triton.cdiv(3 * length, 2 * side)
    return sorted({triton.cdiv(triton.cdiv(length, parts), multiple) * multiple for parts in range(fewest, most + 1)})
