"""Which parameters decay and how fast each learns; the schedules: open_clip's values, as a function of the step."""

import math

import pytest
import torch

from infcl.config import TrainConfig
from infcl.engine.parameter_groups import parameter_groups
from infcl.engine.schedule import Schedule
from infcl.models.clip import CLIP
from infcl.models.config import load_model_config
from tests.lib.checkout import GOLDEN_MODEL
from tests.lib.open_clip_stub import import_open_clip, import_transformers

LR, WARMUP, TOTAL, PER_EPOCH = 1e-3, 10, 100, 20


def schedule(**flags):
    config = TrainConfig(**{"lr": LR, "warmup": WARMUP} | flags)
    return Schedule(config, global_batch_size=4096, total_steps=TOTAL, steps_per_epoch=PER_EPOCH)


def rate(step, **flags):
    return schedule(**flags)(step)


def test_a_peak_that_is_reached_late_is_reported():
    cooldown = {"lr_scheduler": "const-cooldown", "lr": 0.5}
    assert "the warm-up takes 101 of 100 steps; lr ends at 0.00099 of 0.001" in schedule(warmup=TOTAL + 1).oddity()
    assert "takes 30 of 100 steps and the cooldown 80" in schedule(epochs_cooldown=4, warmup=30, **cooldown).oddity()
    assert schedule(warmup=34).oddity() and schedule(warmup=33).oddity() is None
    for usual in ({}, {"epochs_cooldown": 5, "warmup": 0} | cooldown, {"epochs_cooldown": 4, "warmup": 20} | cooldown):
        assert schedule(**usual).oddity() is None


def test_weight_decay_is_for_matrices_only():
    model = CLIP(load_model_config(GOLDEN_MODEL))
    decayed, others = parameter_groups(model, TrainConfig(wd=0.2), LR)
    names = {id(p): name for name, p in model.named_parameters()}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.2, 0.0)
    assert len(decayed["params"]) + len(others["params"]) == len(names)
    assert all(p.ndim >= 2 for p in decayed["params"])
    spared = {names[id(p)] for p in others["params"]}
    assert {"logit_scale", "positional_embedding", "visual.positional_embedding", "visual.class_embedding"} <= spared
    assert all("ln_" not in names[id(p)] and not names[id(p)].endswith("bias") for p in decayed["params"])


@pytest.mark.parametrize(
    ("name", "spared"),
    [
        ("ViT-B-16-SigLIP", "visual.trunk.pos_embed visual.trunk.attn_pool.latent text.positional_embedding"),
        ("EVA02-B-16", "visual.trunk.pos_embed visual.trunk.cls_token"),
        ("MobileCLIP-S1", "visual.trunk.stages.0.blocks.0.layer_scale.gamma"),
        ("coca_ViT-B-32", "visual.attn_pool.query visual.class_embedding text.cls_emb"),
        ("RN50", "visual.attnpool.positional_embedding"),
        ("bert", "embeddings.position_embeddings.weight embeddings.token_type_embeddings.weight"),
        ("roberta", "embeddings.position_embeddings.weight embeddings.token_type_embeddings.weight"),
        ("mt5", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
    ],
)
def test_weight_decay_spares_positions_classes_and_latents_of_foreign_towers(name, spared):
    open_clip, transformers = import_open_clip(), import_transformers()
    with torch.device("meta"):
        if name in ("bert", "roberta", "mt5"):
            small = {"num_hidden_layers": 1, "num_layers": 1, "num_decoder_layers": 1}
            model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(name, **small))
        else:
            config = open_clip.get_model_config(name)
            custom, parts = config.pop("custom_text", False), ("embed_dim", "vision_cfg", "text_cfg", "multimodal_cfg")
            kind = (
                open_clip.CoCa if "multimodal_cfg" in config else open_clip.CustomTextCLIP if custom else open_clip.CLIP
            )
            model = kind(**{part: config[part] for part in parts if part in config})
    decay = {
        id(p): group["weight_decay"] for group in parameter_groups(model, TrainConfig(), LR) for p in group["params"]
    }
    found = {name: decay[id(p)] for name, p in model.named_parameters()}
    assert {name: found[name] for name in spared.split()} == dict.fromkeys(spared.split(), 0.0)
    matrices = (torch.nn.Linear, torch.nn.Conv2d)
    owned = {f"{prefix}.weight" for prefix, module in model.named_modules() if isinstance(module, matrices)}
    assert owned and all(found[name] == 0.2 for name in owned)
    tokens = [n for n in found if n.endswith(("token_embedding.weight", "word_embeddings.weight", "shared.weight"))]
    assert tokens and all(found[name] == 0.2 for name in tokens)


def groups_of(model, **flags):
    """{parameter name: its group}"""
    config = TrainConfig(**{"lr": LR} | flags)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = parameter_groups(model, config, schedule(**flags).peak)
    assert {id(p) for group in groups for p in group["params"]} == {id(p) for p in model.parameters()}
    return {names[id(p)]: group for group in groups for p in group["params"]}


def test_towers_may_have_their_own_learning_rates_that_scale_alike():
    flags = {"image_lr": 2e-4, "text_lr": 3e-3, "lr_scaling": "sqrt:1024"}
    groups = groups_of(CLIP(load_model_config(GOLDEN_MODEL)), **flags)
    peak = schedule(**flags).peak
    assert peak == pytest.approx(2 * LR)
    assert schedule(**flags).tower_rates(WARMUP - 1) == pytest.approx({"lr_image": 4e-4, "lr_text": 6e-3})
    assert schedule().tower_rates(3) == {}
    wanted = {"visual.proj": 4e-4, "text_projection": 6e-3, "logit_scale": 2e-3, "positional_embedding": 6e-3}
    for name, rate_of_it in wanted.items():
        assert groups[name]["lr_scale"] * peak == pytest.approx(rate_of_it)
        assert groups[name]["lr"] == pytest.approx(rate_of_it)


def test_layer_decay_falls_from_the_head_to_the_embeddings():
    groups = groups_of(
        CLIP(load_model_config(GOLDEN_MODEL)), image_layer_decay=0.5, text_layer_decay=0.1, image_lr=2 * LR
    )
    wanted = {
        "logit_scale": 1.0,
        "visual.proj": 2.0,
        "visual.ln_post.weight": 2.0,
        "visual.transformer.resblocks.1.mlp.c_fc.weight": 1.0,
        "visual.transformer.resblocks.0.ln_1.bias": 0.5,
        "visual.conv1.0.weight": 0.25,
        "visual.class_embedding": 0.25,
        "text_projection": 1.0,
        "transformer.resblocks.0.attn.in_proj_weight": 0.1,
        "token_embedding.weight": 0.01,
    }
    assert {name: groups[name]["lr_scale"] for name in wanted} == pytest.approx(wanted)


@pytest.mark.parametrize("step", [3, 9, 40])
def test_weight_decay_of_a_step_is_times_the_towers_lr(step):
    groups = groups_of(CLIP(load_model_config(GOLDEN_MODEL)), wd=0.1, image_lr=0.3 * LR)
    group = groups["visual.proj"]
    assert rate(step) * group["lr_scale"] * group["weight_decay"] == pytest.approx(0.1 * rate(step) * 0.3)
    assert groups["visual.class_embedding"]["weight_decay"] == 0.0


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1.0), ("sqrt", 2**-1.5), ("linear", 1 / 8)])
def test_learning_rates_scale_with_the_global_batch(scaling, factor):
    scaled = schedule(lr_scaling=scaling)  # a batch of 4096; --lr is meant for 32768
    assert scaled(WARMUP - 1) == pytest.approx(LR * factor) == scaled.peak
    assert (f"-> {LR * factor:.3g} ({scaling}: batch 4096 / 32768" in str(scaled)) == (scaling != "none")


def test_the_warm_up_is_a_tenth_of_a_short_run_and_open_clips_of_a_long_one():
    lengths = {5: 0, 808: 80, 99_999: 9_999, 100_000: 10_000, 10**6: 10_000}
    for steps, warmup in lengths.items():
        default = Schedule(TrainConfig(lr=LR), global_batch_size=64, total_steps=steps, steps_per_epoch=PER_EPOCH)
        assert default.warmup == warmup and default.oddity() is None and default(warmup) == LR
        assert f"peak 0.001 after {warmup:,} warm-up steps" in default.describe_warmup()
    assert schedule(warmup=9).describe_warmup() == "peak 0.001 after 9 warm-up steps (9% of the run)"


@pytest.mark.parametrize("step", [0, 5, 9, 10, 37, 99])
def test_warm_up_is_linear_to_the_peak_and_cosine_falls_to_zero(step):
    cosine = 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (TOTAL - WARMUP)))
    assert rate(step) == pytest.approx(LR * ((step + 1) / WARMUP if step < WARMUP else cosine))


def test_constant_stays_and_cooldown_falls_over_the_last_epochs():
    assert rate(99, lr_scheduler="const") == LR
    cooldown = {"lr_scheduler": "const-cooldown", "epochs_cooldown": 2, "lr_cooldown_end": 1e-4}
    assert [rate(step, **cooldown) for step in (59, 60, 80)] == pytest.approx([LR, LR, 1e-4 + 0.5 * (LR - 1e-4)])
    assert rate(80, **cooldown, lr_cooldown_power=2.0) == pytest.approx(1e-4 + 0.25 * (LR - 1e-4))
    scaled = schedule(**cooldown | {"epochs_cooldown": 5}, warmup=0, lr_scaling="linear:1024")
    assert scaled(TOTAL) == pytest.approx(4e-4)
    assert "at the end 0.0001 -> 0.0004" in str(scaled)
