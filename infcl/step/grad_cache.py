"""One step of the gradient cache: the loss of a global batch whose activations never exist all at once.

    encode         pass 1: every micro-batch through the towers without a graph -> features of the rank's batch
    feature_grads  one loss over the features of all ranks -> d loss / d features, d loss / d scalars
    replay         pass 2: each micro-batch again with a graph -> backward of the surrogate
                       sum of <features, their gradient> + sum of <scalar, its gradient> / M
                   whose gradient is the loss's gradient (chain rule; GradCache, Gao et al. 2021)

The last R micro-batches ("resident": cached activations) keep their graphs from pass 1 and are replayed first, latest
first. M micro-batches cost 2 M - R encodings. R = 1 costs no memory, because a replay holds one micro-batch's graph
anyway. R = M is a step without a cache.

The random state (patch dropout, dropout) is saved before a micro-batch's first encoding and restored before its second,
so pass 2 repeats pass 1 exactly. A frozen tower is encoded once: a micro-batch may lack its inputs in pass 2.

Gradient scaling: the mean over ranks of the loss's gradients must be the exact gradient of the global loss. The
surrogate then needs no factor under wrappers that average over ranks: DDP, FSDP, ZeRO, Megatron.

Shapes: m rows per micro-batch, M micro-batches, b = M m rows per rank, D embedding width.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Features = dict[str, torch.Tensor]  # [m, D] float features by name; scalars [1]
RandomState = tuple[torch.Tensor, torch.Tensor | None]


class MicroBatches(Protocol):
    """The micro-batches of a step: a list, or a sequence that loads them on access (batches.StepBatches)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


@dataclass
class StepOutput:
    """Results of a step. Tensors stay on the device, so the host does not wait."""

    loss: torch.Tensor  # [] f32, this rank's share; the mean over ranks is the global loss
    scalars: Features  # inputs of the loss, before the update
    finite_rows: dict[str, torch.Tensor]  # [b] bool per feature tensor: whether the row is finite
    replayed: list[int]  # indices of the micro-batches in the order of their backwards

    @property
    def logit_scale(self) -> torch.Tensor:
        """[1] f32, log-space."""
        return self.scalars["logit_scale"]


def cached_step(
    micro_batches: MicroBatches,
    *,
    encode: Callable[..., Features],
    loss: Callable[[Features], torch.Tensor],
    backward: Callable[[torch.Tensor, bool], object],
    seeds: Sequence[int] | None = None,
    scalar_values: Callable[[Features], Features] | None = None,
    on_phase: Callable[[str], None] = lambda phase: None,
    resident: int = 1,
    randomness: tuple[Callable[[], Any], Callable[[Any], None]] | None = None,
) -> StepOutput:
    """Encode, compute the loss once, replay. `backward` accumulates the gradients.

    Args:
        micro_batches: M micro-batches, accessed by index: 0 ... M - 1, then 0 ... M - R - 1.
        encode: called with a micro-batch as `call` does; returns Features, with the same names for every micro-batch.
            Tensors of two or more dimensions have a row per sample, the others are scalars. In pass 2, features without
            a gradient may be missing.
        loss: features of the rank's batch and scalars -> [] f32, scaled as the module docstring says.
        backward: called as backward(surrogate, is_last), exactly once per encoding with a graph.
        seeds: one per micro-batch, set before its first encoding; None: the encodings continue the random state.
        scalar_values: scalars -> FP32 master values, for a model whose parameters are rounded copies (bf16, fp16). The
            loss uses the master values; gradients flow through the copies.
        on_phase: called with "encode", "loss" and "replay" when that phase begins.
        resident: R, the number of micro-batches that keep their graphs from pass 1; M or more means all.
        randomness: functions that save and restore the random state; None: those of torch's generators.

    Returns:
        Loss, scalars, finite rows and replay order. The random state is then that after pass 1.

    Raises:
        ValueError: the number of seeds is not M.
    """
    num_micro_batches = len(micro_batches)
    if seeds is not None and len(seeds) != num_micro_batches:
        raise ValueError(f"{len(seeds)} seeds for {num_micro_batches} micro-batches")
    num_cached = max(0, num_micro_batches - max(1, resident))
    save, restore = randomness or (random_state, set_random_state)
    states: dict[int, Any] = {}  # before the first encoding of each micro-batch

    def encode_at(index: int) -> Features:
        micro_batch = micro_batches[index]
        if index in states:
            restore(states[index])
        else:
            if seeds is not None:
                torch.manual_seed(seeds[index])  # all devices
            states[index] = save()
        return call(encode, micro_batch)

    on_phase("encode")
    with torch.no_grad():
        outputs = [encode_at(index) for index in range(num_cached)]
    graphs = [encode_at(index) for index in range(num_cached, num_micro_batches)]
    outputs += graphs
    after = save()

    on_phase("loss")
    sides = [name for name, value in outputs[-1].items() if value.ndim > 1]
    scalars = {name: value.detach() for name, value in outputs[-1].items() if value.ndim <= 1}
    if scalar_values is not None:
        scalars = scalar_values(scalars)
    features = {name: _joined(outputs, name) for name in sides}  # [b, D], [t b, D]
    sizes = {name: [len(output[name]) for output in outputs] for name in sides}
    del outputs  # at a million rows per rank a copy of the features takes gigabytes
    loss_value, grads = _feature_grads(loss, features, scalars)
    finite_rows = {name: value.isfinite().all(dim=1) for name, value in features.items()}
    del features

    on_phase("replay")
    rows = {name: grads.pop(name).split(sizes[name]) for name in sides}
    order = [*reversed(range(num_cached, num_micro_batches)), *range(num_cached)]
    for index in order:
        output = graphs.pop() if graphs else encode_at(index)
        surrogate: Any = sum((output[name] * rows[name][index]).sum() for name in sides if name in output)
        surrogate = surrogate + sum((output[name] * (grad / num_micro_batches)).sum() for name, grad in grads.items())
        del output
        backward(surrogate, index == order[-1])
    restore(after)
    return StepOutput(loss_value, scalars, finite_rows, order)


def call(function: Callable[..., Any], given: Any) -> Any:
    """Call a function with a micro-batch: function(**m) for a mapping, function(*m) for a tuple, else function(m)."""
    if isinstance(given, Mapping):
        return function(**given)
    return function(*given) if isinstance(given, tuple) else function(given)


def by_name(loss: Callable[..., torch.Tensor]) -> Callable[[Features], torch.Tensor]:
    """Return a loss of the outputs of infcl.models.CLIP.

    Args:
        loss: (image_features [b, D], text_features [t b, D], scale [1], bias [1] or None) -> [] f32. The t texts of an
            image are adjacent.
    """
    return lambda given: loss(
        given["image_features"], given["text_features"], given["logit_scale"].exp(), given.get("logit_bias")
    )


def random_state() -> RandomState:
    """Return torch's random states of the CPU and of this process's GPU (None before CUDA is initialised)."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def set_random_state(state: RandomState) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])


def _joined(outputs: Sequence[Features], name: str) -> torch.Tensor:
    return torch.cat([output[name].detach() for output in outputs])


def _feature_grads(
    loss: Callable[[Features], torch.Tensor], features: Features, scalars: Features
) -> tuple[torch.Tensor, Features]:
    """Return the loss of the global batch and its gradients, f32 or wider: [b, D] per side, [1] per scalar.

    If the loss is not finite, the scalars' gradients are NaN. The norm of all gradients is then not finite either, and
    the trainer skips the step.
    """
    leaves = {
        name: value.detach().to(torch.promote_types(value.dtype, torch.float32)).requires_grad_()
        for name, value in (features | scalars).items()
    }
    with torch.enable_grad():
        value = loss(leaves)
        gradients = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
    grads = dict(zip(leaves, gradients))
    return value.detach(), grads | {name: grads[name] + 0 * value.detach() for name in scalars}
