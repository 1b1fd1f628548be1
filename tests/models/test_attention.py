"""--attention auto: the Triton kernel of one tile a sequence, its operator, and towers that compute with it.

In processes of their own where the kernel runs in Triton's interpreter, since TRITON_INTERPRET must be set before
Triton is imported; on a GPU with its marker.
"""

import dataclasses
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from infcl.models import CLIP, CLIPConfig, TextConfig, VisionConfig
from infcl.models.attention import BLOCK, LONGEST, SHORT, _lengths, attend, choose_attention, fits, towers_with_kernel
from infcl.models.packing import caption_positions, caption_spans, pack_captions, texts_for_model
from infcl.train.compile import compile_blocks
from tests.lib.checkout import ROOT
from tests.lib.loss_oracle import relative_error
from tests.lib.ranks import end_ranks, run_ranks

CFG = CLIPConfig(
    embed_dim=16,
    vision_cfg=VisionConfig(image_size=12, layers=2, width=32, head_width=16, patch_size=4, mlp_ratio=2.0),
    text_cfg=TextConfig(context_length=7, vocab_size=31, width=32, heads=2, layers=2, mlp_ratio=2.0),
)
HALF = torch.bfloat16


def check(device: str, dtype: torch.dtype, bound: float, *, width: int) -> None:
    """Whole sequences and spans of every tile, with gaps, compared with float64; several blocks and more."""
    whole = ((1, 50, 1, False), (2, 2, 1, False), (2, 77, 3, True), (1, 128, 1, False))
    whole += ((2, 129, 2, False), (1, 257, 1, False), (2, 144, 1, False), (1, 197, 2, False), (1, 272, 1, False))
    for m, tokens, heads, causal in whole:
        torch.manual_seed(0)
        qkv = torch.randn(m, tokens, 3, heads, width, device=device, dtype=dtype).requires_grad_()
        spans = [[row * tokens, tokens] for row in range(m)]
        compare(qkv, None, spans, tokens, causal, bound)
    for lengths, longest in (([65, 1, 128, 32, 64, 33], 128), ([20, 1, 33, 64], 64), ([5, 32], 32)):
        for causal in (False, True):
            torch.manual_seed(1)
            begins = [sum(lengths[:i]) + 3 * i for i in range(len(lengths))]
            places = begins[-1] + lengths[-1] + 3
            qkv = torch.randn(1, places, 3, 2, width, device=device, dtype=dtype).requires_grad_()
            spans = [[begin, length] for begin, length in zip(begins, lengths)]
            compare(qkv, torch.tensor(spans, device=device), spans, longest, causal, bound)


def check_that_results_repeat(device: str, dtype: torch.dtype) -> None:
    """Bit for bit."""
    for tokens, seen in ((70, None), (130, None), (40, torch.tensor([[3, 30], [40, 40]], device=device))):
        qkv = torch.randn(2, tokens, 3, 2, 16, device=device, dtype=dtype).requires_grad_()
        outs = [attend(qkv, seen, causal=seen is not None, longest=tokens) for _ in range(2)]
        assert torch.equal(*outs)
        assert torch.equal(*(torch.autograd.grad(out.sin().sum(), qkv)[0] for out in outs))


def compare(qkv, seen, spans, longest, causal, bound) -> None:
    out = attend(qkv, seen, causal=causal, longest=longest)
    d_out = torch.randn_like(out)
    out.backward(d_out)
    true_qkv, reference = qkv.detach().double().requires_grad_(), torch.zeros_like(out, dtype=torch.float64)
    for begin, length in spans:
        q, k, v = true_qkv.flatten(0, 1)[begin : begin + length].permute(1, 2, 0, 3)
        result = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(0, 1)
        reference.view(-1, *reference.shape[2:])[begin : begin + length] = result
    reference.backward(d_out.double())
    forward = relative_error(out.detach(), reference.detach()) if reference.any() else float(out.detach().abs().max())
    assert forward < bound, (spans, causal, forward)
    backward = relative_error(qkv.grad, true_qkv.grad)
    assert backward < bound, (spans, causal, backward)


def check_adversarial(device: str, dtype: torch.dtype, bound: float) -> None:
    """Scores of thousands, which float32 has to 3e-4, all keys equal, one key far above the others, zeros."""
    torch.manual_seed(3)
    for tokens in (40, 130):
        drawn = torch.randn(1, tokens, 3, 2, 16, device=device)
        large, equal, peaked = drawn.clone(), drawn.clone(), drawn.clone()
        large[:, :, :2] *= 30
        equal[:, :, 1] = equal[:, :1, 1]
        peaked[:, -1, 1] = 20 * peaked[:, 0, 0]
        for qkv in (large, equal, peaked, -large, 0 * drawn):
            spans = [[0, tokens]]
            compare(qkv.to(dtype).requires_grad_(), None, spans, tokens, False, bound)


def check_that_nan_stays_where_it_is(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    spans = torch.tensor([[0, 20], [20, 33], [60, 4]], device=device)
    qkv = torch.randn(1, 70, 3, 2, 16, device=device, dtype=dtype)
    results = []
    for value in (0.0, float("nan")):
        one = qkv.clone()
        one[0, 20:53] = value
        one.requires_grad_()
        out = attend(one, spans, causal=True, longest=33)
        out.backward(torch.ones_like(out))
        results.append((out.detach(), one.grad))
    others = [*range(20), *range(53, 70)]
    for clean, beside in zip(*results):
        assert beside[0, 20:53].isnan().any() and torch.equal(clean[0, others], beside[0, others])


def new_model(**options) -> CLIP:
    torch.manual_seed(0)
    return CLIP(CFG, **options)


def step(model: CLIP, device: str, *, pack: bool, precision: torch.dtype | None) -> dict[str, torch.Tensor]:
    """{name: features, or gradients of a sum of theirs}."""
    model.to(device)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(5, 3, 12, 12, generator=generator).to(device)
    texts = torch.randint(1, 30, (5, 7), generator=generator)
    texts[torch.arange(5), torch.tensor([0, 6, 3, 2, 6])] = 30  # what is pooled
    given = texts_for_model(CFG.text_cfg, pack=True)(texts) if pack else {"texts": texts}
    with torch.autocast(device, precision or HALF, enabled=precision is not None):
        out = model(images, **{name: value.to(device) for name, value in given.items()})
    features = torch.cat([out["image_features"], out["text_features"]])
    weights = torch.randn(features.shape, generator=generator).to(device)
    (features * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"features": features.detach()} | gradients


def check_towers(device: str, precision: torch.dtype | None, bound: float) -> None:
    for pack in (False, True):
        expected = step(new_model(), device, pack=pack, precision=None)
        model = new_model(activation_checkpointing=pack).to(device)
        choose_attention(model, "auto", torch.device(device), precision or torch.float32)
        assert towers_with_kernel(model) == ["image", "text"]
        found = step(model, device, pack=pack, precision=precision)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert relative_error(found[name], value) < bound, (pack, name, relative_error(found[name], value))


def tensor_parallel_step(rank: int, world_size: int) -> tuple[list, list]:
    """Features and a gradient of packed captions and images, of towers in two parts that have the kernel, and of whole
    ones that have torch's."""
    from megatron_patches.towers import split_towers
    from tests.lib.tensor_parallel import layout

    whole, model = new_model(), new_model()
    split_towers(model, layout(world_size).tp_group)
    choose_attention(model, "auto", torch.device("cpu"), torch.float32)
    assert towers_with_kernel(model) == ["image", "text"]
    texts = torch.ones(5, 7, dtype=torch.int64)
    texts[torch.arange(5), torch.tensor([0, 6, 3, 2, 6])] = 30
    images = torch.randn(5, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    results = []
    for one in (model, whole):
        out = one(images, **texts_for_model(CFG.text_cfg, pack=True)(texts))
        features = torch.cat([out["image_features"], out["text_features"]])
        positions = [one.positional_embedding, one.visual.positional_embedding]
        results.append([features.detach(), *torch.autograd.grad(features.sin().sum(), positions)])
    return tuple(results)


def check_tensor_parallel() -> None:
    for found, expected in run_ranks(tensor_parallel_step, 2):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    end_ranks()


def check_operators() -> None:
    """Shapes, strides and gradients that torch.compile assumes are the real ones."""
    for tokens, spans in ((130, None), (12, torch.tensor([[0, 3], [3, 8]]))):
        qkv = torch.randn(tokens, 3, 2, 16)
        given = (qkv.clone().requires_grad_(), spans, tokens, spans is not None)
        torch.library.opcheck(torch.ops.infcl.attention.default, given)
        d_out, (out, lse) = torch.randn(tokens, 2, 16), torch.ops.infcl.attention(qkv, *given[1:])
        torch.library.opcheck(torch.ops.infcl.attention_backward.default, (d_out, qkv, out, lse, *given[1:]))


def check_graphs() -> None:
    """Compiled blocks take packed captions in any number, one too, in the graphs that were made at start."""
    model, device = new_model(), torch.device("cpu")
    choose_attention(model, "auto", device, torch.float32)
    eager, graphs = new_model(), torch._dynamo.utils.counters["stats"]
    compiler = torch.compile
    with mock.patch("torch.compile", lambda f, dynamic: compiler(f, dynamic=dynamic, backend="aot_eager")):
        assert compile_blocks(model, {8}, packed=True)
    before = 0
    for count in (5, 9, 1):
        texts = torch.ones(count, 7, dtype=torch.int64)
        texts[:, 3] = 30
        results = []
        for one in (model, eager):
            features = one(**texts_for_model(CFG.text_cfg, pack=True)(texts))["text_features"]
            results.append([features.detach(), *torch.autograd.grad(features.sin().sum(), one.positional_embedding)])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
        before = before or graphs["unique_graphs"]
        assert graphs["unique_graphs"] == before, count


def run(code: str) -> subprocess.CompletedProcess:
    environ = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", f"from tests.lib import interpreter; interpreter.replace_language_once(); {code}"]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300)


def check_all() -> None:
    """In one process, since each starts for seconds."""
    for name, check_one in {
        "float64": lambda: check("cpu", torch.float32, 1e-5, width=16),
        "adversarial": lambda: check_adversarial("cpu", torch.float32, 1e-3),
        "NaN": lambda: check_that_nan_stays_where_it_is("cpu", torch.float32),
        "towers": lambda: check_towers("cpu", None, 2e-5),
        "operators": check_operators,
        "graphs": check_graphs,
    }.items():
        check_one()
        print(name)


@pytest.mark.long
def test_the_kernels_in_tritons_interpreter():
    """Results and gradients are float64's, towers compute with the kernels what they do with torch's, torch knows
    the operators what they do, and compiled blocks have one graph for any number of packed captions."""
    result = run("from tests.models.test_attention import *; check_all()")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["float64", "adversarial", "NaN", "towers", "operators", "graphs"]


@pytest.mark.long
def test_tensor_parallel_towers_compute_with_it_what_whole_ones_do_with_torchs():
    result = run("from tests.models.test_attention import *; check_tensor_parallel()")
    assert result.returncode == 0, result.stderr


def test_spans_are_where_the_mask_has_captions():
    cfg, generator = TextConfig(context_length=11), torch.Generator().manual_seed(0)
    for count in (1, 2, 9, 70):
        texts = torch.ones(count, 11, dtype=torch.int64)
        ends = torch.randint(11, (count,), generator=generator)
        texts[torch.arange(count), ends] = 2
        rows, places = pack_captions(texts, cfg)
        positions, spans = caption_spans(rows, places)
        expected, mask = caption_positions(rows, places)
        assert torch.equal(positions, expected)
        assert len(spans) == max(2, count) and spans[count:].tolist() == [[0, 0]] * (2 - count)
        spans = spans[:count]
        assert spans[:, 1].tolist() == (ends + 1).tolist()
        assert torch.equal(spans.sum(1) - 1, places)
        length = rows.shape[1]
        for begin, tokens in spans.tolist():
            row, first = divmod(begin, length)
            seen = mask[row, 0, first : first + tokens]
            assert torch.equal(seen[:, first : first + tokens], torch.ones(tokens, tokens).tril().bool())
            assert int(seen.sum()) == tokens * (tokens + 1) // 2


def resized(vision: dict[str, int], text: dict[str, int]) -> CLIPConfig:
    replaced = dataclasses.replace
    return replaced(CFG, vision_cfg=replaced(CFG.vision_cfg, **vision), text_cfg=replaced(CFG.text_cfg, **text))


NARROW = resized({"width": 24, "head_width": 12}, {"width": 24})
LONG = resized({"image_size": 80}, {"context_length": 197})


@pytest.mark.parametrize(
    ("device", "dtype", "cfg"),
    [("cpu", HALF, CFG), ("cuda", torch.float32, CFG), ("cuda", HALF, NARROW), ("cuda", HALF, LONG)],
)
def test_where_the_kernel_does_not_fit_towers_keep_torchs(device, dtype, cfg, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with torch.device("meta"):
        model = CLIP(cfg)
    choose_attention(model, "auto", torch.device(device), dtype)
    choose_attention(model, "torch", torch.device("cuda"), HALF)
    assert towers_with_kernel(model) == [] and not model.attends_spans


def test_other_sequences_are_torchs():
    for length, causal in ((145, False), (129, True)):
        qkv = torch.randn(2, length, 3, 1, 16)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
        assert torch.equal(attend(qkv, None, causal=causal, longest=50), expected)


def test_a_locked_tower_is_asked_with_all_its_patches():
    vision = dataclasses.replace(CFG.vision_cfg, image_size=48, patch_dropout=0.3)
    model = CLIP(dataclasses.replace(CFG, vision_cfg=vision))
    assert _lengths(model) == {"image": 101, "text": 7}
    model.lock_image_tower()
    assert _lengths(model) == {"image": 145, "text": 7}


def test_what_fits_is_one_tile_or_few_tokens_more_than_several_blocks():
    several = [*range(129, 145), *range(193, 209), *range(257, 273)]
    assert [length for length in range(1, 600) if fits(length, causal=False)] == [*range(1, 129), *several]
    assert [length for length in range(1, 600) if fits(length, causal=True)] == [*range(1, 129)]


def test_sizes_are_those_of_the_kernels():
    kernels = pytest.importorskip("infcl.models.triton_attention")
    assert (LONGEST, BLOCK, SHORT) == (kernels.LONGEST, kernels.BLOCK, kernels.TAIL)


@pytest.mark.gpu
def test_results_and_gradients_are_those_of_float64_on_a_gpu():
    check("cuda", HALF, 5e-3, width=64)
    check("cuda", torch.float16, 1e-3, width=32)
    check_adversarial("cuda", HALF, 2e-2)
    check_that_results_repeat("cuda", HALF)
    check_that_nan_stays_where_it_is("cuda", HALF)


@pytest.mark.gpu
def test_towers_compute_with_it_what_they_do_with_torchs_on_a_gpu():
    check_towers("cuda", HALF, 0.05)
