"""One step of the gradient cache: the loss of a global batch whose activations never exist at once.

    encode         pass 1: every micro-batch through the towers without a graph -> features of the rank's whole batch
    feature_grads  the loss once, over the features of all ranks -> d loss / d features, d loss / d logit_scale
    replay         pass 2: each micro-batch again with a graph -> backward of the surrogate
                       <image_features, image_grads> + <text_features, text_grads> + <logit_scale, its grad> / M
                   whose gradient is the loss's (chain rule; GradCache, Gao et al. 2021)

The last micro-batch keeps its graph from pass 1 and is replayed first: M micro-batches cost 2 M - 1 encodings, one
micro-batch costs one; memory is the same, since a replay holds one micro-batch's graph anyway.

Randomness (patch dropout, dropout) is seeded per micro-batch before each encoding, so pass 2 repeats pass 1 exactly.

The loss obeys law 1 (the mean over ranks of their gradients is the truth), and so the surrogate needs no factor under
anything that averages over ranks: DDP, ZeRO, Megatron.

Shapes: m rows per micro-batch, M micro-batches, b = M m rows per rank, D embedding width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Features = dict[str, torch.Tensor]  # image_features, text_features [m, D] f32; logit_scale [1]; maybe logit_bias [1]


@dataclass
class StepOutput:
    """What a step learned about itself; tensors stay on the device, nothing here waits for it."""

    loss: torch.Tensor  # [] f32, this rank's share; the mean over ranks is the global loss
    logit_scale: torch.Tensor  # [1] f32, log-space, before the update


def grad_cache_step(
    micro_batches: Sequence[object],
    *,
    encode: Callable[[object], Features],
    loss: Callable[..., torch.Tensor],
    backward: Callable[[torch.Tensor, bool], None],
    seeds: Sequence[int],
    scalar_values: Callable[[Features], Features] | None = None,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> StepOutput:
    """Encode, take the loss once, replay. Gradients end up where `backward` puts them.

    encode         micro-batch -> Features, through the engine, in train mode
    loss           (image_features [b, D], text_features [b, D], scale [1], bias [1] or None) -> [] f32, obeying law 1
    backward       (surrogate, is_last); exactly one call per encode with a graph
    seeds          one per micro-batch
    scalar_values  Features -> {"logit_scale": [1] f32, ...} when the parameters that the forward returned are rounded
                   copies (bf16, fp16): the loss then sees the fp32 masters' values, gradients go through the copies
    on_phase       told "encode", "loss", "replay" when each begins
    """
    num_micro_batches = len(micro_batches)
    if len(seeds) != num_micro_batches:
        raise ValueError(f"{len(seeds)} seeds for {num_micro_batches} micro-batches")

    on_phase("encode")
    with torch.no_grad():
        cached = [_encode_seeded(encode, batch, seed) for batch, seed in zip(micro_batches[:-1], seeds[:-1])]
    resident = _encode_seeded(encode, micro_batches[-1], seeds[-1])

    on_phase("loss")
    features = {
        name: torch.cat([output[name].detach() for output in (*cached, resident)])
        for name in ("image_features", "text_features")
    }  # [b, D] each
    scalars = {name: resident[name].detach() for name in ("logit_scale", "logit_bias") if name in resident}
    if scalar_values is not None:
        scalars = scalar_values(scalars)
    loss_value, grads = _feature_grads(loss, features, scalars)

    on_phase("replay")
    chunks = {name: grads[name].split([len(o[name]) for o in (*cached, resident)]) for name in features}
    order = [num_micro_batches - 1, *range(num_micro_batches - 1)]
    del cached
    for position, index in enumerate(order):
        output = resident if position == 0 else _encode_seeded(encode, micro_batches[index], seeds[index])
        surrogate = sum((output[name] * chunks[name][index]).sum() for name in features)
        surrogate = surrogate + sum((output[name] * (grads[name] / num_micro_batches)).sum() for name in scalars)
        resident = None
        del output
        backward(surrogate, position == num_micro_batches - 1)
    return StepOutput(loss=loss_value, logit_scale=scalars["logit_scale"])


def _encode_seeded(encode: Callable[[object], Features], micro_batch: object, seed: int) -> Features:
    torch.manual_seed(seed)  # all devices
    return encode(micro_batch)


def _feature_grads(loss, features: Features, scalars: Features) -> tuple[torch.Tensor, Features]:
    """The loss of the global batch, and its gradients: f32 [b, D] per side, [1] per scalar."""
    leaves = {name: value.detach().float().requires_grad_() for name, value in (features | scalars).items()}
    with torch.enable_grad():
        value = loss(
            leaves["image_features"], leaves["text_features"], leaves["logit_scale"].exp(), leaves.get("logit_bias")
        )
        gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=False)
    return value.detach(), dict(zip(leaves, gradients))
