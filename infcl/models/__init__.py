"""MICRO-BATCH -> FEATURES: the two towers, plain nn.Modules whose state dict has open_clip's names.

Reading order: config.py -> transformer.py -> vision.py, text.py -> clip.py; flops.py counts what they compute.
open_clip_config.py and open_clip_model.py let open_clip build the towers; clip.build_towers chooses.
"""

from infcl.models.clip import CLIP, build_towers
from infcl.models.config import (
    CLIPConfig,
    TextConfig,
    VisionConfig,
    list_models,
    load_any_config,
    load_model_config,
)
from infcl.models.flops import forward_flops
from infcl.models.open_clip_config import OpenClipConfig
