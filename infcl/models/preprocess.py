"""Image preprocessing: open_clip's preprocess_cfg, and the normalisation of pixels, which runs on the device."""

from dataclasses import dataclass

import torch

# Statistics of CLIP's training data, for pixels in [0, 1]; open_clip writes them into preprocess_cfg.
IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)
INTERPOLATIONS = ("bicubic", "bilinear", "random")
RESIZE_MODES = ("shortest", "longest", "squash")


@dataclass(frozen=True)
class Preprocess:
    """open_clip's preprocess_cfg.

    Attributes:
        mean, std: statistics of pixels in [0, 1], per channel; applied on the device.
        interpolation: bicubic, bilinear, or random (one of the two per image in training, bicubic in evaluation).
        resize_mode: how evaluation makes an image square. shortest: resize the short side and crop the centre.
            longest: resize the long side and pad with fill_color. squash: resize both sides.
        fill_color: grey level, 0 to 255.

    Raises:
        ValueError: an unknown interpolation or resize_mode, or an invalid mean or std.
    """

    mean: tuple[float, ...] = IMAGE_MEAN
    std: tuple[float, ...] = IMAGE_STD
    interpolation: str = "bicubic"
    resize_mode: str = "shortest"
    fill_color: int = 0

    def __post_init__(self):
        for name, value, choices in (
            ("interpolation", self.interpolation, INTERPOLATIONS),
            ("resize_mode", self.resize_mode, RESIZE_MODES),
        ):
            if value not in choices:
                raise ValueError(f"preprocess_cfg.{name} {value!r} is not one of {', '.join(choices)}")
        if not all(_is_three_numbers(value) for value in (self.mean, self.std)) or min(self.std) <= 0:
            raise ValueError(f"preprocess_cfg: mean {self.mean} and std {self.std} need three numbers each, std > 0")


def _is_three_numbers(value: tuple[float, ...]) -> bool:
    return len(value) == 3 and all(abs(number) < float("inf") for number in value)


CLIP_PREPROCESS = Preprocess()


def normalize_pixels(images: torch.Tensor, like: Preprocess = CLIP_PREPROCESS, *, dim: int = 1) -> torch.Tensor:
    """Return (images / 255 - mean) / std in float32, per channel, with the statistics of `like`.

    The constants are Python numbers on purpose. A buffer would be cast with the model: DeepSpeed's bf16 mode rounds
    mean and std to 8 bits. A tensor made here would need a synchronising copy to the device in every forward.

    Args:
        images: uint8 [m, 3, S, S], or another shape with the channels at `dim`.
    """
    channels = [
        images.select(dim, c).float().mul_(1 / (255 * std)).sub_(mean / std)
        for c, (mean, std) in enumerate(zip(like.mean, like.std))
    ]
    return torch.stack(channels, dim=dim)
