"""Self-attention over few tokens: q|k|v as a tower's projection leaves them, and their gradient in one tensor again.

cuDNN's kernel computes tiles of 128 x 128: 50 tokens as 128, 257 as 384, and a mask's rows whole. Here

    up to 128 tokens    a sequence and head is one tile of 32, 64 or 128, computed whole by one program; the backward
                        makes the probabilities again, so that nothing is kept but q|k|v and the result
    more                whole tiles of BLOCK and a short one for what is left over, a class token say; the running
                        softmax of FlashAttention-2 (Dao 2023, arXiv 2307.08691), whose backward is two sweeps: k's and
                        v's gradients, then q's

Scores, softmax and all sums are float32; probabilities and the scores' gradient are rounded to the type of q|k|v before
they are multiplied. No atomics: results repeat bit for bit.

Shapes: P places of m sequences, which lie one behind the other, with gaps or none; h heads of width d.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILES = (32, 64, 128)  # of one program
LONGEST = TILES[-1]  # tokens that are one tile
_WARPS = {32: 2, 64: 4, 128: 8}
_FORWARD = {"BLOCK": 128, "num_warps": 4}
_BACKWARD = {"BLOCK": 64, "num_warps": 4}
_LOG2E = 1.4426950408889634


def attention_forward(qkv: Tensor, spans: Tensor | None, length: int, causal: bool) -> tuple[Tensor, Tensor]:
    """qkv [P, 3, h, d], contiguous -> out [P, h, d]; log2 of the sums of exp [P, h] f32, which is empty for one tile.

    spans, int64 [m, 2]: first place and number of tokens, `length` at most, of each sequence; what lies in none is
    zero in `out`. None: all P places are sequences of `length`. Several tiles are neither causal nor have spans.
    """
    places, _, heads, width = qkv.shape
    if length > LONGEST:
        out, sums = qkv.new_empty(places, heads, width), qkv.new_empty(places, heads, dtype=torch.float32)
        shape = _blocks(length, _FORWARD)
        grid = (shape["FULL"] + (shape["TAIL"] > 0), places // length * heads)
        _flash_forward[grid](qkv, out, sums, length, width**-0.5 * _LOG2E, heads, width, **shape)
        return out, sums
    out = (qkv.new_empty if spans is None else qkv.new_zeros)(places, heads, width)
    for grid, options in _launches(qkv, spans, length, causal):
        _tile_forward[grid](qkv, out, spans, length, width**-0.5 * _LOG2E, heads, width, **options)
    return out, qkv.new_empty(0, dtype=torch.float32)


def attention_backward(
    d_out: Tensor, qkv: Tensor, out: Tensor, sums: Tensor, spans: Tensor | None, length: int, causal: bool
) -> Tensor:
    """d_out [P, h, d], contiguous; what the forward took and gave -> d_qkv [P, 3, h, d]."""
    places, _, heads, width = qkv.shape
    if length > LONGEST:
        d_qkv, shape = torch.empty_like(qkv), _blocks(length, _BACKWARD)
        grid = (shape["FULL"] + (shape["TAIL"] > 0), places // length * heads)
        given = (qkv, out, sums, d_out, d_qkv, length, width**-0.5, heads, width)
        _flash_backward[grid](*given, **shape)
        return d_qkv
    d_qkv = torch.empty_like(qkv) if spans is None else torch.zeros_like(qkv)
    for grid, options in _launches(qkv, spans, length, causal):
        _tile_backward[grid](qkv, d_out, d_qkv, spans, length, width**-0.5, heads, width, **options)
    return d_qkv


def _launches(qkv: Tensor, spans: Tensor | None, length: int, causal: bool) -> list[tuple[tuple[int], dict]]:
    """A launch for each size of tile that sequences may need; whole ones need one."""
    largest = next(tile for tile in TILES if tile >= length)
    count = qkv.shape[0] // length if spans is None else len(spans)
    tiles = [tile for tile in TILES if tile <= largest] if spans is not None else [largest]
    return [
        (
            (count * qkv.shape[2],),
            {"B": tile, "LEAST": tile // 2 if tile > TILES[0] else 0, "SPANS": spans is not None, "CAUSAL": causal}
            | {"num_warps": _WARPS[tile]},
        )
        for tile in tiles
    ]


def _blocks(length: int, options: dict[str, int]) -> dict[str, int]:
    """FULL blocks; TAIL: the tile of what is left over, 0 where that is nothing."""
    full, rest = divmod(length, options["BLOCK"])
    return options | {"FULL": full, "TAIL": max(16, triton.next_power_of_2(rest)) if rest else 0}


@triton.jit
def _load(base, n, stride, D: tl.constexpr, B: tl.constexpr):
    """B rows of D, of which the first n are there."""
    rows, columns = tl.arange(0, B)[:, None], tl.arange(0, D)[None, :]
    return tl.load(base + rows * stride + columns, mask=rows < n, other=0.0)


@triton.jit
def _store(base, values, n, stride, D: tl.constexpr, B: tl.constexpr):
    rows, columns = tl.arange(0, B)[:, None], tl.arange(0, D)[None, :]
    tl.store(base + rows * stride + columns, values.to(base.dtype.element_ty), mask=rows < n)


# ---- one tile ----


@triton.jit
def _span(spans, length, sequence, SPANS: tl.constexpr):
    """First place and number of tokens of a sequence."""
    if SPANS:
        first, n = tl.load(spans + 2 * sequence), tl.load(spans + 2 * sequence + 1).to(tl.int32)
    else:
        first, n = sequence.to(tl.int64) * length, length
    return first, n


@triton.jit
def _weights(q, k, n, scale_log2, B: tl.constexpr, CAUSAL: tl.constexpr):
    """exp(scores), less the largest of a row, and their sums."""
    rows, columns = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    seen = columns < n
    if CAUSAL:
        seen = seen & (columns <= rows)
    scores = tl.where(seen, tl.dot(q, tl.trans(k)) * scale_log2, -1e30)
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return weights, tl.sum(weights, 1)


@triton.jit
def _tile_forward(
    qkv,
    out,
    spans,
    length,
    scale_log2,
    H,
    D: tl.constexpr,
    B: tl.constexpr,
    LEAST: tl.constexpr,
    SPANS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """One program for each sequence and head; it does those with more than LEAST tokens and at most B."""
    sequence, head = tl.program_id(0) // H, tl.program_id(0) % H
    first, n = _span(spans, length, sequence, SPANS)
    if (n > LEAST) & (n <= B):
        qkv += first * (3 * H * D) + head * D
        q = _load(qkv, n, 3 * H * D, D, B)
        k = _load(qkv + H * D, n, 3 * H * D, D, B)
        v = _load(qkv + 2 * H * D, n, 3 * H * D, D, B)
        weights, sums = _weights(q, k, n, scale_log2, B, CAUSAL)
        _store(out + first * (H * D) + head * D, tl.dot(weights.to(v.dtype), v) / sums[:, None], n, H * D, D, B)


@triton.jit
def _tile_backward(
    qkv,
    d_out,
    d_qkv,
    spans,
    length,
    scale,
    H,
    D: tl.constexpr,
    B: tl.constexpr,
    LEAST: tl.constexpr,
    SPANS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """As _tile_forward."""
    sequence, head = tl.program_id(0) // H, tl.program_id(0) % H
    first, n = _span(spans, length, sequence, SPANS)
    if (n > LEAST) & (n <= B):
        qkv += first * (3 * H * D) + head * D
        d_qkv += first * (3 * H * D) + head * D
        q = _load(qkv, n, 3 * H * D, D, B)
        k = _load(qkv + H * D, n, 3 * H * D, D, B)
        v = _load(qkv + 2 * H * D, n, 3 * H * D, D, B)
        d_o = _load(d_out + first * (H * D) + head * D, n, H * D, D, B)
        weights, sums = _weights(q, k, n, scale * 1.4426950408889634, B, CAUSAL)
        p = weights * (1 / sums)[:, None]
        _store(d_qkv + 2 * H * D, tl.dot(tl.trans(p.to(d_o.dtype)), d_o), n, 3 * H * D, D, B)
        d_p = tl.dot(d_o, tl.trans(v))
        d_s = (p * (d_p - tl.sum(p * d_p, 1)[:, None]) * scale).to(q.dtype)
        _store(d_qkv, tl.dot(d_s, k), n, 3 * H * D, D, B)
        _store(d_qkv + H * D, tl.dot(tl.trans(d_s), q), n, 3 * H * D, D, B)


# ---- several tiles ----


@triton.jit
def _flash_forward(
    qkv,
    out,
    sums,
    length,
    scale_log2,
    H,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Programs (block of queries, sequence and head)."""
    block, sequence, head = tl.program_id(0), tl.program_id(1) // H, tl.program_id(1) % H
    first = sequence.to(tl.int64) * length
    qkv += first * (3 * H * D) + head * D
    out += first * (H * D) + head * D
    sums += first * H + head
    if TAIL > 0:
        if block == FULL:
            _queries(qkv, out, sums, FULL * BLOCK, length, scale_log2, H, D, TAIL, BLOCK, FULL, TAIL)
        else:
            _queries(qkv, out, sums, block * BLOCK, length, scale_log2, H, D, BLOCK, BLOCK, FULL, TAIL)
    else:
        _queries(qkv, out, sums, block * BLOCK, length, scale_log2, H, D, BLOCK, BLOCK, FULL, TAIL)


@triton.jit
def _queries(
    qkv,
    out,
    sums,
    at,
    length,
    scale_log2,
    H,
    D: tl.constexpr,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
    TAIL: tl.constexpr,
):
    """The result of B queries from `at` on."""
    row = 3 * H * D
    q = _load(qkv + at * row, length - at, row, D, B)
    largest = tl.full([B], -1e30, tl.float32)
    total = tl.zeros([B], tl.float32)
    result = tl.zeros([B, D], tl.float32)
    for j in tl.static_range(FULL):
        keys = qkv + j * BLOCK * row + H * D
        result, largest, total = _attend(q, keys, BLOCK, scale_log2, result, largest, total, H, D, BLOCK)
    if TAIL > 0:
        keys, n = qkv + FULL * BLOCK * row + H * D, length - FULL * BLOCK
        result, largest, total = _attend(q, keys, n, scale_log2, result, largest, total, H, D, TAIL)
    _store(out + at * H * D, result / total[:, None], length - at, H * D, D, B)
    places = tl.arange(0, B)
    tl.store(sums + (at + places) * H, largest + tl.log2(total), mask=places < length - at)


@triton.jit
def _attend(q, keys, n, scale_log2, result, largest, total, H, D: tl.constexpr, B: tl.constexpr):
    """Take in B keys and their values, of which n are there."""
    k = _load(keys, n, 3 * H * D, D, B)
    v = _load(keys + H * D, n, 3 * H * D, D, B)
    scores = tl.dot(q, tl.trans(k)) * scale_log2
    scores = tl.where(tl.arange(0, B)[None, :] < n, scores, -1e30)
    above = tl.maximum(largest, tl.max(scores, 1))
    shrink = tl.exp2(largest - above)
    weights = tl.exp2(scores - above[:, None])
    result = tl.dot(weights.to(v.dtype), v, result * shrink[:, None])
    return result, above, total * shrink + tl.sum(weights, 1)


@triton.jit
def _flash_backward(
    qkv,
    out,
    sums,
    d_out,
    d_qkv,
    length,
    scale,
    H,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Programs (block of keys, then of queries; sequence and head)."""
    block, sequence, head = tl.program_id(0), tl.program_id(1) // H, tl.program_id(1) % H
    first = sequence.to(tl.int64) * length
    qkv += first * (3 * H * D) + head * D
    d_qkv += first * (3 * H * D) + head * D
    out += first * (H * D) + head * D
    d_out += first * (H * D) + head * D
    sums += first * H + head
    if TAIL > 0:
        if block == FULL:
            at = FULL * BLOCK
            _d_keys(qkv, out, sums, d_out, d_qkv, at, length, scale, H, D, TAIL, BLOCK, FULL, TAIL)
            _d_queries(qkv, out, sums, d_out, d_qkv, at, length, scale, H, D, TAIL, BLOCK, FULL, TAIL)
        else:
            at = block * BLOCK
            _d_keys(qkv, out, sums, d_out, d_qkv, at, length, scale, H, D, BLOCK, BLOCK, FULL, TAIL)
            _d_queries(qkv, out, sums, d_out, d_qkv, at, length, scale, H, D, BLOCK, BLOCK, FULL, TAIL)
    else:
        at = block * BLOCK
        _d_keys(qkv, out, sums, d_out, d_qkv, at, length, scale, H, D, BLOCK, BLOCK, FULL, TAIL)
        _d_queries(qkv, out, sums, d_out, d_qkv, at, length, scale, H, D, BLOCK, BLOCK, FULL, TAIL)


@triton.jit
def _d_keys(
    qkv,
    out,
    sums,
    d_out,
    d_qkv,
    at,
    length,
    scale,
    H,
    D: tl.constexpr,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
    TAIL: tl.constexpr,
):
    """The gradients of B keys and values from `at` on. All is transposed: keys are rows."""
    row = 3 * H * D
    k = _load(qkv + at * row + H * D, length - at, row, D, B)
    v = _load(qkv + at * row + 2 * H * D, length - at, row, D, B)
    d_k = tl.zeros([B, D], tl.float32)
    d_v = tl.zeros([B, D], tl.float32)
    for i in tl.static_range(FULL):
        d_k, d_v = _add_d_keys(k, v, d_k, d_v, qkv, out, sums, d_out, i * BLOCK, BLOCK, scale, H, D, BLOCK)
    if TAIL > 0:
        n = length - FULL * BLOCK
        d_k, d_v = _add_d_keys(k, v, d_k, d_v, qkv, out, sums, d_out, FULL * BLOCK, n, scale, H, D, TAIL)
    _store(d_qkv + at * row + H * D, d_k * scale, length - at, row, D, B)
    _store(d_qkv + at * row + 2 * H * D, d_v, length - at, row, D, B)


@triton.jit
def _add_d_keys(k, v, d_k, d_v, qkv, out, sums, d_out, at, n, scale, H, D: tl.constexpr, B: tl.constexpr):
    """What B queries from `at` on, of which n are there, add. Those that are not there have no d_out, and add zeros."""
    q = _load(qkv + at * (3 * H * D), n, 3 * H * D, D, B)
    d_o = _load(d_out + at * (H * D), n, H * D, D, B)
    o = _load(out + at * (H * D), n, H * D, D, B)
    places = tl.arange(0, B)
    lse = tl.load(sums + (at + places) * H, mask=places < n, other=0.0)
    delta = tl.sum(o.to(tl.float32) * d_o.to(tl.float32), 1)
    p = tl.exp2(tl.dot(k, tl.trans(q)) * (scale * 1.4426950408889634) - lse[None, :])
    d_v = tl.dot(p.to(d_o.dtype), d_o, d_v)
    d_s = p * (tl.dot(v, tl.trans(d_o)) - delta[None, :])
    return tl.dot(d_s.to(q.dtype), q, d_k), d_v


@triton.jit
def _d_queries(
    qkv,
    out,
    sums,
    d_out,
    d_qkv,
    at,
    length,
    scale,
    H,
    D: tl.constexpr,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
    TAIL: tl.constexpr,
):
    """The gradient of B queries from `at` on."""
    row = 3 * H * D
    places = tl.arange(0, B)
    q = _load(qkv + at * row, length - at, row, D, B)
    d_o = _load(d_out + at * H * D, length - at, H * D, D, B)
    o = _load(out + at * H * D, length - at, H * D, D, B)
    lse = tl.load(sums + (at + places) * H, mask=places < length - at, other=0.0)
    delta = tl.sum(o.to(tl.float32) * d_o.to(tl.float32), 1)
    d_q = tl.zeros([B, D], tl.float32)
    for j in tl.static_range(FULL):
        keys = qkv + j * BLOCK * row + H * D
        d_q = _add_d_queries(q, d_o, lse, delta, d_q, keys, BLOCK, scale, H, D, BLOCK)
    if TAIL > 0:
        keys, n = qkv + FULL * BLOCK * row + H * D, length - FULL * BLOCK
        d_q = _add_d_queries(q, d_o, lse, delta, d_q, keys, n, scale, H, D, TAIL)
    _store(d_qkv + at * row, d_q * scale, length - at, row, D, B)


@triton.jit
def _add_d_queries(q, d_o, lse, delta, d_q, keys, n, scale, H, D: tl.constexpr, B: tl.constexpr):
    """What B keys, of which n are there, add."""
    k = _load(keys, n, 3 * H * D, D, B)
    v = _load(keys + H * D, n, 3 * H * D, D, B)
    scores = tl.dot(q, tl.trans(k)) * (scale * 1.4426950408889634)
    p = tl.exp2(tl.where(tl.arange(0, B)[None, :] < n, scores - lse[:, None], -1e30))
    d_s = p * (tl.dot(d_o, tl.trans(v)) - delta[:, None])
    return tl.dot(d_s.to(k.dtype), k, d_q)
