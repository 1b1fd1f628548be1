"""Report the slow node by name during a run: in every step all others wait for it.

In a step everybody's time is the same, since everybody waits in the first message for whoever comes last. What differs
is what a rank does before that message: it reads its pairs and encodes them. So each rank adds up its own seconds of
that, and at the steps that are logged all compare: a rank of less than 0.8 of the usual rate (`links.SLOW`), by enough
for a step to feel it, several times in a row, is named with its host. Encoding waits for others' parameters under
ZeRO-3, and for others' parts of every layer where tensor-parallel ranks share a model: there only the wait for data is
a rank's own, and a slow GPU stays unnamed (launch/check.sh finds it).

A slow link shows in no rank's own seconds, and all messages of a ring are as late as those of its slowest link. So from
three hosts on (one link is its own median) neighbouring hosts are measured then as well, two at a time.

Cost: a step that is not logged sends nothing and waits for nothing. One that is gathers two floats a rank; over three
hosts and more all meet two or three times, send some messages of 16 MiB (256 KiB on CPUs) to the two neighbours
(infcl/cluster/links.py), and gather the rates. No step's seconds count it.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from statistics import median_low

import torch

from infcl.cluster.links import SLOW, neighbours, slower_than_usual
from infcl.loss.ring import all_gather
from infcl.parallel import Parallel
from infcl.parallel.rendezvous import Node
from infcl.train.observers import Step

IN_A_ROW = 3  # what is seen once may be a compiler, a save, an evaluation
AGAIN = 100  # logged steps between two warnings of one host
NOTICEABLE = 0.05  # of a step: what others wait less for is not worth a line


class Stragglers:
    """every: a step of so many is logged. encoding_waits: for other ranks, so only the wait for data is compared."""

    def __init__(self, parallel: Parallel, *, every: int, encoding_waits: bool = False):
        self.parallel, self.every, self.encoding_waits = parallel, every, encoding_waits
        self._warnings = Warnings()
        self._forget()

    def _forget(self) -> None:
        self._sums, self._steps = [0.0, 0.0, 0.0], 0  # own seconds, of them waiting for data, the whole steps'

    def after_step(self, step: Step) -> None:
        """Add the ranks' seconds, and warnings. Collective where the step is logged."""
        if self.parallel.world_size == 1:
            return
        until_encoded = step.phases.get("data", 0.0) + step.phases.get("encode", 0.0) + step.waited_again
        own = step.waited_for_data if self.encoding_waits else until_encoded
        self._sums = [total + value for total, value in zip(self._sums, (own, step.waited_for_data, step.seconds))]
        self._steps += 1
        if step.number % self.every:
            return
        means = [total / self._steps for total in self._sums]
        self._forget()
        owns, waits = self._gather(means[:2])
        others = None if self.encoding_waits else waits
        slow = {**slow_ranks(owns, others, means[2], self.parallel.nodes), **self._slow_links()}
        step.values |= {"seconds_own_usual": median_low(owns), "seconds_own_slowest": max(owns)}
        step.values["slowest_rank"] = owns.index(max(owns))
        if warnings := self._warnings(slow):
            step.news.append(warnings)

    def _gather(self, own: list[float]) -> tuple[list[float], list[float]]:
        mine = torch.tensor(own, dtype=torch.float64, device=self.parallel.device)
        everyone = torch.empty(2 * self.parallel.world_size, dtype=mine.dtype, device=mine.device)
        all_gather(everyone, mine)
        owns, waits = everyone.view(-1, 2).T.tolist()
        return owns, waits

    def _slow_links(self) -> dict[str, str]:
        if self.parallel.hosts < 3:
            return {}
        rates, names = neighbours(self.parallel)
        slow, usual = slower_than_usual(rates, names)
        usual_rate = f"GB/s (usual {usual:.3g}); launch/check.sh compares it with all others"
        return {name: f"slow link: {name}, {rate:.3g} {usual_rate}" for name, rate in slow.items()}


class Warnings:
    """{who is slow: a line about it} of one log after another -> the lines of those who stay so, each but rarely."""

    def __init__(self):
        self._in_a_row: dict[str, int] = defaultdict(int)
        self._told: dict[str, int] = {}
        self._logs = 0

    def __call__(self, slow: Mapping[str, str]) -> str:
        self._logs += 1
        for name in set(self._in_a_row) - set(slow):
            del self._in_a_row[name]
        return "\n".join(line for name, line in slow.items() if self._is_due(name))

    def _is_due(self, name: str) -> bool:
        self._in_a_row[name] += 1
        due = self._in_a_row[name] >= IN_A_ROW and self._logs - self._told.get(name, -AGAIN) >= AGAIN
        if due:
            self._told[name] = self._logs
        return due


def slow_ranks(owns: list[float], waits: list[float] | None, step: float, nodes: tuple[Node, ...]) -> dict[str, str]:
    """{host, or rank where no hosts are known: a line about its slow ranks}: those that keep the others waiting.

    owns: seconds by rank; waits: of them those for data, None where they are nothing else; step: of a whole one. Of two
    ranks the faster is usual.
    """
    usual = median_low(owns)
    slow = [r for r, own in enumerate(owns) if usual < SLOW * own and own - usual > NOTICEABLE * step]
    lines = {}
    for place, name, ranks in _by_host(slow, nodes):
        worst = max(ranks, key=owns.__getitem__)
        late, of_data, for_data = owns[worst] - usual, True, ""
        if waits is not None:
            waited, usual_wait = waits[worst], median_low(waits)
            of_data = waited - usual_wait > late / 2
            for_data = f" ({waited:.3g} s of them waiting for data, usually {usual_wait:.3g})"
        where = "its storage, cores and --workers" if of_data else "other programs there, clocks and heat of its GPUs"
        what = "waiting for its data" if waits is None else "until its pairs are read and encoded"
        lines[place] = (
            f"{name} is slower than the others: {owns[worst]:.3g} s of a step {what}, where {usual:.3g} s is usual"
            f"{for_data}. All wait for it, {late / step:.0%} of a step; look at {where}"
        )
    return lines


def _by_host(ranks: list[int], nodes: tuple[Node, ...]) -> Iterator[tuple[str, str, list[int]]]:
    """(a host, what to call its slow ranks, these). Hosts are what to count by: other ranks may be slow next time. Two
    may have one name (containers, say), but not the same ranks."""
    for node in nodes:
        its = [rank for rank in ranks if node.first_rank <= rank < node.first_rank + node.num_ranks]
        if len(its) == node.num_ranks:
            yield str(node), str(node), its
        elif its:
            yield str(node), f"{node.host} (rank{'s' * (len(its) > 1)} {', '.join(map(str, its))})", its
    if not nodes:  # another program started the process group
        yield from ((f"rank {rank}", f"rank {rank}", [rank]) for rank in ranks)
