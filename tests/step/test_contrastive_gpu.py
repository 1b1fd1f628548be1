"""contrastive_step under DistributedDataParallel over NCCL equals one process that encodes all ranks' micro-batches.

On one GPU: INFCL_RANKS_PER_GPU=2 pytest -m multigpu tests/step/test_contrastive_gpu.py
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from infcl import Encoders, contrastive_step, inf_cl_loss, split_batch
from tests.lib import gpus
from tests.lib.ranks import free_port
from tests.lib.step_oracle import worst_error

pytestmark = pytest.mark.multigpu

STEPS, ROWS, SIZE, DEVICE = 3, 40, 16, "cuda"  # micro-batches of 16, 16 and 8 rows


def make_model() -> Encoders:
    torch.manual_seed(0)
    encoders = (nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 32)) for _ in range(2))
    return Encoders(*encoders, logit_scale=10.0).to(DEVICE)


def micro_batches(step: int, rank: int) -> list:
    """Those of a rank, whose random numbers start again: dropout draws the same in one process."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    sides = tuple(torch.randn(ROWS, 24, generator=generator).to(DEVICE) for _ in range(2))
    torch.manual_seed(10 * step + rank)
    return split_batch(sides, SIZE)


def train(rank: int, world_size: int, port: int, folder: str) -> None:
    options = {"rank": rank, "world_size": world_size, "device_id": gpus.take(rank)}
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", **options)
    model = nn.parallel.DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        value = contrastive_step(model, micro_batches(step, rank), partial(inf_cl_loss, group=dist.group.WORLD))
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(value)
        losses.append(float(value) / world_size)
    torch.save((losses, model.module.state_dict()), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def in_one_process(world_size: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, losses = make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        outputs = [model(*each) for rank in range(world_size) for each in micro_batches(step, rank)]
        queries, documents = (torch.cat(side) for side in list(zip(*outputs))[:2])
        logits = (outputs[0][2] * queries @ documents.T).double()
        labels = torch.arange(len(logits), device=DEVICE)
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def test_three_steps_over_nccl_equal_those_of_one_process(tmp_path):
    world_size = gpus.num_ranks()
    if world_size < 2:
        pytest.skip("needs two GPUs, or INFCL_RANKS_PER_GPU=2")
    torch.multiprocessing.spawn(train, (world_size, free_port(), str(tmp_path)), nprocs=world_size)
    expected_losses, expected = in_one_process(world_size)
    for rank in range(world_size):
        losses, state = torch.load(tmp_path / f"{rank}.pt", map_location="cpu")
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        assert worst_error(state, {name: value.detach().cpu() for name, value in expected.items()}) < 1e-5
