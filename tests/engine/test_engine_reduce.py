"""ZeRO-3's sums of gradients, a bucket in few launches, are DeepSpeed's own to the bit, however late they are."""

import functools
import math
import os
from unittest import mock

import pytest
import torch

from infcl.config import BatchPlan
from infcl.engine import zero3
from infcl.engine.zero3 import reduce_in_few_launches
from tests.lib.collectives import collectives
from tests.lib.engine_steps import settings
from tests.lib.odd_clip import BUCKET, MICRO_BATCHES, odd_clip, pairs, preset_of
from tests.lib.ranks import free_port, run_ranks
from tests.lib.specs import engine_of
from tests.lib.step_oracle import LR


def steps(rank, world_size, preset, precision, device="cpu", ours=True, step_count=2):
    """The sums of gradients that each step was made with; how many reductions the last one had; the weights."""
    from infcl.checkpoint.load import full_weights
    from infcl.parallel import init_parallel

    config = settings("zero3", precision=precision, deepspeed_config=preset, grad_clip_norm=None)
    parallel = init_parallel(device)
    with mock.patch("infcl.engine.engine.reduce_in_few_launches", reduce_in_few_launches if ours else lambda _: None):
        engine = engine_of(odd_clip(), config, parallel, BatchPlan(world_size, MICRO_BATCHES, 4))

    def backwards(step: int) -> None:
        for index in range(MICRO_BATCHES):
            images, texts = (side.to(parallel.device) for side in pairs(100 * step + 10 * rank + index))
            output = engine.encode(images, texts)
            similar = (output["image_features"] * output["text_features"].roll(1, 0)).sum()
            engine.backward(similar + output["logit_scale"].sum(), index == MICRO_BATCHES - 1)

    sums = []
    for step in range(step_count):
        reductions = collectives("reduce", functools.partial(backwards, step))
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
    world_size = min(torch.cuda.device_count(), 4)
    torch.multiprocessing.spawn(_gpu_steps, (world_size, free_port(), presets), nprocs=world_size)
