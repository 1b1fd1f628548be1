"""Config of a model that open_clip builds: its JSON, and the fields that the trainer reads.

`--model open_clip:NAME` takes a config that is built into the installed open_clip. `--model open_clip:FILE.json` takes
a file or an exported folder in its schema. The config is read as data; infcl.models.open_clip_model builds the model.

Source of the schema: open_clip 3.3, model_configs/*.json, CLIPVisionCfg and CLIPTextCfg of model.py, PreprocessCfg of
transform.py.
"""

import dataclasses
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infcl.models.preprocess import CLIP_PREPROCESS, Preprocess

PREFIX = "open_clip:"
BUILT_BY = "open_clip"  # marks the model_config.json of a run
CLEAN = {"clean": "canonicalize"}  # tokenizer_kwargs: repair captions, then remove punctuation and capitals
_TEXT_DEFAULTS: dict[str, Any] = {"context_length": 77, "vocab_size": 49408, "pad_id": 0, "eos_id": 2}
_TEXT_DEFAULTS |= {"pool_type": "argmax", "hf_model_name": None, "tokenizer_kwargs": None}


@dataclass(frozen=True)
class ImageInput:
    """Input of the image tower: square images of image_size pixels per side."""

    image_size: int
    patch_dropout: float = 0.0


@dataclass(frozen=True)
class TextInput:
    """Input of the text tower: int64 ids [m, context_length] below vocab_size."""

    context_length: int
    vocab_size: int
    pad_id: int
    eos_id: int
    pool_type: str
    hf_model_name: str | None = None
    tokenizer_kwargs: dict[str, Any] | None = None

    @property
    def repairs_captions(self) -> bool:
        """Whether a sentencepiece tokenizer repairs captions before it cleans them; False in models of older runs."""
        return (self.tokenizer_kwargs or {}).get("clean") == CLEAN["clean"]

    @property
    def end_id(self) -> int:
        """The id that ends a caption: the largest id if the tower pools there, else eos_id."""
        return self.vocab_size - 1 if self.pool_type == "argmax" and not self.hf_model_name else self.eos_id


@dataclass(frozen=True)
class OpenClipConfig:
    """Config of a model that open_clip builds.

    Attributes:
        source: name or path of the config, for messages.
        fields: model_cfg, open_clip's own JSON object.
        preprocess: preprocess_cfg.

    Raises:
        ValueError: embed_dim, vision_cfg or text_cfg is missing, the model has a captioning decoder, or its images are
            not square.
    """

    source: str
    fields: dict[str, Any]
    preprocess: Preprocess = Preprocess()

    def __post_init__(self):
        for name in ("embed_dim", "vision_cfg", "text_cfg"):
            if name not in self.fields:
                raise ValueError(f"{self.source}: no model config of open_clip's, {name} is missing")
        if "multimodal_cfg" in self.fields:
            raise ValueError(
                f"{self.source} has a captioning decoder (multimodal_cfg, CoCa), which a contrastive loss does not "
                "train; choose a model of two towers"
            )
        size = self.fields["vision_cfg"].get("image_size", 224)
        if isinstance(size, (list, tuple)) and len(set(size)) != 1:
            raise ValueError(f"{self.source}: images of {size} pixels; the loader makes square ones")

    @property
    def embed_dim(self) -> int:
        return self.fields["embed_dim"]

    @property
    def vision_cfg(self) -> ImageInput:
        fields = self.fields["vision_cfg"]
        size = fields.get("image_size", 224)
        return ImageInput(size[0] if isinstance(size, (list, tuple)) else size, fields.get("patch_dropout", 0.0))

    @property
    def text_cfg(self) -> TextInput:
        fields = self.fields["text_cfg"]
        return TextInput(**{name: fields.get(name, default) for name, default in _TEXT_DEFAULTS.items()})

    @property
    def loads_in_open_clip(self) -> bool:
        return True

    def to_dict(self) -> dict[str, Any]:
        """Return model_cfg, open_clip's JSON object."""
        return self.fields

    def to_json(self) -> str:
        """Return the text of an open_clip_config.json, with a mark that open_clip builds the model."""
        whole = {
            "built_by": BUILT_BY,
            "model_cfg": self.fields,
            "preprocess_cfg": dataclasses.asdict(self.preprocess),
        }
        return json.dumps(whole, indent=4) + "\n"

    def with_overrides(
        self, *, image_size: int | None, context_length: int | None, patch_dropout: float | None
    ) -> "OpenClipConfig":
        """Return the config with the given fields replaced; None keeps a field."""
        vision = {"image_size": image_size, "patch_dropout": patch_dropout}
        return self.with_fields(vision_cfg=vision, text_cfg={"context_length": context_length})

    def with_tokenizer(self, *, repairs: bool = True, **ids: int) -> "OpenClipConfig":
        """Return the config of the same towers with a sentencepiece tokenizer (config.py, with_tokenizer).

        Raises:
            ValueError: the text tower is a Hugging Face model, which has its own vocabulary.
        """
        if name := self.text_cfg.hf_model_name:
            raise ValueError(
                f"--model {self.source}: its text tower {name} has a vocabulary of its own: --tokenizer hf:{name}"
            )
        return self.with_fields(text_cfg=ids | {"pool_type": "eos", "tokenizer_kwargs": CLEAN if repairs else {}})

    def with_fields(self, **parts: dict[str, Any]) -> "OpenClipConfig":
        """Return the config with keys of vision_cfg, text_cfg or preprocess replaced; None keeps a key."""
        given = {
            part: {name: value for name, value in values.items() if value is not None} for part, values in parts.items()
        }
        fields = dict(self.fields)
        for part in ("vision_cfg", "text_cfg"):
            fields[part] = fields[part] | given.get(part, {})
        preprocess = dataclasses.replace(self.preprocess, **given.get("preprocess", {}))
        return dataclasses.replace(self, fields=fields, preprocess=preprocess)


def preprocess_of(cfg: Any) -> Preprocess:
    """Return a model's image preprocessing: CLIP's for our own towers, else that of open_clip's config."""
    return cfg.preprocess if isinstance(cfg, OpenClipConfig) else CLIP_PREPROCESS


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
                f"--model {name_or_path}: no file, and no model that open_clip has built in; "
                "`python -c 'import open_clip; print(open_clip.list_models())'` lists them"
            )
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(whole, dict):
        raise ValueError(f"{path} must be a JSON object, not {type(whole).__name__}")
    return open_clip_config(whole, source=name_or_path)


def open_clip_config(whole: dict[str, Any], *, source: str) -> OpenClipConfig:
    """Return a config from a model_cfg alone, or from {"model_cfg": ..., "preprocess_cfg": ...}."""
    known = {field.name for field in dataclasses.fields(Preprocess)}
    said = {name: value for name, value in (whole.get("preprocess_cfg") or {}).items() if name in known}
    said |= {name: tuple(said[name]) for name in ("mean", "std") if name in said}
    return OpenClipConfig(source, whole.get("model_cfg", whole), Preprocess(**said))


def open_clip_folder() -> Path:
    """Return the folder of the installed open_clip.

    Raises:
        ValueError: open_clip is not installed.
    """
    spec = importlib.util.find_spec("open_clip")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("models of open_clip's need open_clip: pip install open_clip_torch")
    return Path(spec.submodule_search_locations[0])
