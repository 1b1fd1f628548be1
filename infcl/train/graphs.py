"""--cuda-graphs: one launch per pass of a tower instead of hundreds.

A small tower leaves the GPU idle, because the host launches kernels more slowly than the GPU runs them. Here the host
launches a tower's forward, or its backward, as one graph:

    pass 1   forward graph without activations      -> features
    pass 2   forward graph, then backward graph     -> features; gradients of the parameters, which autograd accumulates

A graph reads and writes fixed addresses. Inputs are copied to it, features and gradients from it. The next forward of
the tower overwrites its activations, so none are cached between the passes (--resident-micro-batches 1). Parameters
keep their addresses in ZeRO 0 to 2. Hooks on their gradients run as without graphs, hooks inside a tower do not.

A graph is captured when a shape comes first: images have one, packed captions a few. Random numbers come from torch's
generator at each replay, so a restored random state repeats patch dropout exactly.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from infcl.models.clip import CLIP
from infcl.models.transformer import Transformer

MOST_PASSES = 32  # per tower; batches of further shapes run without a graph
_WARM_UPS = 2  # libraries allocate workspaces, Triton and Inductor compile


def graph_towers(model: CLIP) -> None:
    """Make both towers of a model on a GPU train by CUDA graphs. Call it when an engine has wrapped the model."""
    image = list(model.visual.modules())
    text = [module for module in model.modules() if module not in image]  # its parameters are at the top level
    model.graphs["text"] = GraphedTower(model.encode_text, model, text, model.transformer)
    model.graphs["image"] = GraphedTower(model.visual, model, image, model.visual.transformer)


class Pass:
    """The graphs of a tower for inputs of one shape, with the tensors that they read and write."""

    def __init__(self, inputs: list[Tensor]):
        self.inputs = inputs
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self.features: Tensor
        self.d_features: Tensor
        self.sums: list[Tensor] = []  # of the gradient at the blocks' input, [] f32; the last one is the graph's


class GraphedTower:
    """A tower's forward, inputs [m, ...] -> features [m, D], by graphs while the model trains.

    Args:
        encode: the forward.
        model: graphs are used in its training mode only.
        modules: hold the tower's parameters.
        blocks: the tower's blocks.
    """

    def __init__(self, encode: Callable[..., Tensor], model: CLIP, modules: list[nn.Module], blocks: Transformer):
        self.encode, self.model, self.blocks = encode, model, blocks
        self.places = [
            (module, name)
            for module in modules
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad and name not in ("logit_scale", "logit_bias")
        ]
        self.parameters = [getattr(module, name) for module, name in self.places]
        # One pass of the tower runs at a time, so its graphs share their memory.
        self.memory: dict[str, Any] = {"pool": torch.cuda.graph_pool_handle(), "stream": torch.cuda.Stream()}
        self.passes: dict[tuple[bool, tuple[torch.Size, ...]], Pass] = {}
        self.gradients = [torch.empty_like(parameter) for parameter in self.parameters]
        self.forwards = 0

    def __call__(self, *inputs: Tensor | None) -> Tensor:
        given = [tensor for tensor in inputs if tensor is not None]
        backward = torch.is_grad_enabled() and bool(self.places)
        key = (backward, tuple(tensor.shape for tensor in given))
        if not self.model.training or (key not in self.passes and len(self.passes) == MOST_PASSES):
            return self.encode(*given)
        if key not in self.passes:
            self.passes[key] = self._capture(given, backward=backward)
        found = self.passes[key]
        torch._foreach_copy_(found.inputs, given, non_blocking=True)
        return _Replay.apply(self, found, *self.parameters) if backward else self.replay(found)

    def replay(self, found: Pass) -> Tensor:
        self.forwards += 1
        found.forward.replay()
        return found.features.clone()

    def _capture(self, inputs: list[Tensor], *, backward: bool) -> Pass:
        """Capture the graphs of a pass. The random state stays."""
        state, found = torch.cuda.get_rng_state(), Pass([tensor.clone() for tensor in inputs])
        stream = self.memory["stream"]
        options = self.memory | {"capture_error_mode": "thread_local"}  # a loader pins memory in another thread
        with torch.set_grad_enabled(backward), self._apart(found) as parameters:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    features = self.encode(*found.inputs)
                    if backward:
                        torch.autograd.grad(features, parameters, torch.zeros_like(features))
                    del features
            torch.clear_autocast_cache()  # a graph rounds the weights at each replay
            with torch.cuda.graph(found.forward, **options):
                features = self.encode(*found.inputs)
            found.features = features.detach()
            if backward:
                found.d_features = torch.zeros_like(found.features)
                with torch.cuda.graph(found.backward, **options):
                    torch._foreach_copy_(self.gradients, torch.autograd.grad(features, parameters, found.d_features))
            torch.clear_autocast_cache()
        torch.cuda.set_rng_state(state)
        return found

    @contextmanager
    def _apart(self, found: Pass) -> Iterator[list[nn.Parameter]]:
        """Give the tower other parameters with the same memory, and `found` its sums, inside the context.

        A backward waits for the streams of its leaves. Those of the parameters may be the streams on which DeepSpeed
        has put hooks, and a capture must not wait for them.
        """
        others = [nn.Parameter(parameter.detach()) for parameter in self.parameters]
        for (module, name), other in zip(self.places, others):
            module._parameters[name] = other
        watch = self.blocks.on_input_gradient
        self.blocks.on_input_gradient = lambda gradient: found.sums.append(gradient.sum(dtype=torch.float32))
        try:
            yield others
        finally:
            self.blocks.on_input_gradient = watch
            for (module, name), parameter in zip(self.places, self.parameters):
                module._parameters[name] = parameter


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tower: GraphedTower, found: Pass, *parameters: nn.Parameter) -> Tensor:
        features = tower.replay(found)
        ctx.tower, ctx.found, ctx.number = tower, found, tower.forwards
        return features

    @staticmethod
    def backward(ctx: Any, d_features: Tensor) -> Any:
        tower, found = ctx.tower, ctx.found
        assert ctx.number == tower.forwards, "a later forward of the tower has overwritten the activations"
        found.d_features.copy_(d_features)
        found.backward.replay()
        if tower.blocks.on_input_gradient is not None and found.sums:
            tower.blocks.on_input_gradient(found.sums[-1])
        # The list keeps a reference to each gradient, so autograd copies it and does not take its memory for the sum.
        return None, None, *tower.gradients
