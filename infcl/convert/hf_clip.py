"""Mapping between this project's CLIP and transformers' CLIPModel, in both directions. Both have the same towers.

    ours (open_clip's names)                           transformers
    visual.proj [w, D], text_projection [w, D]         {visual,text}_projection.weight [D, w], transposed
    attn.in_proj_{weight,bias} [3w, ...]               self_attn.{q,k,v}_proj.{weight,bias}
    token_embedding.weight, positional_embedding       text_model.embeddings.{token,position}_embedding.weight
    everything else                                    renamed

CLIPModel has a ViT that pools its class token and a causal text tower that pools at the first eos. Any other model is
rejected. Tested with transformers 5.23.
"""

import json
import re
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

import torch
from pydantic import PositiveInt
from typing_extensions import TypedDict

from infcl.config.json_file import parse_record
from infcl.models.config import CLIPConfig, TextConfig, VisionConfig, parse_model_config
from infcl.models.open_clip_config import check_sizes

_TOP = {
    "logit_scale": "logit_scale",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "text_projection": "text_projection.weight",
    "visual.proj": "visual_projection.weight",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",  # sic
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
}
_TOWERS = {"visual.transformer": "vision_model.encoder", "transformer": "text_model.encoder"}
_BLOCK = {  # a block's modules, followed by weight or bias; several of theirs are parts of ours, along dim 0
    "ln_1.": ("layer_norm1.",),
    "ln_2.": ("layer_norm2.",),
    "mlp.c_fc.": ("mlp.fc1.",),
    "mlp.c_proj.": ("mlp.fc2.",),
    "attn.out_proj.": ("self_attn.out_proj.",),
    "attn.in_proj_": tuple(f"self_attn.{letter}_proj." for letter in "qkv"),
}
_TRANSPOSED = ("visual.proj", "text_projection")
# CLIPModel's setting -> (ours, transformers' default); heads and mlp_ratio are computed
_VISION = {
    "hidden_size": ("width", 768),
    "num_hidden_layers": ("layers", 12),
    "image_size": ("image_size", 224),
    "patch_size": ("patch_size", 32),
}
_TEXT = {
    "vocab_size": ("vocab_size", 49408),
    "hidden_size": ("width", 512),
    "num_hidden_layers": ("layers", 12),
    "max_position_embeddings": ("context_length", 77),
}


class _Tower(TypedDict, total=False):
    """What is computed with in a section of CLIPModel's config.json; the config made from it checks the rest."""

    hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    intermediate_size: int
    vocab_size: int
    hidden_act: str
    layer_norm_eps: float


def to_hf(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename our weights to CLIPModel's names. Raises ValueError for a name without a counterpart."""
    out: dict[str, torch.Tensor] = {}
    names = _names(state_dict)
    for ours, value in state_dict.items():
        if ours not in names:
            raise ValueError(f"CLIPModel has no counterpart of {ours}")
        theirs = names[ours]
        value = value.T if ours in _TRANSPOSED else value
        out |= dict(zip(theirs, value.chunk(len(theirs)) if len(theirs) > 1 else [value]))
    return out


def from_hf(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename CLIPModel's weights to our names; drop position_ids and keep other unknown names.

    Raises:
        ValueError: a block's projections, which are one matrix here, differ in shape.
    """
    left = {name: value for name, value in state_dict.items() if not name.endswith(".position_ids")}
    out = {}
    for ours, theirs in _names(state_dict).items():
        if left.keys() >= set(theirs):
            values = [left.pop(name) for name in theirs]
            if len({value.shape for value in values}) > 1:
                raise ValueError(f"{', '.join(theirs)} differ in shape")
            value = torch.cat(values) if len(values) > 1 else values[0]
            out[ours] = (value.T if ours in _TRANSPOSED else value).contiguous()
    return out | left


def _names(state_dict: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return {our name: CLIPModel's names} for as many blocks as a state dict of either kind has."""
    numbers = {found[1] for name in state_dict if (found := re.search(r"\.(?:resblocks|layers)\.(\d+)\.", name))}
    names: dict[str, tuple[str, ...]] = {ours: (theirs,) for ours, theirs in _TOP.items()}
    for number, (our_tower, their_tower), kind in product(numbers, _TOWERS.items(), ("weight", "bias")):
        for ours, theirs in _BLOCK.items():
            names[f"{our_tower}.resblocks.{number}.{ours}{kind}"] = tuple(
                f"{their_tower}.layers.{number}.{part}{kind}" for part in theirs
            )
    return names


def hf_config(cfg: CLIPConfig) -> dict[str, Any]:
    """Return the config.json of a CLIPModel that computes the same as `cfg`.

    Raises:
        ValueError: CLIPModel cannot express the model; the message lists why.
    """
    vision, text = cfg.vision_cfg, cfg.text_cfg
    eos_id = text.vocab_size - 1 if text.pool_type == "argmax" else text.eos_id
    unsupported = {
        "vision_cfg.conv_stem": vision.conv_stem is not None,
        f"vision_cfg.pool_type {vision.pool_type!r} (only 'tok')": vision.pool_type != "tok",
        f"text_cfg.pool_type {text.pool_type!r} (only 'eos' and 'argmax')": text.pool_type not in ("eos", "argmax"),
        "text_cfg.no_causal_mask": text.no_causal_mask,
        "eos id 2, for which CLIPModel pools at the largest id": text.pool_type == "eos" and eos_id == 2,
        "init_logit_bias (a SigLIP loss's bias)": cfg.init_logit_bias is not None,
        "preprocess_cfg.resize_mode 'longest'": cfg.preprocess.resize_mode == "longest",
    }
    if any(unsupported.values()):
        raise ValueError(
            "transformers' CLIPModel cannot express this model: "
            + "; ".join(what for what, is_so in unsupported.items() if is_so)
            + "; use --format open_clip"
        )
    special_ids: dict[str, Any] = {
        "eos_token_id": eos_id,
        "bos_token_id": None if text.pool_type == "eos" else eos_id - 1,
        "pad_token_id": text.pad_id,
    }
    if text.tokenizer_kwargs:
        special_ids["tokenizer_kwargs"] = text.tokenizer_kwargs  # ignored by transformers
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": cfg.embed_dim,
        "torch_dtype": "float32",
        "text_config": {"model_type": "clip_text_model", **_section(cfg, text, _TEXT), **special_ids},
        "vision_config": {"model_type": "clip_vision_model", **_section(cfg, vision, _VISION), "num_channels": 3},
    }


def _section(cfg: CLIPConfig, tower: VisionConfig | TextConfig, table: Mapping[str, tuple[str, int]]) -> dict[str, Any]:
    return {theirs: getattr(tower, ours) for theirs, (ours, _) in table.items()} | {
        "num_attention_heads": tower.heads,
        "intermediate_size": int(tower.width * tower.mlp_ratio),
        "hidden_act": "quick_gelu" if cfg.quick_gelu else "gelu",
        "projection_dim": cfg.embed_dim,
        "layer_norm_eps": 1e-5,
        "attention_dropout": 0.0,
    }


def from_hf_config(config: Mapping[str, Any], source: str) -> CLIPConfig:
    """Return the model config of a CLIPModel's config.json. Missing keys have the defaults of transformers' CLIPConfig.

    Raises:
        ValueError: another kind of model, or a setting that these towers do not support.
    """
    if config.get("model_type") != "clip":
        raise ValueError(f"{source}: model_type {config.get('model_type')!r} is not transformers' CLIPModel ('clip')")
    check_sizes(dict(config), source)
    given = {}
    for name in ("vision_config", "text_config"):
        older = config.get(f"{name}_dict")  # in old files, which takes precedence
        given[name] = (config.get(name) or {}) if older is None else older
    sections: list[Any] = [*parse_record(json.dumps(given), dict[str, _Tower], source).values()]
    activations = {section.get("hidden_act", "quick_gelu") for section in sections}
    epsilons = {section.get("layer_norm_eps", 1e-5) for section in sections}
    if len(activations) > 1 or not activations <= {"quick_gelu", "gelu"} or epsilons != {1e-5}:
        raise ValueError(
            f"{source}: hidden_act {sorted(activations)} and layer_norm_eps {sorted(epsilons)}; these towers have "
            "quick_gelu in both or gelu in both, and 1e-05"
        )
    vision, text = (
        {ours: section.get(theirs, default) for theirs, (ours, default) in table.items()}
        for section, table in zip(sections, (_VISION, _TEXT))
    )
    theirs = sections[1]
    vision["head_width"] = vision["width"] // sections[0].get("num_attention_heads", 12)
    vision["mlp_ratio"] = _ratio(sections[0].get("intermediate_size", 3072), vision["width"])
    text["heads"] = theirs.get("num_attention_heads", 8)
    text["mlp_ratio"] = _ratio(theirs.get("intermediate_size", 2048), text["width"])
    text |= {"pad_id": theirs.get("pad_token_id") or 0, "tokenizer_kwargs": theirs.get("tokenizer_kwargs")}
    eos_id = theirs.get("eos_token_id", 49407)
    pools_at_largest = eos_id in (2, text["vocab_size"] - 1)  # CLIPModel does so for 2; no id exceeds the last
    text |= {"pool_type": "argmax"} if pools_at_largest else {"pool_type": "eos", "eos_id": eos_id}
    fields = {
        "embed_dim": config.get("projection_dim", 512),
        "quick_gelu": activations == {"quick_gelu"},
        "vision_cfg": vision,
        "text_cfg": text,
    }
    return parse_model_config(fields, source=source)


def _ratio(hidden: int, width: int) -> float:
    """Return a ratio for which int(width * ratio) is `hidden` in spite of rounding errors."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else (hidden + 0.5) / width
