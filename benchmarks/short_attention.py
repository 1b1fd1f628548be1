"""Attention over at most 128 tokens as one tile: a draft, for benchmarks.attention.

One program computes a head of a sequence whole: scores, softmax and result stay on the chip, and the backward makes the
probabilities again, so nothing is kept but q|k|v. cuDNN's kernel computes 50 tokens as 128, and rows of packed captions
with all that a mask then hides; here a caption of 20 is computed as 32, wherever in its row it lies.

Shapes: P places (of m sequences, one behind the other, with gaps or none), h heads of width d (a power of two).
"""

import torch
import triton
import triton.language as tl

_TILES = (32, 64, 128)
LONGEST = _TILES[-1]


class ShortAttention(torch.autograd.Function):
    """qkv [P, 3, h, d], starts int64 [m], lengths int64 [m] -> [P, h, d]; zeros where no sequence is. Of each sequence

        q, k, v = qkv[start : start + length].permute(1, 2, 0, 3)
        out[start : start + length] = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(0, 1)

    longest: no length is above it. ValueError where it is above 128, or d is no power of two from 16 on.
    """

    @staticmethod
    def forward(ctx, qkv, starts, lengths, longest: int, causal: bool):
        width = qkv.shape[-1]
        if longest > LONGEST:
            raise ValueError(f"sequences of {longest} tokens: one tile has {LONGEST}")
        if width < 16 or width & (width - 1):
            raise ValueError(f"heads of {width}: a tile has a power of two from 16 on")
        out = qkv.new_zeros(qkv.shape[0], *qkv.shape[2:])
        ctx.save_for_backward(qkv, starts, lengths)
        ctx.options = _options(qkv, longest, causal)
        _forward[(len(starts) * qkv.shape[2],)](qkv, out, starts, lengths, **ctx.options)
        return out

    @staticmethod
    def backward(ctx, d_out):
        qkv, starts, lengths = ctx.saved_tensors
        d_qkv = torch.zeros_like(qkv)
        grid = (len(starts) * qkv.shape[2],)
        _backward[grid](qkv, d_out.contiguous(), d_qkv, starts, lengths, **ctx.options)
        return d_qkv, None, None, None, None


def _options(qkv: torch.Tensor, longest: int, causal: bool) -> dict:
    """LARGEST: of the tiles, of which each program takes the smallest that holds its sequence."""
    _, _, heads, width = qkv.shape
    largest = next(size for size in _TILES if size >= longest)
    return {"scale": width**-0.5, "H": heads, "D": width, "LARGEST": largest, "CAUSAL": causal, "num_warps": 4}


@triton.jit
def _tile(base, n, stride, D: tl.constexpr, B: tl.constexpr):
    rows, columns = tl.arange(0, B)[:, None], tl.arange(0, D)[None, :]
    return tl.load(base + rows * stride + columns, mask=rows < n, other=0.0)


@triton.jit
def _put(base, values, n, stride, D: tl.constexpr, B: tl.constexpr):
    rows, columns = tl.arange(0, B)[:, None], tl.arange(0, D)[None, :]
    tl.store(base + rows * stride + columns, values.to(base.dtype.element_ty), mask=rows < n)


@triton.jit
def _probabilities(q, k, n, scale, B: tl.constexpr, CAUSAL: tl.constexpr):
    rows, columns = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    seen = columns < n
    if CAUSAL:
        seen = seen & (columns <= rows)
    scores = tl.where(seen, tl.dot(q, tl.trans(k)) * (scale * 1.4426950408889634), -1e30)  # base 2
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return weights / tl.sum(weights, 1)[:, None]


@triton.jit
def _forward_tile(qkv, out, n, scale, H: tl.constexpr, D: tl.constexpr, B: tl.constexpr, CAUSAL: tl.constexpr):
    q = _tile(qkv, n, 3 * H * D, D, B)
    k = _tile(qkv + H * D, n, 3 * H * D, D, B)
    v = _tile(qkv + 2 * H * D, n, 3 * H * D, D, B)
    p = _probabilities(q, k, n, scale, B, CAUSAL)
    _put(out, tl.dot(p.to(v.dtype), v), n, H * D, D, B)


@triton.jit
def _backward_tile(
    qkv, d_out, d_qkv, n, scale, H: tl.constexpr, D: tl.constexpr, B: tl.constexpr, CAUSAL: tl.constexpr
):
    q = _tile(qkv, n, 3 * H * D, D, B)
    k = _tile(qkv + H * D, n, 3 * H * D, D, B)
    v = _tile(qkv + 2 * H * D, n, 3 * H * D, D, B)
    d_o = _tile(d_out, n, H * D, D, B)
    p = _probabilities(q, k, n, scale, B, CAUSAL)
    _put(d_qkv + 2 * H * D, tl.dot(tl.trans(p.to(d_o.dtype)), d_o), n, 3 * H * D, D, B)
    d_p = tl.dot(d_o, tl.trans(v))
    d_s = (p * (d_p - tl.sum(p * d_p, 1)[:, None]) * scale).to(q.dtype)
    _put(d_qkv, tl.dot(d_s, k), n, 3 * H * D, D, B)
    _put(d_qkv + H * D, tl.dot(tl.trans(d_s), q), n, 3 * H * D, D, B)


# Both: qkv [P, 3, H, D], starts and lengths int64 [m] are read, one program for each of m H; a length above LARGEST
# is left out.


@triton.jit
def _forward(
    qkv, out, starts, lengths, scale, H: tl.constexpr, D: tl.constexpr, LARGEST: tl.constexpr, CAUSAL: tl.constexpr
):
    """out [P, H, D] is written."""
    sequence, head = tl.program_id(0) // H, tl.program_id(0) % H
    n, first = tl.load(lengths + sequence), tl.load(starts + sequence)
    qkv += first * (3 * H * D) + head * D
    out += first * (H * D) + head * D
    if n <= 32:
        _forward_tile(qkv, out, n, scale, H, D, 32, CAUSAL)
    elif n <= 64:
        if LARGEST >= 64:
            _forward_tile(qkv, out, n, scale, H, D, 64, CAUSAL)
    else:
        if LARGEST >= 128:
            _forward_tile(qkv, out, n, scale, H, D, 128, CAUSAL)


@triton.jit
def _backward(
    qkv,
    d_out,
    d_qkv,
    starts,
    lengths,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    LARGEST: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """d_out [P, H, D] is read, d_qkv as qkv is written."""
    sequence, head = tl.program_id(0) // H, tl.program_id(0) % H
    n, first = tl.load(lengths + sequence), tl.load(starts + sequence)
    qkv += first * (3 * H * D) + head * D
    d_qkv += first * (3 * H * D) + head * D
    d_out += first * (H * D) + head * D
    if n <= 32:
        _backward_tile(qkv, d_out, d_qkv, n, scale, H, D, 32, CAUSAL)
    elif n <= 64:
        if LARGEST >= 64:
            _backward_tile(qkv, d_out, d_qkv, n, scale, H, D, 64, CAUSAL)
    else:
        if LARGEST >= 128:
            _backward_tile(qkv, d_out, d_qkv, n, scale, H, D, 128, CAUSAL)
