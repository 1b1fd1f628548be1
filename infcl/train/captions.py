"""--pack-captions: whether a run's captions go packed to the text tower (towers/packing.py)."""

from collections.abc import Callable
from functools import partial

import torch

from infcl.config import TrainConfig
from infcl.towers.config import CLIPConfig, TextConfig
from infcl.towers.packing import Texts, packed, packs, whole

_PAYS = 0.95  # of the places: with more of them computed, a text tower takes longer than with whole captions


def packs_captions(config: TrainConfig, model_config: CLIPConfig) -> bool:
    """Whether a run packs its captions. ValueError where --pack-captions on cannot be."""
    reason = _why_not(config, model_config.text_cfg)
    if config.pack_captions == "on" and reason:
        raise ValueError(f"--pack-captions on: {reason}; auto packs where it can")
    return config.pack_captions != "off" and not reason


def _why_not(config: TrainConfig, cfg: TextConfig) -> str:
    if not packs(cfg):
        return (
            f"the text tower of {config.model} sees what follows a caption (no_causal_mask {cfg.no_causal_mask}, "
            f"pool_type {cfg.pool_type!r})"
        )
    if config.lock_text:
        return "what a locked text tower gives is kept caption by caption (--lock-text)"
    if config.tensor_parallel_size > 1:
        return f"each of {config.tensor_parallel_size} tensor-parallel ranks reads a part of the captions"
    return ""


def texts_for_model(config: TrainConfig, model_config: CLIPConfig) -> Callable[[torch.Tensor], Texts]:
    return partial(packed, model_config.text_cfg) if packs_captions(config, model_config) else whole


def longer_when_packed(text_share: float) -> str:
    """What is said of a step whose text tower computed this share of its places; empty where packing pays."""
    if text_share <= _PAYS:
        return ""
    return (
        f"packed captions take {text_share:.0%} of the places that whole ones have, and packing has its cost: "
        "--pack-captions off would be faster"
    )
