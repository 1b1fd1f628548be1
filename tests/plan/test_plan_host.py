"""The plan of host memory: counted against what DeepSpeed holds there; rejected at start; auto leaves room for it."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from infcl.config import BatchPlan, TrainConfig
from infcl.config.precision import PRECISIONS
from infcl.config.preset import BUCKET
from infcl.engine.parameter_groups import checkpoint_bytes, later_host_bytes
from infcl.models import CLIP, load_model_config
from infcl.parallel import init_parallel
from infcl.plan.memory import host_bytes, host_parts, memory_of
from infcl.plan.setting import setting_of_run
from infcl.step import batches
from infcl.train.fit import Fit
from tests.lib.checkout import ROOT
from tests.lib.fitting import fit, under
from tests.lib.ranks import run_ranks
from tests.lib.specs import counts_of, engine_of, planned_run, spec_of
from tests.lib.training import demo_config

GIB = 2**30
OFFLOAD = json.loads((ROOT / "ds_configs" / "zero3_offload.json").read_text())
MICRO_BATCHES = 2


class Narrow(nn.Module):
    """Many small matrices, so that what is split across two ranks' shares is little."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(60)))

    def forward(self, images, texts):
        return {"out": self.layers(images.to(self.layers[0].weight.dtype)).float().sum()}


def bytes_of(tensors) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def offloaded_by_deepspeed(rank, world_size, path, precision):
    """({part: bytes}, parameters, the plan of them) after two steps; on a CPU nothing is pinned."""
    parallel, model, batch = init_parallel("cpu"), Narrow(), BatchPlan(world_size, MICRO_BATCHES, 4)
    numel = sum(parameter.numel() for parameter in model.parameters())
    config = TrainConfig(
        dataset_type="synthetic", train_num_samples=1, deepspeed_config=path, precision=precision, wd=0.0
    )
    engine = engine_of(model, config, parallel, batch)
    for _ in range(2):
        for index in range(MICRO_BATCHES):
            engine.backward(engine.encode(torch.randn(4, 32), None)["out"], index == MICRO_BATCHES - 1)
        engine.step(0.1)
    zero, stage = engine.engine.optimizer, engine.zero_stage
    masters = zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups
    state = [value for entry in zero.optimizer.state.values() for value in entry.values() if value.dim()]
    if stage == 3:
        sums, copies = [zero.grad_partitions_flat_buffer], zero.param_groups_fp16_flat_cpu_memory
    else:
        sums = list(zero.accumulated_grads_in_cpu.values())
        copies = zero.param_buffer_of_bit16_for_cpu_offload_groups
    held = {
        "optimizer": bytes_of([*masters, *state]),
        "gradients": bytes_of([*(master.grad for master in masters), *sums]),
        "parameters": bytes_of(copies),
    }
    offload = json.loads(open(path).read())["zero_optimization"]
    spec = planned_run(config, batch, precision, offload, stage=stage, on_cpu=True)
    planned = setting_of_run(spec, load_model_config("demo"), {"all": (numel, numel)})
    return held, {part: host_parts(planned)[part] for part in held}


@pytest.mark.first(3)
@pytest.mark.parametrize(
    ("stage", "param", "precision", "world_size"),
    [(1, False, "fp32", 1), (1, False, "bf16", 2), (2, False, "fp32", 2), (2, False, "bf16", 1),
     (3, False, "fp32", 2), (3, False, "bf16", 1), (3, True, "fp32", 1), (3, True, "bf16", 2)],
)  # fmt: skip
def test_what_is_offloaded_is_what_deepspeed_holds(stage, param, precision, world_size, tmp_path):
    zero = OFFLOAD["zero_optimization"] | {"stage": stage, "reduce_bucket_size": 10_000}
    if param:
        zero |= {"offload_param": {"device": "cpu", "pin_memory": True}}
    (tmp_path / "preset.json").write_text(json.dumps(OFFLOAD | {"zero_optimization": zero}))
    held, planned = run_ranks(offloaded_by_deepspeed, world_size, str(tmp_path / "preset.json"), precision)[0]
    assert planned["optimizer"] >= 12 * 60 * 32 * 33 / world_size and held == pytest.approx(planned, rel=0.03)


def big_g(*flags: str, host: float = float("inf"), dp_size: int = 8, preset: dict = OFFLOAD) -> Fit:
    cfg = load_model_config("ViT-bigG-14")
    shipped = ["--deepspeed_config", "ds_configs/zero3_offload.json", "--precision", "bf16", "--grad-checkpointing"]
    question = fit("--model", "ViT-bigG-14", "--batch-size", "64", *shipped, *flags, gib=139, ranks=dp_size)
    question = dataclasses.replace(question, cfg=cfg, counts=counts_of(cfg), host=host * GIB, ranks_of_host=8)
    return under(question, precision="bf16", preset=preset)


def test_pinned_memory_is_counted_in_powers_of_2():
    question = big_g(dp_size=1)
    planned = question.setting(question.spec)
    own, parts = planned.trainable, host_parts(planned)
    assert 2 * 10**9 < own < 3 * 10**9
    assert parts["gradients"] == 16 * GIB + 3 * 4 * GIB  # all in one; in groups of a billion elements
    assert parts["optimizer"] == 12 * own
    zero = planned.zero_optimization | {"offload_optimizer": {"device": "cpu"}}
    assert host_parts(planned.with_(zero_optimization=zero))["gradients"] == 8 * own


def test_a_host_that_holds_it_to_the_last_byte_is_enough_and_a_byte_less_is_not():
    question = big_g("--pixel-cache-gb", "1")
    needed = host_bytes(question.setting(question.spec), 8)
    assert needed > 12 * 2.5e9
    dataclasses.replace(question, host=needed).check()
    with pytest.raises(
        ValueError, match=r"GiB of host memory for 8 ranks, [\d.]+ GiB is available \(.*Try .*--skip-memory-check"
    ):
        dataclasses.replace(question, host=needed - 1).check()


def test_the_first_host_of_many_holds_the_first_copy_of_16_bit_parameters():
    question = big_g(dp_size=512)
    planned = question.setting(question.spec)
    parts = host_parts(planned)
    state, later = (sum(parts[name] for name in names) for names in (("optimizer", "gradients"), ("checkpoint",)))
    assert host_bytes(planned, 8) == 8 * state + 4 * planned.trainable > 8 * (state + later)
    whole = dataclasses.replace(planned, precision=PRECISIONS["amp_bf16"])
    assert host_bytes(whole, 8) == 8 * sum(host_parts(whole).values())


def test_on_a_cpu_all_is_one_memory_and_nothing_counts_twice():
    def question(**changes) -> Fit:
        return under(fit("--batch-size", "8", gib=1000, stage=3), device="cpu", **changes)

    buckets = {"zero_optimization": {"stage": 3, "reduce_bucket_size": BUCKET}}  # as large as where it offloads
    plain, offloaded = question(preset=buckets), question(preset=OFFLOAD)
    planned = offloaded.setting(offloaded.spec)
    own, difference = planned.trainable / 8, offloaded.parts(offloaded.spec)["peak"] - plain.parts(plain.spec)["peak"]
    assert difference == pytest.approx(4 * own)  # the gradient that the optimizer is given, in addition to the sum
    assert memory_of(planned)["optimizer"] == memory_of(planned)["gradients"] == 0
    dataclasses.replace(offloaded, host=0.0).check()  # capacity is all there is to ask for
    kept = plain.spec.change(pixel_cache_gb="1", accum_freq=9)
    none = kept.change(pixel_cache_gb="0")
    assert plain.parts(kept)["peak"] - plain.parts(none)["peak"] == 8 * 8 * 3 * 224**2


def test_auto_leaves_room_for_what_comes_after_the_pixels(demo_folder, tmp_path, monkeypatch):
    """A checkpoint's copy, and under ZeRO-2 the sums of offloaded gradients, which the first backward makes."""
    config, cfg = demo_config(demo_folder, tmp_path, accum_freq=1000), load_model_config("demo")
    model, parallel = (
        CLIP(cfg),
        SimpleNamespace(device=torch.device("cpu"), tp_size=1, dp_size=2, ranks_per_node=2, hosts=1),
    )
    numel, free = sum(parameter.numel() for parameter in model.parameters()), 100e6
    saved = checkpoint_bytes(config, numel, numel)
    monkeypatch.setattr(batches, "available_host_bytes", lambda: free)
    monkeypatch.setattr(batches, "max_over", lambda group, values, device: values)
    parallel.dp_group = None
    one = config.batch_size * 3 * cfg.vision_cfg.image_size**2

    def kept(**changes) -> int:
        spec = spec_of(dataclasses.replace(config, **changes), parallel)
        reserved = later_host_bytes(spec, model)
        step = batches.build_step_batches(spec, model, parallel, resident=1, repeats=True, reserved=reserved)
        return len(step.pixels.kept)

    assert kept() == int(0.6 * (free - saved) / 2 // one) < int(0.6 * free / 2 // one)
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    (tmp_path / "zero2.json").write_text(json.dumps({"zero_optimization": zero}))
    preset = str(tmp_path / "zero2.json")
    assert kept(deepspeed_config=preset) == int(0.6 * (free - saved - 4 * numel) / 2 // one) < kept()
    with pytest.raises(ValueError, match="are free next to a checkpoint's copy"):
        kept(pixel_cache_gb=str((free - saved / 2) / 2 / 1e9))
    monkeypatch.setattr(batches, "available_host_bytes", lambda: saved / 2)  # what keeps nothing is not rejected for it
    assert kept() == kept(pixel_cache_gb="0") == 0
