"""Import of weights into these towers: open_clip's files and folders, CLIPModel folders, runs and exports.

In:  a file (.pt, .pth, .bin, .safetensors) with a state dict in open_clip's or CLIPModel's names; or a folder:
     open_clip's `local-dir`, transformers' CLIPModel, a run or checkpoint of this trainer, one of its exports.
     Or "open_clip:TAG": the model's weights of that name, which open_clip downloads.
Out: `Weights`: a state dict in our names, and the model config if the source has one.

Files are read as data only: safetensors, or torch.load with weights_only, which never runs code. Position embeddings
are interpolated if the image size differs (bicubic, as in open_clip), and cut if the text is shorter.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from infcl.config.json_file import read_record
from infcl.convert.hf_clip import from_hf, from_hf_config
from infcl.data.tokenizer.source import described_in
from infcl.models import build_towers, load_any_config
from infcl.models.config import ModelConfig
from infcl.models.open_clip_config import PREFIX, import_open_clip, load_open_clip_config, parse_preprocess
from infcl.models.preprocess import CLIP_PREPROCESS, Preprocess

SCALARS = ("logit_scale", "logit_bias")  # [1] here, 0-dim in open_clip
_ABOUT = ("input_resolution", "context_length", "vocab_size")  # numbers in the state dict of OpenAI's archives
_WRAPPERS = ("module.", "_orig_mod.")  # DistributedDataParallel, torch.compile
_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin", "model.safetensors", "pytorch_model.bin")


class Weights(NamedTuple):
    """Weights from a source, under our names."""

    state: dict[str, torch.Tensor]  # our names
    cfg: ModelConfig | None  # None for a single file of weights
    source: str
    preprocess: Preprocess = CLIP_PREPROCESS  # by which the image tower's pixels were normalised
    averaged: bool | None = None  # whether they are a run's averages; None if they are of no run


def read_weights(path: str | Path, *, model: str | None = None, ema: bool | None = None) -> Weights:
    """Read weights.

    Args:
        path: see the module's docstring.
        model: of which a tag names the weights.
        ema: see `consolidated_state_dict`; for a run or checkpoint.

    Raises:
        ValueError: `path` has no weights, no average, or a file that is no state dict or would run code when loaded.
    """
    source, path = str(path), Path(path)
    is_run = (path / "checkpoints").is_dir() or (path / "infcl.json").is_file()
    if ema is not None and not is_run:
        raise ValueError(f"{path} is not a run or checkpoint of this trainer: it has no averaged weights")
    if model is not None and source.startswith(PREFIX):
        return read_tag(source, model)
    if path.is_file():
        return Weights(_our_names(_read_file(path)), None, str(path), _preprocess_of(path))
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or folder")
    if is_run:
        from infcl.checkpoint.load import newest_intact, takes_average, weights_of

        cfg = load_any_config(described_in(path) / "model_config.json")
        checkpoint, manifest = newest_intact(path)
        averaged = takes_average(manifest, ema)
        state = _our_names(weights_of(checkpoint, manifest, ema=averaged))
        return Weights(state, cfg, f"{path}{' (averaged)' * averaged}", cfg.preprocess, averaged)
    file = next((path / name for name in _FILES if (path / name).is_file()), None)
    if file is None:
        raise ValueError(f"{path}: no weights there (looked for {', '.join(_FILES)}, and checkpoints/ of a run)")
    return Weights(_our_names(_read_file(file)), _folder_config(path), str(path), _preprocess_of(path))


def config_of(weights: Weights, source: str | Path, model: str | None) -> ModelConfig:
    """Return the model config of weights: their own, or that of --model with the preprocessing of their folder or tag.

    Raises:
        ValueError: neither is there, or both are.
    """
    if weights.cfg is not None and not str(source).startswith(PREFIX):
        if model is not None:
            raise ValueError(f"--model {model}: {source} brings its own config; leave --model out")
        return weights.cfg
    if model is None:
        raise ValueError(f"{source} does not say which model it is: give --model, such as ViT-B-32 or a JSON file")
    return load_any_config(model).with_preprocess(weights_preprocess(str(source), model))


def weights_preprocess(source: str | None, model: str) -> dict[str, Any]:
    """Return the preprocess_cfg that comes with the weights of --pretrained, an open_clip tag or a folder; else {}.

    Raises:
        ValueError: open_clip has no such tag, or a value is invalid.
    """
    if source is None:
        return {}
    said = _tag(source, model) if source.startswith(PREFIX) else _preprocessing(described_in(Path(source)))
    preprocess = dataclasses.asdict(parse_preprocess(said, source))
    return {name: value for name, value in preprocess.items() if name in said}


def read_tag(source: str, model: str) -> Weights:
    """Read the weights "open_clip:TAG" of a model. open_clip downloads them if they are not in its cache.

    Raises:
        ValueError: open_clip has no such tag for the model, or the download fails.
    """
    about = _tag(source, model)
    from open_clip.pretrained import download_pretrained

    try:
        file = download_pretrained(about)
    except Exception as error:  # raised by urllib or huggingface_hub
        raise ValueError(f"{source}: {str(error).splitlines()[0]}") from error
    cfg = load_open_clip_config(model)
    if about.get("quick_gelu"):  # OpenAI's, MetaCLIP's and DFN's tags need it
        cfg = dataclasses.replace(cfg, fields=cfg.fields | {"quick_gelu": True})
    return Weights(_our_names(_read_file(Path(file))), cfg, f"{source} of {model}", parse_preprocess(about, source))


def _tag(source: str, model: str) -> dict[str, Any]:
    """Return open_clip's entry for a tag: url, mean, std, interpolation, resize_mode."""
    import_open_clip(source)
    from open_clip.pretrained import get_pretrained_cfg, list_pretrained_tags_by_model

    name = model.removeprefix(PREFIX).replace("/", "-")
    if not (about := get_pretrained_cfg(name, source.removeprefix(PREFIX))):
        tags = ", ".join(list_pretrained_tags_by_model(name)) or "none"
        raise ValueError(f"{source}: open_clip has no weights of that name for --model {model}; it has {tags}")
    return about


def load_pretrained(
    model: Any, whole: str | None = None, image: str | None = None, text: str | None = None, *, name: str = ""
) -> list[str]:
    """Load pretrained weights into a model: first the full model, then single towers.

    Args:
        whole, image, text: sources of all weights and of each tower's, paths or "open_clip:TAG"; None to skip.
        name: the model's name, with which open_clip looks up a tag.

    Returns:
        One line per source: what it loaded, and the changes to the weights.

    Raises:
        ValueError: a source cannot be read, or does not fit the model.
    """
    lines = []
    for tower, path in (("whole", whole), ("image", image), ("text", text)):
        if path is not None:
            weights = read_weights(path, model=name)
            changes = load_tower(model, weights, tower, name)
            what = "all weights" if tower == "whole" else f"the {tower} tower's weights"
            lines.append("; ".join([f"{what} are those of {weights.source}", *changes]))
    return lines


def model_with(weights: Weights, cfg: ModelConfig) -> Any:
    """Build a model with these weights on the CPU. Raises ValueError if they do not fit the config."""
    has_bias = "logit_bias" in weights.state
    if has_bias != (cfg.init_logit_bias is not None):
        cfg = cfg.with_logit_bias(0.0 if has_bias else None)
    with torch.device("meta"):
        shapes = build_towers(cfg)
    _fitted(shapes, weights)  # before a model that may be larger than its weights takes memory
    model = build_towers(cfg)
    load_tower(model, weights)
    return model


@torch.no_grad()
def load_tower(model: Any, weights: Weights, tower: str = "whole", model_name: str = "") -> list[str]:
    """Load one tower ("image", "text") or the "whole" model, and return one line per change to the weights.

    A tower includes its projection, but not logit_scale. In the full model only logit_bias may be missing or
    unexpected, since it belongs to one loss. `model_name` is for messages.

    Raises:
        ValueError: keys are missing, unexpected or of another shape, or settings differ. Nothing is loaded then.
    """
    given, mine, changes = _fitted(model, weights, tower, model_name)
    model.load_state_dict({name: given[name].to(mine[name].dtype) for name in mine if name in given}, strict=False)
    changes += ["logit_bias is not there: it begins as the loss's"] if mine.keys() - given.keys() else []
    return changes + (["its logit_bias is left out"] if given.keys() - mine.keys() else [])


def _fitted(
    model: Any, weights: Weights, tower: str = "whole", model_name: str = ""
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[str]]:
    """Return a tower's weights, the model's own of the same names and shapes, and the changes."""
    if weights.cfg is not None:
        _check_settings(model.cfg, weights.cfg, tower, weights.source)
    mine = {name: value for name, value in model.state_dict().items() if _belongs(name, tower)}
    state = dict(weights.state)
    if any(name.startswith("text.") for name in mine):  # CustomTextCLIP's prefix, which our names lack
        state = {f"text.{name}" if _belongs(name, "text") else name: value for name, value in state.items()}
    given = {name: value for name, value in state.items() if _belongs(name, tower)}
    for name in SCALARS:
        if name in given and given[name].numel() == 1:
            given[name] = given[name].reshape(1)
    changes = _fit_positions(given, mine)
    here, there = ((of.mean, of.std) for of in (model.cfg.preprocess, weights.preprocess))
    if tower != "text" and here != there:
        changes.append(f"its pixels were normalised by {there}, here by {here}")
    misfits = {
        "missing": [name for name in mine if name not in given and name != "logit_bias"],
        "unexpected": [name for name in given if name not in mine and name != "logit_bias"],
        "mismatched": [name for name in mine if name in given and given[name].shape != mine[name].shape],
    }
    if any(misfits.values()):
        part = "the model" if tower == "whole" else f"the {tower} tower"
        lines = [f"{weights.source} does not fit {part}{f' of --model {model_name}' if model_name else ''}:"]
        for what, names in misfits.items():
            shown = [_shapes(name, given.get(name), mine.get(name)) for name in names[:8]]
            shown += [f"and {len(names) - 8} more"] if len(names) > 8 else []
            lines += [f"  {what}: {', '.join(shown)}"] if shown else []
        if "token_embedding.weight" in misfits["mismatched"]:
            lines.append("  (another vocabulary: keep the source's tokenizer, or load --pretrained-image alone)")
        elif not mine.keys() & given.keys():
            lines.append("  (no name in common: choose the --model whose weights these are)")
        raise ValueError("\n".join(lines))
    return given, mine, changes


def resize_image_positions(positions: torch.Tensor, tokens: int) -> torch.Tensor:
    """Resize position embeddings [1 + g^2, w] to [tokens, w]: keep the class token's, interpolate the grid's (bicubic).

    Embeddings that are not of a square grid are returned unchanged.
    """
    old, new = round((len(positions) - 1) ** 0.5), round((tokens - 1) ** 0.5)
    if old**2 + 1 != len(positions) or new**2 + 1 != tokens:
        return positions
    grid = positions[1:].float().T.reshape(1, -1, old, old)
    grid = F.interpolate(grid, size=(new, new), mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([positions[:1], grid[0].flatten(1).T.to(positions.dtype)])


def _fit_positions(given: dict[str, torch.Tensor], mine: Mapping[str, torch.Tensor]) -> list[str]:
    """Fit the position embeddings in `given` to the model's, and return one line per change."""
    changes = []
    for name in ("visual.positional_embedding", "positional_embedding", "text.positional_embedding"):
        if name not in given or name not in mine or given[name].shape[1:] != mine[name].shape[1:]:
            continue
        there, needed = len(given[name]), len(mine[name])
        if name.startswith("visual.") and there != needed:
            given[name] = resize_image_positions(given[name], needed)
            changes.append(f"its {there} image positions are interpolated to {needed}")
        elif there > needed:
            last = name.replace("positional_embedding", "cls_emb") in mine  # the class token's, after the words'
            given[name] = torch.cat([given[name][: needed - last], given[name][there - last :]])
            changes.append(f"of its {there} text positions the first {needed - last}{' and the last' * last} are taken")
    return changes


def _belongs(name: str, tower: str) -> bool:
    return tower == "whole" or (name not in SCALARS and name.startswith("visual.") == (tower == "image"))


def _shapes(name: str, given: torch.Tensor | None, needed: torch.Tensor | None) -> str:
    there, here = (None if one is None else list(one.shape) for one in (given, needed))
    if there is None or here is None:
        return f"{name} {here if there is None else there}"
    return f"{name} is {there}, needed {here}"


def _check_settings(ours: ModelConfig, theirs: ModelConfig, tower: str, source: str) -> None:
    there, here = theirs.unseen_settings(tower), ours.unseen_settings(tower)
    names = [name for name in here if name in there and here[name] != there[name]]
    different = [f"{name} is {there[name]} there, {here[name]} here" for name in names]
    if different:
        hint = ", such as open_clip:ViT-B-32-quickgelu" if "quick_gelu" in names else ""
        if {"text_cfg.pool_type", "text_cfg.eos_id"} & set(names):  # some tokenizers change them
            hint = ", and the tokenizer that belongs to it (open_clip:NAME or hf:FOLDER)"
        raise ValueError(f"{source} is another model: {'; '.join(different)}. Choose a --model with its settings{hint}")


def _read_file(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path}: not a safetensors file ({error})") from error
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except Exception as error:  # torch.load has no common type for damaged and other files
        found = re.search(r"WeightsUnpickler error:\s*(.+)", str(error))  # not torch's advice to run the file's code
        cause = found[1] if found else f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"{path}: torch.load(weights_only=True) rejects it ({cause}): it is not a torch file, or contains more "
            "than tensors, numbers and strings. Save only the state dict, or convert a TorchScript archive to "
            "safetensors"
        ) from error
    content = content.get("state_dict", content) if isinstance(content, dict) else content
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise ValueError(f"{path}: holds no state dict (a dict of tensors, or one under 'state_dict')")
    return content


def _our_names(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Translate CLIPModel's names; remove prefixes of wrappers, CustomTextCLIP's "text." and OpenAI's sizes."""
    for prefix in _WRAPPERS:
        state = {name.removeprefix(prefix): value for name, value in state.items() if name not in _ABOUT}
    if any(name.startswith(("vision_model.", "text_model.")) for name in state):
        return from_hf(state)
    return {name.removeprefix("text."): value for name, value in state.items()}


_PREPROCESSING = {  # file: its section; of open_clip, runs, CLIPImageProcessor and CLIPProcessor
    "open_clip_config.json": "preprocess_cfg",
    "model_config.json": "preprocess_cfg",
    "preprocessor_config.json": None,
    "processor_config.json": "image_processor",
}


def _preprocessing(path: Path) -> dict[str, Any]:
    """Return a folder's preprocessing fields, with those of an image processor under open_clip's names.

    Raises:
        ValueError: they are no object, or images are resampled by another filter.
    """
    said: dict[str, Any] = {}
    for name, section in _PREPROCESSING.items():
        if (path / name).is_file():
            fields = read_record(path / name, dict)
            fields = (fields.get(section) or {}) if section else fields
            if not isinstance(fields, dict):
                raise ValueError(f"{path / name}: {section} is {str(fields)[:60]}, not an object")
            said = {key.removeprefix("image_"): value for key, value in fields.items() if value is not None} | said
    if said.get("resample", 3) not in (2, 3):
        raise ValueError(f"{path}: resample {said['resample']} is neither 2 (bilinear) nor 3 (bicubic)")
    of_processor = {"interpolation": "bilinear"} if said.get("resample") == 2 else {}
    of_processor |= {"resize_mode": "squash"} if said.get("do_center_crop") is False else {}
    return of_processor | said


def _preprocess_of(path: Path) -> Preprocess:
    """Return the preprocessing of a folder's weights, or of a file's in a folder."""
    return parse_preprocess(_preprocessing(described_in(path)), str(path))


def _folder_config(path: Path) -> ModelConfig | None:
    if (path / "open_clip_config.json").is_file():
        return load_any_config(path / "open_clip_config.json")
    theirs = path / "config.json"
    if not theirs.is_file():
        return None
    return from_hf_config(read_record(theirs, dict), str(theirs)).with_preprocess(_preprocessing(path))
