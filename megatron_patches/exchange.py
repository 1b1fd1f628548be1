"""Rows on their way between the ranks of a tensor-parallel group while these multiply.

A swap sends rows to one rank and brings another's: every rank names the same step, sends to the rank that many places
after it and receives from the one before. Two ways, one interface:

    PeerMemory    GPUs of one host: copy engines write into the other GPU's memory, so that products keep every
                  multiprocessor, which collectives of NCCL would share with them
    SendReceive   any process group: what its backend sends and receives

Swaps come in rounds: one or two for each step 1 .. T - 1, the same on all ranks, all waited for before the round ends.
Each rank has slots of peer-visible memory for two rounds, used in turn, and behind them a flag for each slot, with
the number of the swap whose rows lie there. Streams write flags and wait for them without a kernel. That a slot may be
written over needs no flag: what rank A sends B in round k + 2 falls on rows of round k, or older ones. A has had B's
rows of round k + 1 by then, which B sent when it had done with round k. So a rank issues all its rounds to one stream.
"""

import ctypes
import functools
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

ROUND = 2  # swaps for a step in a round, at most
_ALIGNED = 256  # bytes: where slots begin, and flags
_log = logging.getLogger(__name__)
_BITS = 0xFFFFFFFF  # of a flag
_Result = TypeVar("_Result")


class Arrival(Protocol):
    """The rows of one swap, from rank `source` of the group."""

    source: int

    def wait(self) -> torch.Tensor:
        """The current stream waits, once. They are there until the next round."""


class Exchange(Protocol):
    """Swaps among the ranks of a group; `rank` is this one's place in it."""

    rank: int
    size: int

    def swap(self, rows: torch.Tensor, step: int) -> Arrival:
        """Send contiguous `rows` to rank + step; rank - step sends as many. They must not change before `finish`."""

    def finish(self) -> None:
        """Ends a round: what was sent may be written over or freed."""


def exchange_of(group_name: str, device: torch.device) -> Exchange:
    """The group's one exchange, peer to peer where its GPUs can. Collective the first time."""
    # by the group: after destroy_process_group, torch gives another one the same name
    return _exchange_of(dist.distributed_c10d._resolve_process_group(cast("GroupName", group_name)), device)


@functools.cache
def _exchange_of(group: dist.ProcessGroup, device: torch.device) -> Exchange:
    if device.type == "cuda":
        problem = "a rank does not see another's GPU, or cannot write into its memory"
        if _reach_each_other(group, device):
            try:
                return PeerMemory(group, device)
            except _RankFailed as error:  # containers may forbid what sharing memory needs
                problem = str(error)
        _log.warning("rows travel slowly, by send and receive, since GPUs cannot share memory here: %s", problem)
    return SendReceive(group)


class SendReceive:
    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def swap(self, rows: torch.Tensor, step: int) -> Arrival:
        target, source = (self.rank + step) % self.size, (self.rank - step) % self.size
        received = torch.empty_like(rows)
        operations = [
            dist.P2POp(dist.isend, rows, group=self.group, group_peer=target),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=source),
        ]
        return _Received(source, received, dist.batch_isend_irecv(operations))

    def finish(self) -> None:
        """Who waited for the arrivals has waited for what was sent with them."""


class _Received:
    def __init__(self, source: int, rows: torch.Tensor, works: list[dist.Work]):
        self.source, self._rows, self._works = source, rows, works

    def wait(self) -> torch.Tensor:
        for work in self._works:
            work.wait()
        return self._rows


class PeerMemory:
    """Addresses are what this process sees; the driver issues every part of a swap.

    Memory: 2 ROUND (T - 1) slots of the largest rows that were swapped so far.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.device, self.slots, self.slot_bytes = device, 2 * ROUND * (self.size - 1), 0
        self.swaps, self.arrivals = 0, 0
        self.stream, self._driver = _on_all(group, lambda: (torch.cuda.Stream(device), _driver()))
        self._raw = self.stream.cuda_stream
        self._ready, self._sent = torch.cuda.Event(), torch.cuda.Event()
        self._allocate(_ALIGNED)  # what cannot be shared is known from the start

    def swap(self, rows: torch.Tensor, step: int) -> Arrival:
        if rows.nbytes > self.slot_bytes:
            self._allocate(rows.nbytes)
        slot = self.swaps % self.slots
        self.swaps += 1
        target = self._addresses[(self.rank + step) % self.size]
        self._ready.record()
        self.stream.wait_event(self._ready)
        _check(
            self._driver.cuMemcpyDtoDAsync_v2(target + slot * self.slot_bytes, rows.data_ptr(), rows.nbytes, self._raw)
        )
        _check(self._driver.cuStreamWriteValue32_v2(self._raw, target + self._flag(slot), self.swaps & _BITS, 0))
        return _Written(self, (self.rank - step) % self.size, self.swaps, self._rows(slot, rows.shape, rows.dtype))

    def finish(self) -> None:
        self._sent.record(self.stream)
        torch.cuda.current_stream().wait_event(self._sent)

    def _allocate(self, slot_bytes: int) -> None:
        """Larger slots, on all ranks at once."""
        import torch.distributed._symmetric_memory as symmetric_memory

        if self.arrivals < self.swaps:
            raise RuntimeError(
                f"{slot_bytes} bytes do not fit the slots of {self.slot_bytes} that are still waited for"
            )
        slot_bytes = -(-slot_bytes // _ALIGNED) * _ALIGNED
        flags, size = self.slots * slot_bytes, self.slots * (slot_bytes + _ALIGNED)

        def allocate() -> torch.Tensor:
            torch.cuda.synchronize(self.device)
            return symmetric_memory.empty(size, dtype=torch.uint8, device=self.device)

        def share() -> list[int]:
            addresses = list(symmetric_memory.rendezvous(memory, self.group).buffer_ptrs)
            memory[flags:].zero_()
            torch.cuda.synchronize(self.device)
            return addresses

        memory = _on_all(self.group, allocate)
        self._addresses = _on_all(self.group, share)  # all have done with the slots so far, and zeroed their new flags
        self._memory, self.slot_bytes = memory, slot_bytes
        self._views: dict[tuple, torch.Tensor] = {}
        self.swaps, self.arrivals = 0, 0

    def _flag(self, slot: int) -> int:
        """Its place behind the slots."""
        return self.slots * self.slot_bytes + slot * _ALIGNED

    def _rows(self, slot: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """What lies in a slot of this rank."""
        view = self._views.get((slot, shape, dtype))
        if view is None:
            begin = slot * self.slot_bytes
            view = self._memory[begin : begin + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            self._views[slot, shape, dtype] = view
        return view


class _Written:
    def __init__(self, exchange: PeerMemory, source: int, number: int, rows: torch.Tensor):
        self.source, self._exchange, self._number, self._rows = source, exchange, number, rows

    def wait(self) -> torch.Tensor:
        exchange = self._exchange
        flag = exchange._addresses[exchange.rank] + exchange._flag((self._number - 1) % exchange.slots)
        stream = torch.cuda.current_stream().cuda_stream
        _check(exchange._driver.cuStreamWaitValue32_v2(stream, flag, self._number & _BITS, 0))
        exchange.arrivals += 1
        return self._rows


def _reach_each_other(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether every GPU of the group can write into every other's memory."""
    visible = range(torch.cuda.device_count())
    gpus = {f"{socket.gethostname()} {torch.cuda.get_device_properties(index).uuid}": index for index in visible}
    used = _gathered(next(name for name, index in gpus.items() if index == device.index), group)
    others = [gpus.get(name) for name in used if gpus.get(name) != device.index]
    able = all(other is not None and torch.cuda.can_device_access_peer(device.index, other) for other in others)
    return all(_gathered(able, group))


class _RankFailed(RuntimeError):
    """One rank of a group failed, and this is raised on all."""


def _on_all(group: dist.ProcessGroup, own: Callable[[], _Result]) -> _Result:
    """What `own` returns, once every rank's has; where one rank's fails, the others would wait for it: all raise."""
    result = problem = cause = None
    try:
        result = own()
    except (AttributeError, ImportError, OSError, RuntimeError) as error:  # a library or a symbol is missing; memory
        problem, cause = f"{type(error).__name__}: {error}", error
    for rank, told in enumerate(_gathered(problem, group)):
        if told is not None:
            raise _RankFailed(f"rank {rank} of {dist.get_world_size(group)}: {told}") from cause
    return cast(_Result, result)


def _gathered(value, group: dist.ProcessGroup) -> list:
    values: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _driver() -> ctypes.CDLL:
    """CUDA's driver. Its copies and flags need no kernel, so no product has to end before them.

    cuMemcpyDtoDAsync(target, source, bytes, stream): addresses of any GPU that this process reaches.
    cuStreamWriteValue32(stream, address, value, 0): after all that the stream did before, which who sees it sees too.
    cuStreamWaitValue32(stream, address, value, 0): until the 32 bits there are at least `value`, by their difference's
    sign.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    stream, address, value, size = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_size_t
    driver.cuMemcpyDtoDAsync_v2.argtypes = (address, address, size, stream)
    driver.cuStreamWaitValue32_v2.argtypes = (stream, address, value, value)
    driver.cuStreamWriteValue32_v2.argtypes = (stream, address, value, value)
    return driver


def _check(error: int) -> None:
    if error:
        raise RuntimeError(f"a copy to another GPU failed with CUDA's error {error}")
