"""--pack-captions: how a micro-batch's captions go to the text tower.

In:  texts as the loader yields them, int64 [m, L] on the host.
Out: what the model takes in their place: {"texts": [m, L]}, or packed {"texts": [r, R], "text_ends": [m]}.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from infcl.config import TrainConfig
from infcl.towers.config import CLIPConfig, TextConfig
from infcl.towers.packing import pack_captions, packs

Texts = dict[str, torch.Tensor]
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


def whole(texts: torch.Tensor) -> Texts:
    return {"texts": texts}


def packed(cfg: TextConfig, texts: torch.Tensor) -> Texts:
    return dict(zip(("texts", "text_ends"), pack_captions(texts, cfg)))


def merge_texts(parts: Sequence[Texts]) -> Texts:
    """Those of several micro-batches as of one."""
    merged = {"texts": torch.cat([part["texts"] for part in parts])}
    if "text_ends" in parts[0]:
        ends, before = [], 0
        for part in parts:
            ends.append(part["text_ends"] + before)
            before += part["texts"].numel()
        merged["text_ends"] = torch.cat(ends)
    return merged


def longer_when_packed(text_share: float) -> str:
    """What is said of a step whose text tower computed this share of its places; empty where packing pays."""
    if text_share <= _PAYS:
        return ""
    return (
        f"captions fill {text_share:.0%} of the text tower's places when they are packed: "
        "--pack-captions off would be a little faster"
    )


def longest(cfg: TextConfig, size: int) -> torch.Tensor:
    """int64 [size, L]: captions that fill a text tower's places."""
    texts = torch.full((size, cfg.context_length), int(cfg.eos_id == 0))
    texts[:, -1] = cfg.eos_id if cfg.pool_type == "eos" else cfg.vocab_size - 1
    return texts
