"""--pack-captions: whether a run's captions go packed to the text tower (towers/packing.py), and how they get there.

Tensor-parallel ranks read a part of each micro-batch's captions. Whole ones are joined on the device, as pixels are;
packed ones on the host, where each rank packs all of them and comes to the same rows.
"""

from collections.abc import Callable
from functools import partial

import torch

from infcl.config import TrainConfig
from infcl.models.config import CLIPConfig, TextConfig
from infcl.models.open_clip_config import OpenClipConfig, TextInput
from infcl.models.packing import Texts, packed, packs, whole
from infcl.parallel import Parallel, join_parts

_PAYS = 0.95  # of the places: with more of them, and masks, a text tower takes longer than with whole captions


def why_unpackable(config: TrainConfig, model_config: CLIPConfig | OpenClipConfig) -> str:
    """Why the captions of this model cannot be packed; "" if they can."""
    cfg = model_config.text_cfg
    if isinstance(cfg, TextInput):
        return f"{config.model} is built by open_clip, whose text towers take captions one by one"
    if not packs(cfg):
        return (
            f"the text tower of {config.model} sees what follows a caption (no_causal_mask {cfg.no_causal_mask}, "
            f"pool_type {cfg.pool_type!r})"
        )
    if config.lock_text:
        return "what a locked text tower gives is kept caption by caption (--lock-text)"
    return ""


def texts_for_model(text_cfg: TextConfig | TextInput, *, pack: bool) -> Callable[[torch.Tensor], Texts]:
    """int64 [m, L] on the host -> what CLIP's forward takes, there too."""
    return partial(packed, text_cfg) if pack and isinstance(text_cfg, TextConfig) else whole


def texts_of_part(
    text_cfg: TextConfig | TextInput, parallel: Parallel, *, pack: bool
) -> Callable[[torch.Tensor], Texts]:
    """int64 [m / T, L] on the host, this rank's part of a micro-batch's captions -> what CLIP's forward takes of all of
    them, on the device or on their way to it. Collective over the tensor-parallel ranks.
    """
    as_taken = texts_for_model(text_cfg, pack=pack)
    if pack:
        return lambda part: as_taken(join_parts(parallel, part))
    return lambda part: as_taken(join_parts(parallel, part.to(parallel.device, non_blocking=True)))


def longer_when_packed(text_share: float, *, masks: bool) -> str:
    """What is said of a step whose text tower computed this share of its places; empty where packing pays. masks: its
    attention is torch's (attention.py).
    """
    if text_share <= (_PAYS if masks else 1):
        return ""
    return (
        f"packed captions take {text_share:.0%} of the places that whole ones have, and packing has its cost: "
        "--pack-captions off would be faster"
    )
