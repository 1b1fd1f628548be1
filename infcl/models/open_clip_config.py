"""Config of a model that open_clip builds: its JSON, and the fields that the trainer reads.

`--model open_clip:NAME` takes a config that is built into the installed open_clip. `--model open_clip:FILE.json` takes
a file or an exported folder in its schema. The config is read as data; infcl.models.open_clip_model builds the model.

Source of the schema: open_clip 3.3, model_configs/*.json, CLIPVisionCfg and CLIPTextCfg of model.py, PreprocessCfg of
transform.py.
"""

import dataclasses
import importlib
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import torch

from infcl.config.json_file import parse_record, read_record
from infcl.models.preprocess import CLIP_PREPROCESS, Preprocess

PREFIX = "open_clip:"
BUILT_BY = "open_clip"  # marks the model_config.json of a run
# Settings per tower that do not affect shapes: weights with other settings would load, but compute wrong features.
UNSEEN: dict[str, dict[str, Any]] = {  # with open_clip's defaults
    "image": {"quick_gelu": False, "vision_cfg.head_width": 64, "vision_cfg.pool_type": "tok"},
    "text": {
        "quick_gelu": False,
        "text_cfg.heads": 8,
        "text_cfg.pool_type": "argmax",
        "text_cfg.eos_id": 2,
        "text_cfg.no_causal_mask": False,
    },
}
CLEAN = {"clean": "canonicalize"}  # tokenizer_kwargs: repair captions, then remove punctuation and capitals
# Larger numbers in a config build a tower for hours, or overflow the size of a tensor, before anything checks memory.
_MAX_LAYERS, _MAX_IDS, _MAX_CONTEXT, _MAX_SIZE = 1000, 1 << 24, 1 << 13, 1 << 16


@dataclass(frozen=True)
class ImageInput:
    """Input of the image tower: square images of image_size pixels per side."""

    image_size: int
    patch_dropout: float = 0.0


@dataclass(frozen=True)
class TextInput:
    """Input of the text tower: int64 ids [m, context_length] below vocab_size."""

    context_length: int = 77
    vocab_size: int = 49408
    pad_id: int = 0
    eos_id: int = 2
    pool_type: str = "argmax"
    hf_model_name: str | None = None
    tokenizer_kwargs: dict[str, Any] | None = None

    follows_tokenizer: ClassVar[bool] = False
    why_unpackable: ClassVar[str] = "is built by open_clip and takes captions one by one"

    @property
    def end_id(self) -> int:
        """The id that ends a caption: the largest id if the tower pools there, else eos_id."""
        return self.vocab_size - 1 if self.pool_type == "argmax" and not self.hf_model_name else self.eos_id


@dataclass(frozen=True)
class _ImageFields:
    image_size: int | tuple[int, int] = 224
    patch_dropout: float = 0.0


@dataclass(frozen=True)
class _Model:
    """The part of model_cfg that the trainer reads."""

    embed_dim: int
    vision_cfg: _ImageFields
    text_cfg: TextInput


@dataclass(frozen=True)
class OpenClipConfig:
    """Config of a model that open_clip builds; it has the capabilities of a CLIPConfig.

    Attributes:
        source: name or path of the config, for messages.
        fields: model_cfg, open_clip's own JSON object.
        preprocess: preprocess_cfg.

    Raises:
        ValueError: a size is missing or not a positive integer, the model has a captioning decoder, or its images are
            not square.
    """

    source: str
    fields: dict[str, Any]
    preprocess: Preprocess = Preprocess()

    planned: ClassVar[None] = None
    as_clip_model: ClassVar[None] = None
    loads_in_open_clip: ClassVar[bool] = True

    def __post_init__(self):
        check_sizes(self.fields, self.source)
        size = self._model.vision_cfg.image_size
        if "multimodal_cfg" in self.fields:
            raise ValueError(
                f"{self.source} has a captioning decoder (multimodal_cfg, CoCa), which a contrastive loss does not "
                "train; choose a model of two towers"
            )
        if not isinstance(size, int) and size[0] != size[1]:
            raise ValueError(
                f"{self.source}: the image tower takes images of {size} pixels; the loader makes square ones"
            )
        for name in ("embed_dim", "vision_cfg.image_size", "text_cfg.context_length", "text_cfg.vocab_size"):
            if (value := attrgetter(name)(self)) < 1:
                raise ValueError(f"{self.source}: {name} {value} must be positive")

    @cached_property
    def _model(self) -> _Model:
        return parse_record(json.dumps(self.fields), _Model, self.source)

    @property
    def embed_dim(self) -> int:
        return self._model.embed_dim

    @property
    def vision_cfg(self) -> ImageInput:
        size, dropout = self._model.vision_cfg.image_size, self._model.vision_cfg.patch_dropout
        return ImageInput(size if isinstance(size, int) else size[0], dropout)

    @property
    def text_cfg(self) -> TextInput:
        return self._model.text_cfg

    @property
    def init_logit_bias(self) -> float | None:
        return self.fields.get("init_logit_bias")

    def describe(self) -> dict[str, str]:
        """Return rows about the towers for people."""
        images, texts = f"{self.vision_cfg.image_size} pixels a side", f"{self.text_cfg.context_length} tokens"
        return {"model": self.source, "images": images, "texts": texts}

    def unseen_settings(self, tower: str) -> dict[str, Any]:
        """Return the settings of "image", "text" or "whole" that no shape of its weights shows."""
        found = dict(UNSEEN["image"] | UNSEEN["text"] if tower == "whole" else UNSEEN[tower])
        for name, default in found.items():
            section, _, key = name.rpartition(".")
            found[name] = (self.fields[section] if section else self.fields).get(key, default)
        return as_compared(found, self.text_cfg)

    def check_divides(self, size: int) -> None:
        """Raise ValueError for several tensor-parallel ranks."""
        if size > 1:
            raise ValueError(f"--tensor-parallel-size {size}: only our own towers can be split, not {self.source}")

    def to_dict(self) -> dict[str, Any]:
        """Return model_cfg, open_clip's JSON object."""
        return self.fields

    def open_clip_json(self) -> dict[str, Any]:
        """Return the contents of open_clip_config.json, with a mark that open_clip builds the model."""
        preprocess = dataclasses.asdict(self.preprocess)
        return {"built_by": BUILT_BY, "model_cfg": self.fields, "preprocess_cfg": preprocess}

    def to_json(self) -> str:
        return json.dumps(self.open_clip_json(), indent=4) + "\n"

    def with_logit_bias(self, start: float | None) -> "OpenClipConfig":
        """Return the config of a model whose logit_bias begins at `start`; None: it has none."""
        return dataclasses.replace(self, fields=self.fields | {"init_logit_bias": start})

    def with_overrides(
        self, *, image_size: int | None, context_length: int | None, patch_dropout: float | None
    ) -> "OpenClipConfig":
        """Return the config with the given fields replaced; None keeps a field."""
        vision = {"image_size": image_size, "patch_dropout": patch_dropout}
        fields = dict(self.fields)
        for part, given in (("vision_cfg", vision), ("text_cfg", {"context_length": context_length})):
            fields[part] = fields[part] | {name: value for name, value in given.items() if value is not None}
        return dataclasses.replace(self, fields=fields)

    def with_tokenizer(self, **fields: Any) -> "OpenClipConfig":
        """Return the config of the same towers with another tokenizer (CLIPConfig.with_tokenizer)."""
        text = self.fields["text_cfg"] | {"pool_type": "eos", "tokenizer_kwargs": CLEAN} | fields
        kept = {name: value for name, value in text.items() if value is not None or name not in fields}
        return dataclasses.replace(self, fields=self.fields | {"text_cfg": kept})

    def with_preprocess(self, fields: dict[str, Any]) -> "OpenClipConfig":
        """Return the config with other preprocessing; None keeps a field."""
        return dataclasses.replace(self, preprocess=parse_preprocess(fields, self.source, self.preprocess))


def as_compared(settings: dict[str, Any], text: Any) -> dict[str, Any]:
    """Return settings of UNSEEN in which pooling at the largest id is "argmax"; eos_id belongs to "eos" alone."""
    if settings.get("text_cfg.pool_type") == "eos" and text.eos_id == text.vocab_size - 1:
        settings["text_cfg.pool_type"] = "argmax"
    if settings.get("text_cfg.pool_type") != "eos":
        settings.pop("text_cfg.eos_id", None)
    return settings


def load_open_clip_config(name_or_path: str) -> OpenClipConfig:
    """Read the config of a model that open_clip builds.

    Args:
        name_or_path: the name of a built-in config (ViT-B/32 or ViT-B-32), a JSON file, or a folder with
            open_clip_config.json; with or without the prefix "open_clip:".

    Raises:
        ValueError: open_clip is not installed, there is no such config, or it does not describe two towers.
    """
    name = name_or_path.removeprefix(PREFIX)
    path = Path(name) / "open_clip_config.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        configs = open_clip_folder() / "model_configs"
        path = configs / f"{name.replace('/', '-')}.json"
        if path.parent != configs or not path.is_file():
            raise ValueError(
                f"--model {name_or_path}: not a file, and not a model that is built into open_clip; "
                "`python -c 'import open_clip; print(open_clip.list_models())'` lists them"
            )
    return open_clip_config(read_record(path, dict), source=name_or_path)


def open_clip_config(whole: dict[str, Any], *, source: str) -> OpenClipConfig:
    """Return a config from a model_cfg alone, or from {"model_cfg": ..., "preprocess_cfg": ...}."""
    preprocess = parse_preprocess(whole.get("preprocess_cfg") or {}, source)
    return OpenClipConfig(source, whole.get("model_cfg", whole), preprocess)


def check_sizes(fields: Any, source: str) -> None:
    """Raise ValueError for a number in a model's JSON object that no model has, or that is not finite."""
    for place, number in _numbers(fields, ""):
        name = place.rpartition(".")[2]
        limit = _MAX_IDS if name == "vocab_size" or name.endswith("_id") else _MAX_SIZE
        limit = _MAX_LAYERS if "layer" in name else _MAX_CONTEXT if name == "context_length" else limit
        if not abs(number) <= limit:
            raise ValueError(f"{source}: {place[1:]} is {str(number)[:20]}; at most {limit:,} is supported")


def _numbers(value: Any, place: str) -> Iterator[tuple[str, float]]:
    """Yield (".vision_cfg.width", 768), ... of a JSON value."""
    if isinstance(value, dict | list | tuple):
        for key, inner in value.items() if isinstance(value, dict) else [("", inner) for inner in value]:
            yield from _numbers(inner, f"{place}.{key}" if key else place)
    elif isinstance(value, int | float):
        yield place, value


def parse_preprocess(fields: dict[str, Any], source: str, others: Preprocess = CLIP_PREPROCESS) -> Preprocess:
    """Parse a preprocess_cfg, without the keys that the trainer does not use; missing ones are those of `others`.

    Raises:
        ValueError: a value is invalid; the message begins with `source`.
    """
    if not isinstance(fields, dict):
        raise ValueError(f"{source}: preprocessing is {str(fields)[:60]}, not an object")
    given = {name: value for name, value in fields.items() if value is not None}
    return parse_record(json.dumps(dataclasses.asdict(others) | given), Preprocess, f"{source}: preprocessing")


def open_clip_folder(needed_by: str = "--model open_clip:NAME") -> Path:
    """Return the folder of the installed open_clip, without importing it.

    Args:
        needed_by: the flag that needs it, for the message.

    Raises:
        ValueError: open_clip is not installed.
    """
    spec = importlib.util.find_spec("open_clip")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{needed_by} needs open_clip: pip install open_clip_torch")
    return Path(spec.submodule_search_locations[0])


def import_open_clip(needed_by: str) -> Any:
    """Import open_clip, an optional package.

    Args:
        needed_by: the flag and value, or the command, that needs it; for the message.

    Raises:
        ValueError: open_clip is not installed, or the installed torchvision does not fit torch.
    """
    try:
        return importlib.import_module("open_clip")
    except (ImportError, RuntimeError) as error:
        raise ValueError(
            f"{needed_by} needs open_clip, which cannot be imported ({error}): pip install open_clip_torch, and "
            f"install the torchvision that was built for torch {torch.__version__}"
        ) from error


def hugging_face_config(name: str, source: str) -> Any:
    """Read the config of a Hugging Face text tower, without running code that comes with it.

    Args:
        name: text_cfg.hf_model_name, a name on the hub or a folder.
        source: the model, for messages.

    Raises:
        ValueError: transformers is not installed, there is no such config, or it needs its own code.
    """
    where = f"--model {source}: text tower {name}"
    try:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        check_sizes({key: value for key, value in config.to_dict().items() if "layer" in key}, where)
        return config
    except ImportError as error:
        raise ValueError(f"{where} needs transformers: pip install transformers ({error})") from error
    except (OSError, ValueError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        raise ValueError(
            f"{where} cannot be loaded ({why}); put a folder with its config.json into text_cfg.hf_model_name"
        ) from error
