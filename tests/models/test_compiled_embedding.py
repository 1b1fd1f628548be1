"""What comes before the image tower's blocks, compiled: functions, and towers with them, are those of eager torch."""

import copy
import dataclasses
import logging
from functools import partial

import pytest
import torch

from infcl.models.clip import CLIP
from infcl.models.config import VisionConfig, load_model_config
from infcl.models.fused_embedding import CompiledEmbedding
from infcl.models.vision import add_positions, normalize_pixels, patch_rows
from infcl.train import compile as compiled

CPU = torch.device("cpu")
PATCHES_OF_14 = VisionConfig(image_size=56, patch_size=14, width=64, layers=1, head_width=32)  # rows of 588 and 4 more


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
def test_its_functions_and_their_gradients_are_those_of_eager_torch(precision, backend, monkeypatch):
    """aot_eager: graphs, each run by eager kernels; compiling C++ for them takes most of a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    compiled._try_embedding(CompiledEmbedding(frozenset({4})), PATCHES_OF_14, CPU, precision)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return CLIP(dataclasses.replace(load_model_config("demo"), vision_cfg=PATCHES_OF_14))


@pytest.mark.parametrize("which", ["patch_rows", "add_positions", "_norm"])
def test_one_that_computes_something_else_is_named_and_everything_stays_eager(which, model, monkeypatch, caplog):
    def compiling(function, **_):
        return (lambda *given: 2 * function(*given)) if function.__name__ == which else function

    monkeypatch.setattr(torch, "compile", compiling)
    with caplog.at_level(logging.WARNING):
        assert not compiled.compile_blocks(model, CPU, "fp32", {4}, embed=True)
    named = "ln_pre" if which == "_norm" else which
    assert f"compiled code computes something else than eager code: {named} is 1 off" in caplog.text
    assert model.visual.add_positions is add_positions and "forward" not in vars(model.visual.ln_pre)


def test_whatever_training_runs_was_tried_at_start(monkeypatch):
    """Every batch, and the norm with the patches that a dropout leaves."""
    seen: set[tuple] = set()

    def counting(function, **_):
        def run(x, *others, **named):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                seen.add((function.__name__, *x.shape, torch.is_grad_enabled() and x.requires_grad))
            return function(x, *others, **named)

        return run

    monkeypatch.setattr(torch, "compile", counting)
    torch.manual_seed(0)
    vision = dataclasses.replace(PATCHES_OF_14, patch_dropout=0.5)
    model = CLIP(dataclasses.replace(load_model_config("demo"), vision_cfg=vision))
    assert compiled.compile_blocks(model, CPU, "fp32", {4, 8}, embed=True)
    tried = set(seen)
    model.visual(torch.randn(4, 3, 56, 56)).sum().backward()
    with torch.no_grad():
        for size in (4, 8):
            model.visual(torch.randn(size, 3, 56, 56))
    assert tried == seen and {name for name, *_ in tried} >= {"add_positions", "_norm"}


def test_a_copy_of_the_model_has_its_own_norm(model, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    CompiledEmbedding(frozenset({4})).install(model.visual)
    other = copy.deepcopy(model.visual)
    torch.nn.init.zeros_(other.ln_pre.weight)
    assert not other.ln_pre(torch.randn(4, 17, 64)).any() and model.visual.ln_pre(torch.randn(4, 17, 64)).any()


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
    CompiledEmbedding(frozenset({4, 8})).install(visual)
    for size, images in given.items():
        torch.testing.assert_close(visual(images), before[size], rtol=0, atol=0)
    assert sizes == [(name, size) for size in (4, 8) for name in ("add_positions", "_norm")]  # rows: on a GPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_patches_are_the_pixels_normalised_in_their_order(dtype):
    pixels = torch.randint(256, (3, 3, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    rows, normal = patch_rows(pixels, 14, dtype), normalize_pixels(pixels).to(dtype)
    assert rows.shape == (3, 4, 592) and rows.dtype == dtype and not rows[..., 588:].any()
    for patch, (y, x) in enumerate([(0, 0), (0, 14), (14, 0), (14, 14)]):
        wanted = normal[:, :, y : y + 14, x : x + 14].flatten(1)
        torch.testing.assert_close(rows[:, patch, :588], wanted, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["ViT-B-32", "ViT-L-14"])
def test_on_a_gpu_they_are_those_of_eager_torch(name, precision):
    cfg = load_model_config(name).vision_cfg
    compiled._try_embedding(CompiledEmbedding(frozenset({32})), cfg, torch.device("cuda"), precision)


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "kernels"), [(14, 2), (32, 1)])  # 14: the fill is a pass of its own
def test_pixels_become_rows_in_few_kernels(size, kernels):
    torch._dynamo.reset()  # it gives up on a function that others here had compiled eight times
    pixels = torch.randint(256, (16, 3, 224, 224), dtype=torch.uint8, device="cuda")
    run = CompiledEmbedding(frozenset({16})).patch_rows
    run(pixels, size, torch.bfloat16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(pixels, size, torch.bfloat16)
    on_gpu = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(on_gpu) == kernels, on_gpu
