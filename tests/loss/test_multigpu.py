"""Over NCCL: averaged losses and gradients equal the float64 ones; the host waits for no GPU.

One process per GPU, or several on each (tests/lib/gpus.py).
"""

import json
import os
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from infcl import RingOptions, inf_cl_loss, kernels
from infcl.loss.contrastive import LOSSES
from infcl.loss.links import second_group
from tests.lib import gpus
from tests.lib.loss_oracle import Case, averaged, evaluate, oracle, relative_error
from tests.lib.ranks import free_port

pytestmark = pytest.mark.multigpu
WORKSPACE_BYTES = 2**24
CASES = [
    Case(name, 8 * rows, dim, 50.0, dtype=dtype, bias=-10.0, workspace_bytes=WORKSPACE_BYTES)
    for name in LOSSES
    for rows, dim, dtype in ((33, 40, torch.float32), (257, 768, torch.bfloat16))
]
OTHERS = [
    Case("info_nce", 8 * 131, 72, 30.0, columns=8 * 300, positives="shared"),
    Case("info_nce", 8 * 140, 100, 30.0),
    Case("nt_xent", 8 * 131, 72, 30.0),
    *(Case(name, 8 * 131, 72, 30.0, "grid", bias=-5.0, margin=0.05) for name in ("inf_cl", "siglip", "info_nce")),
]
OTHERS = [case._replace(workspace_bytes=WORKSPACE_BYTES) for case in OTHERS]


RINGS = {
    "flat": {},
    "nodes of 2": {"ring": "two-level", "ranks_per_node": 2},
    "nodes of 4": {"ring": "two-level", "ranks_per_node": 4},
}


def _start(rank: int, world_size: int, port: int, **options) -> None:
    where = f"tcp://127.0.0.1:{port}"
    options |= {"rank": rank, "world_size": world_size, "device_id": gpus.take(rank)}
    dist.init_process_group("nccl", init_method=where, **options)


def _evaluate_on_gpu(rank: int, world_size: int, port: int, folder: str, options: dict) -> None:
    _start(rank, world_size, port)
    for _ in range(2):  # again with the memory that the ring keeps
        results = [evaluate(case, rank, world_size, device="cuda", **options) for case in CASES + OTHERS]
    torch.save([tuple(result) for result in results], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def _on_all_gpus(function, ring: str, folder) -> list:
    """What each rank saved; skips where there are too few GPUs for the nodes of this ring."""
    world_size = gpus.num_ranks()
    nodes_of = RINGS[ring].get("ranks_per_node", 1)
    if world_size % nodes_of or world_size == nodes_of:
        pytest.skip(f"{world_size} ranks are not several nodes of {nodes_of}")
    arguments = world_size, free_port(), str(folder), RINGS[ring]
    torch.multiprocessing.spawn(function, arguments, nprocs=world_size)
    return [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]


@pytest.mark.parametrize("ring", RINGS)
def test_losses_over_nccl_average_to_the_float64_loss(ring, tmp_path):
    per_rank = _on_all_gpus(_evaluate_on_gpu, ring, tmp_path)
    for case, *results in zip(CASES + OTHERS, *per_rank):
        reference, result = oracle(case, world_size=len(per_rank)), averaged(results)
        if case in OTHERS:
            for value, expected in zip(result[:4], reference):
                assert relative_error(value, expected, floor=0.1) < 5e-5, case
            continue
        exact = case.dtype == torch.float32
        tiled = case.name in ("inf_cl", "siglip")
        assert relative_error(result.loss, reference.loss) < (1e-5 if exact or tiled else 1e-2), case
        for i, field in enumerate(("d_images", "d_texts")):
            tolerance = 2e-5 if exact else 5e-3 if tiled else 5e-2
            assert relative_error(result[1 + i], reference[1 + i]) < tolerance, (case, field)
        assert relative_error(result.d_scale, reference.d_scale, floor=1e-2) < (1e-4 if exact else 1e-2), case


def _peaks(rank: int, world_size: int, port: int, folder: str, options: dict) -> None:
    """Bytes that a step takes at rising rows a rank: of torch's allocator."""
    _start(rank, world_size, port)
    peaks = []
    for rows in (ROWS[0], *ROWS):  # the first call lets the libraries take their own memory
        pair = [torch.randn(rows, DIM, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2)]
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        inf_cl_loss(
            *pair, 10.0, group=dist.group.WORLD, options=RingOptions(workspace_bytes=2 * WORKSPACE_BYTES, **options)
        ).backward()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    torch.save(peaks[1:], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


ROWS, DIM = (8192, 16384, 32768), 256


@pytest.mark.parametrize("ring", ["flat", "nodes of 2"])
def test_memory_over_ranks_is_the_workspace_plus_a_slope_in_the_rows_of_a_rank(ring, tmp_path):
    """The matrix of one pair of blocks would take 128 MiB, 512 MiB and 2 GiB in bf16."""
    for peaks in _on_all_gpus(_peaks, ring, tmp_path):
        for rows, peak in zip(ROWS, peaks):
            # float32: two gradients, one part under way, two buffers, one result; bf16: features, blocks, gradients
            assert peak < 2 * WORKSPACE_BYTES + 60 * rows * DIM + 2**25, (rows, peaks)
        assert peaks[2] - peaks[1] < 2.3 * (peaks[1] - peaks[0]) + 2**22, peaks
    assert kernels.WORKSPACE_BYTES <= 512 * 2**20


def _second_groups(rank: int, world_size: int, port: int) -> None:
    _start(rank, world_size, port)
    dist.new_group([0])  # PyTorch names groups by number; here rank 0 is in one more than the others
    second = second_group(dist.group.WORLD)
    beside = [torch.full((1024,), float(rank), device="cuda") for _ in range(2)]
    for group, message in zip((dist.group.WORLD, second), beside):
        dist.all_reduce(message, group=group)
    total = world_size * (world_size - 1) / 2
    assert all((message == total).all() for message in beside), (rank, beside)
    dist.destroy_process_group()


def test_a_ring_over_all_ranks_gets_its_second_communicator_whatever_other_groups_there_are():
    world_size = gpus.num_ranks()
    torch.multiprocessing.spawn(_second_groups, (world_size, free_port()), nprocs=world_size)


def _hang(rank: int, world_size: int, port: int, folder: str) -> None:
    sys.stderr = open(f"{folder}/{rank}", "w")
    _start(rank, world_size, port, timeout=timedelta(seconds=10))
    features = [torch.randn(257, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    for step in range(4):
        if (rank, step) == (1, 3):
            time.sleep(600)
        loss = inf_cl_loss(*features, 50.0, group=dist.group.WORLD, options=RingOptions(compare_ranks=step == 0))
        loss.backward()
        loss.item()


def test_a_rank_that_hangs_ends_the_others_by_the_time_out(tmp_path):
    context = torch.multiprocessing.get_context("spawn")
    arguments = 2, free_port(), str(tmp_path)
    ranks = [context.Process(target=_hang, args=(rank, *arguments)) for rank in range(2)]
    for process in ranks:
        process.start()
    ranks[0].join(300)  # after the time-out NCCL writes what it knows of it, which takes a while on a busy host
    exit_code = ranks[0].exitcode
    for process in ranks:
        process.kill()
    assert exit_code in (1, -6), (tmp_path / "0").read_text()  # -6: NCCL's watchdog aborts


def _steps_without_waiting(rank: int, world_size: int, port: int, preset: str, last_backward: bool) -> None:
    from tests.lib.gpu_steps import steps_without_waiting

    os.environ.update(gpus.environment(rank, world_size, port))
    steps_without_waiting(preset, last_backward=last_backward)
    dist.destroy_process_group()


@pytest.mark.parametrize("overlap", [False, True])
def test_the_host_never_waits_for_a_gpu_between_the_first_encoding_and_the_last_backward(overlap, tmp_path):
    """Where reductions overlap the backward, DeepSpeed waits at the end of the last one."""
    preset = tmp_path / "preset.json"
    preset.write_text(json.dumps({"zero_optimization": {"stage": 1, "overlap_comm": overlap}}))
    torch.multiprocessing.spawn(_steps_without_waiting, (2, free_port(), str(preset), not overlap), nprocs=2)
