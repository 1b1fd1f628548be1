import numpy as np
import pytest
import torch

from infcl.data.plan import draw, uniforms
from infcl.data.transforms import TRANSFORM_DRAWS, TrainTransform, grey, jitter
from tests.lib.open_clip_stub import import_open_clip
from tests.lib.shard_files import picture


def image() -> torch.Tensor:
    pixels = torch.from_numpy(picture(0, 24, 24)).permute(2, 0, 1).contiguous()
    pixels[:, 0, 0] = 128  # grey: no hue at all
    return pixels


def random(u: float, first: int) -> np.ndarray:
    """Draws that put operation `first` in front and give every operation the place u in its range."""
    order = np.full(4, 0.5) + np.arange(4) * 0.01
    order[first] = 0.0
    return np.concatenate([order, np.full(4, u)])


@pytest.mark.parametrize("operation, name", enumerate(["brightness", "contrast", "saturation", "hue"]))
@pytest.mark.parametrize("u", [0.0, 0.2, 0.9])
def test_each_operation_is_torchvisions(operation, name, u):
    import_open_clip()  # makes torchvision importable
    from torchvision.transforms.v2 import functional

    amounts = [0.0] * 4
    amounts[operation] = 0.4
    factor = 0.4 * (2 * u - 1) + (name != "hue")
    expected = getattr(functional, f"adjust_{name}")(image().float() / 255, factor) * 255
    result = jitter(image(), tuple(amounts), random(u, operation))
    assert result.dtype == torch.uint8 and (result.float() - expected).abs().max() < 1.0
    assert (grey(image()).float() - functional.rgb_to_grayscale(image().float(), 3)).abs().max() < 1.0


def test_augmentation_is_off_by_default_and_belongs_to_the_position():
    numbers = [uniforms(draw(0, 0, position, stream=0, count=TRANSFORM_DRAWS)) for position in range(60)]
    pixels = picture(3, 40, 40)
    plain, coloured = TrainTransform(16), TrainTransform(16, color_jitter=(0.4, 0.4, 0.4, 0.1), color_jitter_prob=0.5)
    changed = [not torch.equal(plain(pixels, n), coloured(pixels, n)) for n in numbers]
    assert 15 < sum(changed) < 45
    assert all(torch.equal(coloured(pixels, n), coloured(pixels, n.copy())) for n in numbers)
    greys = [TrainTransform(16, gray_scale_prob=0.25)(pixels, n) for n in numbers]
    assert 5 < sum(bool((g[0] == g[1]).all()) for g in greys) < 28
    assert TrainTransform(16, color_jitter=(1, 2, 3), color_jitter_prob=1.0).color_jitter == (1, 2, 3, 0.0)
