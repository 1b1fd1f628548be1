"""CUDA graphs of the towers: one launch per pass of a tower, instead of hundreds.

A small tower on small micro-batches leaves the GPU idle: the host launches kernels more slowly than the GPU runs them.
Here the host launches a tower's forward, or its backward, as one graph:

    pass 1   forward graph without activations      -> features
    pass 2   forward graph, then backward graph     -> features; gradients of the parameters, which autograd accumulates

A graph reads and writes fixed addresses. Inputs are copied to it, features from it. Its activations are overwritten by
the next forward of the tower, so there can be no cached activations (--resident-micro-batches 1). The parameters keep
their addresses in ZeRO 0 to 2. Hooks of the parameters' gradients run as without graphs, those inside a tower do not.

A graph is captured when a shape comes first: images have one, packed captions a few. Random numbers come from torch's
generator at each replay, so a saved random state repeats dropout exactly.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from infcl.models.clip import CLIP
from infcl.models.transformer import Transformer

MOST_PASSES = 32  # per tower; batches of further shapes run without a graph
_WARM_UPS = 2  # libraries allocate workspaces, Triton and Inductor compile

Place = tuple[nn.Module, str]  # owner and name of a parameter


def graph_towers(model: CLIP) -> None:
    """Make both towers of a model on a GPU train by CUDA graphs. Call it after the blocks are compiled."""
    visual: Any = model.visual
    text: Any = model  # the text tower's parameters are at the top level
    owners = set(model.modules()) - set(visual.modules())
    own = [(owner, name) for owner, name in _places(owners) if not name.startswith("logit_")]
    text.encode_text = GraphedTower(model.encode_text, model, own, model.transformer)
    visual.forward = GraphedTower(visual.forward, model, _places(visual.modules()), visual.transformer)


def _places(owners: Iterable[nn.Module]) -> list[Place]:
    return [(owner, name) for owner in owners for name, _ in owner.named_parameters(recurse=False)]


class GraphedTower:
    """A tower's forward, inputs [m, ...] -> features [m, D], by graphs while the model trains.

    Args:
        encode: the forward.
        model: graphs are used in its training mode only.
        places: the tower's parameters.
        blocks: the tower's blocks.
    """

    def __init__(self, encode: Callable[..., Tensor], model: nn.Module, places: list[Place], blocks: Transformer):
        self.encode, self.model, self.blocks = encode, model, blocks
        self.places = [(owner, name) for owner, name in places if getattr(owner, name).requires_grad]
        self.parameters: list[nn.Parameter] = [getattr(owner, name) for owner, name in self.places]
        self.memory: dict[str, Any] = {}  # shared by the graphs, since one pass of the tower runs at a time
        self.passes: dict[tuple[bool, tuple[torch.Size, ...]], Pass] = {}
        self.gradients = [torch.empty(0)] * 0  # of the parameters, at fixed addresses
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
        for fixed, tensor in zip(found.inputs, given):
            fixed.copy_(tensor, non_blocking=True)
        return _Replay.apply(self, found, *self.parameters) if backward else self.replay(found)

    def replay(self, found: "Pass") -> Tensor:
        self.forwards += 1
        found.forward.replay()
        return found.features.clone()

    def _capture(self, given: list[Tensor], *, backward: bool) -> "Pass":
        """Capture the graphs of a pass. The random state stays."""
        state, found = torch.cuda.get_rng_state(), Pass([tensor.clone() for tensor in given])
        self.memory = self.memory or {"pool": torch.cuda.graph_pool_handle(), "stream": torch.cuda.Stream()}
        stream = self.memory["stream"]
        options = self.memory | {"capture_error_mode": "thread_local"}  # a loader pins memory in another thread
        stream.wait_stream(torch.cuda.current_stream())
        with torch.set_grad_enabled(backward), self._aliases() as parameters, self._watched(found):
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    features = self.encode(*found.inputs)
                    if backward:
                        gradients = torch.autograd.grad(features, parameters, torch.zeros_like(features))
                        self.gradients = self.gradients or [torch.empty_like(gradient) for gradient in gradients]
                        del gradients
                    del features
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.clear_autocast_cache()  # a graph rounds the weights at each replay
            with torch.cuda.graph(found.forward, **options):
                features = self.encode(*found.inputs)
            found.features = features.detach()
            if backward:
                found.d_features = torch.zeros_like(found.features)
                with torch.cuda.graph(found.backward, **options):
                    gradients = torch.autograd.grad(features, parameters, found.d_features)
                    torch._foreach_copy_(self.gradients, gradients)
                    del gradients
            del features
            torch.clear_autocast_cache()
        torch.cuda.set_rng_state(state)
        return found

    @contextmanager
    def _aliases(self) -> Iterator[list[nn.Parameter]]:
        """Replace the parameters by others with the same memory, inside the context.

        A backward waits for the streams of its leaves. Those of the parameters may be the streams on which DeepSpeed
        has put hooks, and a capture must not wait for them.
        """
        aliases = [nn.Parameter(parameter.detach()) for parameter in self.parameters]
        for (owner, name), alias in zip(self.places, aliases):
            owner._parameters[name] = alias
        try:
            yield aliases
        finally:
            for (owner, name), parameter in zip(self.places, self.parameters):
                owner._parameters[name] = parameter

    @contextmanager
    def _watched(self, found: "Pass") -> Iterator[None]:
        """Make the graph write the sum that `on_input_gradient` takes, so that it can be called after each replay."""
        watch, self.blocks.on_input_gradient = self.blocks.on_input_gradient, None
        if watch is not None:
            self.blocks.on_input_gradient = lambda gradient: found.input_gradients.append(gradient.sum())
        try:
            yield
        finally:
            self.blocks.on_input_gradient = found.watch = watch


class Pass:
    """The graphs of a tower for inputs of one shape, with the tensors that they read and write."""

    def __init__(self, inputs: list[Tensor]):
        self.inputs = inputs
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self.features: Tensor
        self.d_features: Tensor
        self.input_gradients: list[Tensor] = []  # the last one is the graph's
        self.watch: Callable[[Tensor], None] | None = None


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
        if found.watch is not None and found.input_gradients:
            found.watch(found.input_gradients[-1])
        # The list keeps a reference to each gradient, so autograd copies it and does not take its memory for the sum.
        return None, None, *tower.gradients
