"""The ring: blocks of tensors travel over the ranks of a process group while the caller computes.

`blocks` hands out what is travelling, one rank's block per hop, with the next hop already on the wire; `carry` sends a
running result (a statistic, a gradient) one hop on with every block, so that after W hops it is home, complete.
The idea is ring-flash-attention's RingComm (send_recv / commit / wait); here every tensor has a name and two buffers.

One hop sends each travelling tensor once, point to point, to the next rank: W - 1 hops for blocks, W for results.
A group of one rank sends nothing: what is posted is what is waited for.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor


class RingExchange:
    """Post and wait of named, double-buffered tensors between ring neighbours.

    Received tensors belong to the ring: one is valid until the second `post` of its name after its `wait`. Posted
    tensors must not be written to until the `wait` of their name. All ranks must post and wait in the same order, with
    equal shapes (`require_equal` checks that).
    """

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group
        self.world_size = 1 if group is None else dist.get_world_size(group)
        if self.world_size > 1:
            rank = dist.get_rank(group)
            self._next = dist.get_global_rank(group, (rank + 1) % self.world_size)
            self._previous = dist.get_global_rank(group, (rank - 1) % self.world_size)
        self._buffers: dict[str, list[Tensor]] = {}
        self._pending: dict[str, tuple[list[dist.Work], Tensor, Tensor]] = {}

    def blocks(self, *tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Yield (hop, tensors) for W hops: first one's own tensors, then the previous rank's, and so on round the ring.

        The next hop is posted before the caller computes on this one.
        """
        for hop in range(self.world_size):
            last = hop + 1 == self.world_size
            if not last:
                for i, tensor in enumerate(tensors):
                    self.post(f"block {i}", tensor)
            yield hop, tensors
            if not last:
                tensors = tuple(self.wait(f"block {i}") for i in range(len(tensors)))

    def carry(self, name: str, hop: int, part: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Add this rank's part to the result that travels with the block of this hop, and send it on.

        `combine(travelling, part)` may write to `travelling`. After the last hop, `wait(name)` is the result for one's
        own block.
        """
        self.post(name, combine(self.wait(name), part) if hop else part)

    def post(self, name: str, tensor: Tensor) -> None:
        """Start sending `tensor` to the next rank and receiving its like from the previous one."""
        assert name not in self._pending, f"'{name}' was posted twice without a wait"
        if self.world_size == 1:
            self._pending[name] = ([], tensor, tensor)
            return
        if name not in self._buffers:
            self._buffers[name] = [torch.empty_like(tensor) for _ in range(2)]
        first, second = self._buffers[name]
        received = second if tensor is first else first
        operations = [
            dist.P2POp(dist.isend, tensor, self._next, group=self.group),
            dist.P2POp(dist.irecv, received, self._previous, group=self.group),
        ]
        self._pending[name] = (dist.batch_isend_irecv(operations), tensor, received)

    def wait(self, name: str) -> Tensor:
        """What the previous rank posted under this name; on a GPU the current stream waits, not the host."""
        works, _, received = self._pending.pop(name)
        for work in works:
            work.wait()
        return received

    def require_equal(self, what: str, values: dict[str, int], device: torch.device) -> None:
        """Raise the same ValueError on every rank, with the numbers, unless all ranks have the same values.

        One all-gather of len(values) integers.
        """
        if self.world_size == 1:
            return
        mine = torch.tensor(list(values.values()), dtype=torch.int64, device=device)
        gathered = mine.new_empty(self.world_size * len(values))
        dist.all_gather_into_tensor(gathered, mine, group=self.group)
        for name, per_rank in zip(values, gathered.view(self.world_size, -1).T.tolist()):
            if len(set(per_rank)) > 1:
                raise ValueError(f"{what} needs the same number of {name} on every rank; ranks 0.. have {per_rank}")


def checked_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group, or None for one process; ValueError where None would silently mean "this rank's batch only"."""
    distributed = dist.is_available() and dist.is_initialized()
    if group is None and distributed and dist.get_world_size() > 1:
        raise ValueError(
            f"torch.distributed runs {dist.get_world_size()} ranks but group is None, which means a single process; "
            "pass group=torch.distributed.group.WORLD (or the data-parallel group)"
        )
    if group is not None and dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not a member of the process group it was given")
    return group
