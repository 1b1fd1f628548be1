"""Captions on their way to the text tower, packed (models/packing.py) or padded (--pack-captions).

Each tensor-parallel rank reads a part of a micro-batch's captions. Padded captions are joined on the device, like
pixels. Captions to be packed are joined on the host, where each rank packs all of them into the same rows.
"""

from collections.abc import Callable
from functools import partial

import torch

from infcl.config import TrainConfig
from infcl.models.config import CLIPConfig, TextConfig
from infcl.models.open_clip_config import OpenClipConfig, TextInput
from infcl.models.packing import Texts, packed, packs, whole
from infcl.parallel import Parallel, join_parts

_PAYS = 0.95  # with masks, packed captions above this share of the padded token positions take longer than padded ones


def why_unpackable(config: TrainConfig, model_config: CLIPConfig | OpenClipConfig) -> str:
    """Return why the captions of this model cannot be packed, or "" if they can."""
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
    """Return a function that turns captions int64 [m, L] into text inputs of CLIP's forward; both are on the host."""
    return partial(packed, text_cfg) if pack and isinstance(text_cfg, TextConfig) else whole


def texts_of_part(
    text_cfg: TextConfig | TextInput, parallel: Parallel, *, pack: bool
) -> Callable[[torch.Tensor], Texts]:
    """Return a function that joins the captions of all tensor-parallel ranks into text inputs of CLIP's forward.

    The function takes this rank's part of a micro-batch, int64 [m / T, L] on the host. It is collective over the
    tensor-parallel ranks. The result is on the device, or on the host for packing.
    """
    as_taken = texts_for_model(text_cfg, pack=pack)
    if pack:
        return lambda part: as_taken(join_parts(parallel, part))
    return lambda part: as_taken(join_parts(parallel, part.to(parallel.device, non_blocking=True)))


def longer_when_packed(text_share: float, *, masks: bool) -> str:
    """Return a warning if padded captions would be faster than packed ones, else "".

    Args:
        text_share: token positions that the text tower computed in a step, relative to those of padded captions.
        masks: whether the tower uses torch's attention (attention.py), which needs masks.
    """
    if text_share <= (_PAYS if masks else 1):
        return ""
    return (
        f"packed captions take {text_share:.0%} of the token positions of padded ones, and packing has a cost of its "
        "own: --pack-captions off would be faster"
    )
