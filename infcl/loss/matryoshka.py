"""Matryoshka losses: any loss of the library, at several prefix widths of the features.

In: a loss, widths and weights. Out: a function that is called like the loss, with features [b, D].

    mean over the widths w, by weight, of loss(normalize(images[:, :w]), normalize(texts[:, :w]), ...)

After training, the first w numbers of a feature, normalised, are an embedding of width w. A prefix of width w costs
w / D of the loss at width D, so all together cost (sum of the widths) / D of it, and a float32 copy of each prefix.
Source: Matryoshka Representation Learning, arXiv 2205.13147, Eq. 1, divided by the sum of the weights.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def matryoshka(
    loss: Callable[..., Tensor] | Sequence[Callable[..., Tensor]],
    widths: Sequence[int],
    weights: Sequence[float] | None = None,
) -> Callable[..., Tensor]:
    """Return the weighted mean of a loss over prefixes of its features.

    Example: `matryoshka(inf_cl_loss, [64, 256, 512])(image_features, text_features, scale, group=group)`.

    Args:
        loss: called with two sets of features [b, w] and the further arguments of the call; or one loss per width.
        widths: ascending; the largest is at most D. Dimensions above it get no gradient.
        weights: one per width, at least 0; equal by default. They are divided by their sum.

    Raises:
        ValueError: widths that are not ascending, weights or losses that do not fit them, or (in a call) a width above
            D.
    """
    check_widths(widths, weights)
    given = [1.0] * len(widths) if weights is None else list(weights)
    losses = [loss] * len(widths) if callable(loss) else list(loss)
    if len(losses) != len(widths):
        raise ValueError(f"matryoshka: {len(losses)} losses for {len(widths)} widths")

    def mean_over_widths(first: Tensor, second: Tensor, *arguments: Any, **options: Any) -> Tensor:
        check_widths(widths, dim=first.shape[1])
        values = [
            one(prefix(first, width), prefix(second, width), *arguments, **options) * (weight / sum(given))
            for one, width, weight in zip(losses, widths, given)
        ]
        return torch.stack(values).sum()

    return mean_over_widths


def prefix(features: Tensor, width: int) -> Tensor:
    """Return the first `width` dimensions of features [b, D], of unit length; computed in float32 or wider."""
    wide = features[:, :width].to(torch.promote_types(features.dtype, torch.float32))
    return F.normalize(wide, dim=1).to(features.dtype)


def check_widths(
    widths: Sequence[int],
    weights: Sequence[float] | None = None,
    dim: int | None = None,
    *,
    name: str = "matryoshka widths",
) -> None:
    """Raise ValueError, in which the widths are called `name`, unless they ascend from 1 to `dim` and have weights."""
    listed = f"{name} {' '.join(map(str, widths))}"
    if not widths or widths[0] < 1 or any(low >= high for low, high in zip(widths, widths[1:])):
        raise ValueError(f"{listed} must ascend, from 1 on")
    if dim is not None and widths[-1] > dim:
        raise ValueError(f"{listed}: {widths[-1]} is above the {dim} dimensions of the features")
    if weights is None:
        return
    if len(weights) != len(widths) or not all(0 <= weight < math.inf for weight in weights) or sum(weights) == 0:
        shown = " ".join(f"{weight:g}" for weight in weights)
        called = name.replace("widths", "weights")
        raise ValueError(f"{called} {shown} do not fit {listed}: one of at least 0 for each, not all of them 0")
