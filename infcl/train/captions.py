"""--pack-captions: whether a run's captions go packed to the text tower (towers/packing.py), and how they get there.

Tensor-parallel ranks read a part of each micro-batch's captions. Whole ones are joined on the device, as pixels are;
packed ones on the host, where each rank packs all of them and comes to the same rows.
"""

from collections.abc import Callable
from functools import partial

import torch

from infcl.config import TrainConfig
from infcl.parallel import Parallel, join_on_host, join_parts
from infcl.towers.config import CLIPConfig, TextConfig
from infcl.towers.packing import Texts, packed, packs, whole

_PAYS = 0.95  # of the places: with more of them computed, a text tower takes longer than with whole captions


def packs_captions(config: TrainConfig, model_config: CLIPConfig) -> bool:
    """Whether a run packs its captions. ValueError where --pack-captions on cannot be.

    `auto` does not under tensor parallelism: what it brings on GPUs there has not been measured.
    """
    reason = _why_not(config, model_config.text_cfg)
    if config.pack_captions == "on" and reason:
        raise ValueError(f"--pack-captions on: {reason}; auto packs where it can")
    if config.pack_captions == "auto":
        return not reason and config.tensor_parallel_size == 1
    return config.pack_captions == "on"


def _why_not(config: TrainConfig, cfg: TextConfig) -> str:
    if not packs(cfg):
        return (
            f"the text tower of {config.model} sees what follows a caption (no_causal_mask {cfg.no_causal_mask}, "
            f"pool_type {cfg.pool_type!r})"
        )
    if config.lock_text:
        return "what a locked text tower gives is kept caption by caption (--lock-text)"
    return ""


def texts_for_model(config: TrainConfig, model_config: CLIPConfig) -> Callable[[torch.Tensor], Texts]:
    """int64 [m, L] on the host -> what CLIP's forward takes, there too."""
    return partial(packed, model_config.text_cfg) if packs_captions(config, model_config) else whole


def texts_on_device(
    config: TrainConfig, model_config: CLIPConfig, parallel: Parallel
) -> Callable[[torch.Tensor], Texts]:
    """int64 [m / T, L] on the host, this rank's part of a micro-batch's captions -> what CLIP's forward takes of all of
    them, on the rank's device. Collective over the tensor-parallel ranks.
    """
    device, in_rows = parallel.device, partial(packed, model_config.text_cfg)
    if not packs_captions(config, model_config):
        return lambda part: whole(join_parts(parallel, part.to(device, non_blocking=True)))
    return lambda part: {
        name: value.to(device, non_blocking=True) for name, value in in_rows(join_on_host(parallel, part)).items()
    }


def longer_when_packed(text_share: float) -> str:
    """What is said of a step whose text tower computed this share of its places; empty where packing pays."""
    if text_share <= _PAYS:
        return ""
    return (
        f"packed captions take {text_share:.0%} of the places that whole ones have, and packing has its cost: "
        "--pack-captions off would be faster"
    )
