"""Rows on their way between the ranks of a tensor-parallel group while these multiply.

A swap sends rows to one rank and brings another's: every rank names the same step, sends to the rank that many places
after it and receives from the one before. Two ways, one interface:

    PeerMemory    GPUs of one host: copy engines write into the other GPU's memory, so that products keep every
                  multiprocessor, which collectives of NCCL would share with them
    SendReceive   any process group: what its backend sends and receives

Swaps come in rounds: one or two for each step 1 .. T - 1, the same on all ranks, all waited for before the round ends.
Each rank has slots of peer-visible memory for two rounds, used in turn, and behind them a flag for each slot, with
the number of the swap whose rows lie there (infcl/peer_memory: no part of it is a kernel). That a slot may be written
over needs no flag: what rank A sends B in round k + 2 falls on rows of round k, or older ones. A has had B's rows of
round k + 1 by then, which B sent when it had done with round k. So a rank issues all its rounds to one stream.
"""

import functools
import logging
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed as dist

from infcl import gpu_watch, peer_memory
from infcl.peer_memory import ALIGNED

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

ROUND = 2  # swaps for a step in a round, at most
_log = logging.getLogger(__name__)


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
    """The group's one exchange, peer to peer where its GPUs can. Collective the first time.

    By send and receive while a CUDA graph is captured, too (peer_memory.may_wait).
    """
    # by the group: after destroy_process_group, torch gives another one the same name
    group = dist.distributed_c10d._resolve_process_group(cast("GroupName", group_name))
    return _by_copies(group, device) if peer_memory.may_wait(device) else _by_messages(group)


@functools.cache
def _by_copies(group: dist.ProcessGroup, device: torch.device) -> Exchange:
    exchange, problem = peer_memory.on_peers(group, device, lambda: PeerMemory(group, device))
    if exchange is not None:
        return exchange
    _log.warning("rows travel slowly, by send and receive, since GPUs cannot share memory here: %s", problem)
    return _by_messages(group)


@functools.cache
def _by_messages(group: dist.ProcessGroup) -> Exchange:
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
        self.stream, self._driver = peer_memory.on_all(group, lambda: (torch.cuda.Stream(device), peer_memory.Driver()))
        self._raw = self.stream.cuda_stream
        self._ready, self._sent = torch.cuda.Event(), torch.cuda.Event()
        self._watch = gpu_watch.Watch(group, device, self._missing)
        self._allocate(ALIGNED)  # what cannot be shared, and flags that the driver refuses, are known from the start

    def swap(self, rows: torch.Tensor, step: int) -> Arrival:
        if rows.nbytes > self.slot_bytes:
            self._allocate(rows.nbytes)
        slot = self.swaps % self.slots
        self.swaps += 1
        target = self._addresses[(self.rank + step) % self.size]
        self._ready.record()
        self.stream.wait_event(self._ready)
        self._driver.copy(self._raw, target + slot * self.slot_bytes, rows.data_ptr(), rows.nbytes)
        self._driver.write_flag(self._raw, target + self._flag(slot), self.swaps)
        return _Written(self, (self.rank - step) % self.size, self.swaps, self._rows(slot, rows.shape, rows.dtype))

    def finish(self) -> None:
        self._sent.record(self.stream)
        current = torch.cuda.current_stream()
        current.wait_event(self._sent)
        self._watch.mark_here(current)

    def _missing(self) -> str:
        return (
            f"rank {dist.get_rank()} waits for rows of another rank of its tensor-parallel group, "
            f"{dist.get_process_group_ranks(self.group)}: one ended, hangs, or waits for one that does."
        )

    def _allocate(self, slot_bytes: int) -> None:
        """Larger slots, on all ranks at once."""
        if self.arrivals < self.swaps:
            raise RuntimeError(
                f"{slot_bytes} bytes do not fit the slots of {self.slot_bytes} that are still waited for"
            )
        slot_bytes = -(-slot_bytes // ALIGNED) * ALIGNED
        flags, size = self.slots * slot_bytes, self.slots * (slot_bytes + ALIGNED)
        memory, addresses = peer_memory.allocate(size, slice(flags, None), self.group, self.device)

        def try_flags() -> None:
            others = [address + flags for address in addresses]
            peer_memory.try_flags(self._driver, self._raw, others, others[self.rank])
            self.stream.synchronize()  # a zero that comes late would fall on the first swap's flag

        peer_memory.on_all(self.group, try_flags)
        self._memory, self._addresses, self.slot_bytes = memory, addresses, slot_bytes
        self._views: dict[tuple, torch.Tensor] = {}
        self.swaps, self.arrivals = 0, 0

    def _flag(self, slot: int) -> int:
        """Its place behind the slots."""
        return self.slots * self.slot_bytes + slot * ALIGNED

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
        exchange._driver.wait_flag(stream, flag, self._number)
        exchange.arrivals += 1
        return self._rows
