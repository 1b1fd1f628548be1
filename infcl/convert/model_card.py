"""Model card (README.md) of an exported folder: how to load the model, its sizes, data, settings and scores.

In:  the model config, and the summary of a run if there is one. The flags come from the run's config.json.
The card shows only names of data, never paths of the training machine.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from infcl.checkpoint.run_folder import RunFolder
from infcl.config import teacher_in_words
from infcl.config.redaction import redacted
from infcl.data.tokenizer.source import TokenizerSource
from infcl.models import build_towers
from infcl.models.config import ModelConfig

_FLAGS = {
    "opt": "optimizer",
    "lr": "learning rate",
    "lr_scaling": "scaled by the batch",
    "wd": "weight decay",
    "warmup": "warm-up steps",
    "precision": "precision",
    "loss": "loss",
    "duplicates": "duplicates",
    "false_negative_margin": "margin of false negatives",
}


def write_card(
    folder: Path,
    cfg: ModelConfig,
    name: str,
    *,
    format: str,
    tokenizer: TokenizerSource | None,
    card: Mapping[str, Any],
) -> None:
    """Write README.md.

    Args:
        folder: the exported folder, in `format` (export.FORMATS).
        card: summary.json of the run, or {}.
    """
    flags = RunFolder(Path(card["paths"]["run"])).flags() if "paths" in card else {}
    sections = [
        _usage(cfg, format, tokenizer),
        _section("Model", _model_rows(cfg, flags.get("matryoshka_widths") or ())),
        _section("Training", _training_rows(card, flags)),
        _section("Evaluation", _evaluation_rows(card)),
    ]
    library = "transformers" if format == "hf" else "open_clip" if cfg.loads_in_open_clip else "infcl"
    head = f"---\nlibrary_name: {library}\npipeline_tag: zero-shot-image-classification\ntags: [clip, infcl]\n---\n"
    title = f"# {name}\n\nA CLIP model trained with infcl (the exact contrastive loss of arXiv 2410.17243).\n"
    (folder / "README.md").write_text(head + "\n".join([title, *filter(None, sections)]), encoding="utf-8")


def _usage(cfg: ModelConfig, format: str, tokenizer: TokenizerSource | None) -> str:
    note, takes_raw_text = "", tokenizer is not None and tokenizer.kwargs.get("clean", "") is None
    if format == "hf":
        lines = [
            "from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel\n",
            'model = CLIPModel.from_pretrained("FOLDER")',
            'processor = CLIPImageProcessor.from_pretrained("FOLDER")',
        ]
        if tokenizer is not None:
            lines.append('tokenizer = AutoTokenizer.from_pretrained("FOLDER")')
            options = 'padding="max_length", truncation=True, return_tensors="pt"'
            lines.append(f'texts = tokenizer(["a photo of a cat"], {options})')
        code = "\n".join(lines)
        if tokenizer is not None and not takes_raw_text:
            note = (
                "The tokenizer cleans captions as in training, except for text in a wrong encoding, terminal codes and "
                "rare HTML entities, which training repaired with ftfy and html.unescape."
            )
    elif cfg.loads_in_open_clip:
        code = 'import open_clip\n\nmodel, _, preprocess = open_clip.create_model_and_transforms("local-dir:FOLDER")'
        note = "`model.encode_image` and `model.encode_text` with `normalize=True` give unit vectors."
        if tokenizer is not None:
            code += '\ntokenizer = open_clip.get_tokenizer("local-dir:FOLDER")'
        if tokenizer is not None and tokenizer.kind != "clip":
            note += " For a hub repository set `text_cfg.hf_tokenizer_name` in open_clip_config.json to its id."
        if takes_raw_text:
            note += " open_clip collapses white space and repairs captions before the tokenizer, which took raw text."
    else:
        code = 'from infcl.convert.export import load_exported\n\nmodel, cfg = load_exported("FOLDER")'
        note = "The image tower has a convolutional stem, which open_clip does not know: load it with infcl."
    return f"```python\n{code}\n```\n" + (f"\n{note}\n" if note else "")


def _model_rows(cfg: ModelConfig, widths: Sequence[int]) -> dict[str, object]:
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in build_towers(cfg).parameters())
    rows = {"parameters": f"{parameters:,}", **cfg.describe(), "embedding": cfg.embed_dim}
    if widths:
        rows["shorter embeddings"] = f"the first {', '.join(map(str, widths))} numbers, scaled to unit length"
    return rows


def _training_rows(card: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    if flags.get("train_data"):
        rows["data"] = ", ".join("/".join(part.split("/")[-2:]) for part in redacted(flags["train_data"]).split("::"))
    if card.get("steps"):
        rows |= {"samples seen": f"{card['samples_seen']:,}", "steps": f"{card['steps']:,}"}
        rows["batch"] = f"{card['samples_seen'] // card['steps']:,} samples, one loss over all of them"
    if card.get("ema"):
        rows["weights"] = f"moving average over the steps, decay {flags.get('ema_decay', 'unknown')}"
    rows |= {name: flags[flag] for flag, name in _FLAGS.items() if flags.get(flag) not in (None, "none", "negative")}
    if teacher := teacher_in_words(flags):
        rows["distilled from"] = teacher
    return rows


def _evaluation_rows(card: Mapping[str, Any]) -> dict[str, object]:
    return {
        f"{task} {name}".replace("_", " "): value
        for task, values in card.get("evaluation", {}).items()
        for name, value in values.items()
        if isinstance(value, (int, float))
    }


def _section(title: str, rows: Mapping[str, object]) -> str:
    shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in rows.items()}
    lines = [f"## {title}", "", "| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in shown.items())]
    return "\n".join(lines) + "\n" if rows else ""
