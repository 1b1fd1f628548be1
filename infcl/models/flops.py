"""Floating-point operations of a forward pass, for MFU.

Forward and backward together cost three forwards. The second encoding (gradient cache) and recomputation (activation
checkpointing) each cost one more, which MFU does not credit. Counted: matmuls at 2 flops per multiply-add, and
attention scores in full, although a causal kernel skips half of them (the convention of published MFU figures). Not
counted: norms, activations, softmax, embedding look-ups.
"""

import contextlib

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from infcl.models.clip import build_towers
from infcl.models.config import CLIPConfig, ModelConfig, kept_patches
from infcl.models.open_clip_config import OpenClipConfig


def forward_flops(cfg: ModelConfig, *, training: bool = True) -> dict[str, int]:
    """Count the flops of a forward pass.

    Args:
        cfg: the model's config.
        training: whether patch dropout applies.

    Returns:
        {"image": flops per image, "text": flops per text}.

    Raises:
        ValueError: torch cannot count the flops of a model that open_clip builds.
    """
    if isinstance(cfg, OpenClipConfig):
        return _counted_flops(cfg, training=training)
    vision, text = cfg.vision_cfg, cfg.text_cfg
    patches = kept_patches(vision.num_patches, vision.patch_dropout if training else 0.0)
    image = (
        _patch_embedding_flops(cfg)
        + _transformer_flops(1 + patches, vision.width, vision.layers, vision.mlp_ratio)
        + 2 * vision.width * cfg.embed_dim
    )
    caption = (
        _transformer_flops(text.context_length, text.width, text.layers, text.mlp_ratio)
        + 2 * text.width * cfg.embed_dim
    )
    return {"image": image, "text": caption}


def _counted_flops(cfg: OpenClipConfig, *, training: bool) -> dict[str, int]:
    """Count the flops of towers that open_clip builds, with torch's counter and if possible without memory.

    Try the meta device, then fake tensors (transformers reads values of an attention mask), then a real model (NLLB
    reads other values too).
    """
    for mode in (torch.device("meta"), FakeTensorMode(), contextlib.nullcontext()):
        with contextlib.suppress(RuntimeError, ValueError), mode, torch.no_grad():
            model = build_towers(cfg).train(training).requires_grad_(False)
            images = torch.zeros(2, 3, cfg.vision_cfg.image_size, cfg.vision_cfg.image_size)
            texts = torch.zeros(2, cfg.text_cfg.context_length, dtype=torch.int64)
            flops = {}
            for name, inputs in (("image", {"images": images}), ("text", {"texts": texts})):
                with FlopCounterMode(display=False) as counter:
                    model(**inputs)
                flops[name] = counter.get_total_flops() // 2
            return flops
    raise ValueError(f"the floating-point operations of {cfg.source} cannot be counted")


def _transformer_flops(tokens: int, width: int, layers: int, mlp_ratio: float) -> int:
    projections = 2 * tokens * (4 * width * width + 2 * width * int(width * mlp_ratio))
    attention = 2 * 2 * tokens * tokens * width
    return layers * (projections + attention)


def _patch_embedding_flops(cfg: CLIPConfig) -> int:
    vision = cfg.vision_cfg
    stem = vision.conv_stem or ((vision.width, vision.patch_size, vision.patch_size),)
    flops, channels, side = 0, 3, vision.image_size
    for out_channels, kernel, stride in stem:
        side //= stride
        flops += 2 * side * side * out_channels * channels * kernel * kernel
        channels = out_channels
    return flops
