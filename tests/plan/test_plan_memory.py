"""The memory of a plan, part by part, counted against what live tensors and graphs take."""

import dataclasses
import json
from unittest import mock

import pytest
import torch
from torch import nn

from benchmarks.rows import latest
from benchmarks.rows import rows as rows_of
from infcl.config import BatchPlan, TrainConfig
from infcl.config.precision import PRECISIONS
from infcl.config.preset import read_preset
from infcl.loss.contrastive import ContrastiveLoss
from infcl.loss.inputs import RingOptions
from infcl.loss.matryoshka import matryoshka
from infcl.models import CLIP, load_model_config
from infcl.plan.memory import (
    activation_bytes,
    bucket_bytes,
    gathered_bytes,
    loss_bytes,
    memory_of,
    state_bytes,
)
from infcl.plan.setting import parameter_counts, trained_blocks
from infcl.train.build import build_model
from tests.lib.live_bytes import LiveBytes
from tests.lib.ranks import run_ranks
from tests.lib.specs import counts_of, memory_of_run, setting, whole
from tests.lib.training import demo_config


@pytest.mark.parametrize(
    ("stage", "precision", "per_parameter"),
    [(0, "fp32", 4 + 4 + 8), (1, "fp32", 4 + 4 + 3), (2, "amp_bf16", 4 + 1 + 3), (3, "fp32", 1 + 1 + 3),
     (1, "bf16", 2 + 6 + 3), (1, "fp16", 2 + 4 + 3), (3, "fp16", 0.5 + 1 + 3)],
)  # fmt: skip
def test_state_of_four_ranks_by_stage(stage, precision, per_parameter):
    parts = state_bytes(setting(trainable=1000, ranks=4, zero=stage, precision=precision))
    assert sum(parts.values()) == 1000 * per_parameter


def bytes_of_buckets(rank, world_size, presets):
    """{precision: bytes of each element of ZeRO-1's buckets; 0 where its optimizer has none}."""
    from deepspeed.accelerator import get_accelerator

    from infcl.parallel import init_parallel
    from tests.lib.specs import engine_of

    found = {}
    with (
        mock.patch("infcl.config.preset.cpu_computes_fp16", lambda: True),
        mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda self: True),
    ):
        for precision, path in presets.items():
            config = TrainConfig(
                dataset_type="synthetic", train_num_samples=1, deepspeed_config=path, precision=precision
            )
            optimizer = engine_of(nn.Linear(4, 4), config, init_parallel("cpu"), BatchPlan(2, 2, 3)).engine.optimizer
            has_buckets = hasattr(optimizer, "_gradient_reduction_buffer_dtype")
            found[precision] = optimizer._gradient_reduction_buffer_dtype().itemsize if has_buckets else 0
    return found


def test_the_buckets_of_stage_1_are_those_of_the_optimizer_that_deepspeed_takes(tmp_path):
    """With fp16 parameters not BF16_Optimizer, which has none: 3.7 GiB had been left out of the plan."""
    zero = {"stage": 1, "overlap_comm": True}
    (tmp_path / "plain.json").write_text(json.dumps({"zero_optimization": zero}))
    presets = dict.fromkeys(("fp32", "bf16", "fp16"), str(tmp_path / "plain.json"))
    found = run_ranks(bytes_of_buckets, 2, presets)[0]
    assert found == {"fp32": 4, "bf16": 0, "fp16": 4}
    for precision, size in found.items():
        assert bucket_bytes(setting(trainable=1000, zero_optimization=zero, precision=precision)) == 2 * 5e8 * size
    offloaded = setting(trainable=1000, zero_optimization=zero, precision="bf16", offloads=("optimizer",))
    assert bucket_bytes(offloaded) == 2 * 5e8 * 4


@pytest.mark.parametrize(
    ("options", "kept"),
    [({}, 1.05e9), ({"stage3_max_reuse_distance": 0}, 5e7), ({"stage3_max_live_parameters": 0}, 1.05e9),
     ({"stage3_max_reuse_distance": 1e12}, 3e9),
     ({"stage3_max_reuse_distance": 2e8, "stage3_prefetch_bucket_size": 0}, 2e8)],
)  # fmt: skip
def test_what_stays_gathered_follows_the_reuse_distance_and_not_the_limit_of_prefetching(options, kept):
    sizes = {"trainable": 3 * 10**9, "zero_optimization": options, "ranks": 4, "precision": "bf16"}
    assert gathered_bytes(setting(**sizes, zero=3)) == pytest.approx(kept * 2 * 3 / 4)
    assert gathered_bytes(setting(**sizes, zero=2)) == 0


def test_dense_losses_take_about_what_was_measured():
    tried = set()
    for row in rows_of("loss_h200.csv"):
        if row["impl"] in ("clip", "open_clip", "disco") and row["extra_mib"] and row["extra_mib"] > 1000:
            sizes = {"rows": row["global_batch"] // row["gpus"], "ranks": row["gpus"], "width": row["dim"]}
            planned = sum(loss_bytes(row["impl"], **sizes).values()) / 2**20
            assert planned == pytest.approx(row["extra_mib"], rel=0.2), row
            tried.add((row["impl"], row["gpus"]))
    assert tried >= {("clip", 1), ("clip", 4), ("open_clip", 4), ("disco", 4)}


def test_a_ring_holds_what_was_measured_around_one():
    """Of sends, since copies land in memory that torch does not count; bf16 features, which the caller has."""
    impls = {"inf_cl sends": 2, "inf_cl two-level/2": 4}  # of how many GPUs
    found = latest(rows_of("loss_h200.csv"), "impl", "gpus", "global_batch")
    found = [row for row in found if impls.get(row["impl"]) == row["gpus"]]
    found = [row for row in found if row["global_batch"] >= 2**15 * row["gpus"]]
    assert {row["impl"] for row in found} == set(impls) and len(found) >= 5
    for row in found:
        rows = row["global_batch"] // row["gpus"]
        given = (2 + 1) * rows * row["dim"] * 4  # float32 features, and their operands in half precision
        sizes = {"rows": rows, "ranks": row["gpus"], "width": row["dim"]}
        planned = sum(loss_bytes("inf_cl", **sizes, two_level="two-level" in row["impl"]).values()) - given
        assert planned / 2**20 == pytest.approx(row["extra_mib"], rel=0.04), row


ROWS, WIDTH = 256, 64


def most_bytes_around_a_ring(rank, world_size, loss, tile_dtype, ring, teacher_width=0, widths=()):
    generator = torch.Generator().manual_seed(rank)
    sides = [torch.randn(ROWS, WIDTH, generator=generator).requires_grad_() for _ in range(2)]
    teacher = [torch.randn(ROWS, teacher_width, generator=generator) for _ in range(2)] if teacher_width else None
    module = ContrastiveLoss(
        loss,
        group=torch.distributed.group.WORLD,
        options=RingOptions("torch", tile_dtype, workspace_bytes=2**14, ring=ring, ranks_per_node=2),
    )
    call = matryoshka(module, widths) if widths else module
    with LiveBytes() as live:
        given = {} if teacher is None else {"teacher": (*teacher, 30.0)}
        call(*sides, torch.tensor(10.0), torch.tensor(-5.0), **given).backward()
    return live.most


@pytest.mark.first(1)
@pytest.mark.parametrize(("loss", "precision", "world_size"), [("inf_cl", "fp32", 4), ("siglip", "bf16", 6)])
def test_a_two_level_ring_holds_beside_a_flat_one_what_is_counted(loss, precision, world_size):
    """Two nodes or three, of two ranks. Statistics travel with a block: two buffers of 4 bytes a row."""
    flat, two_level = (
        run_ranks(most_bytes_around_a_ring, world_size, loss, precision, ring) for ring in ("flat", "two-level")
    )
    size = PRECISIONS[precision].matmul_dtype.itemsize
    counted_flat, counted_two_level = (
        loss_bytes(loss, rows=ROWS, ranks=world_size, width=WIDTH, feature_bytes=size, two_level=two)["loss"]
        for two in (False, True)
    )
    counted = counted_two_level - counted_flat
    for of_flat, of_two_level in zip(flat, two_level, strict=True):
        assert counted <= of_two_level - of_flat <= counted + 2 * 4 * ROWS


@pytest.mark.parametrize(("world_size", "precision"), [(1, "fp32"), (3, "bf16")])
def test_a_teacher_counts_as_its_model_its_embeddings_and_its_loss(world_size, precision):
    width, ranks = 96, {"ranks": world_size, "precision": precision}
    one = setting(micro_batch=ROWS // 2, micro_batches=2, **ranks)
    one = one.with_(model=dataclasses.replace(one.model, embed_dim=WIDTH), teacher=(10**6, width))
    without, planned = memory_of(one.with_(teacher=(0, 0))), memory_of(one)
    assert "teacher" not in without and planned["peak"] - without["peak"] == planned["teacher"]
    embeddings = 2 * ROWS * width * 4  # which the caller has
    counted = planned["teacher"] - 4e6 - embeddings
    plain, distilled = (
        run_ranks(most_bytes_around_a_ring, world_size, "inf_cl", precision, "flat", size) for size in (0, width)
    )
    for of_plain, of_distilled in zip(plain, distilled, strict=True):
        assert 0.5 * counted < of_distilled - of_plain <= counted + 12 * 4 * ROWS


@pytest.mark.parametrize(("world_size", "loss", "teacher"), [(1, "inf_cl", 0), (3, "siglip", 96)])
def test_prefixes_count_as_their_copies_and_gradients(world_size, loss, teacher):
    widths = (8, 16, 32, WIDTH)
    one = setting(micro_batch=ROWS, ranks=world_size, loss=loss)
    one = one.with_(model=dataclasses.replace(one.model, embed_dim=WIDTH))
    counted = memory_of(one.with_(widths=widths))["loss"] - memory_of(one)["loss"]
    of_widths = (
        run_ranks(most_bytes_around_a_ring, world_size, loss, "fp32", "flat", teacher, of) for of in ((), widths)
    )
    for of_plain, of_prefixes in zip(*of_widths, strict=True):
        assert 0.5 * counted < of_prefixes - of_plain <= counted + 12 * 4 * ROWS


def test_the_plan_knows_the_optimizer_the_average_and_what_is_locked(demo_folder, tmp_path):
    cfg = load_model_config("ViT-B-16")

    def stage_1(**flags):
        config = demo_config(demo_folder, tmp_path, **flags)
        with torch.device("meta"):
            counts = parameter_counts(build_model(config, cfg)[0])
        return memory_of_run(cfg, BatchPlan(1, 2, 64), config, counts, "fp32", {})

    plain = stage_1()
    for flags, of_plain in (({"opt": "lion"}, 8), ({"opt": "adafactor"}, 6), ({"ema_decay": 0.99}, 16)):
        assert stage_1(**flags)["optimizer"] == pytest.approx(plain["optimizer"] * of_plain / 12), flags
    locked = stage_1(lock_image=True)
    assert locked["parameters"] == plain["parameters"]
    assert locked["optimizer"] < 0.5 * plain["optimizer"] and locked["activations"] < 0.5 * plain["activations"]


@pytest.mark.parametrize("unlocked", [0, 1, 3, 13, 14])
def test_a_partly_locked_tower_counts_as_its_trained_blocks(demo_folder, tmp_path, unlocked):
    cfg = load_model_config("ViT-B-32")
    flags = {"lock_image": True, "lock_image_unlocked_groups": unlocked}
    config = demo_config(demo_folder, tmp_path, **flags, compile_blocks="off")
    with torch.device("meta"):
        model = build_model(config, cfg)[0]
    blocks = model.visual.transformer.resblocks
    trained = sum(all(p.requires_grad for p in block.parameters()) for block in blocks)
    assert trained_blocks(config, cfg) == {"image": trained, "text": 12}
    parts = memory_of_run(cfg, BatchPlan(1, 2, 16), config, parameter_counts(model), "fp32", {})
    one = setting(cfg, micro_batch=16, precision="fp32", compiled=False)
    whole = activation_bytes(one)
    text = activation_bytes(dataclasses.replace(one, blocks={"image": 0, "text": 12}))
    stream, pixels = 16 * 50 * 768 * 4, 16 * 3 * 224**2 * 4
    around = stream * (trained > 0) + (stream + pixels) * (trained == 12)
    assert parts["activations"] == pytest.approx(text + (whole - text - 2 * stream - pixels) * trained / 12 + around)


@pytest.mark.parametrize("precision", ["amp_bf16", "bf16"])
@pytest.mark.parametrize(
    ("ranks", "flags", "changes"),
    [
        (4, {}, {}),
        (4, {"pixel_cache_gb": "gpu", "resident_micro_batches": "2"}, {"pixels": "device", "resident": 2}),
        (1, {"grad_checkpointing": True, "compile_blocks": "off"}, {"checkpointing": True, "compiled": False}),
        (2, {"tensor_parallel_size": 2}, {"tensor_parallel": 2}),
        (2, {"loss": "open_clip"}, {"loss": "open_clip"}),
        (6, {}, {"gpus_per_node": 2}),
        (6, {"loss": "open_clip"}, {"gpus_per_node": 2, "loss": "open_clip"}),
    ],
)
def test_a_run_s_plan_is_that_of_the_planner(demo_folder, tmp_path, precision, ranks, flags, changes):
    cfg, batch = load_model_config("ViT-B-16"), BatchPlan(ranks, 6, 24)
    config = demo_config(demo_folder, tmp_path, **{"compile_blocks": "auto"} | flags)
    for stage in (1, 2, 3):
        of_stage = dataclasses.replace(config, deepspeed_config=f"ds_configs/zero{stage}.json", precision=precision)
        gpus = ranks * config.tensor_parallel_size
        planned = whole(
            cfg, gpus=gpus, global_batch=batch.global_batch_size, micro_batch=24,
            zero=stage, precision=PRECISIONS[precision], **{"gpus_per_node": gpus, "checkpointing": False} | changes,
        )  # fmt: skip
        hosts = planned.nodes
        zero = read_preset(of_stage, "cuda", hosts=hosts)[0]["zero_optimization"]
        where = {"ranks_of_host": gpus // hosts} if hosts > 1 else {}
        run = memory_of_run(cfg, batch, config, counts_of(cfg), precision, zero, stage=stage, **where)
        assert run == pytest.approx(memory_of(planned), rel=1e-6)


def test_a_run_s_plan_counts_its_resident_graphs_and_what_eager_blocks_keep_more(demo_folder, tmp_path):
    cfg = load_model_config("ViT-B-32")
    sizes = {"micro_batch": 16, "precision": "amp_bf16", "checkpointing": False}
    graph, eager = (activation_bytes(setting(cfg, compiled=compiled, **sizes)) for compiled in (True, False))

    def parts(on_cpu=False, **flags):
        config = demo_config(demo_folder, tmp_path, **flags)
        return memory_of_run(cfg, BatchPlan(1, 4, 16), config, counts_of(cfg), "amp_bf16", {}, on_cpu=on_cpu)

    one = parts(compile_blocks="auto")
    for resident, graphs in (("auto", 1), ("3", 3), ("9", 4)):  # of the four that a batch has
        more = parts(compile_blocks="auto", resident_micro_batches=resident)
        assert more["activations"] - one["activations"] == pytest.approx((graphs - 1) * graph)
        assert more["backward"] == one["backward"] > 0
    assert one["activations"] == parts(on_cpu=True, compile_blocks="on")["activations"]
    for off in (parts(compile_blocks="off"), parts(on_cpu=True, compile_blocks="auto")):
        assert off["activations"] - one["activations"] == pytest.approx(eager - graph) and eager > 1.08 * graph


@pytest.mark.parametrize(
    ("stage", "precision", "overlap", "buffers"),  # of one byte an element
    [(0, "fp32", True, 0), (1, "fp32", True, 8), (1, "amp_bf16", True, 8), (1, "amp_bf16", False, 4),
     (1, "bf16", True, 0), (2, "bf16", True, 4), (2, "amp_bf16", True, 8), (3, "amp_bf16", True, 4),
     (3, "bf16", True, 2)],
)  # fmt: skip
def test_gradients_on_their_way_have_buffers_of_each_type_they_travel_in(stage, precision, overlap, buffers):
    def counted(trainable: int) -> float:
        zero = {"reduce_bucket_size": 1000, "overlap_comm": overlap}
        return bucket_bytes(setting(trainable=trainable, zero_optimization=zero, zero=stage, precision=precision))

    assert counted(1000) == 1000 * buffers
    if stage == 3:  # gradients that wait, as many as there are: three buckets at most
        assert [counted(size) for size in (900, 1001, 4000)] == [size * buffers for size in (1000, 1001, 3000)]
        return
    flattened = 0 if stage == 0 or precision == "bf16" else 4000
    assert counted(1001) == 1000 * buffers + flattened


# ---- activations ----


def saved_by_a_forward(cfg, micro_batch_size: int, dtype: torch.dtype, checkpointing: bool) -> int:
    """Return the bytes of all storages that autograd keeps, each counted once, without the model's parameters."""
    model = CLIP(cfg, activation_checkpointing=checkpointing).train().to(dtype)
    side = cfg.vision_cfg.image_size
    images = torch.zeros(micro_batch_size, 3, side, side, dtype=torch.uint8)
    texts = torch.ones(micro_batch_size, cfg.text_cfg.context_length, dtype=torch.int64)
    parameters, kept = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}, {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # keeps it alive, so that its address is not reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(images, texts)
    return sum(size for size, _ in kept.values())


@pytest.mark.first(1)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_whole_graph_is_what_autograd_keeps(precision, dtype, checkpointing):
    """Of one sample more; embeddings and heads included."""
    base = load_model_config("ViT-B-16")
    text = dataclasses.replace(base.text_cfg, layers=2, vocab_size=100)
    cfg = dataclasses.replace(base, text_cfg=text, vision_cfg=dataclasses.replace(base.vision_cfg, layers=2))
    sizes = {"precision": precision, "checkpointing": checkpointing, "compiled": False}
    planned = [activation_bytes(setting(cfg, micro_batch=size, **sizes)) for size in (2, 3)]
    kept = [saved_by_a_forward(cfg, size, dtype, checkpointing) for size in (2, 3)]
    assert planned[1] - planned[0] == pytest.approx(kept[1] - kept[0], rel=0.02)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_convolutional_stem_counts_as_what_autograd_keeps_of_it(precision, dtype, checkpointing):
    """By the difference of one that is finer; nothing of a stem is recomputed."""
    base = load_model_config("demo")
    kept, planned = [], []
    for stem in (((96, 8, 8),), ((40, 3, 2), (56, 3, 2), (96, 3, 2))):
        cfg = dataclasses.replace(base, vision_cfg=dataclasses.replace(base.vision_cfg, image_size=64, conv_stem=stem))
        kept.append(saved_by_a_forward(cfg, 3, dtype, checkpointing))
        sizes = {"micro_batch": 3, "precision": precision, "checkpointing": checkpointing}
        planned.append(activation_bytes(setting(cfg, **sizes)))
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
