"""Export of a trained model to a folder: for open_clip, for transformers, or plain. It needs no GPU.

    --format open_clip   for open_clip's `local-dir:`, Hugging Face's AutoTokenizer, and `load_exported`
    --format hf          for transformers' CLIPModel, AutoTokenizer and CLIPImageProcessor (loading: tested with 5.23)

Weights are FP32. Each folder has a model card, README.md.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from infcl.config.disk import save_tensors
from infcl.convert.export_tokenizer import export_tokenizer, read_model
from infcl.convert.hf_clip import hf_config, to_hf
from infcl.convert.import_weights import SCALARS, model_with, read_weights
from infcl.convert.model_card import write_card
from infcl.data.tokenizer.source import TokenizerSource
from infcl.models import CLIPConfig, build_towers
from infcl.models.config import ModelConfig
from infcl.models.open_clip_config import CLEAN

FORMATS = ("open_clip", "hf")
WEIGHTS, CONFIG = "open_clip_model.safetensors", "open_clip_config.json"


def export_model(
    state_dict: Mapping[str, torch.Tensor],
    cfg: ModelConfig,
    tokenizer: TokenizerSource | str | Path | None,
    out_dir: str | Path,
    *,
    format: str = "open_clip",
    name: str = "infcl",
    card: Mapping[str, object] | None = None,
) -> Path:
    """Write the folder of an exported model, and return it.

    Args:
        state_dict: full state dict of the model (not a shard), of any floating dtype; written as fp32.
        tokenizer: the model's tokenizer, or a sentencepiece file. None: CLIP's own for 49,408 ids, else none.
        name: title of the card, and text_cfg.hf_tokenizer_name, which open_clip requires.
        card: summary.json of a run, the card's source for training and evaluation.

    Raises:
        ValueError: the weights or the tokenizer do not match the config, or `format` cannot express the model. Nothing
            is written.
    """
    out = Path(out_dir)
    _check_weights(state_dict, cfg)
    if isinstance(tokenizer, str | Path):
        tokenizer = TokenizerSource("sentencepiece", str(tokenizer), CLEAN)
    elif tokenizer is None and cfg.text_cfg.vocab_size == 49408:
        tokenizer = TokenizerSource("clip")
    if tokenizer is not None:
        if tokenizer.kind == "sentencepiece":
            _check_tokenizer(tokenizer.where, cfg)
        cfg = _with_record(cfg, tokenizer, name)
    if format == "hf":
        if (towers := cfg.as_clip_model) is None:
            raise ValueError("--format hf: a CLIPModel holds our own towers only; --format open_clip fits this model")
        _write_hf(state_dict, towers, tokenizer, out)
    else:
        _write_open_clip(state_dict, cfg, tokenizer, out)
    write_card(out, cfg, name, format=format, tokenizer=tokenizer, card=card or {})
    return out


def load_exported(folder: str | Path) -> tuple[Any, ModelConfig]:
    """Load an exported folder of any format: the model in eval mode on the CPU, and its config.

    Raises:
        ValueError: the folder has no weights or no config, or they do not match.
    """
    weights = read_weights(folder)
    if weights.cfg is None:
        raise ValueError(f"{folder}: weights without a config; an exported folder has one")
    return model_with(weights, weights.cfg).eval(), weights.cfg


def _with_record(cfg: ModelConfig, tokenizer: TokenizerSource, name: str) -> ModelConfig:
    """Return the config with the record of a tokenizer whose files are in the exported folder."""
    kwargs = {key: value for key, value in tokenizer.kwargs.items() if value is not None}
    record: dict[str, Any] = {"tokenizer_kwargs": kwargs or None, "tokenizer_mode": tokenizer.mode}
    record["hf_tokenizer_name"] = None if tokenizer.kind == "clip" else name
    return cfg.with_tokenizer(pool_type=cfg.text_cfg.pool_type, **record)


def _write_open_clip(
    state_dict: Mapping[str, torch.Tensor],
    cfg: ModelConfig,
    tokenizer: TokenizerSource | None,
    out: Path,
) -> None:
    if tokenizer is not None and tokenizer.kind != "clip":
        export_tokenizer(tokenizer, out, cfg.text_cfg.context_length, takes_raw_text=False)
    out.mkdir(parents=True, exist_ok=True)
    _write_json(out / CONFIG, cfg.open_clip_json())
    _write_weights(state_dict, out / WEIGHTS)


def _write_hf(
    state_dict: Mapping[str, torch.Tensor], cfg: CLIPConfig, tokenizer: TokenizerSource | None, out: Path
) -> None:
    config, weights = hf_config(cfg), to_hf(state_dict)
    if tokenizer is not None:
        export_tokenizer(tokenizer, out, cfg.text_cfg.context_length, takes_raw_text=True)
    out.mkdir(parents=True, exist_ok=True)
    _write_json(out / "config.json", config)
    _write_weights(weights, out / "model.safetensors")
    size, squash = cfg.vision_cfg.image_size, cfg.preprocess.resize_mode == "squash"
    square = {"height": size, "width": size}
    preprocessing = {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": square if squash else {"shortest_edge": size},
        "resample": 2 if cfg.preprocess.interpolation == "bilinear" else 3,  # Pillow's numbers
        "do_center_crop": not squash,
        "crop_size": square,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(cfg.preprocess.mean),
        "image_std": list(cfg.preprocess.std),
    }
    _write_json(out / "preprocessor_config.json", preprocessing)


def _check_weights(state_dict: Mapping[str, torch.Tensor], cfg: ModelConfig) -> None:
    with torch.device("meta"):
        model = build_towers(cfg)
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    missing, unknown = sorted(expected.keys() - state_dict.keys()), sorted(state_dict.keys() - expected.keys())
    if missing or unknown:
        raise ValueError(f"weights are not of this config: missing {missing[:5]}, unknown {unknown[:5]}")
    for name, shape in expected.items():
        given = tuple(state_dict[name].shape)
        if given != shape and not (name in SCALARS and given == ()):
            raise ValueError(f"weights are not of this config: {name} has shape {given}, not {shape}")


def _check_tokenizer(tokenizer_model: str | Path, cfg: ModelConfig) -> None:
    proto, text = read_model(tokenizer_model), cfg.text_cfg
    theirs = (len(proto.pieces), proto.trainer_spec.eos_id, proto.trainer_spec.pad_id)
    ours = (text.vocab_size, text.eos_id, text.pad_id)
    if theirs != ours or text.pool_type == "argmax":
        raise ValueError(
            f"the tokenizer has (vocab_size, eos_id, pad_id) {theirs}, the model {ours} and pool_type "
            f"{text.pool_type!r}: adapt the config with CLIPConfig.with_tokenizer before training"
        )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_weights(state_dict: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write the weights as fp32 safetensors, with 0-dim SCALARS; raise OSError if the write fails."""
    weights = {
        name: (value.reshape(()) if name in SCALARS else value).detach().to("cpu", torch.float32).contiguous()
        for name, value in state_dict.items()
    }
    path.touch()  # with the modes of new files; safetensors makes the file readable only for its owner
    mode = path.stat().st_mode
    save_tensors(path, weights, {"format": "pt"})
    path.chmod(mode)
