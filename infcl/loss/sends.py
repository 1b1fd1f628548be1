"""Messages of the ring that NCCL sends and receives, watched: one that does not come is named.

NCCL's watchdog knows the collective, by a number; its timeout on stderr leaves open which step of which ring it was,
and whom it waited for. NCCL itself cannot tell a message that has not come from one that was not taken: both are named.
A work that NCCL fails by itself, where it notices that a peer has ended, counts as completed: that is NCCL's to say.
"""

import collections
import functools

import torch
import torch.distributed as dist

from infcl import gpu_watch, peer_memory
from infcl.loss.links import Link, uses_nccl

GRACE = 30.0  # seconds that NCCL has for its own end: it writes its flight recorder's dump then


def watch(work: dist.Work, link: Link, device: torch.device, what: str) -> None:
    """what: names the message. A work that is not NCCL's, or is captured for a CUDA graph, is not watched."""
    if link.group is not None and peer_memory.may_wait(device) and uses_nccl(link.group):
        _sends_of(link.group, device).add(work, link, what)


@functools.cache
def _sends_of(group: dist.ProcessGroup, device: torch.device) -> "_Sends":
    return _Sends(group, device)


class _Sends:
    """The messages of one group that are under way, in the order in which NCCL carries them."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self._under_way = collections.deque[tuple[dist.Work, Link, str]]()
        self._watch = gpu_watch.Watch(group, device, self._missing, grace=GRACE)

    def add(self, work: dist.Work, link: Link, what: str) -> None:
        while self._under_way and self._under_way[0][0].is_completed():
            self._under_way.popleft()
        self._under_way.append((work, link, what))
        self._watch.mark(work.is_completed)

    def _missing(self) -> str:
        own = dist.get_rank()
        for work, link, what in list(self._under_way):
            if not work.is_completed():
                return (
                    f"{what} has not come from rank {link.source} to rank {own}, or could not be sent to rank "
                    f"{link.to} (global ranks): one of them ended, hangs, or waits for one that does."
                )
        return f"rank {own} waits, though all messages of its ring have come."
