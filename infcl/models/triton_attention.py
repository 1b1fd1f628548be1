"""Self-attention over few tokens: one tile of up to 128 tokens per sequence and head.

    out = softmax(q k^T / sqrt(d)) v        q|k|v, and also their gradient, are one tensor, as a projection returns it

cuDNN's kernel computes tiles of 128 x 128: 50 tokens as 128, 257 as 384, masked entries included. It returns the
gradients of q, k and v separately, and joining them takes a copy. Here one program computes a head of a sequence in the
smallest tile that holds it, so the cost of a caption follows its length. Scores and softmax stay on the chip, and the
backward recomputes the probabilities. triton_attention_blocks.py computes longer sequences in several blocks.

Matmul operands have the dtype of q|k|v; probabilities and the scores' gradient are rounded to it. Sums are float32.
There are no atomics, so results are bitwise reproducible.

Shapes: P token positions of m sequences, one after another, with or without gaps; h heads of width d, a power of two.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from infcl.kernels.triton_launch import LOG2E
from infcl.models.triton_attention_blocks import BLOCK, TAIL, blocks_backward, blocks_forward, load_rows, store_rows

TILES = (32, 64, 128)
LONGEST = TILES[-1]
_WARPS = {32: 2, 64: 4, 128: 4}


def attention_forward(qkv: Tensor, spans: Tensor | None, length: int, causal: bool) -> tuple[Tensor, Tensor]:
    """Compute attention.

    Args:
        qkv: [P, 3, h, d], contiguous.
        spans: int64 [m, 2], each sequence's first position and its number of tokens, at most `length`. None: the P
            positions are sequences of `length` tokens.
        length: tokens per sequence. Above LONGEST, 1 to TAIL tokens must follow the full blocks, `spans` must be None
            and `causal` False.
        causal: a token attends to itself and to earlier tokens only.

    Returns:
        out: [P, h, d], zero outside the spans.
        lse: f32 [P, h], which the backward needs above LONGEST; else empty.
    """
    positions, _, heads, width = qkv.shape
    if length > LONGEST:
        assert spans is None and not causal and 0 < length % BLOCK <= TAIL
        return blocks_forward(qkv, length)
    out = (qkv.new_empty if spans is None else qkv.new_zeros)(positions, heads, width)
    for grid, options in _launches(qkv, spans, length, causal):
        _forward[grid](qkv, out, spans, length, width**-0.5, heads, width, **options)
    return out, qkv.new_empty(0, dtype=torch.float32)


def attention_backward(
    d_out: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, spans: Tensor | None, length: int, causal: bool
) -> Tensor:
    """Compute the gradient of attention.

    Args:
        d_out: [P, h, d], contiguous.
        qkv, spans, length, causal: arguments of the forward.
        out, lse: results of the forward.

    Returns:
        d_qkv [P, 3, h, d], zero outside the spans.
    """
    if length > LONGEST:
        return blocks_backward(d_out, qkv, out, lse, length)
    d_qkv = torch.empty_like(qkv) if spans is None else torch.zeros_like(qkv)
    _, _, heads, width = qkv.shape
    for grid, options in _launches(qkv, spans, length, causal):
        _backward[grid](qkv, d_out, d_qkv, spans, length, width**-0.5, heads, width, **options)
    return d_qkv


def _launches(qkv: Tensor, spans: Tensor | None, length: int, causal: bool) -> list[tuple[tuple[int], dict]]:
    """Return (grid, options) of each launch: one for sequences of one length, one per tile size for spans.

    In the largest tile, a short sequence would occupy as much of a multiprocessor as a long one.
    """
    largest = next(tile for tile in TILES if tile >= length)
    count = qkv.shape[0] // length if spans is None else len(spans)
    tiles = [tile for tile in TILES if tile <= largest] if spans is not None else [largest]
    known = {"SPANS": spans is not None, "CAUSAL": causal}
    return [
        (
            (count * qkv.shape[2],),
            known | {"B": tile, "LEAST": 0 if tile == tiles[0] else tile // 2, "num_warps": _WARPS[tile]},
        )
        for tile in tiles
    ]


@triton.jit
def _span(spans, length, sequence, SPANS: tl.constexpr):
    """Return the first position and the number of tokens of a sequence."""
    if SPANS:
        first, n = tl.load(spans + 2 * sequence), tl.load(spans + 2 * sequence + 1).to(tl.int32)
    else:
        first, n = sequence.to(tl.int64) * length, length
    return first, n


@triton.jit
def _weights(q, k, n, scale, B: tl.constexpr, CAUSAL: tl.constexpr):
    """Return exp(scores - row maximum) and its row sums."""
    rows, columns = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    seen = columns < n
    if CAUSAL:
        seen = seen & (columns <= rows)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)  # to base 2
    scores = tl.where(seen, scores, -1e30)
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return weights, tl.sum(weights, 1)


@triton.jit
def _forward(
    qkv, out, spans, length, scale, H,
    D: tl.constexpr, B: tl.constexpr, LEAST: tl.constexpr, SPANS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Compute one sequence and head per program; skip sequences that do not have LEAST < n <= B tokens."""
    sequence, head = tl.program_id(0) // H, tl.program_id(0) % H
    first, n = _span(spans, length, sequence, SPANS)
    if (n > LEAST) & (n <= B):
        qkv += first * (3 * H * D) + head * D
        q = load_rows(qkv, n, 3 * H * D, D, B, False)
        k = load_rows(qkv + H * D, n, 3 * H * D, D, B, False)
        v = load_rows(qkv + 2 * H * D, n, 3 * H * D, D, B, False)
        weights, sums = _weights(q, k, n, scale, B, CAUSAL)
        result = tl.dot(weights.to(v.dtype), v, input_precision="ieee") / sums[:, None]
        store_rows(out + first * (H * D) + head * D, result, n, H * D, D, B)


@triton.jit
def _backward(
    qkv, d_out, d_qkv, spans, length, scale, H,
    D: tl.constexpr, B: tl.constexpr, LEAST: tl.constexpr, SPANS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one sequence and head per program, for the sequences of _forward."""
    sequence, head = tl.program_id(0) // H, tl.program_id(0) % H
    first, n = _span(spans, length, sequence, SPANS)
    if (n > LEAST) & (n <= B):
        qkv += first * (3 * H * D) + head * D
        d_qkv += first * (3 * H * D) + head * D
        q = load_rows(qkv, n, 3 * H * D, D, B, False)
        k = load_rows(qkv + H * D, n, 3 * H * D, D, B, False)
        v = load_rows(qkv + 2 * H * D, n, 3 * H * D, D, B, False)
        d_o = load_rows(d_out + first * (H * D) + head * D, n, H * D, D, B, False)
        weights, sums = _weights(q, k, n, scale, B, CAUSAL)
        p = weights * (1 / sums)[:, None]
        d_v = tl.dot(tl.trans(p.to(d_o.dtype)), d_o, input_precision="ieee")
        store_rows(d_qkv + 2 * H * D, d_v, n, 3 * H * D, D, B)
        d_p = tl.dot(d_o, tl.trans(v), input_precision="ieee")
        d_s = (p * (d_p - tl.sum(p * d_p, 1)[:, None]) * scale).to(q.dtype)
        store_rows(d_qkv, tl.dot(d_s, k, input_precision="ieee"), n, 3 * H * D, D, B)
        store_rows(d_qkv + H * D, tl.dot(tl.trans(d_s), q, input_precision="ieee"), n, 3 * H * D, D, B)
