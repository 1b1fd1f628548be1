"""Blocks and results that go round by copy engines arrive whole, whoever is late.

The real RingExchange and PeerCopies issue their passes, for every rank, to simulated streams.
"""

import itertools
from contextlib import ExitStack, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from infcl import peer_memory
from infcl.loss import ring as ring_module
from infcl.loss.copies import PeerCopies
from infcl.loss.links import Link, Links
from infcl.loss.ring import RingExchange
from infcl.peer_memory import ALIGNED
from tests.lib.gpu_streams import Gpus, Stream

GROUP = "the group"  # nothing here asks it for anything


def copies_of_ranks(gpus: Gpus, first: int) -> list[PeerCopies]:
    """One for each rank, which have posted `first` messages."""
    made = []
    for rank in range(gpus.size):
        gpus.rank = rank
        made.append(PeerCopies(GROUP, torch.device("cpu")))
    gpus.run()
    for copies in made:
        copies._posted = first
        copies._flags.memory.view(torch.int32).fill_(first - 2**32 if first >= 2**31 else first)
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


def misread(
    size: int,
    reach: int,
    passes: list[tuple[int, bool]],
    seed: int,
    first: int = 0,
    left: tuple[int, int] | None = None,
    streams: int = 1,
    begin: int = 0,
) -> list:
    """Passes of so many travelling tensors, with or without a result -> [(read, expected)] where these differ.

    left: which pass all ranks leave, as by an exception, and at which hop. streams: how many the passes of a rank have,
    in turn. begin: the hop of the first part of a result.
    """
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
            mock.patch.object(peer_memory, "allocate", shared := Shared(gpus)),
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
            of_streams = [[torch.zeros(length) for length in (30, 5)] for _ in range(streams)]
            kept.append(of_streams)
            computing = [gpus.computing[rank], *(Stream(gpus) for _ in range(1, streams))]
            results = []
            for number, (travelling, result) in enumerate(passes):
                gpus.computing[rank], own = computing[number % streams], of_streams[number % streams]
                ring = RingExchange(GROUP, reach=reach)
                for which, tensor in enumerate(own):  # written over as soon as the last pass has ended
                    gpus.compute(lambda to=tensor, what=100 * number + 10 * which + rank: to.fill_(what))
                for hop, blocks in ring.blocks(*own[:travelling]):
                    for which, block in enumerate(blocks):
                        check(block, 100 * number + 10 * which + (rank - hop) % size)
                    if result and hop >= begin:
                        kept.append(part := ring.part("result", torch.empty(40), torch.float32))
                        gpus.compute(lambda to=part, what=8.0**rank: to.fill_(what))
                        ring.carry("result", hop, part, add)
                    if (number, hop) == left:
                        break
                if left is not None and left[0] == number:
                    kept.append(ring)
                    continue
                if result:
                    results.append((gpus.computing[rank], ring.home("result", add)))
                assert not ring._copied and not ring._pending
            # kept while later passes use the same buffers, for other blocks
            for gpus.computing[rank], result in results:
                check(result, sum(8.0 ** ((rank + hop) % size) for hop in range(begin, reach + 1)))
            assert left is not None or not copies[rank]._under_way
        gpus.run()
    assert len(shared.rooms) <= 1 + 2 + 1, "flags, blocks and a result: each pass has the memory of the one before"
    whole, posted = len(passes) - (left is not None), sum(one._posted - first for one in copies)
    marks = copies[0]._watch.mark.call_count + copies[0]._watch.mark_here.call_count
    assert marks == posted + size * whole, "each message is watched, and the end of a pass"
    return wrong


PASSES = list(itertools.product((1, 2), (False, True)))


@pytest.mark.parametrize("size, reach", [(2, 1), (3, 2), (4, 3), (3, 1), (4, 2)])
def test_blocks_and_results_arrive_whole_whoever_is_late(size, reach):
    for seed, passes in enumerate(itertools.product(PASSES, repeat=2)):
        assert misread(size, reach, list(passes), seed) == [], passes


@pytest.mark.parametrize("size, reach", [(2, 1), (3, 1), (4, 2), (5, 2)])
def test_a_result_may_begin_at_a_later_hop(size, reach):
    """As nt_xent's, whose blocks go half round."""
    for seed in range(10):
        assert misread(size, reach, [(2, True), (1, True), (2, True)], seed, begin=1) == []


@pytest.mark.parametrize("size, reach", [(3, 1), (4, 3), (5, 2)])
def test_a_pass_that_was_left_half_way_does_not_disturb_the_next(size, reach):
    for seed, hop in itertools.product(range(10), range(reach + 1)):
        assert misread(size, reach, [(1, True), (2, True)], seed, left=(0, hop)) == [], (seed, hop)


@pytest.mark.parametrize("size, reach", [(2, 1), (3, 2), (4, 2)])
def test_passes_may_have_other_streams(size, reach):
    for seed in range(20):
        assert misread(size, reach, [(2, True), (1, True), (2, False)], seed, streams=2) == [], seed


def test_numbers_of_messages_may_begin_again():
    for seed in range(10):
        assert misread(3, 2, [(2, True)] * 2, seed, first=2**32 - 7) == []


@pytest.mark.parametrize(
    "arrived, asked, told",
    [
        ((2, 1), (2, 2), "'block 0' of step 2 has not come from rank 2 to rank 0"),
        ((2, 2), (1, 2), "'block 0' of step 2 has not been asked for by rank 1, to which rank 0 sends it"),
        ((2, 2), (2, 2), "all messages of its ring have come"),
    ],
)
def test_what_is_missing_is_told_with_its_rank(arrived, asked, told):
    """arrived, asked: what rank 0's flags say of ranks 1 and 2. It posted two messages, to rank 1 and from rank 2."""
    gpus = Gpus(3, 0)
    with ExitStack() as stack:
        for patch in (
            *gpus.patched(),
            mock.patch.object(torch.cuda, "Stream", lambda device, priority=0: Stream(gpus)),
            mock.patch.object(torch.cuda, "stream", lambda stream: nullcontext()),
            mock.patch.object(dist, "get_rank", lambda group=GROUP: 0),
            mock.patch.object(dist, "get_global_rank", lambda group, rank: rank),
            mock.patch.object(peer_memory, "allocate", Shared(gpus)),
        ):
            stack.enter_context(patch)
        copies, blocks = copies_of_ranks(gpus, 0)[0], [torch.zeros(3)] * 2
        for step in (1, 2):
            copies.post(blocks[0], copies.buffers(blocks[0])[0], 1, 2, f"'block 0' of step {step}")
        numbers = torch.tensor([0, *arrived, 0, *asked], dtype=torch.int32)
        copies._flags.memory.view(torch.int32)[:: ALIGNED // 4] = numbers
        assert told in copies._missing()


def test_a_driver_that_knows_no_flags_is_noticed_before_the_first_message():
    gpus = Gpus(2, 0)
    with ExitStack() as stack:
        for patch in (*gpus.patched(), mock.patch.object(peer_memory, "allocate", Shared(gpus))):
            stack.enter_context(patch)
        stack.enter_context(mock.patch.object(gpus, "wait_flag", side_effect=RuntimeError("CUDA's error 801")))
        with pytest.raises(RuntimeError, match="801"):
            PeerCopies(GROUP, torch.device("cpu"))


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


def test_memory_that_is_refused_once_is_not_asked_for_again():
    gpus, asked = Gpus(1, 0), []

    def refuse(*arguments):
        asked.append(arguments)
        raise peer_memory.RankFailed("rank 3 of 4: OutOfMemoryError")

    with ExitStack() as stack:
        for patch in (*gpus.patched(), mock.patch.object(peer_memory, "allocate", Shared(gpus))):
            stack.enter_context(patch)
        copies = PeerCopies(GROUP, torch.device("cpu"))
        stack.enter_context(mock.patch.object(peer_memory, "allocate", refuse))
        assert [copies.buffers(torch.empty(500)) for _ in range(3)] == [None] * 3 and len(asked) == 1
