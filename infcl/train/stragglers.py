"""Report slow nodes by name during a run, since all other ranks wait for them in every step.

Step times are equal on all ranks, since the first message of a step waits for the slowest rank. Only the time before
that message differs, in which a rank reads and encodes its samples. Each rank sums up that time, and the ranks compare
it at logged steps. A rank is slow if it is below 0.8 of the usual rate (`links.SLOW`) and costs a noticeable share of a
step. After several times in a row it is reported with its node. Under ZeRO-3 and tensor parallelism encoding itself
waits for other ranks. There the ranks compare only the wait for data, and do not find a slow GPU (launch/check.sh
does).

A slow link does not show in any rank's own time. From three nodes on, logged steps also measure the links between
neighbouring nodes, two at a time.

Cost: nothing in a step that is not logged. A logged step gathers two floats per rank; over three nodes and more the
ranks also exchange some messages of 16 MiB (256 KiB on CPUs) with both neighbours (infcl/cluster/links.py). Step
times exclude it.
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

IN_A_ROW = 3  # logs; a single slow one may be due to compilation, a save or an evaluation
AGAIN = 100  # logged steps between two warnings about the same node
NOTICEABLE = 0.05  # share of a step; shorter waits are not reported


class Stragglers:
    """An observer that compares the ranks' speed.

    Args:
        parallel: the ranks.
        every: steps between two comparisons.
        encoding_waits: whether encoding waits for other ranks; then only the wait for data is compared.
    """

    def __init__(self, parallel: Parallel, *, every: int, encoding_waits: bool = False):
        self.parallel, self.every, self.encoding_waits = parallel, every, encoding_waits
        self._warnings = Warnings()
        self._forget()

    def _forget(self) -> None:
        self._sums, self._steps = [0.0, 0.0, 0.0], 0  # own seconds, of which waiting for data; step seconds

    def after_step(self, step: Step) -> None:
        """Add the ranks' seconds and warnings to a logged step. Collective at logged steps."""
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
    """Filter the lines about slow ranks: keep those that are slow IN_A_ROW times, each at most once per AGAIN logs."""

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
    """Return {node, or rank if no nodes are known: a line about its slow ranks}.

    The low median of the ranks is the usual time, so of two ranks the faster one is usual.

    Args:
        owns: own seconds per step of each rank.
        waits: of which waiting for data; None if `owns` is only that.
        step: seconds of a step.
        nodes: nodes of the run.
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
        what = "waiting for its data" if waits is None else "until its samples are read and encoded"
        lines[place] = (
            f"{name} is slower than the others: {owns[worst]:.3g} s of a step {what}, where {usual:.3g} s is usual"
            f"{for_data}. All wait for it, {late / step:.0%} of a step; look at {where}"
        )
    return lines


def _by_host(ranks: list[int], nodes: tuple[Node, ...]) -> Iterator[tuple[str, str, list[int]]]:
    """Yield (node with its ranks, name of its slow ranks, these ranks). Two nodes may have the same name."""
    for node in nodes:
        its = [rank for rank in ranks if node.first_rank <= rank < node.first_rank + node.num_ranks]
        if len(its) == node.num_ranks:
            yield str(node), str(node), its
        elif its:
            yield str(node), f"{node.host} (rank{'s' * (len(its) > 1)} {', '.join(map(str, its))})", its
    if not nodes:  # another program started the process group
        yield from ((f"rank {rank}", f"rank {rank}", [rank]) for rank in ranks)
