"""Model config: three frozen dataclasses with the keys and defaults of open_clip's model JSON.

    {"embed_dim": D, "vision_cfg": {...}, "text_cfg": {...}, "quick_gelu": false, "init_logit_bias": null}

Only keys that these towers implement are accepted. Any other key (timm or Hugging Face towers, attentional pooling,
...) raises an error with the key and the file; open_clip builds such a model (open_clip_config.py). One key is our own:
`vision_cfg.conv_stem`. open_clip cannot load a model that uses it.

Source of the schema: open_clip 3.3, model_configs/*.json and the dataclasses of model.py.
"""

import dataclasses
import json
import math
import reprlib
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

from infcl.config.json_file import parse_record, read_record
from infcl.models.open_clip_config import (
    BUILT_BY,
    CLEAN,
    PREFIX,
    UNSEEN,
    OpenClipConfig,
    as_compared,
    check_sizes,
    load_open_clip_config,
    open_clip_config,
    parse_preprocess,
)
from infcl.models.preprocess import CLIP_PREPROCESS, Preprocess

_CONFIG_DIR = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class VisionConfig:
    """Config of the image tower (`vision_cfg`): a ViT over square images."""

    image_size: int = 224  # pixels per side
    layers: int = 12
    width: int = 768
    head_width: int = 64
    mlp_ratio: float = 4.0
    patch_size: int = 16  # pixels per side and token
    patch_dropout: float = 0.0  # share of patch tokens dropped while training
    pool_type: str = "tok"  # "tok": the class token | "avg": mean of the patch tokens
    # Convolutional stem in place of the patch convolution: [[channels, kernel, stride], ...] with GELU in between. The
    # strides multiply to patch_size, and the last entry has `width` channels. Not known to open_clip.
    conv_stem: tuple[tuple[int, int, int], ...] | None = None

    def __post_init__(self):
        _check_positive(self, "vision_cfg", "image_size", "layers", "width", "head_width", "patch_size", "mlp_ratio")
        if self.image_size % self.patch_size:
            raise ValueError(
                f"vision_cfg.image_size {self.image_size} is not a multiple of patch_size {self.patch_size}: "
                f"{self.image_size % self.patch_size} pixels per side would be cut off"
            )
        if self.width % self.head_width:
            raise ValueError(f"vision_cfg.width {self.width} is not a multiple of head_width {self.head_width}")
        if not 0 <= self.patch_dropout < 1:
            raise ValueError(f"vision_cfg.patch_dropout {self.patch_dropout} must lie in [0, 1)")
        _check_choice("vision_cfg.pool_type", self.pool_type, ("tok", "avg"))
        if self.conv_stem is not None:
            _check_conv_stem(self.conv_stem, self.width, self.patch_size)

    @property
    def heads(self) -> int:
        return self.width // self.head_width

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True)
class TextConfig:
    """Config of the text tower (`text_cfg`): a GPT-like transformer over token ids."""

    context_length: int = 77
    vocab_size: int = 49408
    width: int = 512
    heads: int = 8
    layers: int = 12
    mlp_ratio: float = 4.0
    pool_type: str = "argmax"  # "argmax": at the largest id | "eos": at the first eos_id | "last" | "first"
    no_causal_mask: bool = False  # True: every token attends to every other, padding included
    eos_id: int = 2  # the id at which "eos" pools
    pad_id: int = 0
    # The record of the tokenizer (infcl/data/tokenizer/source.py), which open_clip's get_tokenizer reads too.
    hf_tokenizer_name: str | None = None
    tokenizer_kwargs: dict[str, Any] | None = None
    tokenizer_mode: str | None = None

    hf_model_name: ClassVar[None] = None
    follows_tokenizer: ClassVar[bool] = True  # embeddings and pooling are those of any tokenizer of Hugging Face

    def __post_init__(self):
        _check_positive(self, "text_cfg", "context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio")
        if self.width % self.heads:
            raise ValueError(f"text_cfg.width {self.width} is not a multiple of heads {self.heads}")
        _check_choice("text_cfg.pool_type", self.pool_type, ("argmax", "eos", "last", "first"))
        if self.pool_type == "first" and not self.no_causal_mask:
            raise ValueError('text_cfg.pool_type "first" under a causal mask sees one token: set no_causal_mask')
        for name in ("eos_id", "pad_id"):
            if not 0 <= getattr(self, name) < self.vocab_size:
                raise ValueError(f"text_cfg.{name} {getattr(self, name)} must lie in [0, vocab_size {self.vocab_size})")

    @property
    def end_id(self) -> int:
        """The id that ends a caption, where it is pooled: eos_id if pool_type is "eos", else the largest id."""
        return self.eos_id if self.pool_type == "eos" else self.vocab_size - 1

    @property
    def why_unpackable(self) -> str:
        """Why captions cannot be packed; "" if they can: the mask is causal, and no pooling is at a fixed position."""
        if not self.no_causal_mask and self.pool_type in ("argmax", "eos"):
            return ""
        return f"attends to what follows a caption (no_causal_mask {self.no_causal_mask}, pool_type {self.pool_type!r})"


@dataclass(frozen=True)
class CLIPConfig:
    """Config of a model: two towers that map into one space of `embed_dim` dimensions.

    It has the capabilities of an OpenClipConfig, so that other packages need not tell the two kinds apart.
    """

    embed_dim: int
    vision_cfg: VisionConfig
    text_cfg: TextConfig
    quick_gelu: bool = False  # x * sigmoid(1.702 x), OpenAI's activation, instead of GELU
    init_logit_bias: float | None = None  # a number gives the model a logit_bias (SigLIP)
    preprocess: Preprocess = CLIP_PREPROCESS  # preprocess_cfg, which is stored next to these keys

    def __post_init__(self):
        _check_positive(self, "model config", "embed_dim")

    @property
    def planned(self) -> "CLIPConfig | None":
        """The towers whose memory is planned; None: it is not known before a run."""
        return self

    @property
    def as_clip_model(self) -> "CLIPConfig | None":
        """The towers as transformers' CLIPModel may hold them; None: it cannot."""
        return self

    @property
    def loads_in_open_clip(self) -> bool:
        return self.vision_cfg.conv_stem is None

    def describe(self) -> dict[str, str]:
        """Return rows about the towers for people."""
        image, text = self.vision_cfg, self.text_cfg
        return {
            "image tower": f"ViT, {image.layers} x {image.width}, patch {image.patch_size}, {image.image_size} pixels",
            "text tower": f"{text.layers} x {text.width}, {text.context_length} tokens of {text.vocab_size}",
        }

    def unseen_settings(self, tower: str) -> dict[str, Any]:
        """Return the settings of "image", "text" or "whole" that no shape of its weights shows."""
        names = UNSEEN["image"] | UNSEEN["text"] if tower == "whole" else UNSEEN[tower]
        return as_compared({name: attrgetter(name)(self) for name in names}, self.text_cfg)

    def check_divides(self, size: int) -> None:
        """Raise ValueError unless `size` tensor-parallel ranks can split both towers, frozen ones included.

        They divide the heads and MLP features of each tower.
        """
        vision, text = self.vision_cfg, self.text_cfg
        counts = {
            "heads": (vision.heads, text.heads),
            "MLP features": (int(vision.width * vision.mlp_ratio), int(text.width * text.mlp_ratio)),
        }
        for what, both in counts.items():
            for tower, count in zip(("image", "text"), both):
                if count % size:
                    common = math.gcd(*counts["heads"], *counts["MLP features"])
                    fitting = ", ".join(str(n) for n in range(2, common + 1) if common % n == 0)
                    towers = " and ".join(f"{one} and {other} {name}" for name, (one, other) in counts.items())
                    raise ValueError(
                        f"--tensor-parallel-size {size} does not divide the {count} {what} of the {tower} tower; "
                        f"image and text towers of {towers} can be split over {fitting or 'no'} ranks"
                    )

    def open_clip_json(self) -> dict[str, Any]:
        """Return the contents of open_clip_config.json."""
        return {"model_cfg": self.to_dict(), "preprocess_cfg": dataclasses.asdict(self.preprocess)}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields in open_clip's JSON schema, without keys whose value is None, like open_clip's files."""
        fields = _without_none(dataclasses.asdict(self))
        del fields["preprocess"]
        return fields

    def to_json(self) -> str:
        return json.dumps(self.open_clip_json(), indent=4) + "\n"

    def with_overrides(
        self,
        *,
        image_size: int | None = None,
        context_length: int | None = None,
        patch_dropout: float | None = None,
    ) -> "CLIPConfig":
        """Return the config with the given fields replaced; None keeps a field.

        Raises:
            ValueError: the resulting config is invalid.
        """
        vision = _without_none({"image_size": image_size, "patch_dropout": patch_dropout})
        text = _without_none({"context_length": context_length})
        return dataclasses.replace(
            self,
            vision_cfg=dataclasses.replace(self.vision_cfg, **vision),
            text_cfg=dataclasses.replace(self.text_cfg, **text),
        )

    def with_preprocess(self, fields: dict[str, Any]) -> "CLIPConfig":
        """Return the config with other preprocessing; None keeps a field."""
        return dataclasses.replace(self, preprocess=parse_preprocess(fields, "model config", self.preprocess))

    def with_logit_bias(self, start: float | None) -> "CLIPConfig":
        """Return the config of a model whose logit_bias begins at `start`; None: it has none."""
        return dataclasses.replace(self, init_logit_bias=start)

    def with_tokenizer(self, **fields: Any) -> "CLIPConfig":
        """Return the config of the same towers with other fields of text_cfg, which describe a tokenizer.

        The defaults are those of a sentencepiece tokenizer, which writes [ids..., eos, pad, ...]: pooling moves from
        the largest id (the end-of-text token of CLIP's BPE) to the first eos. The mask does not change: under a causal
        mask the eos position never sees the padding after it, so no padding mask is needed.

        Args:
            fields: vocab_size, context_length, eos_id and pad_id of the tokenizer (`ids_of`), and other fields.
        """
        given = {"pool_type": "eos", "tokenizer_kwargs": CLEAN} | fields
        return dataclasses.replace(self, text_cfg=dataclasses.replace(self.text_cfg, **given))


ModelConfig = CLIPConfig | OpenClipConfig


def kept_patches(patches: int, dropout: float) -> int:
    """Return how many patches of an image the tower sees under patch dropout; at least one."""
    return max(1, int(patches * (1 - dropout)))


def list_models() -> list[str]:
    """Return the model names that `load_model_config` accepts without a path."""
    return sorted(path.stem for path in _CONFIG_DIR.glob("*.json"))


def load_model_config(name_or_path: str | Path) -> CLIPConfig:
    """Read the config of a model with our own towers; see `load_any_config`.

    Raises:
        ValueError: as `load_any_config`, or open_clip builds the model.
    """
    cfg = load_any_config(name_or_path)
    if isinstance(cfg, OpenClipConfig):
        raise ValueError(f"{name_or_path} is a model that open_clip builds; this needs one of our own towers")
    return cfg


def load_any_config(name_or_path: str | Path) -> ModelConfig:
    """Read the config of a model.

    Args:
        name_or_path: a name of `list_models()`, a JSON file in open_clip's schema, or an exported folder
            (open_clip_config.json). With the prefix "open_clip:", an argument of `load_open_clip_config`. Runs and
            exports of models that open_clip built need no prefix, as their config is marked; and folders of open_clip
            need none where our towers lack a key of their config.

    Returns:
        A CLIPConfig for our own towers, an OpenClipConfig for a model that open_clip builds.

    Raises:
        ValueError: there is no such config, or the towers cannot be built from it.
    """
    if str(name_or_path).startswith(PREFIX):
        return load_open_clip_config(str(name_or_path))
    path = _CONFIG_DIR / f"{name_or_path}.json"
    if not path.is_file():
        path = Path(name_or_path)
        if path.is_dir():
            path = path / "open_clip_config.json"
    if not path.is_file():
        raise ValueError(f"no model {str(name_or_path)!r}: not a file, and not one of {', '.join(list_models())}")
    fields = read_record(path, dict)
    model = fields.get("model_cfg", fields)
    if not isinstance(model, dict):
        raise ValueError(f"{path}: model_cfg is {reprlib.repr(model)}, not an object")
    if fields.get("built_by") == BUILT_BY or (path.name == "open_clip_config.json" and not _is_ours(model)):
        return open_clip_config(fields, source=str(path))
    return parse_model_config(model, source=str(path)).with_preprocess(fields.get("preprocess_cfg") or {})


def parse_model_config(fields: dict[str, Any], *, source: str = "model config") -> CLIPConfig:
    """Parse a config from the form of `CLIPConfig.to_dict`.

    Args:
        fields: the model's JSON object.
        source: file name for error messages.

    Raises:
        ValueError: a key is unknown or missing, or a value is invalid.
    """
    check_sizes(fields, source)
    if "preprocess" in fields:
        raise ValueError(f"{source}: unknown key 'preprocess'")
    try:
        return parse_record(json.dumps(fields), CLIPConfig, source, extra="forbid")
    except ValueError as error:
        raise ValueError(f"{error} (--model open_clip:NAME_OR_FILE builds towers of open_clip)") from error


def _is_ours(model: dict[str, Any]) -> bool:
    """Return whether our towers know all keys of a model_cfg. A list of layers is a ResNet's."""
    vision, text = (model.get(name) or {} for name in ("vision_cfg", "text_cfg"))
    if not isinstance(vision, dict) or not isinstance(text, dict):
        return True  # which reports it
    known = ({field.name for field in dataclasses.fields(cfg)} for cfg in (CLIPConfig, VisionConfig, TextConfig))
    return all(map(set.issuperset, known, (model, vision, text))) and not isinstance(vision.get("layers"), list)


def _check_positive(cfg: Any, section: str, *names: str) -> None:
    for name in names:
        if getattr(cfg, name) <= 0:
            raise ValueError(f"{section}: {name} {getattr(cfg, name)} must be positive")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} {value!r} is not one of {', '.join(choices)}")


def _check_conv_stem(stem: tuple[tuple[int, int, int], ...], width: int, patch_size: int) -> None:
    """Raise ValueError unless the convolutions map an image to the grid of its patches without gaps."""
    covers = all(
        channels > 0 and kernel >= stride > 0 and (stride > 1 or kernel % 2 == 1) for channels, kernel, stride in stem
    )
    if not covers or math.prod(stride for _, _, stride in stem) != patch_size or stem[-1][0] != width:
        raise ValueError(
            f"vision_cfg.conv_stem {[list(entry) for entry in stem]}: entries are [channels, kernel, stride], kernel "
            f">= stride (odd where the stride is 1); strides must multiply to patch_size {patch_size}, the last "
            f"entry must have width {width} channels"
        )


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, dict) else value
        for key, value in fields.items()
        if value is not None
    }
