"""A trained model as a folder: for open_clip (`local-dir:`), Hugging Face's AutoTokenizer and `load_exported`.

    open_clip_model.safetensors   fp32 weights, logit_scale 0-dim as open_clip has it
    open_clip_config.json         {"model_cfg": ..., "preprocess_cfg": ...}
    spiece.model, tokenizer.json, tokenizer_config.json
    README.md                     a model card

`python -m infcl.export RUN --out DIR` exports the last checkpoint of a run folder.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from infcl.export_tokenizer import export_tokenizer, read_model
from infcl.towers import CLIP, CLIPConfig, load_model_config
from infcl.towers.vision import IMAGE_MEAN, IMAGE_STD

WEIGHTS, CONFIG = "open_clip_model.safetensors", "open_clip_config.json"
SCALARS = ("logit_scale", "logit_bias")  # [1] here, 0-dim in open_clip

# open_clip's keys; the values are those of this project's evaluation transform and of the towers' normalisation.
PREPROCESS = {
    "mean": list(IMAGE_MEAN),
    "std": list(IMAGE_STD),
    "interpolation": "bicubic",
    "resize_mode": "shortest",
}


def export_model(
    state_dict: Mapping[str, torch.Tensor],
    cfg: CLIPConfig,
    tokenizer_model: str | Path | None,
    out_dir: str | Path,
    *,
    name: str = "infcl",
    preprocess: Mapping[str, Any] = PREPROCESS,
    card: Mapping[str, object] | None = None,
) -> Path:
    """Write the folder and return its path.

    state_dict       the model's, whole (not a shard), any floating dtype; written as fp32
    tokenizer_model  the sentencepiece file; None for a model that uses CLIP's own BPE
    name             the title of the card, and text_cfg.hf_tokenizer_name, which open_clip wants to be set
    card             rows of the card's table, such as a run's summary; only numbers and strings are shown

    ValueError when the weights or the tokenizer are not the config's.
    """
    out = Path(out_dir)
    _check_weights(state_dict, cfg)
    model_cfg = cfg.to_dict()
    if tokenizer_model is not None:
        _check_tokenizer(tokenizer_model, cfg)
        model_cfg["text_cfg"].setdefault("hf_tokenizer_name", name)
        model_cfg["text_cfg"]["tokenizer_kwargs"] = {"clean": "canonicalize"}  # what infcl.data.tokenizer does
    out.mkdir(parents=True, exist_ok=True)
    if tokenizer_model is not None:
        export_tokenizer(tokenizer_model, out, context_length=cfg.text_cfg.context_length)
    config = {"model_cfg": model_cfg, "preprocess_cfg": dict(preprocess)}
    (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _write_weights(state_dict, out / WEIGHTS)
    shutil.copymode(out / CONFIG, out / WEIGHTS)  # safetensors makes it readable for its owner alone
    (out / "README.md").write_text(_model_card(cfg, name, tokenizer_model is not None, card or {}), encoding="utf-8")
    return out


def load_exported(folder: str | Path) -> tuple[CLIP, CLIPConfig]:
    """The model of an exported folder, in eval mode, on the CPU."""
    from safetensors.torch import load_file

    cfg = load_model_config(folder)
    with torch.device("meta"):
        model = CLIP(cfg)
    model.load_state_dict(load_file(Path(folder) / WEIGHTS), assign=True)
    return model.eval(), cfg


def _check_weights(state_dict: Mapping[str, torch.Tensor], cfg: CLIPConfig) -> None:
    with torch.device("meta"):
        expected = {name: tuple(value.shape) for name, value in CLIP(cfg).state_dict().items()}
    missing, unknown = sorted(expected.keys() - state_dict.keys()), sorted(state_dict.keys() - expected.keys())
    if missing or unknown:
        raise ValueError(f"weights are not of this config: missing {missing[:5]}, unknown {unknown[:5]}")
    for name, shape in expected.items():
        given = tuple(state_dict[name].shape)
        if given != shape and not (name in SCALARS and given == ()):
            raise ValueError(f"weights are not of this config: {name} has shape {given}, not {shape}")


def _check_tokenizer(tokenizer_model: str | Path, cfg: CLIPConfig) -> None:
    proto, text = read_model(tokenizer_model), cfg.text_cfg
    theirs = (len(proto.pieces), proto.trainer_spec.eos_id, proto.trainer_spec.pad_id)
    ours = (text.vocab_size, text.eos_id, text.pad_id)
    if theirs != ours or text.pool_type == "argmax":
        raise ValueError(
            f"the tokenizer has (vocab_size, eos_id, pad_id) {theirs}, the model {ours} and pool_type "
            f"{text.pool_type!r}: adapt the config with with_tokenizer before training"
        )


def _write_weights(state_dict: Mapping[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    weights = {name: value.detach().to("cpu", torch.float32).contiguous() for name, value in state_dict.items()}
    for name in SCALARS:
        if name in weights:
            weights[name] = weights[name].reshape(())
    save_file(weights, path, metadata={"format": "pt"})


def _model_card(cfg: CLIPConfig, name: str, has_tokenizer: bool, card: Mapping[str, object]) -> str:
    vision, text = cfg.vision_cfg, cfg.text_cfg
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in CLIP(cfg).parameters())
    rows = {
        "parameters": f"{parameters:,}",
        "image tower": f"ViT, {vision.layers} x {vision.width}, patch {vision.patch_size}, {vision.image_size} pixels",
        "text tower": f"{text.layers} x {text.width}, {text.context_length} tokens of {text.vocab_size}",
        "embedding": cfg.embed_dim,
        **{key: value for key, value in card.items() if isinstance(value, (int, float, str))},
    }
    table = "\n".join(
        f"| {key.replace('_', ' ')} | {round(value, 4) if isinstance(value, float) else value} |"
        for key, value in rows.items()
    )
    if cfg.loads_in_open_clip:
        model_line = 'model, _, preprocess = open_clip.create_model_and_transforms("local-dir:FOLDER")'
        usage = f'import open_clip\n\n{model_line}\ntokenizer = open_clip.get_tokenizer("local-dir:FOLDER")'
        note = "`model.encode_image` and `model.encode_text` with `normalize=True` give unit vectors."
        if has_tokenizer:
            note += " For a hub repository set `text_cfg.hf_tokenizer_name` in open_clip_config.json to its id."
    else:
        usage = 'from infcl.export import load_exported\n\nmodel, cfg = load_exported("FOLDER")'
        note = "The image tower has a convolutional stem, which open_clip does not know: load it with infcl."
    library = "open_clip" if cfg.loads_in_open_clip else "infcl"
    return f"""---
library_name: {library}
pipeline_tag: zero-shot-image-classification
tags: [clip, infcl]
---
# {name}

A CLIP model trained with infcl (the exact contrastive loss of arXiv 2410.17243).

| | |
|---|---|
{table}

```python
{usage}
```

{note}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m infcl.export", description="Export a run for open_clip.")
    parser.add_argument("run", type=Path, help="run folder (its last checkpoint is taken)")
    parser.add_argument("--out", type=Path, help="folder to write [RUN/export]")
    parser.add_argument("--name", help="name of the model on its card [the run's]")
    args = parser.parse_args(arguments)

    from infcl.train.checkpoint import consolidated_state_dict

    try:
        cfg = load_model_config(args.run / "model_config.json")
        tokenizer, summary = args.run / "tokenizer.model", args.run / "summary.json"
        out = export_model(
            consolidated_state_dict(args.run),
            cfg,
            tokenizer if tokenizer.is_file() else None,
            args.out or args.run / "export",
            name=args.name or args.run.resolve().name,
            card=json.loads(summary.read_text()) if summary.is_file() else None,
        )
    except ValueError as error:
        print(f"infcl.export: {error}", file=sys.stderr)
        return 2
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
