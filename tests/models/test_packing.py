"""Packed captions: features, gradients and whole runs are those of the captions one by one."""

import dataclasses
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infcl.config import TrainConfig, resolve
from infcl.models.clip import CLIP
from infcl.models.config import TextConfig, load_model_config
from infcl.models.packing import (
    longest,
    pack_captions,
    pooled_positions,
    row_length,
    texts_for_model,
)
from infcl.step.batches import StepBatches
from infcl.step.pixels import PixelCache
from infcl.train.compile import compile_blocks
from tests.lib.loss_oracle import relative_error

CPU = torch.device("cpu")
EOS = TextConfig(context_length=13, vocab_size=50, width=24, heads=3, layers=2, pool_type="eos", eos_id=1)
ARGMAX = dataclasses.replace(EOS, pool_type="argmax", eos_id=2)


def captions(cfg: TextConfig, lengths, seed=0) -> torch.Tensor:
    """int64 [m, L]: tokens, the one that is pooled, and noise behind it, where padding would be."""
    generator = torch.Generator().manual_seed(seed)
    texts = torch.randint(3, cfg.vocab_size - 1, (len(lengths), cfg.context_length), generator=generator)
    for text, length in zip(texts, lengths):
        text[length - 1] = cfg.eos_id if cfg.pool_type == "eos" else cfg.vocab_size - 1
    return texts


def model_of(text_cfg: TextConfig) -> CLIP:
    torch.manual_seed(1)
    model = CLIP(dataclasses.replace(load_model_config("demo"), text_cfg=text_cfg)).double()
    with torch.no_grad():
        model.positional_embedding.normal_()  # so that a wrong position shows
    return model


@pytest.mark.parametrize("cfg", [EOS, ARGMAX], ids=["eos", "argmax"])
@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 13), max_size=150))
def test_every_caption_lies_whole_in_one_row_and_nothing_else_does(cfg, lengths):
    texts = captions(cfg, lengths)
    rows, ends = pack_captions(texts, cfg)
    assert rows.shape[1] == row_length(13) == 32 and len(ends) == len(lengths)
    free = torch.ones(rows.numel(), dtype=torch.bool)
    for text, length, end in zip(texts, lengths, ends.tolist()):
        first = end - length + 1
        assert first // 32 == end // 32 and free[first : end + 1].all()
        assert torch.equal(rows.view(-1)[first : end + 1], text[:length])
        free[first : end + 1] = False
    assert (rows.view(-1)[free] == cfg.pad_id).all()
    full = -(-sum(lengths) // 32)  # rows that no way of packing could do without
    assert len(rows) <= max(2, 1.5 * full + 1 + -(-len(lengths) // 64))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("cfg", [EOS, ARGMAX], ids=["eos", "argmax"])
def test_features_and_gradients_are_those_of_the_captions_one_by_one(cfg, checkpointing):
    lengths = [1, 13, 13, 2, 7, 7, 7, 12, 3, 1, 9, 4, 6, 5, 11, 8, 2]
    texts, model = captions(cfg, lengths), model_of(cfg)
    model.transformer.activation_checkpointing = checkpointing
    assert pooled_positions(texts, cfg.pool_type, cfg.eos_id).tolist() == [length - 1 for length in lengths]
    weights = torch.randn(len(lengths), model.cfg.embed_dim, dtype=torch.float64)
    found = []
    for given_texts in ({"texts": texts}, texts_for_model(cfg, pack=True)(texts)):
        model.zero_grad()
        features = model.encode_text(given_texts["texts"], ends=given_texts.get("text_ends"))  # in float64
        (features * weights).sum().backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append({"features": features.detach()} | gradients)
    assert found[0].keys() == found[1].keys() and len(found[0]) > 20
    for name, value in found[0].items():
        torch.testing.assert_close(
            found[1][name], value, rtol=1e-10, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_in_16_bits_gradients_are_as_near_to_the_truth_as_those_of_whole_captions():
    """Of 1,024 captions, whose positions' gradients are sums of as many: added up in BF16 they are 12% off."""
    generator = torch.Generator().manual_seed(2)
    texts = captions(EOS, torch.randint(1, 14, (1024,), generator=generator).tolist())
    weights, found = torch.randn(1024, model_of(EOS).cfg.embed_dim, dtype=torch.float64, generator=generator), []
    exact = model_of(EOS).bfloat16().double()
    for model, given_texts in (
        (exact, {"texts": texts}),
        (model_of(EOS).bfloat16(), {"texts": texts}),
        (model_of(EOS).bfloat16(), texts_for_model(EOS, pack=True)(texts)),
    ):
        (model(**given_texts)["text_features"].double() * weights).sum().backward()
        found.append({n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None})
    errors = [{n: relative_error(one[n], value) for n, value in found[0].items()} for one in found[1:]]
    for name, whole_error in errors[0].items():
        assert errors[1][name] < 2 * whole_error + 1e-3, (name, whole_error, errors[1][name])


def test_texts_that_are_too_long_are_rejected():
    with pytest.raises(ValueError, match=r"\[4, 14\].*context_length 13"):
        texts_for_model(EOS, pack=True)(torch.ones(4, 14, dtype=torch.int64))


@pytest.mark.long
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_graph_serves_any_number_of_rows(backend, monkeypatch):
    """aot_eager: graphs, each run by eager kernels; compiling C++ for them takes most of a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch.manual_seed(0)
    model = CLIP(load_model_config("demo"))
    cfg = model.cfg.text_cfg
    graphs = torch._dynamo.utils.counters["stats"]
    assert compile_blocks(model, {64}, packed=True)
    features = model(**texts_for_model(cfg, pack=True)(captions(cfg, [9] * 64)))["text_features"]
    features.sum().backward()
    before = graphs["unique_graphs"]
    for size, length in ((64, 20), (64, 5), (33, 11), (5, 2)):
        texts = captions(cfg, [length] * size)
        features = model(**texts_for_model(cfg, pack=True)(texts))["text_features"]
        torch.testing.assert_close(features, model(texts=texts)["text_features"])  # eager
        features.sum().backward()
    assert graphs["unique_graphs"] == before


def packs(config, cfg) -> bool:
    return resolve(config, device="cpu", unpackable=cfg.text_cfg.why_unpackable).packs_captions


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ({"no_causal_mask": True}, "attends to what follows a caption"),
        ({"pool_type": "last"}, "pool_type 'last'"),
    ],
)
def test_where_captions_cannot_be_packed_they_are_not_or_the_reason_is_said(text, reason):
    demo = load_model_config("demo")
    other = dataclasses.replace(demo, text_cfg=dataclasses.replace(demo.text_cfg, **text))
    assert packs(TrainConfig(), demo) and not packs(TrainConfig(pack_captions="off"), demo)
    assert not packs(TrainConfig(), other)
    assert texts_for_model(other.text_cfg, pack=False)(longest(other.text_cfg, 3)).keys() == {"texts"}
    with pytest.raises(ValueError, match=reason):
        packs(TrainConfig(pack_captions="on"), other)


def test_tensor_parallel_ranks_pack_where_it_is_asked_for():
    """What it brings on GPUs has not been measured."""
    demo, split = load_model_config("demo"), TrainConfig(tensor_parallel_size=2)
    assert not packs(split, demo)
    assert packs(dataclasses.replace(split, pack_captions="on"), demo)


@pytest.mark.parametrize(("parts", "rows_of_short", "rows_of_long"), [(1, 4, 4), (2, 4, 8)])
def test_the_share_of_places_is_that_of_a_steps_texts(parts, rows_of_short, rows_of_long):
    """parts: ranks that read a part of each micro-batch, here all alike."""
    cfg, images = EOS, (4, 3, 2, 2)
    step = StepBatches(
        PixelCache(CPU, images, replayed=1, kept=1), 2, device=CPU, parts=parts,
        texts=lambda texts: texts_for_model(cfg, pack=True)(torch.cat([texts] * parts)),
    )  # fmt: skip
    for lengths, rows in (([[5, 6, 7, 8], [1, 1, 1, 1]], rows_of_short), ([[13] * 4] * 2, rows_of_long)):
        batches = [
            {"images": torch.zeros(images, dtype=torch.uint8), "texts": captions(cfg, one), "ids": torch.arange(4)}
            for one in lengths
        ]
        step.begin(iter(batches))
        assert step[0].keys() == {"images", "texts", "text_ends"} and step[1].keys() == step[0].keys()
        assert step.text_share == rows * 32 / (parts * 2 * 4 * 13)
