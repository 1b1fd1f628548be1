"""Tiles of attention to and from memory: B rows of D numbers, `stride` apart, of which the first n are there."""

import triton
import triton.language as tl


@triton.jit
def load_rows(base, n, stride, D: tl.constexpr, B: tl.constexpr, WHOLE: tl.constexpr):
    """Rows that are not there are zeros. WHOLE: all are."""
    rows, columns = tl.arange(0, B)[:, None], tl.arange(0, D)[None, :]
    if WHOLE:
        return tl.load(base + rows * stride + columns)
    return tl.load(base + rows * stride + columns, mask=rows < n, other=0.0)


@triton.jit
def store_rows(base, values, n, stride, D: tl.constexpr, B: tl.constexpr):
    rows, columns = tl.arange(0, B)[:, None], tl.arange(0, D)[None, :]
    tl.store(base + rows * stride + columns, values.to(base.dtype.element_ty), mask=rows < n)
