"""One step of the gradient cache: the loss of a global batch whose activations never exist at once.

    encode         pass 1: every micro-batch through the towers without a graph -> features of the rank's whole batch
    feature_grads  the loss once, over the features of all ranks -> d loss / d features, d loss / d logit_scale
    replay         pass 2: each micro-batch again with a graph -> backward of the surrogate
                       <image_features, image_grads> + <text_features, text_grads> + <logit_scale, its grad> / M
                   whose gradient is the loss's (chain rule; GradCache, Gao et al. 2021)

The last R micro-batches ("resident") keep their graphs from pass 1 and are replayed first, latest first: M of them
cost 2 M - R encodings. R = 1 costs no memory, since a replay holds one micro-batch's graph anyway; R = M is a step
without a cache.

Randomness (patch dropout, dropout) is seeded per micro-batch before each encoding, so pass 2 repeats pass 1 exactly.
A tower that is frozen is encoded once: `encode_again` does what has a gradient, from what pass 1 kept of the rest.

The loss obeys law 1 (the mean over ranks of their gradients is the truth), and so the surrogate needs no factor under
anything that averages over ranks: DDP, ZeRO, Megatron.

Shapes: m rows per micro-batch, M micro-batches, b = M m rows per rank, D embedding width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

Features = dict[str, torch.Tensor]  # image_features, text_features [m, D] f32; logit_scale [1]; maybe logit_bias [1]
SIDES = ("image_features", "text_features")


class MicroBatches(Protocol):
    """A step's: a list, or what makes them when they are asked for (offload.PixelCache)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


@dataclass
class StepOutput:
    """What a step learned about itself; tensors stay on the device, nothing here waits for it."""

    loss: torch.Tensor  # [] f32, this rank's share; the mean over ranks is the global loss
    logit_scale: torch.Tensor  # [1] f32, log-space, before the update
    finite_rows: dict[str, torch.Tensor]  # of image_features and text_features: [b] bool
    replayed: list[int]  # the micro-batches in the order of their backwards


def grad_cache_step(
    micro_batches: MicroBatches,
    *,
    encode: Callable[[Any], Features],
    loss: Callable[..., torch.Tensor],
    backward: Callable[[torch.Tensor, bool], None],
    seeds: Sequence[int],
    scalar_values: Callable[[Features], Features] | None = None,
    on_phase: Callable[[str], None] = lambda phase: None,
    resident: int = 1,
    encode_again: Callable[..., Features] | None = None,
) -> StepOutput:
    """Encode, take the loss once, replay. Gradients end up where `backward` puts them.

    micro_batches    M of them, asked for by index: 0 ... M - 1, then 0 ... M - R - 1
    encode           micro-batch -> Features, through the engine, in train mode
    loss             (image_features [b, D], text_features [t b, D], scale [1], bias [1] or None) -> [] f32, obeying law
                     1; t texts of each image, which are neighbours
    backward         (surrogate, is_last); exactly one call per encode with a graph
    seeds            one per micro-batch
    scalar_values    Features -> {"logit_scale": [1] f32, ...} when the parameters that the forward returned are rounded
                     copies (bf16, fp16): the loss then sees the fp32 masters' values, gradients go through the copies
    on_phase         told "encode", "loss", "replay" when each begins
    resident         how many micro-batches keep their graphs from pass 1; all of them where it is M or more
    encode_again     (micro-batch, kept, first) -> Features: `encode` in pass 2, where it need not do all again. kept:
                     what pass 1 returned as "..._trunk", [b, ...] or [t b, ...]; first: the micro-batch's first image;
                     features without a gradient may be missing
    """
    num_micro_batches = len(micro_batches)
    if len(seeds) != num_micro_batches:
        raise ValueError(f"{len(seeds)} seeds for {num_micro_batches} micro-batches")
    num_cached = max(0, num_micro_batches - max(1, resident))

    on_phase("encode")
    outputs: list[Features] = []
    with torch.no_grad():
        for i in range(num_cached):
            outputs.append(_encode_seeded(encode, micro_batches[i], seeds[i]))
    graphs = [_encode_seeded(encode, micro_batches[i], seeds[i]) for i in range(num_cached, num_micro_batches)]
    outputs += graphs

    on_phase("loss")
    features = {name: torch.cat([output[name].detach() for output in outputs]) for name in SIDES}  # [b, D], [t b, D]
    scalars: Features = {
        name: outputs[-1][name].detach() for name in ("logit_scale", "logit_bias") if name in outputs[-1]
    }
    if scalar_values is not None:
        scalars = scalar_values(scalars)
    kept = {n: torch.cat([o[n].detach() for o in outputs]) for n in outputs[-1] if n.endswith("_trunk")}
    del outputs  # at a million rows a rank a copy of the features is gigabytes
    loss_value, grads = _feature_grads(loss, features, scalars)
    finite_rows = {name: value.isfinite().all(dim=1) for name, value in features.items()}

    on_phase("replay")
    first, last = 0, len(features["image_features"])  # images whose gradients are still to be sent back
    each = {name: len(value) // last for name, value in features.items()}  # rows of an image: 1, t
    del features
    order = [*reversed(range(num_cached, num_micro_batches)), *range(num_cached)]
    for index in order:
        if graphs:
            output = graphs.pop()
            begin = last = last - _images(output, each)
        else:
            again = encode if encode_again is None else partial(encode_again, kept=kept, first=first)
            output = _encode_seeded(again, micro_batches[index], seeds[index])
            begin, first = first, first + _images(output, each)
        surrogate: Any = sum(
            (output[name] * grads[name][begin * each[name] :][: len(output[name])]).sum()
            for name in SIDES
            if name in output
        )
        surrogate = surrogate + sum((output[name] * (grads[name] / num_micro_batches)).sum() for name in scalars)
        del output
        backward(surrogate, first == last)
    return StepOutput(loss_value, scalars["logit_scale"], finite_rows, order)


def _images(output: Features, each: dict[str, int]) -> int:
    return next(len(output[name]) // each[name] for name in SIDES if name in output)


def _encode_seeded(encode: Callable[[Any], Features], micro_batch: Any, seed: int) -> Features:
    torch.manual_seed(seed)  # all devices
    return encode(micro_batch)


def _feature_grads(loss, features: Features, scalars: Features) -> tuple[torch.Tensor, Features]:
    """The loss of the global batch, and its gradients: f32 [b, D] per side, [1] per scalar.

    Where the loss is not finite, logit_scale's gradient is NaN, whatever the others are: that the norm of all gradients
    is not finite is by what a step is left out.
    """
    leaves = {name: value.detach().float().requires_grad_() for name, value in (features | scalars).items()}
    with torch.enable_grad():
        value = loss(
            leaves["image_features"], leaves["text_features"], leaves["logit_scale"].exp(), leaves.get("logit_bias")
        )
        gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=False)
    grads = dict(zip(leaves, gradients))
    grads["logit_scale"] = grads["logit_scale"] + 0 * value.detach()
    return value.detach(), grads
