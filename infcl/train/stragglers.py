"""Report the slowest rank of a run by name, since all other ranks wait for it in every step.

Step times are equal on all ranks, since the first message of a step waits for the slowest rank. Only the time before
that message differs, in which a rank reads and encodes its samples. Each rank sums up that time, and logged steps
gather two floats per rank. A rank is slow if it is below SLOW of the usual rate and costs a noticeable share of a step.

Under ZeRO-3 and tensor parallelism encoding itself waits for other ranks. There the ranks compare only the wait for
data, and do not find a slow GPU. A slow link delays all ranks alike. launch/check.sh finds both before a run.
"""

from statistics import median_low

import torch

from infcl.loss.ring import all_gather
from infcl.parallel import Parallel
from infcl.parallel.rendezvous import Node
from infcl.train.observers import Step

SLOW = 0.8  # share of the usual rate
NOTICEABLE = 0.05  # share of a step; shorter waits are not reported
IN_A_ROW = 3  # logged steps; a single slow one may be due to compilation, a save or an evaluation
AGAIN = 100  # logged steps between two reports of a node that stays slow


class Stragglers:
    """An observer that compares the ranks' speed and reports the slowest one.

    Args:
        parallel: the ranks.
        every: steps between two comparisons.
        encoding_waits: whether encoding waits for other ranks; then only the wait for data is compared.
    """

    def __init__(self, parallel: Parallel, *, every: int, encoding_waits: bool = False):
        self.parallel, self.every, self.encoding_waits = parallel, every, encoding_waits
        self._seconds: list[tuple[float, float, float]] = []  # own, of which waiting for data, the step
        self._slow_node, self._in_a_row = "", 0

    def after_step(self, step: Step) -> None:
        """Add the ranks' seconds and a line about a slow one to a logged step. Collective at logged steps."""
        if self.parallel.world_size == 1:
            return
        until_encoded = step.phases.get("data", 0.0) + step.phases.get("encode", 0.0) + step.pixels.waited_again
        own = step.pixels.waited_for_data if self.encoding_waits else until_encoded
        self._seconds.append((own, step.pixels.waited_for_data, step.seconds))
        if step.number % self.every:
            return
        *means, seconds = (sum(column) / len(self._seconds) for column in zip(*self._seconds))
        self._seconds = []
        owns, waits = self._gather(means)
        step.values |= {"seconds_own_usual": median_low(owns), "seconds_own_slowest": max(owns)}
        step.values["slowest_rank"] = owns.index(max(owns))
        node, line = slowest(owns, None if self.encoding_waits else waits, seconds, self.parallel.nodes)
        self._in_a_row = self._in_a_row + 1 if node == self._slow_node else 1
        self._slow_node = node
        if line and self._in_a_row % AGAIN == IN_A_ROW:
            step.news.append(line)

    def _gather(self, own: list[float]) -> tuple[list[float], list[float]]:
        mine = torch.tensor(own, dtype=torch.float64, device=self.parallel.device)
        everyone = torch.empty(2 * self.parallel.world_size, dtype=mine.dtype, device=mine.device)
        all_gather(everyone, mine)
        owns, waits = everyone.view(-1, 2).T.tolist()
        return owns, waits


def slowest(owns: list[float], waits: list[float] | None, step: float, nodes: tuple[Node, ...]) -> tuple[str, str]:
    """Return the node of the slowest rank and a line about that rank; two empty strings if no rank is slow.

    The low median of the ranks is the usual time, so of two ranks the faster one is usual.

    Args:
        owns: own seconds per step of each rank.
        waits: of which waiting for data; None if `owns` is only that.
        step: seconds of a step.
        nodes: nodes of the run; without any, the rank itself counts as its node.
    """
    usual, own = median_low(owns), max(owns)
    late = own - usual
    if usual >= SLOW * own or late <= NOTICEABLE * step:
        return "", ""
    rank, of_data, for_data = owns.index(own), True, ""
    if waits is not None:
        usual_wait = median_low(waits)
        of_data = waits[rank] - usual_wait > late / 2
        for_data = f" ({waits[rank]:.3g} s of them waiting for data, usually {usual_wait:.3g})"
    its = [node for node in nodes if node.first_rank <= rank < node.first_rank + node.num_ranks]
    where = "its storage, cores and --workers" if of_data else "other programs there, clocks and heat of its GPUs"
    what = "waiting for its data" if waits is None else "until its samples are read and encoded"
    return (
        str(its[0]) if its else f"rank {rank}",
        f"{f'{its[0].host} (rank {rank})' if its else f'rank {rank}'} is slower than the others: {own:.3g} s of a step "
        f"{what}, where {usual:.3g} s is usual{for_data}. All wait for it, {late / step:.0%} of a step; "
        f"look at {where}",
    )
