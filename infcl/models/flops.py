"""What a forward pass computes, in floating-point operations, for MFU. Forward and backward cost three times as much; a
second encoding (gradient cache) and recomputation (activation checkpointing) add one each, which MFU does not credit.

Counted: matrix products at 2 flops per multiply-add; attention scores in full, also where a causal kernel skips half
(the convention of published MFU figures). Not counted: norms, activations, softmax, embedding look-ups.
"""

import contextlib

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from infcl.models.clip import build_towers
from infcl.models.config import CLIPConfig, kept_patches
from infcl.models.open_clip_config import OpenClipConfig


def forward_flops(cfg: CLIPConfig | OpenClipConfig, *, training: bool = True) -> dict[str, int]:
    """{"image": flops of one image, "text": flops of one text}, forward; patch dropout counts where `training`."""
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
    """Those of towers that others build, counted by torch in a forward without memory.

    On the meta device; with fake tensors where transformers looks into an attention mask; and a model that looks into
    other values too (NLLB) is built for it.
    """
    for mode in (torch.device("meta"), FakeTensorMode(), contextlib.nullcontext()):
        with contextlib.suppress(RuntimeError, ValueError), mode, torch.no_grad():
            model = build_towers(cfg).train(training)
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
