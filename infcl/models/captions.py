"""--pack-captions: whether a run packs the captions for the text tower (models/packing.py), and how they reach it.

Tensor-parallel ranks read a part of each micro-batch's captions. Padded captions are joined on the device, as pixels
are. For packing they are joined on the host, where each rank packs all of them into the same rows.
"""

from collections.abc import Callable
from functools import partial

import torch

from infcl.config import TrainConfig
from infcl.models.config import CLIPConfig, TextConfig
from infcl.models.open_clip_config import OpenClipConfig, TextInput
from infcl.models.packing import Texts, packed, packs, whole
from infcl.parallel import Parallel, join_parts

_PAYS = 0.95  # of the token positions: with more of them, and masks, packed captions take longer than padded ones


def why_unpackable(config: TrainConfig, model_config: CLIPConfig | OpenClipConfig) -> str:
    """Return why the captions of this model cannot be packed; "" if they can."""
    cfg = model_config.text_cfg
    if isinstance(cfg, TextInput):
        return f"{config.model} is built by open_clip, whose text towers take captions one by one"
    if not packs(cfg):
        return (
            f"the text tower of {config.model} attends to what follows a caption (no_causal_mask {cfg.no_causal_mask}, "
            f"pool_type {cfg.pool_type!r})"
        )
    if config.lock_text:
        return "the outputs of a locked text tower are cached caption by caption (--lock-text)"
    return ""


def texts_for_model(text_cfg: TextConfig | TextInput, *, pack: bool) -> Callable[[torch.Tensor], Texts]:
    """Return the function from captions int64 [m, L] on the host to what CLIP's forward takes, on the host too."""
    return partial(packed, text_cfg) if pack and isinstance(text_cfg, TextConfig) else whole


def texts_of_part(
    text_cfg: TextConfig | TextInput, parallel: Parallel, *, pack: bool
) -> Callable[[torch.Tensor], Texts]:
    """Return the function from this rank's part of a micro-batch's captions to what CLIP's forward takes of all parts.

    The part is int64 [m / T, L] on the host; the result is on the device, or for packing on the host. The function is
    collective over the tensor-parallel ranks.
    """
    as_taken = texts_for_model(text_cfg, pack=pack)
    if pack:
        return lambda part: as_taken(join_parts(parallel, part))
    return lambda part: as_taken(join_parts(parallel, part.to(parallel.device, non_blocking=True)))


def longer_when_packed(text_share: float, *, masks: bool) -> str:
    """Return a warning about a step whose text tower computed this share of its token positions, or "" if packing pays.

    masks: the tower's attention is torch's (attention.py), which needs masks.
    """
    if text_share <= (_PAYS if masks else 1):
        return ""
    return (
        f"packed captions take {text_share:.0%} of the token positions of padded ones, and packing has a cost of its "
        "own: --pack-captions off would be faster"
    )
