"""What every tiled loss does with its inputs and gradients: check, convert, scale."""

from collections.abc import Sequence
from typing import SupportsFloat

import torch
from torch import Tensor

from infcl.kernels import Tile

_TF32_ROUNDS_BELOW = 2.0**128 - 2.0**116  # from there on to 2^128


def check_features(name: str, image_features: Tensor, text_features: Tensor) -> dict[str, int]:
    """{what: number} that all ranks must have alike. ValueError with the shapes unless these are [b, D] floats."""
    shapes = tuple(image_features.shape), tuple(text_features.shape)
    if image_features.ndim != 2 or shapes[0] != shapes[1] or image_features.numel() == 0:
        raise ValueError(f"{name} needs two sets of features of one shape [b, D], not empty; got {shapes}")
    if image_features.dtype != text_features.dtype or not image_features.is_floating_point():
        raise ValueError(
            f"{name} needs floating point features of one dtype; got {image_features.dtype}, {text_features.dtype}"
        )
    if image_features.device != text_features.device:
        raise ValueError(f"{name} needs features on one device; got {image_features.device}, {text_features.device}")
    return {"rows": shapes[0][0], "feature dimensions": shapes[0][1]}


def gradients_wanted(features: Sequence[Tensor]) -> list[bool]:
    """Of rows, of columns, ...: whether this rank's backward pass will ask for the gradient."""
    return [torch.is_grad_enabled() and x.requires_grad for x in features]


def named_wishes(wanted: Sequence[bool]) -> dict[str, bool]:
    """{what to call it: whether its gradient is wanted}, to compare: a side's gradient travels, or it does not."""
    return {f"requires_grad of {side}": wish for side, wish in zip(("rows", "columns"), wanted)}


def as_operand(features: Tensor, tile: Tile) -> Tensor:
    """Features as the tile reads them: its operand type (tf32: rounded to it), contiguous."""
    operand = features.detach().to(tile.operand_dtype).contiguous()
    return rounded_to_tf32(operand) if tile.tf32 else operand


def rounded_to_tf32(features: Tensor) -> Tensor:
    """float32 features with the 11 bits of tf32, rounded to nearest, ties to even; a new tensor.

    Tensor cores would cut the other bits off: every cosine would be smaller, by 7e-4 of it, and the scale's gradient,
    where most of that sum cancels, off by 1e-3 to 1e-2 of it. What is not finite stays, and so does what would become
    so: the last half step below float32's largest number.
    """
    bits = features.view(torch.int32)
    rounded = (bits >> 13).bitwise_and_(1).add_(0xFFF).add_(bits).bitwise_and_(-0x2000).view(torch.float32)
    return torch.where(features.abs() < _TF32_ROUNDS_BELOW, rounded, features, out=rounded)


def scalar_like(features: Tensor, value: Tensor | float) -> Tensor:
    """A float or one-element tensor as a 0-dim tensor on the features' device, float32 or wider; differentiable."""
    dtype = torch.promote_types(features.dtype, torch.float32)
    if not isinstance(value, Tensor):
        if not isinstance(value, SupportsFloat):
            raise ValueError(f"logit_scale and logit_bias are a float or a tensor of one element, not {value!r}")
        return torch.full((), float(value), dtype=dtype, device=features.device)
    if value.numel() != 1:
        raise ValueError(
            f"logit_scale and logit_bias are a float or a tensor of one element, not of shape {tuple(value.shape)}"
        )
    return value.reshape(()).to(device=features.device, dtype=dtype)


def scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`(gradient * factor).to(dtype)` in one pass, in place where the dtype stays."""
    out = gradient if dtype == gradient.dtype else torch.empty_like(gradient, dtype=dtype)
    return torch.mul(gradient, factor, out=out)


def scaled_sides(gradients: Sequence[Tensor | None], factor: Tensor, sides: Sequence[Tensor]) -> list[Tensor | None]:
    """`scaled` for each side that has a gradient, in the dtype of its features."""
    return [None if g is None else scaled(g, factor, side.dtype) for g, side in zip(gradients, sides)]


def matched_gradient(slopes: Tensor, partners: Tensor, out: Tensor | None = None) -> Tensor:
    """The matched pairs' part of a gradient, to which the others' is added: `slopes[:, None] * partners`, [n, D].

    slopes [n]: dS at the matches, in the gradient's dtype. partners [n, D]: what each row is matched with; promoted
    element by element, without a copy.
    """
    return torch.mul(slopes[:, None], partners, out=out)


def inner_product(features: Tensor, gradient: Tensor) -> Tensor:
    """`(features * gradient).sum()` in the gradient's dtype, 0-dim, by pieces so that no [b, D] temporary is made."""
    total = (features[:16384] * gradient[:16384]).sum()
    for start in range(16384, len(features), 16384):
        total += (features[start : start + 16384] * gradient[start : start + 16384]).sum()
    return total


def refuse_double_backward(name: str) -> None:
    """Called in a backward pass: RuntimeError under create_graph=True, where its result would count as a constant."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"{name} does not support double backward (create_graph=True): it has no second derivative")
