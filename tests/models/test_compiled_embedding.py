"""The compiled image embedding: features, gradients and pixel rows equal those of eager torch."""

import dataclasses
from functools import partial
from unittest import mock

import pytest
import torch

from infcl.models.clip import CLIP
from infcl.models.config import VisionConfig, load_model_config
from infcl.models.vision import VisionTransformer, normalize_pixels, patch_rows
from infcl.train.compile import compile_embedding

PATCHES_OF_14 = VisionConfig(image_size=56, patch_size=14, width=64, layers=1, head_width=32)  # rows of 588 and 4 more


@pytest.fixture
def model():
    torch.manual_seed(0)
    return CLIP(dataclasses.replace(load_model_config("demo"), vision_cfg=PATCHES_OF_14))


@pytest.mark.first(1)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_compiled_embedding_has_the_features_and_gradients_of_eager_torch(model, backend, monkeypatch):
    """aot_eager: graphs, each run by eager kernels; compiling C++ for them takes most of a minute."""
    check(model.visual, torch.randint(256, (4, 3, 56, 56), dtype=torch.uint8), partial(torch.compile, backend=backend))


def check(visual, images, compiler, **tolerance):
    results = []
    for compiled in (False, True):
        if compiled:
            with mock.patch("torch.compile", compiler):
                compile_embedding(visual, {len(images)})
        visual.zero_grad()
        features = visual(images)
        features.float().square().sum().backward()
        results.append([features.detach(), *(parameter.grad.clone() for parameter in visual.parameters())])
    for found, expected in zip(*results[::-1]):
        torch.testing.assert_close(found, expected, **tolerance)


def test_only_batches_of_training_run_compiled(model, monkeypatch):
    sizes = []

    def counting(function, **_):
        def run(x, *others, **named):
            sizes.append((function.__name__, len(x)))
            return function(x, *others, **named)

        return run

    monkeypatch.setattr(torch, "compile", counting)
    visual, given = model.visual, {size: torch.randn(size, 3, 56, 56) for size in (3, 4, 8)}
    before = {size: visual(images) for size, images in given.items()}
    compile_embedding(visual, {4, 8})
    for size, images in given.items():
        torch.testing.assert_close(visual(images), before[size], rtol=0, atol=0)
    assert sizes == [(name, size) for size in (4, 8) for name in ("add_positions", "layer_norm")]  # rows: on a GPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_patches_are_the_pixels_normalised_in_their_order(dtype):
    pixels = torch.randint(256, (3, 3, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    rows, normal = patch_rows(pixels, 14, dtype), normalize_pixels(pixels).to(dtype)
    assert rows.shape == (3, 4, 592) and rows.dtype == dtype and not rows[..., 588:].any()
    for patch, (y, x) in enumerate([(0, 0), (0, 14), (14, 0), (14, 14)]):
        wanted = normal[:, :, y : y + 14, x : x + 14].flatten(1)
        torch.testing.assert_close(rows[:, patch, :588], wanted, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ViT-B-32", "ViT-L-14"])
def test_on_a_gpu_the_compiled_embedding_is_that_of_eager_torch(name):
    vision = dataclasses.replace(load_model_config(name).vision_cfg, layers=1)
    visual = CLIP(dataclasses.replace(load_model_config("demo"), vision_cfg=vision)).visual.cuda()
    images = torch.randint(256, (32, 3, 224, 224), dtype=torch.uint8, device="cuda")
    check(visual, images, torch.compile, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "kernels"), [(14, 2), (32, 1)])  # 14: the fill is a pass of its own
def test_pixels_become_rows_in_few_kernels(size, kernels):
    torch._dynamo.reset()  # it gives up on a function that others here had compiled eight times
    pixels = torch.randint(256, (16, 3, 224, 224), dtype=torch.uint8, device="cuda")
    visual = VisionTransformer(VisionConfig(image_size=224, patch_size=size, width=64, layers=1, head_width=32), 32)
    compile_embedding(visual, {16})
    run = visual.conv1.patch_rows
    run(pixels, size, torch.bfloat16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(pixels, size, torch.bfloat16)
    on_gpu = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(on_gpu) == kernels, on_gpu
