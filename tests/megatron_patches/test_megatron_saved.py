"""What compiled tensor-parallel blocks keep for their backward is what the planner counts."""

import dataclasses
import functools

import pytest
import torch

from infcl.models import CLIP, CLIPConfig, TextConfig, VisionConfig
from infcl.plan.memory import activation_bytes
from infcl.train.compile import compile_blocks
from tests.lib.ranks import run_ranks
from tests.lib.saved_tensors import saved_bytes
from tests.lib.specs import setting
from tests.lib.tensor_parallel import layout

SAMPLES = 8
TEXT = TextConfig(context_length=8, vocab_size=32, width=64, heads=2, layers=1)
VISION = VisionConfig(image_size=64, layers=4, width=256, head_width=64, patch_size=8)
CFG = CLIPConfig(embed_dim=64, vision_cfg=VISION, text_cfg=TEXT)


def with_layers(layers: int) -> CLIPConfig:
    return dataclasses.replace(CFG, vision_cfg=dataclasses.replace(VISION, layers=layers))


def kept_by_four_blocks(rank, world_size):
    """Bytes, the parameters' BF16 copies among them: by the difference of eight blocks and four.

    Of the image tower, whose stream is BF16, as the convolution's output, under autocast.
    """
    from megatron_patches.towers import split_towers

    group, kept = layout(world_size).tp_group, []
    for layers in (4, 8):
        torch.compiler.reset()
        model = CLIP(with_layers(layers)).train()
        split_towers(model, group)
        assert compile_blocks(model, {SAMPLES})
        kept.append(_kept(model, torch.randn(SAMPLES, 65, VISION.width, dtype=torch.bfloat16, requires_grad=True)))
    return kept[1] - kept[0]


def _kept(model: CLIP, x: torch.Tensor) -> int:
    def forward():
        with torch.autocast("cpu", torch.bfloat16):
            functools.reduce(lambda rows, block: block(rows), model.visual.transformer.resblocks, x)

    return saved_bytes(model, forward)


@pytest.mark.slow
def test_what_compiled_blocks_keep_is_planned():
    sizes = {"micro_batch": SAMPLES, "tensor_parallel": 2}
    four, eight = (activation_bytes(setting(with_layers(layers), **sizes)) for layers in (4, 8))
    copies = 4 * 2 * 12 * VISION.width**2 / 2
    kept = run_ranks(kept_by_four_blocks, 2, timeout=600)[0]
    assert kept == pytest.approx(eight - four + copies, rel=0.01)
