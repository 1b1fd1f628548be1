"""Export for Hugging Face's transformers: a folder for CLIPModel, AutoTokenizer and CLIPImageProcessor.

    config.json  model.safetensors     CLIPModel's names and shapes (infcl/convert/hf_clip.py), fp32
    tokenizer.json  tokenizer_config.json  spiece.model
    preprocessor_config.json           shortest side to S (bicubic), centre crop, CLIP's mean and std
    README.md                          a model card

tokenizer.json takes raw text: it cleans captions as training does (no punctuation, lower case) before it splits them.
Writing does not need transformers; loading was tested with 5.23.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from infcl.convert.export_bpe import export_bpe, read_merges
from infcl.convert.export_tokenizer import LOWER_STEPS, export_tokenizer, repair_steps
from infcl.convert.hf_clip import hf_config, to_hf
from infcl.models import CLIPConfig
from infcl.models.preprocess import IMAGE_MEAN, IMAGE_STD

WEIGHTS = "model.safetensors"
# As infcl.data.tokenizer.canonicalise: '_' becomes a space, other ASCII punctuation is removed, letters are lowercased.
# Characters that Python counts as space, but that the model's charsmap would remove, become spaces here too.
_CLEAN = [
    {"type": "Replace", "pattern": {"String": "_"}, "content": " "},
    {"type": "Replace", "pattern": {"Regex": r"[!-/:-@\[-`{-~]"}, "content": ""},
    {"type": "Replace", "pattern": {"Regex": r"[\x0b\x1c-\x1f\x{85}]"}, "content": " "},
    *LOWER_STEPS,
]


def write_hf(
    state_dict: Mapping[str, torch.Tensor], cfg: CLIPConfig, tokenizer_model: str | Path | None, out: Path
) -> None:
    """Write the folder except the model card.

    Args:
        state_dict: the model's weights; export_model checks that they match `cfg`.
        cfg: the model's config.
        tokenizer_model: sentencepiece file that matches `cfg`, or None.
        out: folder to write.

    Raises:
        ValueError: CLIPModel cannot express the model, or the tokenizer is CLIP's own and open_clip, which ships it, is
            not installed. Nothing is written.
    """
    from safetensors.torch import save_file

    config = hf_config(cfg)
    has_own_bpe = tokenizer_model is None and cfg.text_cfg.vocab_size == 49408  # CLIP's own
    merges = read_merges() if has_own_bpe else []
    weights = to_hf({key: value.detach().to("cpu", torch.float32) for key, value in state_dict.items()})
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(weights, out / WEIGHTS, metadata={"format": "pt"})
    shutil.copymode(out / "config.json", out / WEIGHTS)  # safetensors makes the file readable only for its owner
    if tokenizer_model is not None:
        export_tokenizer(tokenizer_model, out, context_length=cfg.text_cfg.context_length)
        _take_raw_captions(out, repair_steps() if cfg.text_cfg.repairs_captions else [])
    elif has_own_bpe:
        export_bpe(merges, out, context_length=cfg.text_cfg.context_length)
    preprocessing = _preprocessing(cfg.vision_cfg.image_size)
    (out / "preprocessor_config.json").write_text(json.dumps(preprocessing, indent=2) + "\n", encoding="utf-8")


def _take_raw_captions(out: Path, repairs: list[dict[str, Any]]) -> None:
    """Let the tokenizer clean captions, and read "</s>" and the like as text, since they would end the caption."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        content = json.loads((out / name).read_text(encoding="utf-8"))
        if name == "tokenizer.json":
            content["normalizer"]["normalizers"][:0] = [*repairs, *_CLEAN]
        else:
            content["split_special_tokens"] = True
        (out / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _preprocessing(image_size: int) -> dict[str, object]:
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": image_size},
        "resample": 3,  # bicubic
        "do_center_crop": True,
        "crop_size": {"height": image_size, "width": image_size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(IMAGE_MEAN),
        "image_std": list(IMAGE_STD),
    }
