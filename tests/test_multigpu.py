"""Over NCCL, one process per GPU: averaged losses and gradients equal the float64 ones; the host waits for no GPU."""

import json
import os

import pytest
import torch
import torch.distributed as dist

from infcl.loss.contrastive import LOSSES
from tests.loss_oracle import Case, averaged, evaluate, oracle, relative_error
from tests.ranks import free_port

pytestmark = pytest.mark.multigpu
WORKSPACE_BYTES = 2**24
CASES = [
    Case(name, 8 * rows, dim, 50.0, dtype=dtype, bias=-10.0, workspace_bytes=WORKSPACE_BYTES)
    for name in LOSSES
    for rows, dim, dtype in ((33, 40, torch.float32), (257, 768, torch.bfloat16))
]


RINGS = {
    "flat": {},
    "no overlap": {"ring_overlap": "off"},
    "nodes of 2": {"ring": "two-level", "ranks_per_node": 2},
    "nodes of 4": {"ring": "two-level", "ranks_per_node": 4},
}


def _evaluate_on_gpu(rank: int, world_size: int, port: int, folder: str, options: dict) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        device_id=torch.device("cuda", rank),
    )
    results = [evaluate(case, rank, world_size, device="cuda", **options) for case in CASES]
    torch.save([tuple(result) for result in results], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("ring", RINGS)
def test_losses_over_nccl_average_to_the_float64_loss(ring, tmp_path):
    world_size = min(torch.cuda.device_count(), 8)
    nodes_of = RINGS[ring].get("ranks_per_node", 1)
    if world_size % nodes_of or world_size == nodes_of:
        pytest.skip(f"{world_size} GPUs are not several nodes of {nodes_of}")
    arguments = world_size, free_port(), str(tmp_path), RINGS[ring]
    torch.multiprocessing.spawn(_evaluate_on_gpu, arguments, nprocs=world_size)
    per_rank = [torch.load(tmp_path / f"{rank}.pt") for rank in range(world_size)]
    for case, *results in zip(CASES, *per_rank):
        truth, result = oracle(case), averaged(results)
        exact = case.dtype == torch.float32
        tiled = case.name in ("inf_cl", "siglip")
        assert relative_error(result.loss, truth.loss) < (1e-5 if exact or tiled else 1e-2), case
        for i, field in enumerate(("d_images", "d_texts")):
            tolerance = 2e-5 if exact else 5e-3 if tiled else 5e-2
            assert relative_error(result[1 + i], truth[1 + i]) < tolerance, (case, field)
        assert relative_error(result.d_scale, truth.d_scale, floor=1e-2) < (1e-4 if exact else 1e-2), case


def _steps_without_waiting(rank: int, world_size: int, port: int, preset: str, last_backward: bool) -> None:
    from tests.test_step_gpu import steps_without_waiting

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    steps_without_waiting(preset, last_backward=last_backward)
    dist.destroy_process_group()


@pytest.mark.parametrize("overlap", [False, True])
def test_the_host_never_waits_for_a_gpu_between_the_first_encoding_and_the_last_backward(overlap, tmp_path):
    """Where reductions overlap the backward, DeepSpeed waits at the end of the last one."""
    preset = tmp_path / "preset.json"
    preset.write_text(json.dumps({"zero_optimization": {"stage": 1, "overlap_comm": overlap}}))
    torch.multiprocessing.spawn(_steps_without_waiting, (2, free_port(), str(preset), not overlap), nprocs=2)
