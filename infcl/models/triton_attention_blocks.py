"""Self-attention over several blocks of tokens without a mask, for triton_attention.py.

Tokens are processed in blocks of 64. A remainder of up to 16, such as a class token, takes a tile of 16. One program
computes a block's queries with the running softmax of FlashAttention-2 (Dao 2023, arXiv 2307.08691). In the backward
one program computes the gradients of a block's keys and values, or of its queries. This takes 7 matmuls instead of 5,
but every result has one writer, so there are no atomics.

    delta   the sum of d_out * out over a head's d numbers, [P, h] f32
    lse     log2 of the sum of 2^score, [P, h] f32; scores are log2(e) / sqrt(d) of q k^T

Shapes: m sequences of L tokens, P = m L positions; h heads of width d.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from infcl.kernels.triton_launch import LOG2E

BLOCK, TAIL = 64, 16
_BLOCK, _TAIL, _STAGES = tl.constexpr(BLOCK), tl.constexpr(TAIL), tl.constexpr(3)
_WARPS = 4
_ROWS = 64  # rows per program of _delta


def blocks_forward(qkv: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Compute attention.

    Args:
        qkv: [P, 3, h, d], contiguous.
        length: tokens per sequence: full blocks and 1 to TAIL tokens more.

    Returns:
        out: [P, h, d].
        lse: f32 [P, h].
    """
    positions, _, heads, width = qkv.shape
    out, lse = qkv.new_empty(positions, heads, width), qkv.new_empty(positions, heads, dtype=torch.float32)
    full = length // BLOCK
    grid = ((full + 1) * (positions // length) * heads,)
    _forward[grid](qkv, out, lse, length, width**-0.5, heads, width, FULL=full, num_warps=_WARPS)
    return out, lse


def blocks_backward(d_out: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, length: int) -> Tensor:
    """Return d_qkv [P, 3, h, d] from d_out [P, h, d], contiguous, and the forward's arguments and results."""
    positions, _, heads, width = qkv.shape
    d_qkv, delta = torch.empty_like(qkv), torch.empty_like(lse)
    _delta[(triton.cdiv(positions * heads, _ROWS),)](out, d_out, delta, positions * heads, width, _ROWS)
    full = length // BLOCK
    grid = (2 * (full + 1) * (positions // length) * heads,)
    given = (qkv, lse, delta, d_out, d_qkv, length, width**-0.5, heads, width)
    _backward[grid](*given, FULL=full, num_warps=_WARPS)
    return d_qkv


# In the functions below, qkv, out, lse ... point at the first token of one sequence and head. n is the number of rows
# of a tile that exist; the others are read as zeros. B is the number of rows of the current tile, or of a full block.


@triton.jit
def _place(program, FULL: tl.constexpr, H: tl.constexpr):
    """Return block, sequence and head. Blocks of a head are neighbours, so they find its keys in the cache."""
    of_head = program // (FULL + 1)
    return program % (FULL + 1), of_head // H, of_head % H


@triton.jit
def _forward(qkv, out, lse, length, scale, H: tl.constexpr, D: tl.constexpr, FULL: tl.constexpr):
    """Compute one block of queries of one head and sequence per program."""
    block, sequence, head = _place(tl.program_id(0), FULL, H)
    first = sequence.to(tl.int64) * length
    qkv += first * (3 * H * D) + head * D
    out += first * (H * D) + head * D
    lse += first * H + head
    scale *= LOG2E  # scores to base 2
    if block == FULL:
        _queries(qkv, out, lse, FULL * _BLOCK, length, scale, H, D, _TAIL, FULL)
    else:
        _queries(qkv, out, lse, block * _BLOCK, length, scale, H, D, _BLOCK, FULL)


@triton.jit
def _queries(qkv, out, lse, at, length, scale, H: tl.constexpr, D: tl.constexpr, B: tl.constexpr, FULL: tl.constexpr):
    """Compute the output of B queries, from position `at` on."""
    ROW: tl.constexpr = 3 * H * D
    q = load_rows(qkv + at * ROW, length - at, ROW, D, B, False)
    largest = tl.full([B], -1e30, tl.float32)
    total = tl.zeros([B], tl.float32)
    result = tl.zeros([B, D], tl.float32)
    for j in tl.range(0, FULL, num_stages=_STAGES):
        keys = qkv + j * _BLOCK * ROW + H * D
        result, largest, total = _attend(q, keys, _BLOCK, scale, result, largest, total, H, D, _BLOCK, True)
    keys = qkv + FULL * _BLOCK * ROW + H * D
    n = length - FULL * _BLOCK
    result, largest, total = _attend(q, keys, n, scale, result, largest, total, H, D, _TAIL, False)
    store_rows(out + at * H * D, result / total[:, None], length - at, H * D, D, B)
    positions = tl.arange(0, B)
    tl.store(lse + (at + positions) * H, largest + tl.log2(total), mask=positions < length - at)


@triton.jit
def _attend(
    q, keys, n, scale, result, largest, total,
    H: tl.constexpr, D: tl.constexpr, B: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return result, running maximum and sum after B more keys and values."""
    k = load_rows(keys, n, 3 * H * D, D, B, WHOLE)
    v = load_rows(keys + H * D, n, 3 * H * D, D, B, WHOLE)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if not WHOLE:
        scores = tl.where(tl.arange(0, B)[None, :] < n, scores, -1e30)
    above = tl.maximum(largest, tl.max(scores, 1))
    shrink = tl.exp2(largest - above)
    weights = tl.exp2(scores - above[:, None])
    result = tl.dot(weights.to(v.dtype), v, result * shrink[:, None], input_precision="ieee")
    return result, above, total * shrink + tl.sum(weights, 1)


@triton.jit
def _delta(out, d_out, delta, rows, D: tl.constexpr, B: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * B
    o = load_rows(out + first * D, rows - first, D, D, B, False).to(tl.float32)
    d_o = load_rows(d_out + first * D, rows - first, D, D, B, False).to(tl.float32)
    positions = tl.arange(0, B)
    tl.store(delta + first + positions, tl.sum(o * d_o, 1), mask=positions < rows - first)


@triton.jit
def _backward(qkv, lse, delta, d_out, d_qkv, length, scale, H: tl.constexpr, D: tl.constexpr, FULL: tl.constexpr):
    """Compute the gradients of one block of keys, or of one block of queries, per program."""
    of_keys = tl.program_id(0) % 2 == 0
    block, sequence, head = _place(tl.program_id(0) // 2, FULL, H)
    first = sequence.to(tl.int64) * length
    qkv += first * (3 * H * D) + head * D
    d_qkv += first * (3 * H * D) + head * D
    d_out += first * (H * D) + head * D
    lse += first * H + head
    delta += first * H + head
    if of_keys:
        if block == FULL:
            _d_keys(qkv, lse, delta, d_out, d_qkv, FULL * _BLOCK, length, scale, H, D, _TAIL, FULL)
        else:
            _d_keys(qkv, lse, delta, d_out, d_qkv, block * _BLOCK, length, scale, H, D, _BLOCK, FULL)
    else:
        if block == FULL:
            _d_queries(qkv, lse, delta, d_out, d_qkv, FULL * _BLOCK, length, scale, H, D, _TAIL, FULL)
        else:
            _d_queries(qkv, lse, delta, d_out, d_qkv, block * _BLOCK, length, scale, H, D, _BLOCK, FULL)


@triton.jit
def _d_keys(
    qkv, lse, delta, d_out, d_qkv, at, length, scale,
    H: tl.constexpr, D: tl.constexpr, B: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of B keys and their values, from position `at` on."""
    ROW: tl.constexpr = 3 * H * D
    k = load_rows(qkv + at * ROW + H * D, length - at, ROW, D, B, False)
    v = load_rows(qkv + at * ROW + 2 * H * D, length - at, ROW, D, B, False)
    d_k = tl.zeros([B, D], tl.float32)
    d_v = tl.zeros([B, D], tl.float32)
    for i in tl.range(0, FULL, num_stages=_STAGES):
        rows = i * _BLOCK
        d_k, d_v = _add_d_keys(k, v, d_k, d_v, qkv, lse, delta, d_out, rows, _BLOCK, scale, H, D, _BLOCK, True)
    rows = FULL * _BLOCK
    n = length - rows
    d_k, d_v = _add_d_keys(k, v, d_k, d_v, qkv, lse, delta, d_out, rows, n, scale, H, D, _TAIL, False)
    store_rows(d_qkv + at * ROW + H * D, d_k * scale, length - at, ROW, D, B)
    store_rows(d_qkv + at * ROW + 2 * H * D, d_v, length - at, ROW, D, B)


@triton.jit
def _add_d_keys(
    k, v, d_k, d_v, qkv, lse, delta, d_out, at, n, scale,
    H: tl.constexpr, D: tl.constexpr, B: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return d_k and d_v plus the share of B queries from `at` on. Scores are [keys, queries].

    Queries that do not exist have a d_out of zeros, so they add zeros.
    """
    q = load_rows(qkv + at * (3 * H * D), n, 3 * H * D, D, B, WHOLE)
    d_o = load_rows(d_out + at * (H * D), n, H * D, D, B, WHOLE)
    positions = tl.arange(0, B)
    of_queries = tl.load(lse + (at + positions) * H, mask=positions < n, other=0.0)
    expected = tl.load(delta + (at + positions) * H, mask=positions < n, other=0.0)
    scores = tl.dot(k, tl.trans(q), input_precision="ieee") * (scale * LOG2E)
    p = tl.exp2(scores - of_queries[None, :])
    d_v = tl.dot(p.to(d_o.dtype), d_o, d_v, input_precision="ieee")
    d_s = p * (tl.dot(v, tl.trans(d_o), input_precision="ieee") - expected[None, :])
    return tl.dot(d_s.to(q.dtype), q, d_k, input_precision="ieee"), d_v


@triton.jit
def _d_queries(
    qkv, lse, delta, d_out, d_qkv, at, length, scale,
    H: tl.constexpr, D: tl.constexpr, B: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of B queries, from position `at` on."""
    ROW: tl.constexpr = 3 * H * D
    positions = tl.arange(0, B)
    q = load_rows(qkv + at * ROW, length - at, ROW, D, B, False)
    d_o = load_rows(d_out + at * H * D, length - at, H * D, D, B, False)
    of_queries = tl.load(lse + (at + positions) * H, mask=positions < length - at, other=0.0)
    expected = tl.load(delta + (at + positions) * H, mask=positions < length - at, other=0.0)
    d_q = tl.zeros([B, D], tl.float32)
    for j in tl.range(0, FULL, num_stages=_STAGES):
        keys = qkv + j * _BLOCK * ROW + H * D
        d_q = _add_d_queries(q, d_o, of_queries, expected, d_q, keys, _BLOCK, scale, H, D, _BLOCK, True)
    keys = qkv + FULL * _BLOCK * ROW + H * D
    n = length - FULL * _BLOCK
    d_q = _add_d_queries(q, d_o, of_queries, expected, d_q, keys, n, scale, H, D, _TAIL, False)
    store_rows(d_qkv + at * ROW, d_q * scale, length - at, ROW, D, B)


@triton.jit
def _add_d_queries(
    q, d_o, of_queries, expected, d_q, keys, n, scale,
    H: tl.constexpr, D: tl.constexpr, B: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return d_q plus the share of B keys."""
    k = load_rows(keys, n, 3 * H * D, D, B, WHOLE)
    v = load_rows(keys + H * D, n, 3 * H * D, D, B, WHOLE)
    exponents = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E) - of_queries[:, None]
    if not WHOLE:
        exponents = tl.where(tl.arange(0, B)[None, :] < n, exponents, -1e30)
    d_s = tl.exp2(exponents) * (tl.dot(d_o, tl.trans(v), input_precision="ieee") - expected[:, None])
    return tl.dot(d_s.to(k.dtype), k, d_q, input_precision="ieee")


# ---- load and store of tiles: B rows of D numbers, `stride` numbers apart, of which the first n exist ----


@triton.jit
def load_rows(base, n, stride, D: tl.constexpr, B: tl.constexpr, WHOLE: tl.constexpr):
    """Load a tile. Rows that do not exist are zeros; WHOLE: all rows exist."""
    rows, columns = tl.arange(0, B)[:, None], tl.arange(0, D)[None, :]
    if WHOLE:
        return tl.load(base + rows * stride + columns)
    return tl.load(base + rows * stride + columns, mask=rows < n, other=0.0)


@triton.jit
def store_rows(base, values, n, stride, D: tl.constexpr, B: tl.constexpr):
    """Store the first n rows of a tile in the dtype of the memory."""
    rows, columns = tl.arange(0, B)[:, None], tl.arange(0, D)[None, :]
    tl.store(base + rows * stride + columns, values.to(base.dtype.element_ty), mask=rows < n)
