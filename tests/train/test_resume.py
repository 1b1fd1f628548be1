"""A resumed run is the uninterrupted one: bit for bit on the same ranks, and in other layouts up to rounding."""

import dataclasses
import json

import pytest
import torch
from safetensors import safe_open

from infcl.checkpoint.load import consolidated_state_dict
from infcl.models import load_model_config
from tests.lib.open_clip_stub import declare_torchvision_operators, import_open_clip
from tests.lib.ranks import run_ranks
from tests.lib.teachers import metrics, with_embeddings, write_teacher
from tests.lib.training import demo_config, fit, rejection, run_losses

TEXT = {"context_length": 16, "vocab_size": 512, "width": 64, "heads": 4, "layers": 2}
VISION = {"image_size": 32, "layers": [1, 2, 1, 1], "width": 16, "head_width": 32}
RESNET = {"embed_dim": 32, "vision_cfg": VISION, "text_cfg": TEXT}
BY_OPEN_CLIP = {"model": "open_clip:{folder}/resnet.json", "force_patch_dropout": None}
SPLIT = {"tensor_parallel_size": 2, "pack_captions": "on", "model": "{folder}/four_heads.json"}
RUNS = {  # flags; presets by their name
    "zero3": {},
    "zero2_bf16": {"precision": "bf16"},
    "zero0": {},
    "zero1, margin": {
        "false_negative_margin": 0.05,
        "matryoshka_widths": [16, 64],
        "matryoshka_weights": [1.0, 2.0],
    },
    "zero1, distilled": {"distill_model": "{folder}/teacher", "captions": "lines", "distill_weight": 2.0},
    "zero3, distilled": {"teacher_key": "t:40", "train_data": "{folder}/train"},
    "zero1, T = 2": SPLIT,
    "zero1, batch norm": BY_OPEN_CLIP,
    "zero2, adafactor": {"opt": "adafactor", "wd": 0.1},
    "zero2, adamw8bit": {"opt": "adamw8bit", "wd": 0.1},
    "zero1, lion": {"opt": "lion", "wd": 0.1},
    "zero3, lamb": {"opt": "lamb", "wd": 0.1},
}


def fit_any(rank, world_size, config, die_after=None):
    if config.model.startswith("open_clip:"):
        declare_torchvision_operators()
    return fit(rank, world_size, config, die_after)


@pytest.fixture(scope="module")
def models(demo_folder, tmp_path_factory):
    """The demo's model with heads that ranks can share, a ResNet of open_clip's, a teacher, and shards with another."""
    folder, fields = tmp_path_factory.mktemp("models"), load_model_config("demo").to_dict()
    fields["vision_cfg"] |= {"head_width": 24}
    fields["text_cfg"] |= {"heads": 4}
    (folder / "four_heads.json").write_text(json.dumps(fields))
    (folder / "resnet.json").write_text(json.dumps(RESNET))
    write_teacher(folder / "teacher", demo_folder)
    with_embeddings(demo_folder / "train", folder / "train")
    return folder


@pytest.mark.first(1)
@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_continues_bit_for_bit(name, models, demo_folder, tmp_path):
    """Patch dropout on; saved after step 4, which is inside an epoch, and ended abruptly a step later."""
    if "batch norm" in name:
        import_open_clip()
    flags = {"batch_size": 8, "steps": 6, "save_every_n_steps": 4, "ema_decay": 0.9, "force_patch_dropout": 0.25}
    flags |= {"deepspeed_config": f"ds_configs/{name.partition(',')[0]}.json"} | RUNS[name]
    for flag in {"model", "distill_model", "train_data"} & flags.keys():
        flags[flag] = flags[flag].format(folder=models)
    whole, stopped = (demo_config(demo_folder, tmp_path / place, **flags) for place in ("whole", "stopped"))
    losses = run_ranks(fit_any, 2, whole)[0]
    run_ranks(fit_any, 2, stopped, 5)
    assert run_ranks(fit_any, 2, dataclasses.replace(stopped, resume="latest"))[0] == losses
    averages = [consolidated_state_dict(tmp_path / place / "run", ema=True) for place in ("whole", "stopped")]
    assert all(torch.equal(averages[0][name], averages[1][name]) for name in averages[0])
    assert ("batch norm" in name) == (sum("running_var" in name for name in averages[0]) > 5)
    records = metrics(tmp_path / "stopped" / "run")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 5, 6], "it did not continue after step 4"
    shares = {record.get("micro_left_out_share") for record in records}
    assert all(0 < share < 1 for share in shares) if "margin" in name else shares == {None}
    assert all(("micro_distillation_loss" in record) == ("distilled" in name) for record in records)


LAYOUTS = {  # flags; of each leg its ranks, --tensor-parallel-size and preset
    "adamw": ({}, [(3, 1, "zero1"), (2, 1, "zero3")]),
    "adamw, offload": ({}, [(4, 1, "zero2"), (2, 1, "zero3_offload"), (1, 1, "zero0"), (3, 1, "zero1")]),
    "T": ({}, [(4, 2, "zero1"), (2, 1, "zero3"), (4, 4, "zero0")]),
    # a frozen tower is encoded once, a partly frozen one twice
    "locked": ({"lock_image": True, "force_patch_dropout": 0.5}, [(2, 1, "zero1"), (2, 1, "zero3"), (2, 1, "zero2")]),
    "partly locked": (
        {"lock_image": True, "lock_image_unlocked_groups": 2, "force_patch_dropout": 0.5},
        [(2, 1, "zero0"), (2, 1, "zero3"), (2, 1, "zero2")],
    ),
    "lion": ({"opt": "lion"}, [(2, 1, "zero1"), (1, 1, "zero0")]),
    "lamb": ({"opt": "lamb"}, [(2, 1, "zero3"), (1, 1, "zero0")]),
    "adafactor": ({"opt": "adafactor"}, [(2, 1, "zero2"), (1, 1, "zero0")]),
    "adamw8bit": ({"opt": "adamw8bit"}, [(2, 1, "zero2"), (1, 1, "zero0")]),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_continues_in_another_layout(name, models, demo_folder, tmp_path):
    """Three steps in each, resumed from the one before; the losses are those of an uninterrupted run in the first.

    In 8 bits the blocks lie elsewhere in another layout, and so does the rounding.
    """
    flags, path = LAYOUTS[name]
    flags = {"steps": 3 * len(path), "save_every_n_steps": 3, "keep_checkpoints": 0, "wd": 0.1, "warmup": 2} | flags

    def config_of(leg: int, logs: str, **changes):
        ranks, size, preset = path[leg]
        own = {"tensor_parallel_size": size, "deepspeed_config": f"ds_configs/{preset}.json"}
        own |= {"model": str(models / "four_heads.json"), "batch_size": 24 * size // ranks // 2}
        return demo_config(demo_folder, tmp_path / logs, **own, **flags | changes)

    whole = run_losses(path[0][0], config_of(0, "whole"))
    for leg, (ranks, _, preset) in enumerate(path):
        die_after = 3 * leg + 4 if leg < len(path) - 1 else None
        losses = run_losses(ranks, config_of(leg, "moved", resume="latest"), die_after)
        written = tmp_path / "moved" / "run" / "checkpoints" / f"step_{3 * leg + 3:08d}" / "infcl.json"
        manifest = json.loads(written.read_text())
        assert (manifest["world_size"], f"zero{manifest['zero_stage']}") == (ranks, preset[:5]), "resumed elsewhere"
    bounds = {"adamw8bit": 2e-2, "locked": 1e-5, "partly locked": 1e-5}
    assert losses == pytest.approx(whole, rel=bounds.get(name, 2e-5))
    with safe_open(written.parent / "state_00000.safetensors", framework="pt") as file:
        moved = [key.split("/", 1)[1] for key in file.keys() if key.startswith("exp_avg/")]
    first_block = [key for key in moved if key.startswith("visual.transformer.resblocks.0.")]
    assert moved and bool(first_block) == ("lock_image" not in flags)
    if "opt" in flags:
        other = config_of(0, "other", resume=str(written.parent), opt="adamw")
        assert f"--opt {flags['opt']}, not adamw" in run_ranks(rejection, path[0][0], other)[0]
