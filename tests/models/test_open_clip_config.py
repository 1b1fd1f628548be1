"""Configs of open_clip's: every one that is built in, and what a run reads from them."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from infcl.convert.import_weights import config_of, read_weights, weights_preprocess
from infcl.data.tokenizer.source import find_tokenizer
from infcl.data.transforms import PillowTransform
from infcl.models.clip import build_towers
from infcl.models.config import CLIPConfig, load_any_config
from infcl.models.flops import forward_flops
from infcl.models.open_clip_config import load_open_clip_config, open_clip_folder
from infcl.models.preprocess import Preprocess
from tests.lib.open_clip_stub import import_open_clip


@pytest.fixture(autouse=True)
def _open_clip():
    import_open_clip()


# Hugging Face's text towers, whose configs open_clip takes from the hub: the few fields that differ from the defaults.
HUB = {
    "roberta-base": ("RobertaConfig", {"vocab_size": 50265, "max_position_embeddings": 514}),
    "xlm-roberta-base": ("XLMRobertaConfig", {"vocab_size": 250002, "max_position_embeddings": 514}),
    "xlm-roberta-large": (
        "XLMRobertaConfig",
        {
            "vocab_size": 250002,
            "max_position_embeddings": 514,
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
    ),
    "google/mt5-base": ("MT5Config", {"d_model": 768, "d_ff": 2048, "num_layers": 12, "num_heads": 12}),
    "google/mt5-xl": ("MT5Config", {"d_model": 2048, "d_ff": 5120, "num_layers": 24, "num_heads": 32}),
    "facebook/nllb-200-distilled-600M": ("M2M100Config", {"vocab_size": 256206, "d_model": 1024}),
    "facebook/nllb-200-distilled-1.3B": ("M2M100Config", {"vocab_size": 256206, "d_model": 1024, "encoder_layers": 24}),
}


def build_and_encode(name: str) -> None:
    """A built-in model on the meta device: features of the right shape from two images and two captions."""

    with torch.device("meta"):
        build_towers(load_open_clip_config(f"open_clip:{name}"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_built_in_configs_but_those_with_a_decoder_build_and_encode(tmp_path, monkeypatch):
    import transformers

    for name, (kind, fields) in HUB.items():  # transformers takes a folder of this name in the working directory
        getattr(transformers, kind)(**fields).save_pretrained(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    names = sorted(path.stem for path in (open_clip_folder() / "model_configs").glob("*.json"))
    rejected = {}
    for name in names:
        try:
            build_and_encode(name)
        except ValueError as error:
            rejected[name] = str(error)
    assert len(names) - len(rejected) >= 138, rejected
    assert all("captioning decoder" in why for why in rejected.values()), rejected
    if folder := os.environ.get("OPEN_CLIP_TABLE"):  # docs/results/open_clip_models.csv
        rows = [f"{name},{'rejected,captioning decoder' if name in rejected else 'built,'}" for name in names]
        Path(folder).write_text("model,result,why\n" + "\n".join(rows) + "\n")


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["ViT-B-32", "RN50", "convnext_tiny", "ViT-B-16-SigLIP2"])
def test_a_built_in_config_builds_without_memory(name):
    build_and_encode(name)


def test_a_config_is_read_by_name_file_folder_and_from_a_run(tmp_path):
    cfg = load_any_config("open_clip:ViT-B/16")
    assert cfg.vision_cfg.image_size == 224 and cfg.text_cfg.end_id == 49407 and cfg.embed_dim == 512
    (tmp_path / "open_clip_config.json").write_text(
        json.dumps(
            {"model_cfg": cfg.fields, "preprocess_cfg": {"mean": [0.5] * 3, "resize_mode": "squash", "size": 224}}
        )
    )
    folder = load_any_config(f"open_clip:{tmp_path}")
    assert folder.preprocess == Preprocess(mean=(0.5, 0.5, 0.5), resize_mode="squash")
    (tmp_path / "model_config.json").write_text(folder.to_json())
    again = load_any_config(tmp_path / "model_config.json")
    assert (again.fields, again.preprocess) == (folder.fields, folder.preprocess)


@pytest.mark.parametrize(("name", "is_ours"), [("ViT-B-16", True), ("RN50", False), ("ViT-B-16-SigLIP", False)])
def test_a_folder_of_open_clip_needs_no_prefix(name, is_ours, tmp_path):
    """Such as open_clip's own on the hub, whose config is not marked: our towers where they can be it."""
    theirs = load_any_config(f"open_clip:{name}")
    fields = {"model_cfg": theirs.fields, "preprocess_cfg": {"mean": [0.5] * 3}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(fields))
    save_file({"logit_scale": torch.zeros(())}, tmp_path / "open_clip_model.safetensors")
    for cfg in (load_any_config(tmp_path), read_weights(tmp_path).cfg):
        assert isinstance(cfg, CLIPConfig) == is_ours and cfg.embed_dim == theirs.embed_dim
        assert cfg.preprocess.mean == (0.5, 0.5, 0.5) and (is_ours or cfg.fields == theirs.fields)
    file = tmp_path / "open_clip_model.safetensors"  # alone, its folder says how its pixels were normalised
    assert config_of(read_weights(file), file, f"open_clip:{name}").preprocess.mean == (0.5, 0.5, 0.5)


def test_a_config_that_asks_for_remote_code_is_rejected_without_running_it(tmp_path):
    mark = tmp_path / "ran"
    (tmp_path / "text").mkdir()
    auto_map = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
    (tmp_path / "text/config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto_map}))
    (tmp_path / "text/evil.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    fields = load_open_clip_config("RN50").fields | {"text_cfg": {"hf_model_name": str(tmp_path / "text")}}
    (tmp_path / "evil.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="cannot be loaded"):
        build_towers(load_any_config(f"open_clip:{tmp_path / 'evil.json'}"))
    assert not mark.exists()


@pytest.mark.parametrize(
    ("mode", "interpolation"), [("shortest", "bicubic"), ("longest", "bilinear"), ("squash", "bicubic")]
)
@pytest.mark.parametrize("size", [(50, 90), (90, 51), (20, 17), (64, 64)])
def test_evaluation_images_are_open_clips(mode, interpolation, size):
    from open_clip.transform import PreprocessCfg, image_transform_v2
    from PIL import Image

    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8))
    cfg = {"interpolation": interpolation, "resize_mode": mode, "fill_color": 7}
    theirs = image_transform_v2(PreprocessCfg(size=48, mean=(0,) * 3, std=(1,) * 3, **cfg), is_train=False)(image)
    ours = PillowTransform(48, Preprocess(**cfg))(image)
    assert torch.equal(ours, (theirs * 255).round().to(torch.uint8))


def test_flops_of_a_model_that_both_build_agree():
    ours, theirs = (forward_flops(load_any_config(name)) for name in ("ViT-B-32", "open_clip:ViT-B-32"))
    for tower in ("image", "text"):
        assert theirs[tower] == pytest.approx(ours[tower], rel=0.06)  # torch does not count all of the attention


def test_a_tag_brings_its_preprocessing_and_an_unknown_one_names_those_there_are():
    assert weights_preprocess("open_clip:webli", "open_clip:ViT-B-16-SigLIP")["mean"] == (0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="it has openai, laion400m"):
        weights_preprocess("open_clip:nothing", "open_clip:ViT-B-16")


def test_a_tokenizer_that_cannot_be_had_is_an_error():
    with pytest.raises(ValueError, match="--tokenizer hf:timm/ViT-B-16-SigLIP"):
        find_tokenizer("open_clip:ViT-B-16-SigLIP", load_open_clip_config("open_clip:ViT-B-32")).open(64)
