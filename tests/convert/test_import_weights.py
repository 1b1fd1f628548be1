"""Others' weights into these towers: every kind of source gives its features; what does not fit is reported in full."""

import dataclasses
import json
import random

import pytest
import torch
from safetensors.torch import save_file

from infcl.config import TrainConfig
from infcl.convert.__main__ import main
from infcl.convert.export import export_model, load_exported
from infcl.convert.hf_clip import from_hf_config
from infcl.convert.import_weights import (
    Weights,
    load_pretrained,
    model_with,
    read_weights,
    resize_image_positions,
    weights_preprocess,
)
from infcl.models import CLIP, build_towers
from infcl.models.config import load_any_config, parse_model_config
from infcl.models.open_clip_config import OpenClipConfig
from infcl.models.preprocess import Preprocess
from infcl.train.build import build_tokenizer_and_model_config
from tests.lib.open_clip_stub import import_open_clip
from tests.lib.shard_files import Payload

VISION = {"image_size": 32, "layers": 1, "width": 48, "head_width": 16, "patch_size": 8}
TEXT = {"context_length": 12, "vocab_size": 90, "width": 32, "heads": 4, "layers": 2, "pool_type": "eos", "eos_id": 1}


def config(vision=(), text=(), **top):
    fields = {"embed_dim": 24, "vision_cfg": {**VISION, **dict(vision)}, "text_cfg": {**TEXT, **dict(text)}, **top}
    return parse_model_config(fields)


def seeded(cfg, seed) -> CLIP:
    torch.manual_seed(seed)
    return CLIP(cfg).eval()


@pytest.fixture(scope="module")
def source():
    return seeded(config(), 1)


def write(kind, model, path):
    """`model` as open_clip, DDP, CustomTextCLIP, transformers or this project would leave it; returns what to load."""
    state = {name: value.detach() for name, value in model.state_dict().items()}
    state["logit_scale"] = state["logit_scale"][0]
    if kind == "pt":
        torch.save(state, path / "w.pt")
    elif kind == "ddp":
        torch.save({"epoch": 3, "state_dict": {f"module._orig_mod.{n}": v for n, v in state.items()}}, path / "w.pt")
    elif kind == "custom_text":
        top = ("visual.", "logit_scale")
        torch.save({n if n.startswith(top) else f"text.{n}": v for n, v in state.items()}, path / "w.bin")
    elif kind == "openai":  # the state dict of its archive has sizes in it
        sizes = {"input_resolution": 32, "context_length": 12, "vocab_size": 90}
        torch.save(state | {name: torch.tensor(value) for name, value in sizes.items()}, path / "w.pt")
    elif kind == "safetensors":
        save_file(state, path / "w.safetensors")
    else:
        export_model(model.state_dict(), model.cfg, None, path, format=kind.removeprefix("folder_"))
        return path
    return next(path.glob("w.*"))


KINDS = ["pt", "ddp", "openai", "custom_text", "safetensors", "folder_open_clip", "folder_hf"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_started_from_any_source_has_its_weights(kind, source, tmp_path):
    model, path = seeded(config(), 2), write(kind, source, tmp_path)
    load_pretrained(model, str(path))
    models = [model]
    if kind.startswith("folder"):
        loaded, cfg = load_exported(path)
        assert not loaded.training and cfg.vision_cfg == source.cfg.vision_cfg
        assert (cfg.text_cfg.pool_type, cfg.text_cfg.eos_id) == ("eos", 1)
        modes = {file.stat().st_mode for file in path.iterdir() if file.suffix in (".safetensors", ".md")}
        assert len(modes) == 1, "whoever may read the card may read the weights"
        models.append(loaded)
    for name, value in source.state_dict().items():
        assert all(torch.equal(one.state_dict()[name], value) for one in models), name


@pytest.mark.parametrize(
    ("image_size", "place"), [(32, "open_clip_config"), (48, "preprocessor_config"), (32, "processor_config")]
)
def test_weights_bring_the_normalisation_of_their_pixels(image_size, place, source, tmp_path):
    """open_clip's ViT-L-14 laion2b_s32b_b82k has mean and std 0.5."""
    mean, std = [0.5, 0.4, 0.3], [0.5, 0.25, 0.2]
    path = write("folder_open_clip" if place == "open_clip_config" else "folder_hf", source, tmp_path)
    (path / "preprocessor_config.json").unlink(missing_ok=True)
    said = {"image_mean": mean, "image_std": std}
    if place == "open_clip_config":
        said = json.loads((path / f"{place}.json").read_text()) | {"preprocess_cfg": {"mean": mean, "std": std}}
    elif place == "processor_config":
        said = {"image_processor": said}
    (path / f"{place}.json").write_text(json.dumps(said))
    preprocess = weights_preprocess(str(path), "any")
    assert preprocess == {"mean": tuple(mean), "std": tuple(std)}
    cfg = config(vision={"image_size": image_size})
    ours, theirs = seeded(cfg.with_preprocess(preprocess), 2), seeded(cfg, 3)
    assert "its pixels were normalised by" not in load_pretrained(ours, image=str(path))[0]
    assert "its pixels were normalised by" in load_pretrained(theirs, image=str(path))[0]
    assert main(["import", str(path), "--out", str(tmp_path / "imported")]) == 0
    file = str(write("pt", source, tmp_path))
    assert "its pixels were normalised by" not in load_pretrained(ours, image=file)[0], "a file is as its folder says"
    load_pretrained(theirs, file)
    (tmp_path / "small.json").write_text(cfg.to_json())
    flags = TrainConfig(model=str(tmp_path / "small.json"), pretrained="infcl", pretrained_image=str(path))
    assert build_tokenizer_and_model_config(flags)[1].preprocess == ours.cfg.preprocess, "the image tower's source"
    pixels = torch.randint(256, (3, 3, image_size, image_size), dtype=torch.uint8)
    normalised = (pixels / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    with torch.no_grad():
        expected, got = theirs(normalised)["image_features"], ours(pixels)["image_features"]
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)
        if image_size == 32:
            imported = load_exported(tmp_path / "imported")[0](pixels)["image_features"]
            torch.testing.assert_close(imported, expected, rtol=0, atol=2e-6)
        assert (theirs(pixels)["image_features"] - expected).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("preprocessor_config", {"resample": 1}, r"resample 1 is neither 2 \(bilinear\) nor 3 \(bicubic\)"),
        (
            "processor_config",
            {"image_processor": [1]},
            r"json: image_processor is \[1\], not an object",
        ),
    ],
)
def test_preprocessing_that_cannot_be_done_is_rejected(file, fields, message, source, tmp_path):
    path = write("folder_hf", source, tmp_path)
    (path / f"{file}.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=message):
        read_weights(path)


def test_a_folder_with_the_name_of_a_model_has_its_own_config(source, tmp_path, monkeypatch):
    write("folder_open_clip", source, tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    assert read_weights("demo").cfg == read_weights(tmp_path / "demo").cfg == source.cfg


@pytest.mark.parametrize(
    ("kind", "file", "foreign"),
    [
        ("open_clip", "open_clip_config", {"preprocess_cfg": {"resize_mode": "squash", "interpolation": "bilinear"}}),
        ("hf", "preprocessor_config", {"resample": 2, "do_center_crop": False}),
    ],
)
def test_weights_bring_the_resizing_of_their_images_through_every_format(kind, file, foreign, source, tmp_path):
    """open_clip's ViT-H-14-378 of DFN5B squashes its images."""
    path = write(f"folder_{kind}", source, tmp_path / "first")
    fields = json.loads((path / f"{file}.json").read_text())
    (path / f"{file}.json").write_text(json.dumps(fields | foreign))
    for format in ("hf", "open_clip"):
        assert main(["import", str(path), "--format", format, "--out", str(path := tmp_path / format)]) == 0
        assert load_exported(path)[1].preprocess == Preprocess(resize_mode="squash", interpolation="bilinear")


@pytest.mark.parametrize("tower", ["image", "text"])
def test_one_tower_alone_leaves_the_other_and_the_scale_as_they_were(tower, source, tmp_path):
    path, model = str(write("safetensors", source, tmp_path)), seeded(config(), 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert load_pretrained(model, **{tower: path}) == [f"the {tower} tower's weights are those of {path}"]
    for name, value in model.state_dict().items():
        loaded = name not in ("logit_scale", "logit_bias") and name.startswith("visual.") == (tower == "image")
        assert torch.equal(value, (source.state_dict() if loaded else before)[name]), name


def test_position_embeddings_are_interpolated_as_open_clip_does(source, tmp_path):
    open_clip = import_open_clip()
    path, cfg = write("pt", source, tmp_path), config(vision={"image_size": 48})
    ours, theirs = seeded(cfg, 2), open_clip.model.CLIP(**cfg.to_dict())
    load_pretrained(ours, str(path))
    open_clip.load_checkpoint(theirs, str(path))
    assert ours.visual.positional_embedding.shape == (37, 48)
    torch.testing.assert_close(ours.visual.positional_embedding, theirs.visual.positional_embedding, rtol=0, atol=1e-6)


def test_position_embeddings_that_are_resized_or_cut_are_reported(source, tmp_path):
    path, model = str(write("pt", source, tmp_path)), seeded(config({"image_size": 48}, {"context_length": 8}), 2)
    changes = "its 17 image positions are interpolated to 37; of its 12 text positions the first 8 are taken"
    assert load_pretrained(model, path) == [f"all weights are those of {path}; {changes}"]
    assert torch.equal(model.positional_embedding, source.positional_embedding[:8])
    positions = source.visual.positional_embedding.detach()
    torch.testing.assert_close(resize_image_positions(positions, len(positions)), positions)


def test_a_shorter_text_tower_keeps_the_position_of_its_class_token(tmp_path):
    """open_clip's embed_cls puts a class token after the words, so its position is the last one."""
    import_open_clip()
    text = TEXT | {"embed_cls": True, "pool_type": "argmax", "vocab_size": 90}
    fields = {"embed_dim": 24, "vision_cfg": VISION, "text_cfg": text, "custom_text": True}
    whole = OpenClipConfig("x", fields)
    cut = whole.with_overrides(image_size=None, context_length=8, patch_dropout=None)
    torch.manual_seed(5)
    source, model = build_towers(whole).eval(), build_towers(cut).eval()
    torch.nn.init.normal_(source.text.positional_embedding)
    torch.save(source.state_dict(), tmp_path / "w.pt")
    (line,) = load_pretrained(model, str(tmp_path / "w.pt"))
    assert line.endswith("of its 13 text positions the first 8 and the last are taken")
    ids = torch.tensor([[5, 8, 7, 89, 0, 0, 0, 0], [9, 89, 0, 0, 0, 0, 0, 0]])
    with torch.no_grad():
        long = source(None, torch.nn.functional.pad(ids, (0, 4)))["text_features"]
        torch.testing.assert_close(model(None, ids)["text_features"], long, rtol=0, atol=1e-6)


def test_what_does_not_fit_is_listed_with_shapes_and_nothing_is_loaded(source, tmp_path):
    state = dict(source.state_dict())
    state["visual.proj"], state["visual.extra"] = torch.zeros(48, 16), torch.zeros(2, 3)
    del state["ln_final.bias"]
    torch.save(state, tmp_path / "w.pt")
    model = seeded(config(), 2)
    before = model.visual.conv1.weight.clone()
    with pytest.raises(ValueError) as error:
        load_pretrained(model, str(tmp_path / "w.pt"))
    for part in (
        "w.pt does not fit the model",
        "missing: ln_final.bias [32]",
        "unexpected: visual.extra [2, 3]",
        "mismatched: visual.proj is [48, 16], needed [48, 24]",
    ):
        assert part in str(error.value)
    assert torch.equal(model.visual.conv1.weight, before)
    load_pretrained(model, text=None, image=None)


def built_by_open_clip(text=(), **top):
    import_open_clip()
    fields = {"embed_dim": 24, "vision_cfg": VISION, "text_cfg": {**TEXT, **dict(text)}, **top}
    return build_towers(OpenClipConfig("small", fields))


@pytest.mark.parametrize("kind", ["open_clip", "hf", "built by open_clip"])
def test_settings_must_agree_also_where_shapes_do_not_show_them(kind, source, tmp_path):
    """A sentencepiece tokenizer has the ids of SigLIP, but its models pool at the end of a caption."""
    is_ours = kind in ("open_clip", "hf")
    make = (lambda text=(), **top: seeded(config(text=text, **top), 2)) if is_ours else built_by_open_clip
    model = source if is_ours else built_by_open_clip()
    export_model(model.state_dict(), model.cfg, None, tmp_path, format=kind if is_ours else "open_clip")
    load_pretrained(make(), str(tmp_path))
    others = [
        (make(quick_gelu=True), "quick_gelu is False there, True here. Choose a --model with its settings, such as"),
        (make({"heads": 2}), "text_cfg.heads is 4 there, 2 here"),
        (make({"no_causal_mask": True}), "no_causal_mask is False there, True here"),
        (make({"pool_type": "last"}), "pool_type is eos there, last here.* and the tokenizer that belongs to it"),
    ]
    if is_ours:
        others.append((seeded(config(vision={"head_width": 24}), 2), "head_width is 16 there, 24 here"))
        other = make({"vocab_size": 50, "width": 64})
        load_pretrained(other, image=str(tmp_path))
        assert torch.equal(other.visual.conv1.weight, source.visual.conv1.weight)
        others.append((other, "keep the source's tokenizer"))
    else:
        largest = make({"eos_id": 89}).cfg
        assert largest.unseen_settings("whole") == make({"pool_type": "argmax"}).cfg.unseen_settings("whole")
    for other, message in others:
        with pytest.raises(ValueError, match=message):
            load_pretrained(other, str(tmp_path))


@pytest.mark.parametrize("name", ["ViT-B-32", "open_clip:ViT-B-32", "open_clip:ViT-B-32-quickgelu"])
def test_a_tag_whose_weights_need_quick_gelu_is_rejected_for_a_model_without_it(name, tmp_path, monkeypatch):
    """open_clip only warns: 28 of its tags, as OpenAI's, MetaCLIP's and DFN's, need another model than their own."""
    open_clip = import_open_clip()
    save_file({"logit_scale": torch.zeros(())}, tmp_path / "w.safetensors")
    monkeypatch.setattr(open_clip.pretrained, "download_pretrained", lambda _: str(tmp_path / "w.safetensors"))
    with torch.device("meta"):
        model = build_towers(load_any_config(name))
    message = "does not fit" if "quickgelu" in name else "quick_gelu is True there, False here.*ViT-B-32-quickgelu"
    with pytest.raises(ValueError, match=message):
        load_pretrained(model, "open_clip:openai", name=name)


@pytest.mark.parametrize(
    ("eos_id", "vocab_size", "pooling"), [(2, 49408, "argmax"), (49407, 49408, "argmax"), (49407, 49410, "eos")]
)
def test_clip_model_pools_at_the_eos_that_it_names_also_where_larger_ids_exist(eos_id, vocab_size, pooling):
    text = {"eos_token_id": eos_id, "vocab_size": vocab_size, "num_attention_heads": 8}
    text |= {"hidden_size": 448, "intermediate_size": 453}
    cfg = from_hf_config({"model_type": "clip", "text_config_dict": text, "text_config": {"vocab_size": 9}}, "here")
    assert (cfg.text_cfg.pool_type, cfg.text_cfg.vocab_size) == (pooling, vocab_size)
    assert pooling == "argmax" or cfg.text_cfg.eos_id == eos_id
    assert int(448 * cfg.text_cfg.mlp_ratio) == 453 > int(448 * (453 / 448)), "in spite of rounding"


def test_a_loss_s_own_bias_may_be_missing_or_left_over(source, tmp_path):
    with_bias = seeded(config(init_logit_bias=-10.0), 2)
    (line,) = load_pretrained(with_bias, str(write("pt", source, tmp_path)))
    assert line.endswith("; logit_bias is not there: it begins as the loss's")
    assert with_bias.logit_bias.item() == -10.0
    (tmp_path / "other").mkdir()
    path = write("folder_open_clip", with_bias, tmp_path / "other")
    (line,) = load_pretrained(seeded(config(), 3), str(path))
    assert line.endswith("; its logit_bias is left out")
    assert load_exported(path)[0].logit_bias.item() == -10.0


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("zipped", [True, False])
def test_a_damaged_file_is_rejected_or_read_whatever_torch_raises(tmp_path, zipped):
    """Never another error: torch.load raises a dozen types."""
    torch.save({"a": torch.ones(3, 4), "b": "text"}, tmp_path / "whole.pt", _use_new_zipfile_serialization=zipped)
    whole, chance, rejected = (tmp_path / "whole.pt").read_bytes(), random.Random(0), 0
    for _ in range(300):
        damaged = bytearray(whole[: chance.randrange(len(whole) + 1)] if chance.random() < 0.3 else whole)
        for place in chance.choices(range(min(300, len(damaged)) or 1), k=3):
            damaged[place : place + 1] = bytes([chance.randrange(256)])
        (tmp_path / "damaged.pt").write_bytes(damaged)
        try:
            read_weights(tmp_path / "damaged.pt")
        except ValueError:
            rejected += 1
    assert rejected > 100


def test_files_that_would_run_code_are_rejected(tmp_path):
    torch.save({"a": Payload(tmp_path / "ran")}, tmp_path / "evil.pt")
    (tmp_path / "noise.bin").write_bytes(b"not a checkpoint")
    for number, content in enumerate((b"", b"\x80", b"other bytes\n")):  # each raises another type in torch.load
        (tmp_path / f"{number}.bin").write_bytes(content)
    (tmp_path / "noise.safetensors").write_bytes(b"not a checkpoint")
    torch.save({"state_dict": [1, 2]}, tmp_path / "list.pt")
    for name, message in (
        ("evil.pt", "weights_only"),
        *((f"{name}.bin", "weights_only.*not a torch file") for name in ("noise", 0, 1, 2)),
        ("noise.safetensors", "not a safetensors file"),
        ("list.pt", "no state dict"),
        ("nothing.pt", "no such file"),
    ):
        with pytest.raises(ValueError, match=message) as rejected:
            read_weights(tmp_path / name)
        assert "Re-running" not in str(rejected.value)  # torch's advice
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ValueError, match="no weights there"):
        read_weights(tmp_path)


def test_import_writes_the_weights_for_another_program(source, tmp_path, capsys):
    def imports(*arguments):
        return main(["import", *map(str, arguments)])

    path = write("pt", source, tmp_path)
    (tmp_path / "model.json").write_text(source.cfg.to_json())
    out = tmp_path / "out"
    assert imports(path, "--out", out) == 2 and "give --model" in capsys.readouterr().err
    assert imports(path, "--out", out, "--model", tmp_path / "model.json", "--format", "hf") == 0
    assert imports(out, "--out", out) == 2 and "choose another" in capsys.readouterr().err
    assert imports(out, "--out", tmp_path / "again", "--model", "ViT-B-32") == 2
    assert "brings its own config; leave --model out" in capsys.readouterr().err
    assert imports(out, "--out", tmp_path / "again") == 0
    for folder in (out, tmp_path / "again"):
        state = load_exported(folder)[0].state_dict()
        assert all(torch.equal(state[name], value) for name, value in source.state_dict().items())


def test_weights_that_do_not_fit_are_reported_before_a_model_takes_memory(source, tmp_path, monkeypatch):
    """The config is larger than the weights by 64 GB; scalars of seven elements, kernels without channels."""
    large, built = dataclasses.replace(source.cfg, embed_dim=1 << 16), []
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "normal_", lambda tensor, *_, **__: built.append(tensor.device.type))
        with pytest.raises(ValueError, match=r"mismatched: .*visual\.proj is \[48, 24\], needed \[48, 65536\]"):
            model_with(Weights(dict(source.state_dict()), large, "w"), large)
    assert set(built) == {"meta"}
    for name, value in (
        ("logit_scale", torch.zeros(7)),
        ("visual.conv1.weight", torch.zeros(48, 3)),
        ("visual.positional_embedding", torch.tensor(1.0)),
        ("positional_embedding", torch.tensor(1.0)),
    ):
        state = source.state_dict() | {name: value}
        with pytest.raises(ValueError, match=rf"mismatched: {name} is "):
            model_with(Weights(state, source.cfg, "w"), source.cfg)


OTHER_TOWERS = "these towers have quick_gelu in both or"


@pytest.mark.parametrize(
    ("section", "fields", "message"),
    [
        ("text_config", {"hidden_act": "gelu_new"}, f"gelu_new.*{OTHER_TOWERS}"),
        ("vision_config", {"hidden_act": "quick_gelu"}, f"quick_gelu.*{OTHER_TOWERS}"),
        ("vision_config", {"layer_norm_eps": 1e-6}, f"1e-06.*{OTHER_TOWERS}"),
        ("vision_config", {"hidden_size": "x"}, ""),
        ("vision_config", {"hidden_size": 0}, ""),
        ("vision_config", {"num_attention_heads": 0}, ""),
        ("vision_config", {"num_hidden_layers": 10**9}, ""),
        ("vision_config", {"hidden_act": ["gelu"]}, ""),
        ("text_config", {"pad_token_id": [1]}, ""),
    ],
)
def test_a_clip_model_config_that_these_towers_cannot_be_is_rejected_in_one_line(section, fields, message, tmp_path):
    write("hf", seeded(config(), 1), tmp_path)
    whole = json.loads((tmp_path / "config.json").read_text())
    whole[section] |= fields
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(ValueError, match=rf"config\.json: .*{message}") as wrong:
        read_weights(tmp_path)
    assert "\n" not in str(wrong.value)
