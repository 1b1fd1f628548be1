"""Rows that travel between GPUs arrive whole, and no others fall on them before they are read, whoever is late.

The real PeerMemory issues its swaps, for every rank, to simulated streams.
"""

import itertools
from contextlib import ExitStack
from unittest import mock

import pytest
import torch

from infcl import peer_memory
from infcl.peer_memory import ALIGNED
from megatron_patches.exchange import ROUND, PeerMemory
from tests.lib.gpu_streams import Gpus
from tests.loss.test_ring_copies import Shared

WIDTH = 6  # elements of a swap


def exchanges_of(gpus: Gpus, first: int) -> list[PeerMemory]:
    """One for each rank, which have swapped `first` times."""
    made = []
    for rank in range(gpus.size):
        gpus.rank = rank
        one = PeerMemory(None, torch.device("cpu"))
        one.slot_bytes, one.swaps, one.arrivals, one._views = ALIGNED, first, first, {}
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
        stack.enter_context(mock.patch.object(PeerMemory, "_allocate", lambda *_: None))  # all at once: exchanges_of
        exchanges = exchanges_of(gpus, first)
        sent = torch.zeros(size, ROUND, size, WIDTH)  # each rank's is written over in every round
        for rank, (one, own) in enumerate(zip(exchanges, sent)):
            gpus.rank = rank
            for number, swaps in enumerate(rounds):
                arrivals = []
                for which, step in itertools.product(range(swaps), range(1, size)):
                    content = 1000 * number + 100 * which + 10 * step  # + rank
                    gpus.compute(lambda to=own[which, step], what=content + rank: to.fill_(what))
                    arrivals.append((content, one.swap(own[which, step], step)))
                for content, arrival in arrivals:
                    pair = arrival.wait(), torch.full((WIDTH,), float(content + arrival.source))
                    gpus.compute(lambda pair=pair: torch.equal(*pair) or wrong.append([rows.tolist() for rows in pair]))
                one.finish()
        gpus.run()
    return wrong


@pytest.mark.parametrize("size", (2, 3, 4))
@pytest.mark.parametrize("first", (0, 2**32 - 7))
def test_no_rows_fall_on_others_before_these_are_read(size, first):
    """In rounds of one and two swaps a step, in any order; also where the flags' numbers begin again."""
    for seed, rounds in enumerate(itertools.product(range(1, ROUND + 1), repeat=5)):
        assert misread(size, rounds, seed, first) == [], rounds


def test_flags_that_are_tried_have_come_before_the_first_swap():
    """A zero that came later would fall on a number that is waited for."""
    gpus, written = Gpus(3, 0), []
    with ExitStack() as stack:
        for patch in (*gpus.patched(), mock.patch.object(peer_memory, "allocate", Shared(gpus))):
            stack.enter_context(patch)
        write = gpus.write_flag
        stack.enter_context(mock.patch.object(gpus, "write_flag", lambda *flag: written.append(flag) or write(*flag)))
        for rank in range(gpus.size):
            gpus.rank = rank
            PeerMemory(None, torch.device("cpu"))
            assert len(written) == (rank + 1) * gpus.size and not any(gpus.queues)
