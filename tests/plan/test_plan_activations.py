"""What graphs of the towers keep, and what a backward adds, is what autograd does."""

import dataclasses

import pytest
import torch

from infcl.models import CLIP, load_model_config
from infcl.plan.activations import activation_bytes, graph_bytes
from tests.lib.saved_tensors import saved_bytes
from tests.lib.specs import load


def test_activation_checkpointing_and_half_precision_shrink_the_graph():
    cfg = load_model_config("ViT-L-14")
    sizes = {
        (precision, checkpointing): activation_bytes(
            load(cfg, micro_batch_size=8, precision=precision, checkpointing=checkpointing)
        )
        for precision in ("fp32", "amp_bf16")
        for checkpointing in (False, True)
    }
    assert sizes["fp32", False] > 1.7 * sizes["amp_bf16", False] > 4 * sizes["amp_bf16", True]


def saved_by_a_forward(cfg, micro_batch_size: int, dtype: torch.dtype, checkpointing: bool) -> int:
    model = CLIP(cfg, activation_checkpointing=checkpointing).train().to(dtype)
    side = cfg.vision_cfg.image_size
    images = torch.zeros(micro_batch_size, 3, side, side, dtype=torch.uint8)
    texts = torch.ones(micro_batch_size, cfg.text_cfg.context_length, dtype=torch.int64)
    return saved_bytes(model, lambda: model(images, texts))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_activations_of_a_block_are_what_autograd_keeps(precision, dtype, checkpointing):
    """By differences, so that embeddings and heads drop out: of two more blocks in the image tower."""
    base = load_model_config("ViT-B-16")
    text = dataclasses.replace(base.text_cfg, layers=1, vocab_size=100)
    cfgs = [
        dataclasses.replace(base, text_cfg=text, vision_cfg=dataclasses.replace(base.vision_cfg, layers=layers))
        for layers in (1, 3)
    ]
    options = {"micro_batch_size": 2, "precision": precision, "checkpointing": checkpointing}
    one, three = (activation_bytes(load(cfg, **options)) for cfg in cfgs)
    kept_one, kept_three = (saved_by_a_forward(cfg, 2, dtype, checkpointing) for cfg in cfgs)
    assert kept_three - kept_one == pytest.approx(three - one, rel=0.02)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_whole_graph_is_what_autograd_keeps(precision, dtype, checkpointing):
    """Of one sample more; embeddings and heads included."""
    base = load_model_config("ViT-B-16")
    text = dataclasses.replace(base.text_cfg, layers=2, vocab_size=100)
    cfg = dataclasses.replace(base, text_cfg=text, vision_cfg=dataclasses.replace(base.vision_cfg, layers=2))
    sizes = {"precision": precision, "checkpointing": checkpointing, "compiled": False}
    planned = [activation_bytes(load(cfg, micro_batch_size=size, **sizes)) for size in (2, 3)]
    kept = [saved_by_a_forward(cfg, size, dtype, checkpointing) for size in (2, 3)]
    assert planned[1] - planned[0] == pytest.approx(kept[1] - kept[0], rel=0.02)


@pytest.mark.parametrize(
    ("trained", "checkpointing", "tower"),
    [((12, 12), True, "image"), ((12, 12), False, "text"), ((0, 12), True, "text"), ((12, 0), True, "image"),
     ((12, 0), False, "image")],
)  # fmt: skip
def test_a_backward_adds_what_one_block_of_a_tower_needs(trained, checkpointing, tower):
    """Of the image tower less what the text tower has freed by then, whichever tower's turn is worse."""
    cfg, tokens = load_model_config("ViT-B-16"), {"image": 197, "text": 77}
    blocks = dict(zip(("image", "text"), trained))
    parts = graph_bytes(load(cfg, micro_batch_size=4, precision="bf16", checkpointing=checkpointing, blocks=blocks))
    added = {
        name: 4 * tokens[name] * width * (12 + 32 * checkpointing) for name, width in (("image", 768), ("text", 512))
    }
    freed = 4 * 77 * 512 * trained[1] * (2 if checkpointing else 32) * (tower == "image")
    assert parts["backward"] == pytest.approx(added[tower] - freed)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_convolutional_stem_counts_as_what_autograd_keeps_of_it(precision, dtype, checkpointing):
    """By the difference of one that is finer; nothing of a stem is recomputed."""
    base = load_model_config("demo")
    kept, planned = [], []
    for stem in (((96, 8, 8),), ((40, 3, 2), (56, 3, 2), (96, 3, 2))):
        cfg = dataclasses.replace(base, vision_cfg=dataclasses.replace(base.vision_cfg, image_size=64, conv_stem=stem))
        kept.append(saved_by_a_forward(cfg, 3, dtype, checkpointing))
        sizes = {"micro_batch_size": 3, "precision": precision, "checkpointing": checkpointing}
        planned.append(activation_bytes(load(cfg, **sizes)))
    assert kept[1] - kept[0] == pytest.approx(planned[1] - planned[0], rel=0.01) and planned[1] > planned[0]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_text_tower_is_first_in_the_backward(checkpointing):
    """So its graph is gone when the image tower's blocks are recomputed: graph_bytes counts on it."""
    cfg, order = load_model_config("demo"), []
    model = CLIP(cfg, activation_checkpointing=checkpointing).train()
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda _, name=name: order.append(name.startswith("visual.")))
    side = cfg.vision_cfg.image_size
    images = torch.zeros(2, 3, side, side, dtype=torch.uint8)
    out = model(images, torch.ones(2, cfg.text_cfg.context_length, dtype=torch.int64))
    (out["image_features"].sum() + out["text_features"].sum()).backward()
    first = order.index(True)
    assert 0 < first and all(order[first:]) and not any(order[:first])
