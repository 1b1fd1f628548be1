"""CUDA graphs of whole towers: one launch instead of thousands, where the host issues blocks slower than they run.

    forward    x -> the static input, replay, a copy of the static output
    backward   d y -> its static place, replay, copies of the static gradients

The graphs are recorded at a tower's first training forward, forward and backward together, from a shadow of the tower:
the same modules around parameters that share the real ones' memory. So what hangs on the real parameters (DeepSpeed's
hooks, gradients that tensor-parallel ranks add up) runs as ever, on the copied gradients.

A tower's activations have one place: while a forward waits for its backward, others run without a graph. So do
evaluation, other shapes than that of the first forward, and parts of a tower. Not for ZeRO-3, whose parameters come
and go. Reserved between steps: one micro-batch's activations, and the gradients of the towers once more.
"""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from infcl.towers.clip import CLIP
from infcl.towers.transformer import Transformer

_WARM_UPS = 3  # what is compiled, opened and allocated once is there before anything is recorded


def graph_towers(model: CLIP, recorder: Callable[[], Any] | None = None) -> None:
    """Replay both towers' blocks in training. To be called when the engine has placed the parameters.

    recorder() -> an object with `warm_up` and `record` of CudaGraphs; None: that.
    """
    for transformer in (model.visual.transformer, model.transformer):
        transformer.forward = GraphedTower(transformer, recorder or CudaGraphs)  # type: ignore[method-assign]  # hooks stay around it


class GraphedTower:
    """A transformer's forward, x [m, L, w] -> [m, L, w], replayed where that can be."""

    def __init__(self, transformer: Transformer, recorder: Callable[[], Any]):
        self.transformer, self.eager, self.recorder = transformer, transformer.forward, recorder
        self.shadow = _shadow(transformer)
        self.parameters = [p for p in transformer.parameters() if p.requires_grad]
        self.addresses = [p.data_ptr() for p in self.parameters]
        self.key: tuple | None = None
        self.recorded: _Recorded | None = None

    def __call__(self, x: torch.Tensor, begin: int = 0, end: int | None = None) -> torch.Tensor:
        if begin or end is not None or not self._trains():
            return self.eager(x, begin, end)
        device = x.device.type
        key = (x.shape, x.dtype, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        if self.recorded is None:
            self.key, self.recorded = key, _Recorded(self.shadow, x, self.recorder())
        if key != self.key or self.recorded.is_waiting():
            return self.eager(x)
        if torch.is_grad_enabled():
            if self.transformer.on_input_gradient is not None and x.requires_grad:
                x.register_hook(self.transformer.on_input_gradient)
            return _Replay.apply(self.recorded, x, *self.parameters)
        return self.recorded.forward(x)

    def _trains(self) -> bool:
        in_place = self.addresses == [p.data_ptr() for p in self.parameters]
        return self.transformer.training and bool(self.parameters) and in_place


class _Recorded:
    """Two graphs and the places that they read and write."""

    def __init__(self, shadow: Transformer, x: torch.Tensor, recorder: Any):
        device = x.device.type
        dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        parameters = [p for p in shadow.parameters() if p.requires_grad]
        self.x = x.detach().clone().requires_grad_()
        self.waiting: Callable[[], Any] = lambda: None
        alive: list[torch.Tensor] = []

        def forward() -> list[torch.Tensor]:
            with torch.enable_grad(), torch.autocast(device, dtype, enabled, cache_enabled=False):
                alive[:] = [shadow(self.x)]
            return [alive[0].detach()]

        def backward() -> list[torch.Tensor | None]:
            return list(torch.autograd.grad(alive, [self.x, *parameters], [self.d_y], allow_unused=True))

        def both() -> None:
            self.d_y = torch.zeros_like(forward()[0])
            backward()

        recorder.warm_up(both)
        [self.y], self.replay_forward = recorder.record(forward)
        (self.d_x, *self.d_parameters), self.replay_backward = recorder.record(backward)
        if recorder.keeps_nothing:
            alive.clear()

    def is_waiting(self) -> bool:
        """Whether the activations of a forward are needed for its backward, which can still come."""
        return self.waiting() is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.x.copy_(x)
            self.replay_forward()
            return self.y.clone()

    def backward(self, d_y: torch.Tensor) -> list[torch.Tensor | None]:
        self.d_y.copy_(d_y)
        self.replay_backward()
        # A parameter's first gradient becomes its `grad` as it is: it must not be what the next replay writes.
        return [None if d is None else d.clone() for d in (self.d_x, *self.d_parameters)]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, recorded, x, *parameters):
        ctx.recorded, ctx.token = recorded, _Token()
        recorded.waiting = weakref.ref(ctx.token)
        return recorded.forward(x)

    @staticmethod
    def backward(ctx, d_y):
        if ctx.recorded.waiting() is not ctx.token:
            raise RuntimeError("the activations of this forward are overwritten: it has been sent backward before")
        gradients = ctx.recorded.backward(d_y)
        ctx.recorded.waiting = lambda: None
        return None, *gradients


class _Token:
    """Lives as long as a forward can be sent backward."""


class CudaGraphs:
    """Records what runs on the current GPU; the graphs of one object share their memory."""

    keeps_nothing = True  # a replay needs no Python object of what was recorded

    def __init__(self):
        self.pool = None

    def warm_up(self, function: Callable[[], Any]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                function()
        torch.cuda.current_stream().wait_stream(stream)

    def record(self, function: Callable[[], list]) -> tuple[list, Callable[[], None]]:
        """What `function` returned, and what computes it again into the same places."""
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's watchdog, autograd's) may do meanwhile what this one must not.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            outputs = function()
        self.pool = graph.pool()
        return outputs, graph.replay


def bytes_of_graphs() -> int:
    """Memory of this process's GPU that graphs keep for what they compute, which torch does not count as allocated."""
    segments = (s for s in torch.cuda.memory_snapshot() if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0))
    return sum(segment["total_size"] - segment["allocated_size"] for segment in segments)


def _shadow(transformer: Transformer) -> Transformer:
    """A copy whose parameters share the memory of the real ones and nothing else: no hooks, no gradients."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in transformer.parameters()
    }
    return copy.deepcopy(transformer, memo)
