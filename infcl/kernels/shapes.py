"""How a pair of feature blocks is cut into tiles and chunks on a GPU, and what that costs; from sizes alone.

Costs are in steps of the products' depth: what one multiprocessor needs for one step of a 128 x 256 tile. The kernels
choose by them, and the planner takes them for time.
"""

import math
from functools import cache

_HEIGHT, _WIDTH = 128, 256  # of a tile of half-precision features, cuBLAS's too


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


# ---- forward: statistics ----


def chain_tiles(row_tiles: int, column_tiles: int, splits: int, processors: int) -> float:
    """Tiles on the longest chain of programs, each of which has a start-up of a third of a tile."""
    return ceil_div(column_tiles * splits, processors) * (ceil_div(row_tiles, splits) + 0.33)


@cache
def row_splits(row_tiles: int, column_tiles: int, processors: int) -> int:
    """How many programs share a column block: enough to fill the GPU evenly.

    Up to four where it costs nothing: fewer column blocks are then in use at a time, and stay in the L2 cache.
    """

    def cost(splits: int) -> float:
        return chain_tiles(row_tiles, column_tiles, splits, processors)

    candidates = range(1, min(row_tiles, 2 * processors) + 1)
    best = min(candidates, key=cost)
    return max((s for s in candidates if s <= 4 and cost(s) <= 1.03 * cost(best)), default=best)


def forward_cost(num_rows: int, num_columns: int, dim: int, workspace_bytes: int, processors: int) -> float:
    """Of the statistics of a pair of blocks; a tile costs its depth, and 135 for its exponentials and sums."""
    row_tiles, column_tiles = ceil_div(num_rows, _HEIGHT), ceil_div(num_columns, _WIDTH)
    chunk = max(1, min(column_tiles, workspace_bytes // (4 * num_rows)))
    tiles = chain_tiles(row_tiles, chunk, row_splits(row_tiles, chunk, processors), processors)
    return ceil_div(column_tiles, chunk) * tiles * (dim + 135)


# ---- backward: dS and its two products, a chunk at a time ----


def backward_cost(num_rows: int, num_columns: int, dim: int, shape: tuple[int, int], processors: int) -> int:
    """Of the gradients of a pair of blocks in chunks of this height and width.

    All three products are taken to run in whole tiles, in waves of one per multiprocessor, a wave costing its depth;
    forming dS costs 330 more, the start and end of a chunk 4000.
    """
    height, width = shape

    def waves(rows: int, columns: int) -> int:
        return ceil_div(ceil_div(rows, _HEIGHT) * ceil_div(columns, _WIDTH), processors)

    chunk = waves(height, width) * (dim + 330) + waves(height, dim) * width + waves(width, dim) * height + 4000
    return ceil_div(num_rows, height) * ceil_div(num_columns, width) * chunk


@cache
def chunk_shape(num_rows: int, num_columns: int, dim: int, elements: int, processors: int) -> tuple[int, int]:
    """Height (of 128s) and width (of 256s) of the workspace: at most `elements` where possible, pieces of equal size.

    The pieces differ in how evenly their three products fill the GPU.
    """

    def cost(shape: tuple[int, int]) -> int:
        return backward_cost(num_rows, num_columns, dim, shape, processors)

    side = max(1, math.isqrt(elements))
    heights, widths = _even_pieces(num_rows, side, _HEIGHT), _even_pieces(num_columns, side, _WIDTH)
    shapes = [(height, width) for height in heights for width in widths if height * width <= elements]
    return min(shapes, key=cost, default=(_HEIGHT, _WIDTH))


def _even_pieces(length: int, side: int, multiple: int) -> list[int]:
    """Sizes between 2/3 and 3/2 of `side` that cut a length into equal pieces, rounded up to a multiple."""
    fewest, most = ceil_div(2 * length, 3 * side), ceil_div(3 * length, 2 * side)
    return sorted({ceil_div(ceil_div(length, pieces), multiple) * multiple for pieces in range(fewest, most + 1)})
