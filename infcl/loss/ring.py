"""The ring: blocks of tensors travel over the ranks of a process group while the caller computes.

`blocks` yields one rank's block per hop, while the next hop is already being sent. `carry` sends a running result (a
statistic, a gradient) one hop on with every block, and `home` returns the complete result.
The idea is ring-flash-attention's RingComm (send_recv / commit / wait); here every tensor has a name and two buffers.

Flat ring: one hop sends each travelling tensor once, point to point, to the next rank: W - 1 hops for blocks, W for
results. A group of one rank sends nothing: `wait` returns the posted tensor.

Two-level ring, N nodes of G ranks, W = N * G; rank (n, g) is local rank g of node n. There are N laps. In lap k the
blocks of the ranks of node n - k travel once around node n:

    hop (k, j)   rank (n, g) has the block of rank (n - k, g - j)                       # j = 0 .. G-1
    blocks       (k, j) -> (k, j+1) inside the node; (k, 0) -> (k+1, 0) to (n+1, g), in flight during lap k
    results      G hops inside the node give the node's sum, which is added to the sum of the previous nodes and sent to
                 (n+1, g), in flight during lap k+1; after N laps it is back at its owner

    per rank, block of c bytes, result of a bytes    within the node              between nodes
    flat, at each node's last rank                   -                            (W-1) c + W a, at every hop
    two-level, at every rank                         N (G-1) c + N G a            (N-1) c + N a, once per lap

In a flat ring over nodes, one rank of each node sends all inter-node messages, and each message overlaps with the
computation of one block. In a two-level ring all G ranks of a node send, G times less each. Each message overlaps with
the computation of G blocks, except the last message of the results. The cost is two more buffers for a block and three
for a result. The first part of each later lap needs memory too, because both buffers of the hops are then in use.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from infcl.loss.links import global_ranks, second_group

Combine = Callable[[Tensor, Tensor], Tensor]


class Link(NamedTuple):
    """Global ranks of the two peers, and the group that carries the messages (None: one rank, no messages)."""

    group: dist.ProcessGroup | None
    to: int
    source: int


class RingExchange:
    """Post and wait of named, double-buffered tensors between ring neighbours.

    The ring owns received tensors. One is valid until the next `post` of its name that does not send it on, at most
    until the end of the pass. A group runs one pass at a time. Do not write to a posted tensor before the `wait` of its
    name. All ranks must post and wait in the same order, with equal shapes (`parallel.require_equal` checks them).

    With gloo, a message that fails or exceeds the group's timeout raises RuntimeError with the step and the peer. With
    NCCL the host does not wait: the watchdog aborts the process after the timeout.

    Args:
        group: process group, None for a single process.
        lap: ranks in a lap (see links.lap_length); None: all, a flat ring.
    """

    def __init__(self, group: dist.ProcessGroup | None, lap: int | None = None):
        self.group = group
        self.ranks = global_ranks(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = len(self.ranks)
        self.lap = self.world_size if lap is None else lap
        self.laps = self.world_size // self.lap
        first, turn = self.rank - self.rank % self.lap, self.rank % self.lap  # first rank of this node, and local rank
        to, source = (self.ranks[first + (turn + step) % self.lap] for step in (1, -1))
        self.next = Link(group if self.world_size > 1 else None, to, source)
        self._step = 0
        self._buffers: dict[str, list[Tensor]] = {}
        self._pending: dict[str, tuple[list[dist.Work], Link, Tensor, Tensor]] = {}

    def blocks(self, *tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Yield (hop, tensors) for W hops: first this rank's tensors, then those of the other ranks, as drawn above.

        The next hop is posted before the caller computes on this one, and the start of the next lap before this lap.
        """
        for lap in range(self.laps):
            if lap + 1 < self.laps:
                self._post_all("lap", tensors, self._across)
            for turn in range(self.lap):
                self._step = lap * self.lap + turn
                if turn < self.lap - 1:
                    self._post_all("block", tensors, self.next)
                yield self._step, tensors
                if turn < self.lap - 1:
                    tensors = self._wait_all("block", len(tensors))
            if lap + 1 < self.laps:
                tensors = self._wait_all("lap", len(tensors))

    def part(self, name: str, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory, shaped as `like`, for this rank's next `carry` under this name.

        The first part uses the second of the two receive buffers, which is free until the first part is sent. Later
        parts need new memory, because one result arrives while another leaves. Release each part before the next call.
        """
        part, link = torch.empty_like(like, dtype=dtype), self.next
        if name in self._buffers or link.group is None:
            return part
        self._buffers[name] = [torch.empty_like(part), part]
        return part

    def carry(self, name: str, hop: int, part: Tensor, combine: Combine) -> None:
        """Add this rank's part to the result that travels with the block of this hop, and send it on.

        `combine(travelling, part)` is associative and commutative, and may write to `travelling`. After the last hop,
        `home(name, combine)` returns the result for this rank's block. All ranks may skip the first hops.
        """
        lap, turn = divmod(hop, self.lap)
        if lap and turn == 0:
            self._end_lap(name, combine)
        if name in self._pending:
            part = combine(self.wait(name), part)
        self.post(name, part)

    def home(self, name: str, combine: Combine) -> Tensor:
        """Return the complete result for this rank's block after the last `carry`. The caller may keep it."""
        if self.laps > 1:
            self._end_lap(name, combine)
            name = f"{name}, between nodes"
        return self.wait(name)

    def post(self, name: str, tensor: Tensor, link: Link | None = None) -> None:
        """Start to send `tensor` along a link (default: to the next rank) and to receive one of the same shape."""
        assert name not in self._pending, f"'{name}' was posted twice without a wait"
        link = self.next if link is None else link
        if link.group is None:
            self._pending[name] = ([], link, tensor, tensor)
            return
        if name not in self._buffers:
            self._buffers[name] = [torch.empty_like(tensor) for _ in range(2)]
        first, second = self._buffers[name]
        received = second if tensor is first else first
        try:
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, tensor, link.to, group=link.group),
                    dist.P2POp(dist.irecv, received, link.source, group=link.group),
                ]
            )
        except RuntimeError as error:
            raise self._failure(name, f"to rank {link.to} or from rank {link.source}", error) from error
        self._pending[name] = (works, link, tensor, received)

    def wait(self, name: str) -> Tensor:
        """Return the tensor that the link's source posted under this name. On a GPU only the current stream waits."""
        works, link, _, received = self._pending.pop(name)
        # gloo returns one work per operation, NCCL one for the batch
        peers = [f"to rank {link.to}", f"from rank {link.source}"]
        for work, peer in zip(works, peers if len(works) == 2 else [" or ".join(peers)]):
            try:
                work.wait()
            except RuntimeError as error:
                raise self._failure(name, peer, error) from error
        return received

    @cached_property
    def _across(self) -> Link:
        """Return the link to the next node, on its own connections, which are created on first use."""
        assert self.group is not None, "one rank alone has no other node"
        to, source = (self.ranks[(self.rank + step) % self.world_size] for step in (self.lap, -self.lap))
        return Link(second_group(self.group), to, source)

    def _failure(self, name: str, peer: str, error: RuntimeError) -> RuntimeError:
        return RuntimeError(
            f"ring step {self._step + 1} of {self.world_size}: rank {dist.get_rank()} could not pass "
            f"'{name}' {peer} (global ranks): that rank ended, hangs, or waits for one that does. {error}"
        )

    def _post_all(self, name: str, tensors: tuple[Tensor, ...], link: Link) -> None:
        for i, tensor in enumerate(tensors):
            self.post(f"{name} {i}", tensor, link)

    def _wait_all(self, name: str, count: int) -> tuple[Tensor, ...]:
        return tuple(self.wait(f"{name} {i}") for i in range(count))

    def _end_lap(self, name: str, combine: Combine) -> None:
        """Add the node's sum to that of the previous nodes and send it to the next node."""
        total, across = self.wait(name), f"{name}, between nodes"
        # The copy frees the buffer for the next lap's hops.
        total = combine(self.wait(across), total) if across in self._pending else total.clone()
        self.post(across, total, self._across)


def checked_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the group, or None for a single process.

    Raises:
        ValueError: group is None but several ranks run, so the loss would cover this rank's batch only; or this rank is
            not in the group.
    """
    distributed = dist.is_available() and dist.is_initialized()
    if group is None and distributed and dist.get_world_size() > 1:
        raise ValueError(
            f"torch.distributed runs {dist.get_world_size()} ranks but group is None, which means a single process; "
            "pass group=torch.distributed.group.WORLD (or the data-parallel group)"
        )
    if group is not None and dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not a member of the process group it was given")
    return group
