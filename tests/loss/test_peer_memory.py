"""Memory that GPUs share is taken where all of them can."""

import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from infcl import peer_memory
from infcl.loss import copies
from infcl.peer_memory import RankFailed
from tests.lib.ranks import run_ranks

MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
CUDA0 = torch.device("cuda", 0)


def reached(rank, size, gpus, environment):
    """gpus: which one each rank computes on. All ranks see all, each its own as number 0; or rank 1 its own alone."""
    seen = [gpus[rank], *sorted({*gpus, 7} - {gpus[rank]})]
    if rank == 1 and "CUDA_VISIBLE_DEVICES" in environment:
        del seen[1:]
    with (
        mock.patch.object(torch.cuda, "device_count", return_value=len(seen)),
        mock.patch.object(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=seen[index])),
        mock.patch.object(torch.cuda, "can_device_access_peer", lambda own, other: seen[other] != 5),
        mock.patch.object(peer_memory, "_in_order", lambda own, other: seen[other] != 6),  # 6 is behind PCIe
        mock.patch.dict(os.environ, environment if rank == 1 else {}),
    ):
        return peer_memory.reach_each_other(dist.group.WORLD, CUDA0)


@pytest.mark.parametrize(
    "gpus, environment, able",
    [
        ((0, 1, 2), {}, True),
        ((0, 5, 2), {}, False),
        ((0, 1, 6), {}, False),
        ((0, 1, 1), {}, False),
        ((0, 1, 2), {"CUDA_VISIBLE_DEVICES": "1"}, False),
        ((0, 1, 2), {"NCCL_P2P_DISABLE": "0"}, True),
        ((0, 1, 2), {"NCCL_P2P_DISABLE": "1"}, False),
    ],
)
def test_all_ranks_agree_whether_every_gpu_reaches_every_other(gpus, environment, able):
    assert run_ranks(reached, 3, gpus, environment) == [able] * 3


def allocated(rank, size, what):
    """(bytes, address of this rank) or why it failed; CUDA's part is a stand-in."""
    import torch.distributed._symmetric_memory as symmetric_memory

    calls = []

    def empty(num_bytes, **_):
        calls.append(num_bytes)
        if what == "full until the cache is emptied" and rank == 1 and len(calls) == 1:
            raise RuntimeError("CUDA driver error: out of memory")
        return torch.ones(num_bytes, dtype=torch.uint8)

    def rendezvous(memory, group):
        assert os.environ[MULTICAST] == "1"
        shift = 512 if what == "inside a pool" and rank == 1 else 0
        return SimpleNamespace(buffer_ptrs=[memory.data_ptr() - shift] * size)

    environment = {"TMPDIR": "/" + 95 * "t"} if what == "far away" and rank == 1 else {}
    with (
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(symmetric_memory, "empty", empty),
        mock.patch.object(symmetric_memory, "rendezvous", rendezvous),
        mock.patch.dict(os.environ, environment),
        mock.patch.object(peer_memory, "_rendezvous", 3 * rank if what == "shared before" else 0),
    ):
        try:
            memory, addresses = peer_memory.allocate(1024, slice(512, None), dist.group.WORLD, CUDA0)
        except RankFailed as error:
            return str(error)
        assert MULTICAST not in os.environ
        assert addresses[rank] == memory.data_ptr() and peer_memory._rendezvous == 1
        return memory.tolist() == [1] * 512 + [0] * 512


@pytest.mark.parametrize(
    "what, expected",
    [
        ("nothing", True),
        ("full until the cache is emptied", True),
        ("inside a pool", "rank 1 of 2: RuntimeError: torch shares memory that lies elsewhere than its tensor"),
        ("far away", "rank 1 of 2: RuntimeError: the path of a socket, /ttt"),
        ("shared before", "ranks 0.. have shared memory [0, 3] times before, with other groups too"),
    ],
)
def test_memory_that_ranks_cannot_find_of_each_other_is_refused_on_all(what, expected):
    for said in run_ranks(allocated, 2, what):
        assert said is expected if expected is True else said.startswith(expected)


def test_a_ring_that_a_cuda_graph_captures_goes_by_sends():
    """Flags have the numbers of messages, which a graph would write and wait for again."""
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
        mock.patch.object(copies, "_copies_of") as asked,
    ):
        assert copies.copies_of("the group", CUDA0) is None
    asked.assert_not_called()


@pytest.mark.parametrize("config, asked", [("cuda:nccl", 1), ("cpu:gloo,cuda:nccl", 1), ("cpu:gloo,cuda:gloo", 0)])
def test_messages_of_nccl_go_by_copies_whatever_the_group_has_for_cpus(config, asked):
    with (
        mock.patch.object(dist, "get_backend_config", return_value=config),
        mock.patch.object(torch.cuda, "device"),
        mock.patch.object(peer_memory, "reach_each_other", return_value=False) as reach,
    ):
        assert copies._copies_of.__wrapped__("the group", CUDA0) is None
    assert reach.call_count == asked
