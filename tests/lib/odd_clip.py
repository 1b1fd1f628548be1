"""A model of odd sizes for tests of the gradient reduction under ZeRO-3."""

import json

import torch

MICRO_BATCHES, BUCKET = 3, 4000


def odd_clip():
    """Make towers of three blocks, with sizes that no number of ranks divides and parameters larger than a bucket."""
    from infcl.models.clip import CLIP
    from infcl.models.config import CLIPConfig, TextConfig, VisionConfig

    torch.manual_seed(0)
    vision = VisionConfig(image_size=14, layers=3, width=35, head_width=7, patch_size=7)
    text = TextConfig(context_length=5, vocab_size=31, width=21, heads=3, layers=3)
    return CLIP(CLIPConfig(embed_dim=13, vision_cfg=vision, text_cfg=text), activation_checkpointing=True)


def pairs(seed: int):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (4, 3, 14, 14), dtype=torch.uint8, generator=generator)
    return images, torch.randint(1, 30, (4, 5), generator=generator)


def preset_of(folder, **zero) -> str:
    path = folder / "preset.json"
    zero = {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": BUCKET,
        "stage3_param_persistence_threshold": 0,
    } | zero
    path.write_text(json.dumps({"zero_optimization": zero}))
    return str(path)
