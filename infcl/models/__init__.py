"""MICRO-BATCH -> FEATURES: the two towers, plain nn.Modules whose state dict has open_clip's names.

Reading order: config.py -> transformer.py -> vision.py, text.py -> clip.py; flops.py counts what they compute.
"""

from infcl.models.clip import CLIP
from infcl.models.config import (
    CLIPConfig,
    TextConfig,
    VisionConfig,
    list_models,
    load_model_config,
    with_overrides,
    with_tokenizer,
)
from infcl.models.flops import forward_flops

__all__ = [
    "CLIP",
    "CLIPConfig",
    "TextConfig",
    "VisionConfig",
    "forward_flops",
    "list_models",
    "load_model_config",
    "with_overrides",
    "with_tokenizer",
]
