"""The towers by themselves: precision, recomputation, pooling, freezing, configs, flops. Parity has its own file."""

import json

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from infcl.models import CLIP, forward_flops, list_models, load_any_config, load_model_config
from infcl.models.config import parse_model_config
from infcl.models.open_clip_config import check_sizes, open_clip_folder
from infcl.models.preprocess import CLIP_PREPROCESS, IMAGE_MEAN, IMAGE_STD, Preprocess, normalize_pixels
from infcl.models.vision import drop_patches, patch_rows, patches_times
from tests.lib.loss_oracle import relative_error
from tests.lib.ranks import run_ranks

FIELDS = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 48, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 12, "vocab_size": 90, "width": 32, "heads": 4, "layers": 2},
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def small_config(**sections):
    return parse_model_config(
        {key: {**value, **sections.get(key, {})} if isinstance(value, dict) else value for key, value in FIELDS.items()}
        | {key: value for key, value in sections.items() if key not in FIELDS}
    )


def build(cfg=None, seed=0, **options) -> CLIP:
    torch.manual_seed(seed)
    return CLIP(cfg or small_config(), **options)


def batch(m=5):
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (m, 3, 32, 32), dtype=torch.uint8, generator=generator)
    texts = torch.randint(2, 89, (m, 12), generator=generator)
    texts[:, -2] = 89
    return images, texts


def surrogate_gradients(model, images, texts):
    out = model(images, texts)
    weights = torch.linspace(-1, 1, out["image_features"].numel()).view_as(out["image_features"])
    ((out["image_features"] + 2 * out["text_features"]) * weights).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pixels", [torch.uint8, torch.float32])
def test_features_are_float32_unit_vectors_in_every_parameter_dtype(dtype, pixels):
    reference, model = build(), build().to(dtype)
    images, texts = batch()
    expected = reference(images, texts)
    if pixels == torch.float32:
        images = normalize_pixels(images)
    out = model(images, texts)
    for key in ("image_features", "text_features"):
        assert out[key].dtype == torch.float32
        torch.testing.assert_close(out[key].norm(dim=1), torch.ones(5))
        assert (out[key] * expected[key]).sum(1).min() > (1 - 1e-5 if dtype == torch.float32 else 0.999)
    assert out["logit_scale"].dtype == torch.float32


def test_normalisation_of_pixels_is_open_clips_and_survives_a_cast_of_the_model():
    images, _ = batch()
    mean, std = torch.tensor(IMAGE_MEAN).view(3, 1, 1), torch.tensor(IMAGE_STD).view(3, 1, 1)
    torch.testing.assert_close(normalize_pixels(images), (images / 255 - mean) / std, rtol=0, atol=1e-6)
    assert not list(build().buffers())  # nothing that DeepSpeed's bf16 mode could round


def test_shorter_texts_are_accepted_and_wrong_shapes_are_named():
    model = build()
    images, texts = batch()
    assert model(texts=texts[:, :7])["text_features"].shape == (5, 24)
    with pytest.raises(ValueError, match=r"\[5, 13\].*context_length 12"):
        model(texts=torch.zeros(5, 13, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"\[5, 3, 32, 24\].*32, 32"):
        model(images[..., :24])


@pytest.mark.parametrize("patch_dropout", [0.0, 0.5])
def test_activation_checkpointing_changes_nothing(patch_dropout):
    images, texts = batch()
    gradients = []
    for recompute in (False, True):
        model = build(patch_dropout=patch_dropout, activation_checkpointing=recompute)
        torch.manual_seed(7)
        gradients.append(surrogate_gradients(model, images, texts))
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[0].items():
        assert torch.equal(gradients[1][name], expected), name


def test_patch_dropout_keeps_the_class_token_and_is_replayed_by_the_seed():
    x = torch.arange(2 * 17 * 3.0).view(2, 17, 3)
    torch.manual_seed(0)
    first = drop_patches(x, 0.7)
    torch.manual_seed(0)
    assert torch.equal(first, drop_patches(x, 0.7))
    assert first.shape == (2, 1 + 4, 3) and torch.equal(first[:, 0], x[:, 0])
    for row in range(2):
        assert len({tuple(token) for token in first[row].tolist()} & {tuple(t) for t in x[row].tolist()}) == 5


def test_patch_dropout_acts_while_training_only():
    images, _ = batch()
    model, plain = build(patch_dropout=0.5), build()
    assert model.cfg.vision_cfg.patch_dropout == 0.5
    assert not torch.equal(model(images)["image_features"], plain(images)["image_features"])
    assert torch.equal(model.eval()(images)["image_features"], plain(images)["image_features"])


@pytest.mark.parametrize("unlocked", [0, 1, 2, 3, 4])
def test_unlocked_groups_are_counted_from_the_end(unlocked):
    model = build()
    model.lock_image_tower(unlocked)
    model.lock_text_tower(unlocked)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert ("visual.proj" in trainable) == ("text_projection" in trainable) == (unlocked >= 1)
    assert ("visual.ln_post.weight" in trainable) == ("ln_final.weight" in trainable) == (unlocked >= 2)
    assert ("transformer.resblocks.1.ln_1.bias" in trainable) == (unlocked >= 2)
    assert ("visual.transformer.resblocks.0.mlp.c_fc.weight" in trainable) == (unlocked >= 3)
    assert ("visual.class_embedding" in trainable) == ("token_embedding.weight" in trainable) == (unlocked >= 4)


def test_too_many_unlocked_groups_are_an_error():
    with pytest.raises(ValueError, match="9 unlocked groups: this tower has 4"):
        build().lock_image_tower(9)


def test_zero_init_shards_the_same_initial_weights():
    assert run_ranks(_differences_under_zero_init, 2) == [[], []]


def _differences_under_zero_init(rank: int, world_size: int) -> list[str]:
    from infcl.engine.engine import _import_deepspeed

    deepspeed = _import_deepspeed()  # without its own way over shared memory, which a compiler would have to build
    deepspeed.init_distributed("gloo")
    config = {"train_batch_size": world_size, "zero_optimization": {"stage": 3}}
    expected = dict(build(load_model_config("demo")).named_parameters())
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = build(load_model_config("demo"))
    different = []
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            if not torch.equal(parameter, expected[name]):
                different.append(name)
    return different


def _convolution(images, weight):
    return torch.nn.functional.conv2d(images, weight, stride=weight.shape[-1]).flatten(2).transpose(1, 2)


@pytest.mark.parametrize(("size", "side"), [(14, 56), (8, 40), (5, 35)])
def test_a_product_of_patches_is_the_convolution(size, side):
    """14: the fill is 4 numbers of 592; 8: there is none."""
    inputs = torch.randn(3, 3, side, side, dtype=torch.float64), torch.randn(20, 3, size, size, dtype=torch.float64)
    found = []
    for ways in (patches_times, _convolution):
        images, weight = (tensor.clone().requires_grad_() for tensor in inputs)
        output = ways(images, weight)
        found.append((output, *torch.autograd.grad(output.sin().sum(), (images, weight))))
    for mine, other in zip(*found):
        assert mine.shape == other.shape
        assert torch.allclose(mine, other, rtol=1e-12, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_patches_are_embedded_on_a_gpu_as_on_a_cpu(dtype):
    model = build(small_config()).double()
    images = torch.randn(5, 3, 32, 32, dtype=torch.float64)
    wanted = model.visual.conv1(images)
    found = model.visual.conv1.to("cuda", dtype)(images.to("cuda", dtype)).cpu().double()
    bound = {torch.float32: 2e-3, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]  # float32: tf32 may be on
    assert relative_error(found, wanted) < bound


def test_conv_stem_yields_the_configured_grid():
    stem = [[8, 4, 2], [16, 3, 1], [48, 5, 4]]
    model = build(small_config(vision_cfg={"conv_stem": stem}))
    assert model.visual.conv1(torch.zeros(2, 3, 32, 32)).shape == (2, 16, 48)
    assert model(batch()[0])["image_features"].shape == (5, 24)


@pytest.mark.parametrize("name", list_models())
def test_configs_survive_a_round_trip_through_json(name, tmp_path):
    cfg = load_model_config(name)
    (tmp_path / "model.json").write_text(cfg.to_json())
    assert load_model_config(tmp_path / "model.json") == cfg


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"custom_text": True}, "unknown key 'custom_text'.*open_clip:"),
        ({"vision_cfg": {"timm_model_name": "x"}}, "unknown key 'vision_cfg.timm_model_name'"),
        ({"vision_cfg": {"image_size": 30}}, "image_size 30 is not a multiple of patch_size 8: 6 pixels"),
        ({"vision_cfg": {"image_size": [32, 32]}}, r"image_size is \[32, 32\]: .*integer"),
        ({"vision_cfg": {"width": 40}}, "width 40 is not a multiple of head_width 16"),
        ({"vision_cfg": {"patch_dropout": 1.0}}, "patch_dropout 1.0 must lie in"),
        ({"vision_cfg": {"conv_stem": [[48, 4, 4]]}}, "must multiply to patch_size 8"),
        ({"vision_cfg": {"conv_stem": [[40, 8, 8]]}}, r"conv_stem \[\[40, 8, 8\]\].* must have width 48 channels"),
        ({"vision_cfg": {"conv_stem": [[48, 4, 8]]}}, r"conv_stem \[\[48, 4, 8\]\].*kernel >= stride"),
        ({"text_cfg": {"heads": 5}}, "width 32 is not a multiple of heads 5"),
        ({"text_cfg": {"pool_type": "mean"}}, "'mean' is not one of argmax, eos, last, first"),
        ({"text_cfg": {"pool_type": "first"}}, "set no_causal_mask"),
        ({"text_cfg": {"eos_id": 90}}, r"eos_id 90 must lie in \[0, vocab_size 90\)"),
        ({"text_cfg": {"layers": 0}}, "layers 0 must be positive"),
        ({"init_logit_bias": "high"}, "init_logit_bias is 'high': .*number"),
    ],
)
def test_wrong_configs_are_errors_with_the_numbers(fields, message):
    with pytest.raises(ValueError, match=message):
        small_config(**fields)


def test_overrides_replace_what_is_given_and_are_validated():
    cfg = small_config().with_overrides(image_size=64, context_length=9)
    assert (cfg.vision_cfg.num_patches, cfg.text_cfg.context_length, cfg.vision_cfg.patch_dropout) == (64, 9, 0.0)
    with pytest.raises(ValueError, match="image_size 63 is not a multiple"):
        cfg.with_overrides(image_size=63)


def test_a_missing_section_and_an_unknown_name_are_reported(tmp_path):
    (tmp_path / "broken.json").write_text('{"embed_dim": 8}')
    with pytest.raises(ValueError, match=r"broken\.json: vision_cfg is missing"):
        load_model_config(tmp_path / "broken.json")
    with pytest.raises(ValueError, match="no model 'ViT-Z-1'.*ViT-L-14"):
        load_model_config("ViT-Z-1")


@pytest.mark.parametrize("causal", [True, False])
def test_counted_flops_equal_torchs_counter(causal):
    cfg = small_config(text_cfg={"no_causal_mask": not causal}, vision_cfg={"mlp_ratio": 3.3})
    model = build(cfg)
    images, texts = batch(m=1)
    for inputs, key in (({"images": images}, "image"), ({"texts": texts}, "text")):
        assert _counted(model, inputs) == forward_flops(cfg)[key], key


def test_flops_count_the_conv_stem_and_patch_dropout():
    demo = load_model_config("demo")
    assert _counted(build(demo), {"images": torch.zeros(1, 3, 32, 32)}) == forward_flops(demo)["image"]
    cfg = small_config()
    dropped = cfg.with_overrides(patch_dropout=0.5)
    assert (
        forward_flops(dropped)["image"] < forward_flops(cfg)["image"] == forward_flops(dropped, training=False)["image"]
    )


def _counted(model, inputs):
    """The counter knows matrix products only, so attention must take its unfused path."""
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model.eval()(**inputs)
    return counter.get_total_flops()


def with_number(text: str, **place: str) -> str:
    """The text of a model's JSON with a number as it is written, which Python could not hold."""
    ((section, name),) = place.items()
    fields = {key: {**value, name: "NUMBER"} if key == section else value for key, value in FIELDS.items()}
    return json.dumps(fields | ({name: "NUMBER"} if section == "top" else {})).replace('"NUMBER"', text)


def with_preprocess(fields) -> str:
    return json.dumps({"built_by": "open_clip", "model_cfg": FIELDS, "preprocess_cfg": fields})


HOSTILE = {
    "a billion layers": with_number("1000000000", vision_cfg="layers"),
    "layers of stages": with_number("[3, 4, 1000000000, 3]", vision_cfg="layers"),
    "width of 70 bits": with_number(str(2**70), vision_cfg="width"),
    "width of 4000 digits": with_number("9" * 4000, vision_cfg="width"),
    "embedding": with_number(str(2**62), top="embed_dim"),
    "vocabulary": with_number(str(2**50), text_cfg="vocab_size"),
    "context": with_number(str(2**40), text_cfg="context_length"),
    "ratio": with_number("1e999", vision_cfg="mlp_ratio"),
    "ratio of NaN": with_number("NaN", vision_cfg="mlp_ratio"),
    "bias": with_number("-1e999", top="init_logit_bias"),
    "stem": with_number("[[1000000000, 4, 4], [48, 2, 2]]", vision_cfg="conv_stem"),
    "deep list": "[" * 100_000,
    "deep object": '{"vision_cfg":' * 100_000,
    "deep value": with_number("[" * 100_000 + "]" * 100_000, text_cfg="tokenizer_kwargs"),
    "list": "[]",
    "no towers": '{"model_cfg": [1]}',
    "tower": '{"embed_dim": 8, "vision_cfg": [], "text_cfg": 3}',
    "kwargs": with_number("[1]", text_cfg="tokenizer_kwargs"),
    "id": with_number('"x"', text_cfg="pad_id"),
    "pooling": with_number("3", text_cfg="pool_type"),
    "preprocessing": with_preprocess([1]),
    "mean": with_preprocess({"mean": [float("inf"), 0, 0]}),
    "colour": with_preprocess({"fill_color": "x"}),
}


@pytest.mark.parametrize("prefix", ["", "open_clip:", "folder"])
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_strangers_config_is_one_line_before_a_tower_is_built(text, prefix, tmp_path):
    name, door = ("open_clip_config.json", "") if prefix == "folder" else ("model.json", f"{prefix}{tmp_path}/")
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")) as wrong:
        load_any_config(tmp_path if prefix == "folder" else f"{door}{name}")
    assert "\n" not in str(wrong.value) and len(str(wrong.value)) < 3 * len(str(tmp_path)) + 300


def test_the_configs_of_open_clip_are_within_the_bounds():
    for path in sorted((open_clip_folder() / "model_configs").glob("*.json")):
        check_sizes(json.loads(path.read_text()), path.name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("like", [CLIP_PREPROCESS, Preprocess(mean=(0.5, 0.4, 0.3), std=(0.5, 0.25, 0.2))])
def test_rows_of_patches_are_the_pixels_normalised_in_their_order(dtype, like):
    pixels = torch.randint(256, (3, 3, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    rows, normal = patch_rows(pixels, 14, dtype, like), normalize_pixels(pixels, like).to(dtype)
    weight = torch.randn(48, 3, 14, 14).to(dtype)
    expected = torch.nn.functional.linear(rows[..., :588], weight.flatten(1))
    torch.testing.assert_close(patches_times(pixels, weight, like), expected)
    assert rows.shape == (3, 4, 592) and rows.dtype == dtype and not rows[..., 588:].any()
    for patch, (y, x) in enumerate([(0, 0), (0, 14), (14, 0), (14, 14)]):
        wanted = normal[:, :, y : y + 14, x : x + 14].flatten(1)
        torch.testing.assert_close(rows[:, patch, :588], wanted, rtol=0, atol=0)
