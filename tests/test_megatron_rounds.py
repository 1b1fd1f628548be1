"""Rows that travel between GPUs arrive whole, and no others fall on them before they are read, whoever is late.

The real PeerMemory issues its swaps, for every rank, to streams that are simulated: queues, one of which, by chance,
does its next operation. Copies move memory of this process, half of the rows at a time.
"""

import ctypes
import itertools
import random
from contextlib import ExitStack
from unittest import mock

import pytest
import torch

from megatron_patches import exchange
from megatron_patches.exchange import ROUND, PeerMemory

WIDTH = 6  # elements of a swap


class Gpus:
    """The streams of all ranks, and what PeerMemory asks of the driver and of torch for the rank that issues now."""

    def __init__(self, size: int, seed: int):
        self.chance, self.size, self.rank = random.Random(seed), size, 0
        self.queues: list[list] = []
        self.computing = [Stream(self) for _ in range(size)]

    def patched(self) -> list:
        return [
            mock.patch.object(torch.cuda, "Stream", lambda device: Stream(self)),
            mock.patch.object(torch.cuda, "Event", lambda: Event(self)),
            mock.patch.object(torch.cuda, "current_stream", lambda: self.computing[self.rank]),
            mock.patch.object(torch.distributed, "get_rank", lambda group: self.rank),
            mock.patch.object(torch.distributed, "get_world_size", lambda group: self.size),
            mock.patch.object(exchange, "_driver", lambda: self),
            mock.patch.object(PeerMemory, "_allocate", lambda one, slot_bytes: None),  # all at once: exchanges_of
        ]

    def issue(self, stream: int, operation) -> int:
        """operation: is asked again later as long as it returns False. -> 0, as from the driver."""
        self.queues[stream].append(operation)
        return 0

    def cuMemcpyDtoDAsync_v2(self, target, source, size, stream):
        half = size // 2
        self.issue(stream, lambda: ctypes.memmove(target, source, half))
        return self.issue(stream, lambda: ctypes.memmove(target + half, source + half, half))

    def cuStreamWriteValue32_v2(self, stream, address, value, _):
        return self.issue(stream, lambda: ctypes.memmove(address, value.to_bytes(4, "little"), 4))

    def cuStreamWaitValue32_v2(self, stream, address, value, _):
        there = ctypes.c_uint32.from_address(address)
        return self.issue(stream, lambda: ctypes.c_int32(there.value - value).value >= 0)

    def run(self) -> None:
        """All that was issued. Some streams go far while others stand still."""
        order = list(range(len(self.queues)))
        while any(self.queues):
            if self.chance.random() < 0.1:
                self.chance.shuffle(order)
            able = (queue for queue in map(self.queues.__getitem__, order) if queue and queue[0]() is not False)
            del next(able)[0]  # StopIteration: every stream waits


class Stream:
    def __init__(self, gpus: Gpus):
        self.gpus, self.cuda_stream = gpus, len(gpus.queues)
        gpus.queues.append([])

    def wait_event(self, event: "Event") -> None:
        reached = event.reached
        self.gpus.issue(self.cuda_stream, lambda: bool(reached))


class Event:
    def __init__(self, gpus: Gpus):
        self.gpus = gpus

    def record(self, stream: Stream | None = None) -> None:
        self.reached = reached = []
        self.gpus.issue((stream or torch.cuda.current_stream()).cuda_stream, lambda: reached.append(True))


def exchanges_of(gpus: Gpus, first: int) -> list[PeerMemory]:
    """One for each rank, which have swapped `first` times."""
    made = []
    for rank in range(gpus.size):
        gpus.rank = rank
        one = PeerMemory(None, torch.device("cpu"))
        one.slot_bytes, one.swaps, one.arrivals, one._views = exchange._ALIGNED, first, first, {}
        one._memory = torch.zeros(one._flag(one.slots), dtype=torch.uint8)
        one._memory[one._flag(0) :].view(torch.int32).fill_(first - 2**32 if first >= 2**31 else first)
        made.append(one)
    for one in made:
        one._addresses = [other._memory.data_ptr() for other in made]
    return made


def misread(size: int, rounds: tuple[int, ...], seed: int, first: int) -> list:
    """Swaps for a step in each round -> [(what arrived, what was sent)] where these differ."""
    gpus, wrong = Gpus(size, seed), []
    with ExitStack() as stack:
        for patch in gpus.patched():
            stack.enter_context(patch)
        exchanges = exchanges_of(gpus, first)
        sent = torch.zeros(size, ROUND, size, WIDTH)  # each rank's is written over in every round
        for rank, (one, own) in enumerate(zip(exchanges, sent)):
            gpus.rank = rank
            compute = gpus.computing[rank].cuda_stream
            for number, swaps in enumerate(rounds):
                arrivals = []
                for which, step in itertools.product(range(swaps), range(1, size)):
                    content = 1000 * number + 100 * which + 10 * step  # + rank
                    gpus.issue(compute, lambda to=own[which, step], what=content + rank: to.fill_(what))
                    arrivals.append((content, one.swap(own[which, step], step)))
                for content, arrival in arrivals:
                    pair = arrival.wait(), torch.full((WIDTH,), float(content + arrival.source))
                    gpus.issue(
                        compute,
                        lambda pair=pair: None if torch.equal(*pair) else wrong.append([x.tolist() for x in pair]),
                    )
                one.finish()
        gpus.run()
    return wrong


@pytest.mark.parametrize("size", (2, 3, 4))
@pytest.mark.parametrize("first", (0, 2**32 - 7))
def test_no_rows_fall_on_others_before_these_are_read(size, first):
    """In rounds of one and two swaps a step, in any order; also where the flags' numbers begin again."""
    for seed, rounds in enumerate(itertools.product(range(1, ROUND + 1), repeat=5)):
        assert misread(size, rounds, seed, first) == [], rounds
