"""Rows between tensor-parallel ranks, and products over them, equal what one process computes from all rows."""

import math
import os

import pytest
import torch
import torch.distributed as dist

from tests.lib.ranks import free_port, run_ranks

SIZES = (2, 3, 4)


def product_errors(rank, size, device="cpu", dtype=torch.float64, shape=(3, 5), width=7, features=11, repeats=1):
    """Each operator's largest deviation, relative to the largest element, from the dense product in float64."""
    from megatron_patches import products

    device = torch.device(device, rank) if device == "cuda" else torch.device(device)
    name, worst = dist.group.WORLD.group_name, {}
    for repeat in range(repeats):
        generator = torch.Generator(device).manual_seed(repeat)
        rows = torch.randn(size, *shape, width, generator=generator, device=device, dtype=dtype)
        inside = (size, size * shape[0], *shape[1:], features)
        parts = torch.randn(inside, generator=generator, device=device, dtype=dtype)
        weights = torch.randn(size, features, width, generator=generator, device=device, dtype=dtype)
        bias = torch.randn(features, generator=generator, device=device, dtype=dtype)
        if device.type == "cuda":
            torch.cuda._sleep((10_000_000, 0)[(rank + repeat) % 2])  # one GPU is late, then the other
        got = {
            "gather": products.gather_multiply(rows[rank], weights[rank], bias, size, name),
            "scatter": products.multiply_scatter(parts[rank], weights[rank].T.contiguous(), size, name),
            "gather both": products.gather_multiply_both(rows[rank], parts[rank], weights[rank].T, size, name),
            "scatter both": products.multiply_scatter_both(parts[rank], rows[rank], weights[rank], size, name),
        }
        r, p, w = rows.flatten(0, 1).double(), parts.double(), weights.double()
        summed = sum(part @ weight for part, weight in zip(p, w)).chunk(size)[rank]
        want = {
            "gather": r @ w[rank].T + bias.double(),
            "scatter": summed,
            "gather both": (r @ w[rank].T, r.flatten(0, -2).T @ p[rank].flatten(0, -2)),
            "scatter both": (summed, p[rank].flatten(0, -2).T @ r.flatten(0, -2)),
        }
        for what in want:
            pairs = zip(*([x] if isinstance(x, torch.Tensor) else x for x in (got[what], want[what])))
            errors = [float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs]
            assert all(map(math.isfinite, errors)), (what, errors)
            worst[what] = max(*errors, worst.get(what, 0))
    return worst


@pytest.mark.parametrize("size", SIZES)
def test_products_over_travelling_rows_equal_the_dense_ones(size):
    for errors in run_ranks(product_errors, size):
        assert len(errors) == 4 and max(errors.values()) < 1e-12


def what_arrives(rank, size):
    from megatron_patches.exchange import exchange_of

    exchange = exchange_of(dist.group.WORLD.group_name, torch.device("cpu"))
    swaps = [(step, exchange.swap(torch.full((3, 2), 10.0 * rank + step), step)) for step in range(1, size)]
    rows = [(step, arrival.source, arrival.wait().unique().tolist()) for step, arrival in swaps]
    exchange.finish()
    return rows


@pytest.mark.parametrize("size", SIZES)
def test_a_swap_brings_the_rows_of_the_rank_so_many_places_before(size):
    for rank, rows in enumerate(run_ranks(what_arrives, size)):
        for step, source, values in rows:
            assert source == (rank - step) % size and values == [10.0 * source + step]


def without_shared_memory(rank, size):
    """What is taken, and said, where GPUs reach one another and still cannot share memory: here there are none."""
    from unittest import mock

    from infcl import peer_memory
    from megatron_patches import exchange

    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
        mock.patch.object(peer_memory, "reach_each_other", return_value=True),
        mock.patch.object(exchange, "_log") as log,
    ):
        taken = exchange.exchange_of(dist.group.WORLD.group_name, torch.device("cuda", rank))
    return type(taken).__name__, log.warning.call_count


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can share its memory")
def test_where_memory_cannot_be_shared_rows_are_sent_and_the_run_says_so():
    assert run_ranks(without_shared_memory, 2) == [("SendReceive", 1)] * 2


def where_one_rank_fails(rank, size, failing, part, largest):
    """(the exchange taken, warnings, the error of a larger swap) where `part` fails on one rank; CUDA's are stand-ins.

    largest: bytes from which on it fails.
    """
    from types import SimpleNamespace
    from unittest import mock

    import torch.distributed._symmetric_memory as symmetric_memory

    from infcl import peer_memory
    from megatron_patches import exchange

    def failing_at(name, result):
        def call(amount=0, *_, **__):
            if name == part and rank == failing and getattr(amount, "nbytes", amount) >= largest:
                raise OSError("libcuda.so.1 is missing") if name == "driver" else torch.OutOfMemoryError("CUDA is full")
            return result(amount)

        return call

    wait = failing_at("flags", lambda value: None)
    driver = SimpleNamespace(write_flag=mock.Mock(), wait_flag=lambda stream, address, value: wait(value))
    with (
        mock.patch.multiple(torch.cuda, Stream=mock.Mock(), Event=mock.Mock(), synchronize=mock.Mock()),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
        mock.patch.object(peer_memory, "reach_each_other", return_value=True),
        mock.patch.object(peer_memory, "Driver", failing_at("driver", lambda _: driver)),
        mock.patch.object(symmetric_memory, "empty", failing_at("empty", lambda n: torch.ones(n, dtype=torch.uint8))),
        mock.patch.object(
            symmetric_memory,
            "rendezvous",
            failing_at("rendezvous", lambda memory: SimpleNamespace(buffer_ptrs=[memory.data_ptr()] * size)),
        ),
        mock.patch.object(exchange, "_log") as log,
    ):
        taken = exchange.exchange_of(dist.new_group().group_name, torch.device("cuda", rank))
        error = None
        if isinstance(taken, exchange.PeerMemory):
            kept = taken.slot_bytes
            try:
                taken._allocate(100_000)
            except RuntimeError as failure:
                error = str(failure)
            assert taken.slot_bytes == (100_096 if error is None else kept)
            assert len(taken._memory) == taken._flag(taken.slots) and not taken._memory[taken._flag(0) :].any()
    return type(taken).__name__, [call.args[1] for call in log.warning.call_args_list], error


@pytest.mark.parametrize("part", ["driver", "empty", "rendezvous", "flags"])
@pytest.mark.parametrize("failing", [0, 2])
def test_memory_that_one_rank_cannot_share_sends_the_rows_of_all_and_all_say_why(part, failing):
    for taken, warnings, _ in run_ranks(where_one_rank_fails, 3, failing, part, 0):
        assert taken == "SendReceive" and len(warnings) == 1
        assert f"rank {failing} of 3: " in warnings[0] and ("missing" in warnings[0] or "is full" in warnings[0])


@pytest.mark.parametrize("part", ["empty", "rendezvous", "neither"])
def test_larger_slots_that_one_rank_cannot_share_fail_on_all(part):
    for taken, warnings, error in run_ranks(where_one_rank_fails, 3, 1, part, 100_000):
        assert taken == "PeerMemory" and not warnings
        assert error == (None if part == "neither" else "rank 1 of 3: OutOfMemoryError: CUDA is full")


def while_captured(rank, size):
    """What is taken before, while and after a CUDA graph is captured; of PeerMemory a stand-in."""
    from unittest import mock

    from infcl import peer_memory
    from megatron_patches import exchange

    name, taken = dist.new_group().group_name, []
    with (
        mock.patch.object(peer_memory, "reach_each_other", return_value=True),
        mock.patch.object(exchange, "PeerMemory", lambda *_: "copies"),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", side_effect=[False, True, True, False]),
    ):
        for _ in range(4):
            taken.append(exchange.exchange_of(name, torch.device("cuda", rank)))
    return [one if isinstance(one, str) else type(one).__name__ for one in taken]


def test_rows_that_a_cuda_graph_captures_go_by_sends():
    """Flags have the numbers of swaps, which a graph would write and wait for again."""
    expected = ["copies", "SendReceive", "SendReceive", "copies"]
    assert run_ranks(while_captured, 2) == [expected] * 2


def test_a_group_has_its_own_exchange_though_one_before_had_its_name():
    from megatron_patches.exchange import exchange_of

    names, cpu = [], torch.device("cpu")
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group = dist.new_group([0])
        exchange = exchange_of(group.group_name, cpu)
        assert exchange.group is group and exchange_of(group.group_name, cpu) is exchange
        names.append(group.group_name)
        dist.destroy_process_group()
    assert names[0] == names[1]


SHAPES = (  # leading dimensions, width, features: of more bytes and of fewer, in turn
    ((3, 5), 7, 11),
    ((16, 257), 1024, 512),
    ((1, 33), 40, 24),
    ((32, 257), 1024, 1536),
)


def on_gpus(rank, size, port):
    from megatron_patches.exchange import PeerMemory, exchange_of

    torch.cuda.set_device(rank)
    torch.backends.cuda.matmul.allow_tf32 = False
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("nccl", rank=rank, world_size=size, device_id=torch.device("cuda", rank))
    assert isinstance(exchange_of(dist.group.WORLD.group_name, torch.device("cuda", rank)), PeerMemory)
    for shape, width, features in SHAPES:
        for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            given = {"shape": shape, "width": width, "features": features, "repeats": 12}
            errors = product_errors(rank, size, "cuda", dtype, **given)
            assert max(errors.values()) < bound, (rank, shape, dtype, errors)
    dist.barrier()
    os._exit(0)


@pytest.mark.multigpu
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "size",
    [
        pytest.param(n, marks=pytest.mark.skipif(torch.cuda.device_count() < n, reason=f"needs {n} GPUs"))
        for n in (2, 4)
    ],
)
def test_products_over_peers_memory_equal_the_dense_ones_whoever_is_late(size):
    torch.multiprocessing.spawn(on_gpus, (size, free_port()), nprocs=size)
