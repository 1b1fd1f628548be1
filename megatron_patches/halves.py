"""Towers that send one half of a micro-batch's sums while they compute the other half.

    attention of half 1 | attention of half 2 | MLP of half 1       | MLP of half 2       | attention of half 1 ...
                          half 1 on the wire    half 2 on the wire    half 1 on the wire    half 2 on the wire

A row layer starts its sum; what reads it waits for it. A piece, which torch.compile takes as one graph, is what lies
between: it waits for the sum of the piece before, adds it, and starts its own. In the backward a column layer's sum
goes beside the gradients of the piece's weights. It pays where the GPU is the limit, so with CUDA graphs
(infcl/train/graphs.py) or large micro-batches: there are twice as many products, of half the rows.

The blocks' own forwards are passed over, so none of this goes with ZeRO-3, activation checkpointing, sequence
parallelism or locked towers.

Shapes: m samples, L tokens, w width.
"""

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F

from infcl.towers.clip import CLIP
from infcl.towers.transformer import Linear, ResidualBlock, Transformer
from megatron_patches.linear import Sharing

_collectives = torch.ops._c10d_functional
_SENDS_EARLY: Any = {  # in the backward of a piece both weights' gradients come after its one sum has been started
    "reorder_for_peak_memory": False,
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["raise_comms"],
}
_VARIANTS = 64  # of a compiled piece: two towers, the first block, with and without gradient, batch sizes


class SendingLinear(Linear):
    """A row layer without its bias, whose result is on its way: nobody may read it before `_received` has it."""

    sharing: Sharing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sent.apply(F.linear(x, self.weight), self.sharing.group.group_name)


class HalvesTransformer(Transformer):
    """[m, L, w] -> [m, L, w]; an odd m goes whole."""

    attend: Callable
    feed: Callable

    def forward(self, x: torch.Tensor, begin: int = 0, end: int | None = None) -> torch.Tensor:
        if self.on_input_gradient is not None and x.requires_grad:
            x.register_hook(self.on_input_gradient)
        halves = list(x.chunk(2) if len(x) % 2 == 0 else [x])
        sums: list[torch.Tensor | None] = [None] * len(halves)
        bias: torch.Tensor | None = None
        block: Any
        for block in islice(self.resblocks, begin, end):
            for i, half in enumerate(halves):
                halves[i], sums[i] = self.attend(block, half, sums[i], bias)
            bias = block.attn.out_proj.bias
            for i, half in enumerate(halves):
                halves[i], sums[i] = self.feed(block, half, sums[i], bias)
            bias = block.mlp.c_proj.bias
        return torch.cat([_received(half, sums[i], bias) for i, half in enumerate(halves)])


def send_halves(model: CLIP, *, compiles: bool) -> None:
    """Let both towers of a model that `split_towers` has cut do so. ValueError for what it does not go with."""
    torch._dynamo.config.recompile_limit = max(_VARIANTS, torch._dynamo.config.recompile_limit)
    pieces = (
        [torch.compile(piece, dynamic=False, options=_SENDS_EARLY) for piece in (_attend, _feed)]
        if compiles
        else [_attend, _feed]
    )
    for transformer in (model.visual.transformer, model.transformer):
        if transformer.activation_checkpointing or transformer.first_trained or type(transformer) is not Transformer:
            raise ValueError("halves are for plain towers: no checkpointing, sequence parallelism or locked blocks")
        transformer.__class__ = HalvesTransformer
        halved: Any = transformer
        halved.attend, halved.feed = pieces
        for block in halved.resblocks:
            block.attn.out_proj.__class__ = block.mlp.c_proj.__class__ = SendingLinear


Pair = tuple[torch.Tensor, torch.Tensor]


def _attend(block: ResidualBlock, x: torch.Tensor, sent: torch.Tensor | None, bias: torch.Tensor | None) -> Pair:
    """(the residual stream with what was sent, attention's sum on its way)."""
    x = _received(x, sent, bias)
    return x, block.attn(block.ln_1(x))


def _feed(block: ResidualBlock, x: torch.Tensor, sent: torch.Tensor | None, bias: torch.Tensor | None) -> Pair:
    x = _received(x, sent, bias)
    return x, block.mlp(block.ln_2(x))


def _received(x: torch.Tensor, sent: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    if sent is None or bias is None:
        return x
    return x + (_Received.apply(sent) + bias.to(sent.dtype))


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, group_name):
        return _collectives.all_reduce(y.contiguous(), "sum", group_name)

    @staticmethod
    def backward(ctx, d_y):
        return d_y, None


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return _collectives.wait_tensor(y)

    @staticmethod
    def backward(ctx, d_y):
        return d_y
