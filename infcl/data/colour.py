"""Colour augmentation of one image: jitter of brightness, contrast, saturation and hue, and grey.

In and out: uint8 [3, S, S], RGB. The operations and their ranges are torchvision's ColorJitter (which open_clip's
--aug-cfg color_jitter names); they run in float32 in a row and are rounded once, at the end.
"""

import numpy as np
import torch

JITTER_DRAWS = 8
_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601


def check_jitter(amounts: tuple[float, ...]) -> tuple[float, float, float, float]:
    """Return (brightness, contrast, saturation, hue); a missing hue is 0. Raises ValueError outside their ranges."""
    given = amounts if isinstance(amounts, (tuple, list)) else ()
    full = (*given, 0.0) if len(given) == 3 else tuple(given)
    if len(full) != 4 or min(full) < 0 or full[3] > 0.5:
        raise ValueError(f"color_jitter {amounts}: (brightness, contrast, saturation, hue) >= 0 with hue <= 0.5")
    return full


def jitter(pixels: torch.Tensor, amounts: tuple[float, float, float, float], random: np.ndarray) -> torch.Tensor:
    """Factors from [max(0, 1-a), 1+a], a hue shift from [-h, h], in random order; random: float64 [JITTER_DRAWS]."""
    image = pixels.float() / 255
    for operation in np.argsort(random[:4]).tolist():
        amount, u = amounts[operation], float(random[4 + operation])
        if amount == 0:
            continue
        if operation == 3:
            image = shift_hue(image, amount * (2 * u - 1))
            continue
        low = max(0.0, 1 - amount)
        factor = low + (1 + amount - low) * u
        if operation == 0:
            other = torch.zeros(())
        elif operation == 1:
            other = luma(image).mean()
        else:
            other = luma(image)
        image = (image * factor + other * (1 - factor)).clamp_(0, 1)
    return _to_bytes(image)


def grey(pixels: torch.Tensor) -> torch.Tensor:
    """Return the luma of every pixel, in all three channels."""
    return _to_bytes(luma(pixels.float() / 255)).expand(3, -1, -1).contiguous()


def luma(image: torch.Tensor) -> torch.Tensor:
    """Return the luma [1, H, W] of float [3, H, W]."""
    return (image * torch.tensor(_LUMA).view(3, 1, 1)).sum(0, keepdim=True)


def shift_hue(image: torch.Tensor, turns: float) -> torch.Tensor:
    """Move the hue of float [3, H, W] in [0, 1] by `turns` of the circle; HSV's saturation and value stay."""
    value, least = image.amax(0), image.amin(0)
    chroma = value - least
    safe = chroma.clamp(min=1e-12)
    red, green, blue = image
    hue = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )  # in sixths of a turn
    hue = (hue + 6 * turns) % 6
    offsets = torch.tensor([5.0, 3.0, 1.0]).view(3, 1, 1)
    k = (offsets + hue) % 6  # Smith 1978, as f(n) = V - C max(0, min(k, 4 - k, 1))
    return value - chroma * torch.minimum(k, 4 - k).clamp(0, 1)


def _to_bytes(image: torch.Tensor) -> torch.Tensor:
    return (image * 255).round_().clamp_(0, 255).to(torch.uint8)
