"""Tiling of a pair of feature blocks on a GPU, and a cost model that depends on sizes only.

The kernels choose the cheapest shape.
"""

import math
from functools import cache

_HEIGHT, _WIDTH = 128, 256  # tile of half-precision features, in the kernels and in cuBLAS


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


# ---- forward: statistics ----


@cache
def row_splits(row_tiles: int, column_tiles: int, processors: int) -> int:
    """Return the number of programs that share a column block, enough to fill the GPU evenly.

    Prefers up to four if the cost is within 3%: fewer column blocks are then in use at a time and stay in the L2 cache.
    """

    def cost(splits: int) -> float:
        """Return the tiles on the longest chain of programs; the start of a program costs a third of a tile."""
        return ceil_div(column_tiles * splits, processors) * (ceil_div(row_tiles, splits) + 0.33)

    candidates = range(1, min(row_tiles, 2 * processors) + 1)
    best = min(candidates, key=cost)
    return max((s for s in candidates if s <= 4 and cost(s) <= 1.03 * cost(best)), default=best)


# ---- backward: dS and its two matmuls, a chunk at a time ----


def backward_cost(num_rows: int, num_columns: int, dim: int, shape: tuple[int, int], processors: int) -> int:
    """Return the cost of the gradients of a pair of blocks in chunks of this height and width.

    All three matmuls run in whole tiles, in waves of one tile per multiprocessor; a wave costs its depth. Computing dS
    costs 330 more per wave, the start and end of a chunk 4000.
    """
    height, width = shape

    def waves(rows: int, columns: int) -> int:
        return ceil_div(ceil_div(rows, _HEIGHT) * ceil_div(columns, _WIDTH), processors)

    chunk = waves(height, width) * (dim + 330) + waves(height, dim) * width + waves(width, dim) * height + 4000
    return ceil_div(num_rows, height) * ceil_div(num_columns, width) * chunk


@cache
def chunk_shape(num_rows: int, num_columns: int, dim: int, elements: int, processors: int) -> tuple[int, int]:
    """Return height and width of the workspace (multiples of 128 and 256) with the lowest cost.

    Candidates cut the blocks into equal chunks of at most `elements` entries, or 128 x 256 if none fits. They differ in
    how evenly their three matmuls fill the GPU.
    """

    def cost(shape: tuple[int, int]) -> int:
        return backward_cost(num_rows, num_columns, dim, shape, processors)

    side = max(1, math.isqrt(elements))
    heights, widths = _even_pieces(num_rows, side, _HEIGHT), _even_pieces(num_columns, side, _WIDTH)
    shapes = [(height, width) for height in heights for width in widths if height * width <= elements]
    return min(shapes, key=cost, default=(_HEIGHT, _WIDTH))


def _even_pieces(length: int, side: int, multiple: int) -> list[int]:
    """Return sizes between 2/3 and 3/2 of `side` that cut a length into equal pieces, rounded up to a multiple."""
    fewest, most = ceil_div(2 * length, 3 * side), ceil_div(3 * length, 2 * side)
    return sorted({ceil_div(ceil_div(length, pieces), multiple) * multiple for pieces in range(fewest, most + 1)})
