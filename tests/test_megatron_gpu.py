"""Tensor parallelism over NCCL on four GPUs: ViT-L-14 at T = 2 x D = 2 follows T = 1 x D = 4 for twenty steps."""

import os

import pytest
import torch

from infcl.config import BatchPlan, TrainConfig
from infcl.towers import CLIP, load_model_config
from tests.ranks import free_port

pytestmark = [pytest.mark.multigpu, pytest.mark.timeout(900)]
GPUS, GLOBAL_BATCH, MICRO_BATCH_SIZE, STEPS = 4, 64, 8, 20

PRECISIONS = {
    "fp32": {"precision": "fp32", "compile_blocks": "off"},
    "amp_bf16": {"precision": "amp_bf16", "compile_blocks": "on"},
}


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One of two batches, so that twenty steps learn something."""
    generator = torch.Generator().manual_seed(step % 2)
    images = torch.randint(256, (GLOBAL_BATCH, 3, 224, 224), dtype=torch.uint8, generator=generator)
    return images, torch.randint(49408, (GLOBAL_BATCH, 77), generator=generator)


def train(rank: int, port: int, folder: str, flags: dict) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": GPUS, "LOCAL_WORLD_SIZE": GPUS, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"})
    from infcl.parallel import destroy_parallel, init_parallel, mean_over
    from infcl.step.grad_cache import grad_cache_step
    from infcl.train.build import build_loss, split_model
    from infcl.train.compiled import prepare_blocks
    from infcl.train.engine import Engine, read_preset
    from megatron_patches.groups import init_tensor_parallel

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    config = TrainConfig(dataset_type="synthetic", train_num_samples=1, wd=0.1, grad_clip_norm=1.0, **flags)
    parallel = init_parallel("cuda", timeout_minutes=5)
    if config.tensor_parallel_size > 1:
        parallel = init_tensor_parallel(parallel, config.tensor_parallel_size)
    batch = BatchPlan(parallel.dp_size, GLOBAL_BATCH // parallel.dp_size // MICRO_BATCH_SIZE, MICRO_BATCH_SIZE)
    torch.manual_seed(0)
    with parallel.device:
        model = CLIP(load_model_config("ViT-L-14"))
    split_model(model, config, parallel)
    prepare_blocks(model, config, parallel, read_preset(config, "cuda")[1], batch)
    engine, loss = Engine(model, config, parallel, batch), build_loss(config, parallel)
    losses, norms = [], []
    for step in range(STEPS):
        own = slice(parallel.dp_rank * batch.rank_batch_size, (parallel.dp_rank + 1) * batch.rank_batch_size)
        sides = [side[own].to(parallel.device).split(MICRO_BATCH_SIZE) for side in batch_of(step)]
        output = grad_cache_step(
            list(zip(*sides)),
            encode=lambda pair: engine.encode(*pair),
            loss=loss,
            backward=engine.backward,
            seeds=range(batch.num_micro_batches),
            scalar_values=engine.scalar_values,
        )
        engine.step(1e-4 * min(1, (step + 1) / 5))
        losses.append(float(mean_over(engine.dp_group, output.loss)))
        norms.append(engine.grad_norm())
    replicated = {
        name: engine.state.read(parameter).double().sum().item()
        for name, parameter in engine.state.parameters()
        if not hasattr(parameter, "tensor_parallel_split")
    }
    torch.save((losses, norms, replicated), f"{folder}/{rank}.pt")
    torch.distributed.barrier()
    destroy_parallel()


def results_of(tmp_path, name: str, flags: dict) -> list:
    folder = tmp_path / name
    folder.mkdir()
    torch.multiprocessing.spawn(train, (free_port(), str(folder), flags), nprocs=GPUS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(GPUS)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Losses and norms of T = 1 x D = 4 by precision."""
    folder = tmp_path_factory.mktemp("plain")
    return {precision: results_of(folder, precision, flags)[0] for precision, flags in PRECISIONS.items()}


@pytest.mark.skipif(torch.cuda.device_count() < GPUS, reason=f"needs {GPUS} GPUs")
@pytest.mark.parametrize(
    ("precision", "flags", "tolerance"),
    [
        ("fp32", {}, 2e-3),
        ("fp32", {"sequence_parallel": True, "deepspeed_config": "ds_configs/zero3.json"}, 2e-3),
        ("amp_bf16", {"sequence_parallel": True}, 3e-2),
    ],
    ids=["fp32", "fp32-sequence-zero3", "amp_bf16-sequence"],
)
def test_twenty_steps_of_vit_l_14_follow_those_without_tensor_parallelism(tmp_path, plain, precision, flags, tolerance):
    results = results_of(tmp_path, "split", PRECISIONS[precision] | {"tensor_parallel_size": 2} | flags)
    losses, norms, _ = results[0]
    expected_losses, expected_norms, _ = plain[precision]
    print(f"losses {losses}\nexpected {expected_losses}\nnorms {norms}\nexpected {expected_norms}")
    assert losses == pytest.approx(expected_losses, rel=tolerance)
    assert norms[:5] == pytest.approx(expected_norms[:5], rel=5 * tolerance)
    assert losses[-1] < losses[0] - 0.05
    for copy in (0, 2):  # what is not split stays equal to the bit within a tensor-parallel group
        assert results[copy][2] == results[copy + 1][2]
