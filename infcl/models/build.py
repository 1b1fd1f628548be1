"""A model of a config: our own towers, or open_clip's."""

from typing import Any

from infcl.models.clip import CLIP
from infcl.models.config import CLIPConfig
from infcl.models.open_clip_config import OpenClipConfig


def build_towers(cfg: CLIPConfig | OpenClipConfig, **options: Any) -> Any:
    """A model with random weights; both kinds have one interface (CLIP's forward, locks, `cfg`).

    Args:
        cfg: of our own towers, or of a model that open_clip builds.
        options: init_logit_scale, init_logit_bias, activation_checkpointing; see CLIP.

    Raises:
        ValueError: open_clip is needed and cannot be imported, or cannot build the model.
    """
    if isinstance(cfg, CLIPConfig):
        return CLIP(cfg, **options)
    from infcl.models.open_clip_model import build_open_clip

    return build_open_clip(cfg, **options)
