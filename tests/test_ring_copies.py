"""Blocks and results that go round by copy engines arrive whole, whoever is late.

The real RingExchange and PeerCopies issue their passes, for every rank, to simulated streams.
"""

import itertools
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from infcl import peer_memory
from infcl.loss import ring as ring_module
from infcl.loss.copies import PeerCopies
from infcl.loss.links import Link, Links
from infcl.loss.ring import RingExchange
from tests.gpu_streams import Gpus

GROUP = "the group"  # nothing here asks it for anything


def copies_of_ranks(gpus: Gpus, first: int) -> list[PeerCopies]:
    """One for each rank, which have posted `first` messages."""
    made = []
    for rank in range(gpus.size):
        gpus.rank = rank
        made.append(PeerCopies(GROUP, torch.device("cpu")))
        made[-1]._posted = first
        made[-1]._flags.memory.view(torch.int32).fill_(first - 2**32 if first >= 2**31 else first)
    return made


class Shared:
    """peer_memory.allocate for all ranks at once: what the first asks for, the others find."""

    def __init__(self, gpus: Gpus):
        self.gpus, self.asked = gpus, [0] * gpus.size
        self.rooms: list[list[torch.Tensor]] = []

    def __call__(self, num_bytes: int, flags: slice, group: str, device: torch.device):
        which = self.asked[self.gpus.rank]
        self.asked[self.gpus.rank] += 1
        if which == len(self.rooms):
            self.rooms.append([torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(self.gpus.size)])
        memory = self.rooms[which]
        assert len(memory[0]) == num_bytes, "ranks share memory of one size"
        return memory[self.gpus.rank], [one.data_ptr() for one in memory]


def links_of(rank: int, size: int, reach: int) -> Links:
    def away(distance: int) -> Link:
        return Link(GROUP, (rank + distance) % size, (rank - distance) % size)

    return Links(size, away(1), away(-reach), away(size))


def misread(size: int, reach: int, passes: list[tuple[int, bool]], seed: int, first: int = 0) -> list:
    """Passes of so many travelling tensors, with or without a result -> [(read, expected)] where these differ."""
    gpus, wrong = Gpus(size, seed), []
    kept = []  # until streams have done with it: a GPU's allocator knows the order of a stream

    def check(read: torch.Tensor, expected: float) -> None:
        gpus.compute(lambda: bool((read == expected).all()) or wrong.append((read.tolist(), expected)))

    def later(tensor: torch.Tensor) -> torch.Tensor:
        copied = torch.empty_like(tensor)
        gpus.compute(lambda: copied.copy_(tensor))
        return copied

    def add(travelling: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        gpus.compute(lambda: travelling.add_(part))
        return travelling

    with ExitStack() as stack:
        for patch in (
            *gpus.patched(),
            mock.patch.object(peer_memory, "allocate", Shared(gpus)),
            mock.patch.object(dist, "get_group_rank", lambda group, rank: rank),
            mock.patch.object(dist, "all_reduce"),
            mock.patch.object(torch.Tensor, "clone", later),
            mock.patch.object(ring_module, "copies_of", lambda *_: copies[gpus.rank]),
            mock.patch.object(ring_module, "links_of", lambda *_, **__: links_of(gpus.rank, size, reach)),
        ):
            stack.enter_context(patch)
        copies = copies_of_ranks(gpus, first)
        for rank in range(size):
            gpus.rank = rank
            own = [torch.zeros(length) for length in (30, 5)]
            kept.append(own)
            results = []
            for number, (travelling, result) in enumerate(passes):
                ring = RingExchange(GROUP, reach=reach)
                for which, tensor in enumerate(own):  # written over as soon as the last pass has ended
                    gpus.compute(lambda to=tensor, what=100 * number + 10 * which + rank: to.fill_(what))
                for hop, blocks in ring.blocks(*own[:travelling]):
                    for which, block in enumerate(blocks):
                        check(block, 100 * number + 10 * which + (rank - hop) % size)
                    if result:
                        kept.append(part := torch.empty(40))
                        gpus.compute(lambda to=part, what=8.0**rank: to.fill_(what))
                        ring.carry("result", hop, part, add)
                if result:
                    results.append(ring.home("result", add))
                assert not ring._copied and not ring._pending
            for result in results:  # kept while later passes use the same buffers, for other blocks
                check(result, sum(8.0 ** ((rank + hop) % size) for hop in range(reach + 1)))
        gpus.run()
    return wrong


PASSES = list(itertools.product((1, 2), (False, True)))


@pytest.mark.parametrize("size, reach", [(2, 1), (3, 2), (4, 3), (3, 1), (4, 2)])
def test_blocks_and_results_arrive_whole_whoever_is_late(size, reach):
    for seed, passes in enumerate(itertools.product(PASSES, repeat=2)):
        assert misread(size, reach, list(passes), seed) == [], passes


def test_numbers_of_messages_may_begin_again():
    for seed in range(10):
        assert misread(3, 2, [(2, True)] * 2, seed, first=2**32 - 7) == []


def test_memory_is_kept_and_used_again_up_to_the_limit():
    gpus = Gpus(1, 0)
    with ExitStack() as stack:
        for patch in (*gpus.patched(), mock.patch.object(peer_memory, "allocate", Shared(gpus))):
            stack.enter_context(patch)
        copies = PeerCopies(GROUP, torch.device("cpu"))
        copies.limit, block, gradient = copies.kept_bytes + 6144, torch.empty(500), torch.empty(100, 7)
        for _ in range(3):
            copies.begin()
            blocks, none = copies.buffers(block), copies.buffers(gradient)
            smaller = copies.buffers(block[:250])
            assert none is None and copies.kept_bytes == copies.limit, "4096 bytes for blocks, 2048 for smaller ones"
            spans = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in (*blocks, *smaller))
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        copies.begin()
        assert copies.buffers(gradient) is None, "no piece that is kept is large enough"
