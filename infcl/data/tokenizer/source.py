"""Which tokenizer a model has: chosen once by --tokenizer, recorded in the model's config, found again from there.

The record is text_cfg of model_config.json, in open_clip's keys (hf_tokenizer_name, tokenizer_kwargs, tokenizer_mode),
with the tokenizer's files next to it. The trainer, the evaluation, the export and the report all build their tokenizer
from a `TokenizerSource`, so that all of them give the same ids.

    kind             files of a run        of an export                     tokenizer_kwargs
    sentencepiece    tokenizer.model       spiece.model, tokenizer.model    {"clean": "canonicalize"}
    hf               tokenizer/            tokenizer.json and others        those of the model, or of open_clip:MODEL
    clip             none                  none                             {}, or those of open_clip:MODEL

A name only selects a JSON config of the installed open_clip, which is read as data.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infcl.data.tokenizer import Tokenizer
from infcl.data.tokenizer.open_clip import (
    HF_FOLDER,
    HF_PREFIX,
    PREFIX,
    AnyTokenizer,
    HuggingFaceTokenizer,
    OpenClipTokenizer,
)
from infcl.models.config import ModelConfig
from infcl.models.open_clip_config import CLEAN, open_clip_folder

_OPTIONS = ("clean", "strip_sep_token", "language")  # of tokenizer_kwargs; others could run code
_HF_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json")


@dataclass(frozen=True)
class TokenizerSource:
    """A tokenizer that has not been opened.

    Attributes:
        kind: "sentencepiece", "hf", or "clip" for CLIP's own.
        where: model file, or folder or name on the hub; "" for CLIP's own.
        kwargs: tokenizer_kwargs as in open_clip; {"clean": None} for one that takes captions as they are.
        mode: tokenizer_mode as in open_clip.
    """

    kind: str
    where: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)
    mode: str | None = None

    def __post_init__(self):
        if self.kwargs.get("clean") not in (None, "whitespace", "lower", "canonicalize"):
            raise ValueError(
                f"tokenizer_kwargs.clean {self.kwargs['clean']!r} is not whitespace, lower or canonicalize"
            )

    def open(self, context_length: int) -> AnyTokenizer:
        """Open the tokenizer. Raises ValueError if it cannot be opened."""
        if self.kind == "sentencepiece":
            return Tokenizer(self.where, context_length)
        if self.kind == "clip":
            return OpenClipTokenizer(context_length, self.kwargs.get("clean", "lower"))
        fields = {"tokenizer_kwargs": self.kwargs, "tokenizer_mode": self.mode}
        return HuggingFaceTokenizer(self.where, context_length, fields)


def find_tokenizer(name: str | Path, cfg: ModelConfig) -> TokenizerSource:
    """Return the tokenizer that --tokenizer selects for a model.

    Args:
        name: a sentencepiece file, a folder with one or with Hugging Face's files, "open_clip:MODEL" for the one that
            is built into open_clip with that model, or "hf:NAME_OR_FOLDER", with the model's tokenizer_kwargs.

    Raises:
        ValueError: there is none of that name.
    """
    text = cfg.to_dict()["text_cfg"]
    if str(name).startswith(PREFIX):
        return _named(_built_in(str(name)).get("text_cfg", {})) or TokenizerSource("clip")
    if str(name).startswith(HF_PREFIX):
        return _hugging_face(str(name).removeprefix(HF_PREFIX), text)
    path = Path(name)
    if not path.is_dir():
        if not path.exists():
            raise ValueError(f"--tokenizer {path}: no such file or folder")
        return TokenizerSource("sentencepiece", str(path), CLEAN)
    if (found := _in_folder(path, text, is_of_the_model=False)) is None:
        raise ValueError(f"--tokenizer {path}: no tokenizer there (tokenizer.model, spiece.model, tokenizer.json)")
    return found


def stored_tokenizer(weights: Path, cfg: ModelConfig) -> TokenizerSource | None:
    """Return the tokenizer that is recorded with weights, or None if there is no record.

    Args:
        weights: a run, checkpoint, export, open_clip or CLIPModel folder, or a weights file.
    """
    text = cfg.to_dict()["text_cfg"]
    return _in_folder(described_in(weights), text, is_of_the_model=weights.is_dir()) or _named(text)


def described_in(weights: Path) -> Path:
    """Return the folder with the configs of weights: the run of a checkpoint, the folder of a file."""
    folder = weights if weights.is_dir() else weights.parent
    return folder.parent.parent if (folder / "infcl.json").is_file() else folder


def read_ids(cfg: ModelConfig, source: TokenizerSource, tokenizer: AnyTokenizer) -> ModelConfig:
    """Return the config of the model whose text tower reads a tokenizer's ids, with the record of the tokenizer.

    The tower then pools at the tokenizer's end. These keep their pooling: towers of Hugging Face, all with CLIP's own
    tokenizer, and those of open_clip that pool at a fixed position, with a tokenizer of Hugging Face.

    Raises:
        ValueError: the tower pools at the end of a caption, and the tokenizer writes none.
    """
    text, kind, tower = cfg.text_cfg, source.kind, cfg.text_cfg.hf_model_name
    if kind == "sentencepiece" and tower:
        raise ValueError(f"text tower {tower} has a vocabulary of its own: --tokenizer {HF_PREFIX}{tower}")
    fields: dict[str, Any] = {"pad_id": tokenizer.pad_id, "pool_type": text.pool_type, "tokenizer_mode": source.mode}
    fields |= {"context_length": tokenizer.context_length, "hf_tokenizer_name": source.where if kind == "hf" else None}
    fields["tokenizer_kwargs"] = source.kwargs or None
    if kind == "sentencepiece" or (kind == "hf" and text.follows_tokenizer):
        fields |= {"pool_type": "eos", "vocab_size": tokenizer.vocab_size}
    elif kind == "hf" and text.pool_type == "argmax" and not tower:
        fields["pool_type"] = "eos"
    if fields["pool_type"] == "eos" and not tower:
        if tokenizer.eos_id is None:
            raise ValueError(
                f"--tokenizer {HF_PREFIX}{source.where} does not end each caption with an id that occurs nowhere else "
                "in it, at which the text tower would pool: its post-processor (tokenizer.json) has to add an end token"
            )
        fields["eos_id"] = tokenizer.eos_id
    return cfg.with_tokenizer(**fields)


def _in_folder(folder: Path, text: dict[str, Any], *, is_of_the_model: bool) -> TokenizerSource | None:
    """Return the tokenizer whose files a folder has, or None. text_cfg is `is_of_the_model` if it says how to use them.

    SigLIP's folders have a sentencepiece file that other programs read; ours are of models that pool at eos.
    """
    for file in (folder / "tokenizer.model", folder / "spiece.model"):
        is_ours = text.get("tokenizer_kwargs") == CLEAN and text.get("pool_type") == "eos"
        if file.is_file() and (is_ours or not is_of_the_model):
            return TokenizerSource("sentencepiece", str(file), CLEAN)
    for place in (folder / HF_FOLDER, folder):
        if any((place / name).is_file() for name in _HF_FILES):
            is_recorded = bool(text.get("hf_tokenizer_name"))  # not in a CLIPModel folder, which cleans nothing
            return _hugging_face(str(place), text if is_recorded else {"tokenizer_kwargs": {"clean": None}})
    return None


def _named(text: dict[str, Any]) -> TokenizerSource | None:
    """Return the tokenizer that text_cfg names: one of the hub, or CLIP's own; None if there is none."""
    if name := text.get("hf_tokenizer_name"):
        return _hugging_face(name, text)
    kwargs = text.get("tokenizer_kwargs") or {}
    own = {"clean": kwargs["clean"]} if "clean" in kwargs else {}
    return TokenizerSource("clip", kwargs=own) if text.get("vocab_size", 49408) == 49408 else None


def _hugging_face(where: str, text: dict[str, Any]) -> TokenizerSource:
    given = text.get("tokenizer_kwargs") or {}
    kwargs = {key: given[key] for key in _OPTIONS if key in given}
    return TokenizerSource("hf", where, kwargs, text.get("tokenizer_mode"))


def _built_in(name: str) -> dict[str, Any]:
    """Return the config of a built-in model of open_clip. Raises ValueError for any other name."""
    model = name.removeprefix(PREFIX).replace("/", "-")  # open_clip takes ViT-B/32 too
    configs = open_clip_folder() / "model_configs"
    if model not in {path.stem for path in configs.glob("*.json")}:
        raise ValueError(
            f"--tokenizer {name}: not a model that is built into open_clip, such as open_clip:ViT-B-32; for a folder "
            "give its path, or hf:FOLDER"
        )
    return json.loads((configs / f"{model}.json").read_text(encoding="utf-8"))
