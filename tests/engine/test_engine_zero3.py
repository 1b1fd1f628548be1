"""ZeRO-3 gathers a model that fits once a step, every forward sees the weights that it should, and its sums of
gradients, a bucket in few launches, are DeepSpeed's own to the bit, however late they are."""

import json
import math
import os
from unittest import mock

import pytest
import torch

from infcl.config import BatchPlan
from infcl.engine import zero3
from infcl.engine.engine import Engine
from infcl.engine.zero3 import reduce_in_few_launches
from tests.lib.collectives import collectives
from tests.lib.engine_steps import engine_on_cpu, settings
from tests.lib.ranks import free_port, run_ranks
from tests.lib.specs import engine_of
from tests.lib.step_oracle import LR

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


# ---- gathering ----


def gathering_engine(preset: str, **changes) -> Engine:
    return engine_on_cpu(odd_clip(), "zero3", MICRO_BATCHES, deepspeed_config=preset, **changes)


def encode_and_replay(engine: Engine, rank: int, step: int) -> None:
    """Both passes of a step."""
    batches = [pairs(100 * step + 10 * rank + index) for index in range(MICRO_BATCHES)]
    engine.train()
    with torch.no_grad():
        for batch in batches:
            engine.encode(*batch)
    backwards(engine, rank, step)


def backwards(engine: Engine, rank: int, step: int) -> None:
    for index in range(MICRO_BATCHES):
        output = engine.encode(*(side.to(engine.parallel.device) for side in pairs(100 * step + 10 * rank + index)))
        surrogate = (output["image_features"] * output["text_features"].roll(1, 0)).sum() + output["logit_scale"].sum()
        engine.backward(surrogate, index == MICRO_BATCHES - 1)


def whole_parameters(engine: Engine) -> int:
    """How many are gathered."""
    return sum(parameter.ds_status.name == "AVAILABLE" for parameter in engine.module.parameters())


def gathers_of_steps(rank, world_size, preset, poisoned=None):
    """Of each of three steps: gathers of its first forward, of all others and the backwards; parameters whole before
    and after the update; how many modules DeepSpeed's trace has then, by which it prefetches; whether it was made. The
    gradients of step `poisoned` are not finite."""
    engine, found = gathering_engine(preset), []
    coordinator = engine.engine.optimizer.parameter_offload.get_param_coordinator()
    for step in range(3):
        engine.train()
        with torch.no_grad():
            first = collectives("gather", lambda: engine.encode(*pairs(0)))
        others = collectives("gather", lambda step=step: encode_and_replay(engine, rank, step))
        before = whole_parameters(engine)
        if step == poisoned:
            engine.engine.optimizer.grad_partitions_flat_buffer[0] = float("nan")
        applied = engine.step(LR)
        trace = len(coordinator._PartitionedParameterCoordinator__submodule_order) * coordinator.is_complete_trace()
        found.append((first, others, before, whole_parameters(engine), trace, applied))
    return found, len(list(engine.module.parameters()))


PREFETCHES = {"all at once": {}, "in parts": {"stage3_prefetch_bucket_size": 20000}}
PERSISTENT = {"stage3_param_persistence_threshold": 1000} | PREFETCHES["in parts"]


@pytest.mark.first(1)
@pytest.mark.parametrize("options", [*PREFETCHES.values(), PERSISTENT], ids=[*PREFETCHES, "small ones stay"])
def test_what_fits_is_gathered_once_a_step(options, tmp_path):
    poisoned = None if options is PERSISTENT else 1  # what persists is gathered behind an update that is made
    steps, parameters = run_ranks(gathers_of_steps, 2, preset_of(tmp_path, **options), poisoned)[0]
    for first, others, before, after, trace, _ in steps:
        assert first > 0 and others == 0 and before == parameters
        assert 0 < after < parameters if options is PERSISTENT else after == 0, "also where the step is skipped"
        assert trace == steps[0][-2] > 10, "a forward's modules, in every step"
    assert [applied for *_, applied in steps] == [step != poisoned for step in range(3)]


IN_HOST_MEMORY = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [{"stage3_max_live_parameters": 1000}, {"stage3_max_reuse_distance": 1000}, IN_HOST_MEMORY],
    ids=lambda options: next(iter(options)),
)
def test_a_model_above_a_limit_or_in_host_memory_is_gathered_again(options, tmp_path):
    steps, _ = run_ranks(gathers_of_steps, 2, preset_of(tmp_path, **options))[0]
    assert all(first > 0 and others > 0 for first, others, *_ in steps)


def weights_and_evaluations(rank, world_size, preset, kept):
    """After three steps: the weights; and between them what evaluations saw, of the weights and of their average.

    At last, what a forward sees of a weight that is written between the passes of a step.
    """
    from infcl.checkpoint.load import full_weights

    engine, seen = gathering_engine(preset, ema_decay=0.5), []
    persistent = sum(parameter.ds_persist for parameter in engine.module.parameters())
    assert engine.kept.fits
    if not kept:
        engine.kept.fits = engine.kept.on = False

    @torch.no_grad()
    def see() -> None:
        seen.append(engine.encode(*pairs(1000))["image_features"])

    for step in range(3):
        encode_and_replay(engine, rank, step)
        assert engine.step(LR)
        engine.state.update_average()
        engine.train(False)
        see()
        with engine.showing_average():
            see()
        see()
        if kept:  # DeepSpeed alone leaves what its trace of a step with backwards says is used again
            assert whole_parameters(engine) == persistent
    engine.train()
    see()
    parameter = dict(engine.module.named_parameters())["visual.proj"]
    engine.state.write(parameter, engine.state.read(parameter).flip(0))
    see()
    return full_weights(engine, keep=True), seen


@pytest.mark.first(1)
@pytest.mark.parametrize(("world_size", "options"), [(1, {}), (3, {}), (2, PERSISTENT)])
def test_steps_and_evaluations_are_those_without_keeping_to_the_bit(world_size, options, tmp_path):
    preset = preset_of(tmp_path, **options)
    (weights, seen), (expected, beside) = (
        run_ranks(weights_and_evaluations, world_size, preset, kept)[0] for kept in (True, False)
    )
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert all(torch.equal(a, b) for a, b in zip(seen, beside, strict=True))
    assert not torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[-2], seen[-1]), "a weight that is written while all is kept is seen"


# ---- reducing ----


def steps(rank, world_size, preset, precision, device="cpu", ours=True, step_count=2):
    """The sums of gradients that each step was made with; how many reductions the last one had; the weights."""
    from infcl.checkpoint.load import full_weights
    from infcl.parallel import init_parallel

    config = settings("zero3", precision=precision, deepspeed_config=preset, grad_clip_norm=None)
    parallel = init_parallel(device)
    with mock.patch("infcl.engine.engine.reduce_in_few_launches", reduce_in_few_launches if ours else lambda _: None):
        engine = engine_of(odd_clip(), config, parallel, BatchPlan(world_size, MICRO_BATCHES, 4))

    sums = []
    for step in range(step_count):
        reductions = collectives("reduce", lambda step=step: backwards(engine, rank, step))
        if engine.zero_stage == 3:
            sums.append(engine.engine.optimizer.grad_partitions_flat_buffer.clone().cpu())
        engine.step(LR)
    return sums, reductions, full_weights(engine, keep=True)


CASES = [(2, "bf16", BUCKET), (2, "fp32", 10**9), (3, "fp32", BUCKET), (1, "amp_bf16", BUCKET)]


@pytest.mark.first(1)
@pytest.mark.parametrize(("world_size", "precision", "bucket"), CASES)
def test_sums_are_deepspeeds_and_a_bucket_is_one_collective(world_size, precision, bucket, tmp_path):
    """To the bit; three ranks add up in another order, and paddings are added too, and stay zero. Buckets are as full
    as they become in the order of the backward, which is that of DeepSpeed's hooks."""
    preset = preset_of(tmp_path, reduce_bucket_size=bucket)
    ours = run_ranks(steps, world_size, preset, precision)
    theirs = run_ranks(steps, world_size, preset, precision, ours=False)
    for (own, reductions, weights), (other, _, expected) in zip(ours, theirs):
        assert all(float(buffer.abs().max()) > 0 for buffer in own)
        for a, b in zip(own, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
            assert torch.equal(a == 0, b == 0) if world_size == 3 else torch.equal(a, b)
        assert world_size == 3 or all(torch.equal(weights[name], value) for name, value in expected.items())
        elements = sum(value.numel() for value in weights.values())
        least = math.ceil(elements / bucket) * (world_size > 1)
        assert MICRO_BATCHES * least <= reductions <= MICRO_BATCHES * (1 if bucket > elements else 3 * least)


def _gpu_steps(rank: int, world_size: int, port: int, presets: list[str]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    rows = zero3._rows

    def late(gradient, ranks):
        torch.cuda._sleep(2_000_000)  # a millisecond: the backward is buckets ahead of what reads its gradients
        return rows(gradient, ranks)

    with mock.patch.object(zero3, "_rows", late):
        _, _, found = steps(rank, world_size, presets[0], "fp32", device="cuda", step_count=5)
    _, _, expected = steps(rank, world_size, presets[1], "fp32", device="cuda", step_count=5)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)
    torch.distributed.destroy_process_group()


@pytest.mark.gpu
def test_gradients_whose_reduction_is_late_are_not_overwritten_on_gpus(tmp_path):
    """Weights after five steps, and those of ZeRO-1."""
    (tmp_path / "1").mkdir()
    presets = [preset_of(tmp_path), preset_of(tmp_path / "1", stage=1, reduce_bucket_size=10**6)]
    world_size = max(1, min(torch.cuda.device_count(), 4))
    torch.multiprocessing.spawn(_gpu_steps, (world_size, free_port(), presets), nprocs=world_size)
