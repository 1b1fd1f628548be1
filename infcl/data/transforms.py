"""Transforms: resize, crop and augment an image to uint8 [3, S, S] for the image tower.

Training uses a random crop and the other augmentations of --aug-cfg; the caller draws the random numbers. Evaluation
uses the centre crop. Resizing is antialiased bicubic on uint8. The colour operations and their ranges are those of
torchvision's ColorJitter. They run in float32, with one rounding at the end. The device normalises the pixels later.
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from infcl.models.preprocess import CLIP_PREPROCESS, Preprocess

if TYPE_CHECKING:
    from PIL import Image

_CROP_DRAWS = 23  # ten tries of (area, aspect), crop position (2), flip
JITTER_DRAWS = 8
TRANSFORM_DRAWS = _CROP_DRAWS + 2 + JITTER_DRAWS  # random numbers that TrainTransform consumes
_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601


@dataclass(eq=False)
class TrainTransform:
    """RandomResizedCrop on uint8 with antialiased bicubic resizing, then optional flip, colour jitter and greyscale.

    The crop has torchvision's distribution: ten tries with area ~ U(scale) and aspect ~ exp U(log ratio), else the
    largest centre crop within `ratio`. The defaults are those of open_clip.

    Args:
        image_size: side S of the output, in pixels.
        scale: range of the crop's area, as a fraction of the image.
        ratio: range of the crop's aspect ratio, width / height.
        hflip: probability of a horizontal flip; 0 by default, since captions mention left and right.
        color_jitter: (brightness, contrast, saturation, hue), as in open_clip; a missing hue is 0.
        scaled_decode: decode JPEGs at 1/2, 1/4 or 1/8 of their size if the crop keeps at least 1.5 S pixels per side.
            It is faster for sources above 800 pixels at S = 224, but the pixels differ (about 37 dB).

    Raises:
        ValueError: an argument is out of range.
    """

    image_size: int
    _: KW_ONLY
    scale: tuple[float, float] = (0.9, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    hflip: float = 0.0
    color_jitter: tuple[float, ...] | None = None
    color_jitter_prob: float = 0.0
    gray_scale_prob: float = 0.0
    scaled_decode: bool = False

    def __post_init__(self) -> None:
        probabilities = ("hflip", "color_jitter_prob", "gray_scale_prob")
        for name, is_valid, needed in (
            ("scale", _is_range(self.scale, 1), "(low, high) with 0 < low <= high <= 1 (shares of the image's area)"),
            ("ratio", _is_range(self.ratio, math.inf), "(low, high) with 0 < low <= high"),
            *((name, _is_number(getattr(self, name), 0, 1), "a probability, 0 to 1") for name in probabilities),
            ("scaled_decode", isinstance(self.scaled_decode, bool), "True or False"),
        ):
            if not is_valid:
                raise ValueError(f"{name} {getattr(self, name)}: need {needed}")
        given = self.color_jitter
        if (given is None) != (self.color_jitter_prob == 0):
            raise ValueError(
                f"color_jitter {given} and color_jitter_prob {self.color_jitter_prob} only work together: give both"
            )
        if given is not None:
            amounts = tuple(given) if isinstance(given, (tuple, list)) else ()
            self.color_jitter = (*amounts, 0.0) if len(amounts) == 3 else amounts
            if len(self.color_jitter) != 4 or min(self.color_jitter) < 0 or self.color_jitter[3] > 0.5:
                raise ValueError(f"color_jitter {given}: (brightness, contrast, saturation, hue) >= 0 with hue <= 0.5")

    def __call__(self, image: np.ndarray, random: np.ndarray) -> torch.Tensor:
        """Transform uint8 [H, W, 3] to uint8 [3, S, S], with random float64 [TRANSFORM_DRAWS] in [0, 1)."""
        top, left, height, width = self._crop(image.shape[0], image.shape[1], random)
        pixels = resize(image[top : top + height, left : left + width], self.image_size, self.image_size)
        if random[22] < self.hflip:
            pixels = pixels.flip(-1)
        if self.color_jitter is not None and random[_CROP_DRAWS] < self.color_jitter_prob:
            pixels = jitter(pixels, self.color_jitter, random[_CROP_DRAWS + 2 :])
        return grey(pixels) if random[_CROP_DRAWS + 1] < self.gray_scale_prob else pixels

    def shrink(self, height: int, width: int, random: np.ndarray) -> int:
        """Return the factor (1, 2, 4 or 8) by which a JPEG may be decoded smaller, given its random numbers."""
        if not self.scaled_decode:
            return 1
        short = min(self._crop(height, width, random)[2:])
        return next((factor for factor in (8, 4, 2) if short >= 1.5 * factor * self.image_size), 1)

    def _crop(self, height: int, width: int, random: np.ndarray) -> tuple[int, int, int, int]:
        area, (low, high) = height * width, self.scale
        log_low, log_high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for u, v in random[:20].reshape(10, 2).tolist():
            target, aspect = area * (low + (high - low) * u), math.exp(log_low + (log_high - log_low) * v)
            w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
            if 0 < w <= width and 0 < h <= height:
                return int(random[20] * (height - h + 1)), int(random[21] * (width - w + 1)), h, w
        w, h = min(width, round(height * self.ratio[1])), min(height, round(width / self.ratio[0]))
        return (height - h) // 2, (width - w) // 2, h, w


def _is_number(value: Any, least: float, most: float) -> bool:
    return isinstance(value, (int, float)) and least <= value <= most


def _is_range(value: Any, most: float) -> bool:
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2
    return is_pair and all(_is_number(v, 0, most) for v in value) and 0 < value[0] <= value[1]


def jitter(pixels: torch.Tensor, amounts: Sequence[float], random: np.ndarray) -> torch.Tensor:
    """Jitter the colours of uint8 [3, H, W], with the operations in random order.

    Args:
        pixels: uint8 [3, H, W].
        amounts: (brightness, contrast, saturation, hue). Each factor is drawn from [max(0, 1 - a), 1 + a], the hue
            shift from [-h, h] turns.
        random: float64 [JITTER_DRAWS] in [0, 1).
    """
    image = pixels.float() / 255
    for operation in np.argsort(random[:4]).tolist():
        amount, u = amounts[operation], float(random[4 + operation])
        low = max(0.0, 1 - amount)
        factor = low + (1 + amount - low) * u
        if amount == 0:
            continue
        if operation == 3:
            image = shift_hue(image, amount * (2 * u - 1))
        elif operation == 0:
            image = (image * factor).clamp_(0, 1)
        else:
            grey_image = luma(image).mean() if operation == 1 else luma(image)
            image = (image * factor + grey_image * (1 - factor)).clamp_(0, 1)
    return _to_bytes(image)


def grey(pixels: torch.Tensor) -> torch.Tensor:
    """Replace all three channels of uint8 [3, H, W] by the luma."""
    return _to_bytes(luma(pixels.float() / 255)).expand(3, -1, -1).contiguous()


def luma(image: torch.Tensor) -> torch.Tensor:
    """Return the luma [1, H, W] of float [3, H, W]."""
    return (image * torch.tensor(_LUMA).view(3, 1, 1)).sum(0, keepdim=True)


def shift_hue(image: torch.Tensor, turns: float) -> torch.Tensor:
    """Rotate the hue of float [3, H, W] in [0, 1] by `turns`; HSV saturation and value do not change."""
    value, least = image.amax(0), image.amin(0)
    chroma = value - least
    safe = chroma.clamp(min=1e-12)
    red, green, blue = image
    other_hue = torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe)
    hue = (torch.where(value == red, (green - blue) / safe, other_hue) + 6 * turns) % 6  # in sixths of a turn
    offsets = torch.tensor([5.0, 3.0, 1.0]).view(3, 1, 1)
    k = (offsets + hue) % 6  # Smith 1978, as f(n) = V - C max(0, min(k, 4 - k, 1))
    return value - chroma * torch.minimum(k, 4 - k).clamp(0, 1)


def _to_bytes(image: torch.Tensor) -> torch.Tensor:
    return (image * 255).round_().clamp_(0, 255).to(torch.uint8)


class EvalTransform:
    """open_clip's evaluation transform: antialiased resize by `preprocess.resize_mode`, then the S x S centre crop."""

    def __init__(self, image_size: int, preprocess: Preprocess = CLIP_PREPROCESS):
        self.image_size, self.preprocess = image_size, preprocess
        self.mode = "bilinear" if preprocess.interpolation == "bilinear" else "bicubic"

    def __call__(self, image: np.ndarray) -> torch.Tensor:
        """Transform uint8 [H, W, 3] to uint8 [3, S, S]."""
        return self.crop(resize(image, *self.resized(*image.shape[:2]), mode=self.mode))

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) to resize to.

        "shortest" makes the shorter side S and rounds the other down; "longest" makes the longer side S; "squash" both.
        """
        size = self.image_size
        if self.preprocess.resize_mode == "squash":
            return size, size
        if self.preprocess.resize_mode == "longest":
            return max(1, round(size * height / max(height, width))), max(1, round(size * width / max(height, width)))
        short = min(height, width)
        return size * height // short, size * width // short

    def crop(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the centre [3, S, S] of [3, H, W]; smaller images are padded."""
        size = self.image_size
        rows, columns = (max(0, size - side) for side in pixels.shape[1:])
        around = (columns // 2, (columns + 1) // 2, rows // 2, (rows + 1) // 2)
        pixels = torch.nn.functional.pad(pixels, around, value=self.preprocess.fill_color)
        top, left = round((pixels.shape[1] - size) / 2), round((pixels.shape[2] - size) / 2)
        return pixels[:, top : top + size, left : left + size]


class PillowTransform(EvalTransform):
    """The same resize and crop with Pillow, as in the evaluation code of open_clip and CLIP.

    An image is converted to RGB first, as ImageFolder and open_clip's shards do; transparency is dropped. Up to 1 % of
    the values differ from EvalTransform, mostly by one level.
    """

    def __call__(self, image: "Image.Image") -> torch.Tensor:  # type: ignore[override]
        """Transform a Pillow image to uint8 [3, S, S]."""
        from PIL import Image

        height, width = self.resized(image.height, image.width)
        image = image.convert("RGB")
        if (width, height) != image.size:
            image = image.resize((width, height), Image.Resampling[self.mode.upper()])
        return self.crop(torch.from_numpy(np.array(image)).permute(2, 0, 1))


def resize(image: np.ndarray, height: int, width: int, *, mode: str = "bicubic") -> torch.Tensor:
    """Resize uint8 [H, W, 3] to uint8 [3, height, width], antialiased; bit-identical to torchvision on tensors."""
    pixels = torch.from_numpy(image).permute(2, 0, 1).unsqueeze(0)  # [1, 3, H, W], channels last
    if pixels.shape[2:] != (height, width):
        pixels = torch.nn.functional.interpolate(pixels, size=(height, width), mode=mode, antialias=True)
    return pixels[0]
