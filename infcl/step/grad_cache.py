"""One step of the gradient cache: the loss of a global batch whose activations never exist at once.

    encode         pass 1: every micro-batch through the towers without a graph -> features of the rank's whole batch
    feature_grads  the loss once, over the features of all ranks -> d loss / d features, d loss / d scalars
    replay         pass 2: each micro-batch again with a graph -> backward of the surrogate
                       sum of <features, their gradient> + sum of <scalar, its gradient> / M
                   whose gradient is the loss's (chain rule; GradCache, Gao et al. 2021)

The last R micro-batches ("resident") keep their graphs from pass 1 and are replayed first, latest first: M of them
cost 2 M - R encodings. R = 1 costs no memory, since a replay holds one micro-batch's graph anyway; R = M is a step
without a cache.

Randomness (patch dropout, dropout) is set per micro-batch before each encoding, so pass 2 repeats pass 1 exactly.
A tower that is frozen is encoded once: `encode_again` does what has a gradient, from what pass 1 kept of the rest.

The loss obeys law 1 (the mean over ranks of their gradients is the exact gradient), so the surrogate needs no factor
under anything that averages over ranks: DDP, FSDP, ZeRO, Megatron.

Shapes: m rows per micro-batch, M micro-batches, b = M m rows per rank, D embedding width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

Features = dict[str, torch.Tensor]  # [m, D] float features by name; scalars [1]; kept trunks "..._trunk" [m, ...]


class MicroBatches(Protocol):
    """A step's: a list, or what makes them when they are asked for (offload.PixelCache)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


@dataclass
class StepOutput:
    """Results of a step; tensors stay on the device, nothing here waits for it."""

    loss: torch.Tensor  # [] f32, this rank's share; the mean over ranks is the global loss
    scalars: Features  # as the loss saw them, before the update
    finite_rows: dict[str, torch.Tensor]  # of each of the features: [b] bool
    replayed: list[int]  # the micro-batches in the order of their backwards

    @property
    def logit_scale(self) -> torch.Tensor:
        """[1] f32, log-space."""
        return self.scalars["logit_scale"]


def grad_cache_step(
    micro_batches: MicroBatches,
    *,
    encode: Callable[[Any], Features],
    loss: Callable[..., torch.Tensor],
    seeds: Sequence[int],
    **options: Any,
) -> StepOutput:
    """`cached_step` of a model with the outputs of infcl.models.CLIP, each micro-batch under a seed.

    encode   micro-batch -> image_features and text_features [m, D] f32, logit_scale [1], maybe logit_bias [1], maybe
             "..._trunk" [m, ...]: through the engine, in train mode
    loss     (image_features [b, D], text_features [t b, D], scale [1], bias [1] or None) -> [] f32, obeying law 1;
             t texts of each image, which are neighbours
    seeds    one per micro-batch
    options  those of `cached_step`
    """
    if len(seeds) != len(micro_batches):
        raise ValueError(f"{len(seeds)} seeds for {len(micro_batches)} micro-batches")
    return cached_step(
        micro_batches,
        encode=encode,
        loss=lambda given: loss(
            given["image_features"], given["text_features"], given["logit_scale"].exp(), given.get("logit_bias")
        ),
        before_encode=lambda index: torch.manual_seed(seeds[index]),  # all devices
        **options,
    )


def cached_step(
    micro_batches: MicroBatches,
    *,
    encode: Callable[[Any], Features],
    loss: Callable[[Features], torch.Tensor],
    backward: Callable[[torch.Tensor, bool], object],
    before_encode: Callable[[int], object],
    scalar_values: Callable[[Features], Features] | None = None,
    on_phase: Callable[[str], None] = lambda phase: None,
    resident: int = 1,
    encode_again: Callable[..., Features] | None = None,
) -> StepOutput:
    """Encode, take the loss once, replay. Gradients end up where `backward` puts them.

    micro_batches    M of them, asked for by index: 0 ... M - 1, then 0 ... M - R - 1
    encode           micro-batch -> Features: those of two or more dimensions have a row per sample, the others are
                     scalars; the same names for every micro-batch
    loss             Features of the rank's whole batch and the scalars -> [] f32, obeying law 1
    backward         (surrogate, is_last); exactly one call per encode with a graph
    before_encode    called with a micro-batch's index before each of its encodings: sets the random states
    scalar_values    scalars -> the same when the parameters that the forward returned are rounded copies (bf16, fp16):
                     the loss then sees the FP32 master weights' values, gradients go through the copies
    on_phase         called with "encode", "loss", "replay" when each begins
    resident         how many micro-batches keep their graphs from pass 1; all of them where it is M or more
    encode_again     (micro-batch, kept, first) -> Features: `encode` in pass 2, where it need not do all again. kept:
                     what pass 1 returned as "..._trunk", [b, ...] or [t b, ...]; first: the micro-batch's first row of
                     the features that `encode` returns first (images); features without a gradient may be missing
    """
    num_micro_batches = len(micro_batches)
    num_cached = max(0, num_micro_batches - max(1, resident))

    def encode_at(index: int, encode: Callable[[Any], Features] = encode) -> Features:
        micro_batch = micro_batches[index]
        before_encode(index)
        return encode(micro_batch)

    on_phase("encode")
    with torch.no_grad():
        outputs = [encode_at(index) for index in range(num_cached)]
    graphs = [encode_at(index) for index in range(num_cached, num_micro_batches)]
    outputs += graphs

    on_phase("loss")
    kept = {name: _joined(outputs, name) for name in outputs[-1] if name.endswith("_trunk")}
    sides = [name for name, value in outputs[-1].items() if value.ndim > 1 and name not in kept]
    scalars = {name: value.detach() for name, value in outputs[-1].items() if value.ndim <= 1}
    if scalar_values is not None:
        scalars = scalar_values(scalars)
    features = {name: _joined(outputs, name) for name in sides}  # [b, D], [t b, D]
    sizes = {name: [len(output[name]) for output in outputs] for name in sides}
    del outputs  # at a million rows a rank a copy of the features is gigabytes
    loss_value, grads = _feature_grads(loss, features, scalars)
    finite_rows = {name: value.isfinite().all(dim=1) for name, value in features.items()}
    del features

    on_phase("replay")
    rows = {name: grads.pop(name).split(sizes[name]) for name in sides}
    order = [*reversed(range(num_cached, num_micro_batches)), *range(num_cached)]
    for index in order:
        if graphs:
            output = graphs.pop()
        elif encode_again is None:
            output = encode_at(index)
        else:
            output = encode_at(index, partial(encode_again, kept=kept, first=sum(sizes[sides[0]][:index])))
        surrogate: Any = sum((output[name] * rows[name][index]).sum() for name in sides if name in output)
        surrogate = surrogate + sum((output[name] * (grad / num_micro_batches)).sum() for name, grad in grads.items())
        del output
        backward(surrogate, index == order[-1])
    return StepOutput(loss_value, scalars, finite_rows, order)


def _joined(outputs: Sequence[Features], name: str) -> torch.Tensor:
    return torch.cat([output[name].detach() for output in outputs])


def _feature_grads(
    loss: Callable[[Features], torch.Tensor], features: Features, scalars: Features
) -> tuple[torch.Tensor, Features]:
    """The loss of the global batch, and its gradients: at least f32, [b, D] per side, [1] per scalar.

    Where the loss is not finite, the scalars' gradients are NaN, whatever the others are: that the norm of all
    gradients is not finite is by what a step is left out.
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
