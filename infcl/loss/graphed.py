"""Small batches on one GPU: the loss and its gradients recorded once as a CUDA graph, then replayed.

In: features [b, D] and scale. Out: the loss, whose backward multiplies gradients that the forward has already computed.

Below b = 8192 the GPU needs less time for a step (0.1 ms at b = 1024) than the host needs to issue it (1.6 ms, some 60
launches). A replay is one launch of the same kernels.

A graph has inputs and outputs of its own, so features are copied in and gradients copied out. It keeps its temporary
memory: b^2 operands of at most 2 bytes (128 MiB at b = 8192) and some 20 bytes a feature. KEPT graphs are kept. Shapes
are recorded when they come for the third time, so that passing ones cost nothing. What cannot be recorded is computed
as ever, with a warning that says why.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from infcl.kernels import Tile
from infcl.loss.operands import refuse_double_backward
from infcl.loss.ring import RingExchange

MAX_ROWS = 8192
KEPT = 2
_CALLS_BEFORE = 2

Inputs = tuple[Tensor, Tensor, Tensor]
Record = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, tuple[Tensor, Tensor, Tensor]]]

_log = logging.getLogger(__name__)
_calls: OrderedDict[Hashable, int] = OrderedDict()
_refused: set[Hashable] = set()  # shapes whose recording failed
_kept: OrderedDict[Hashable, "Recorded"] = OrderedDict()


class Recorded:
    """The graph of `record(*inputs)`, and where it reads and writes."""

    def __init__(self, record: Record, inputs: Inputs):
        self.inputs = [x.detach().clone() for x in inputs]
        self.graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.autocast("cuda", enabled=False):
            with torch.cuda.stream(side):  # libraries take memory of their own at their first call on a stream
                record(*self.inputs)
            torch.cuda.current_stream().wait_stream(side)
            # thread_local: other threads, such as NCCL's watchdog, may go on using the GPU.
            with torch.cuda.graph(self.graph, stream=side, capture_error_mode="thread_local"):
                loss, gradients = record(*self.inputs)
                self.results = torch.cat([x.flatten().float() for x in (*gradients, loss)])


def worthwhile(inputs: Inputs, ring: RingExchange, tile: Tile, workspace_bytes: int) -> bool:
    """Whether a replay would save time and nothing stands against it: one GPU alone, few rows, a gradient wanted."""
    rows = len(inputs[0])
    return (
        inputs[0].is_cuda
        and tile.name == "triton"
        and rows <= MAX_ROWS
        and rows**2 * tile.operand_dtype.itemsize <= workspace_bytes
        and ring.world_size == 1
        and torch.is_grad_enabled()
        and any(x.requires_grad for x in inputs)
        and not torch.cuda.is_current_stream_capturing()
    )


def find(record: Record, inputs: Inputs, options: Hashable) -> Recorded | None:
    """The graph for inputs of these shapes, recorded now if they come for the third time; None before, or if it fails.

    `options`: what else distinguishes `record` from another of the same shapes.
    """
    features = inputs[0]
    key = (features.shape, features.dtype, torch.cuda.current_stream(features.device), options)
    if key in _refused:
        return None
    if key not in _kept:
        _calls[key] = _calls.pop(key, 0) + 1
        while len(_calls) > 16:
            _calls.popitem(last=False)
        if _calls[key] <= _CALLS_BEFORE:
            return None
        while len(_kept) >= KEPT:
            _kept.popitem(last=False)
        try:
            _kept[key] = Recorded(record, inputs)
        except RuntimeError as error:  # out of memory, or something on this thread that a capture does not allow
            _refused.add(key)
            cause = (str(error).strip().splitlines() or [""])[0]
            _log.warning("the loss of %d rows is not recorded as a CUDA graph: %s", len(features), cause)
            return None
    _kept.move_to_end(key)
    return _kept[key]


def replay(recorded: Recorded, inputs: Inputs) -> Tensor:
    """The loss of the inputs, differentiable once."""
    return _Replay.apply(*inputs, recorded)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, image_features, text_features, scale, recorded):
        torch._foreach_copy_(recorded.inputs, [image_features, text_features, scale])
        recorded.graph.replay()
        results = recorded.results.clone()
        ctx.save_for_backward(results)
        ctx.shape, ctx.dtypes = image_features.shape, (image_features.dtype, text_features.dtype, scale.dtype)
        return results[-1].clone()

    @staticmethod
    def backward(ctx, d_loss):
        refuse_double_backward("inf_cl")
        (results,) = ctx.saved_tensors
        size = ctx.shape.numel()
        parts = (results[:size].view(ctx.shape), results[size : 2 * size].view(ctx.shape), results[2 * size])
        # Not in place: with retain_graph another backward pass may read them again.
        return *(torch.mul(g, d_loss, out=torch.empty_like(g, dtype=t)) for g, t in zip(parts, ctx.dtypes)), None
