"""Whether all hosts are still there: a lost host ends the run on every other within `timeout`, and is named.

A collective that waits for a host without power or network sees no closed connection: only the process group's
time-out, half an hour, would end it, without a name. So the first rank of each host counts up in the run's store every
second or few, in a thread; rank 0 looks whether all counters move. A host whose counter stands still for `timeout`
seconds is lost: rank 0 says so, in the log and in the store, and every host's launcher ends the host's ranks when its
first rank has ended. A host that cannot reach the store for as long ends by itself.

A thread cannot end what the main thread waits for, so the process exits at once, with code 69 (EX_UNAVAILABLE). Work
since the last checkpoint is lost, a checkpoint half-written is not used.
"""

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from infcl.parallel.rendezvous import Node

HOST_LOST = 69
LEAVING = 20.0  # seconds, at most, in which a call of the store comes back: on a busy host two were too few
_MESSAGE = "lost host"


class HostWatch:
    """Watches from construction until `close`. `exit` is called with HOST_LOST where the run has to end."""

    def __init__(
        self,
        store: dist.Store,
        nodes: list[Node],
        rank: int,
        *,
        timeout: float,
        exit: Callable[[int], None] = os._exit,
    ):
        self.store = store.clone()  # type: ignore[attr-defined]  # torch's stub lacks it
        self.nodes, self.rank, self.timeout, self.exit = nodes, rank, timeout, exit
        self.interval = min(5.0, timeout / 5)
        self._closed = threading.Event()
        self._reached_at = time.monotonic()  # when the store last answered
        self._moved = [(0, time.monotonic())] * len(nodes)  # rank 0: (counter, since when) of every node
        self.threads = [threading.Thread(target=run, daemon=True) for run in (self._beat, self._wait)]
        for thread in self.threads:
            thread.start()
        atexit.register(self._leave)

    def _leave(self) -> None:
        """This process ends, maybe by a mistake that others are to miss it for. Where that is not by program.py, a
        thread that comes back from the store's C++ while the interpreter is taken down aborts it, exit code and all."""
        self._closed.set()
        for thread in self.threads:
            thread.join(timeout=LEAVING)

    def close(self) -> None:
        """This host has finished: the others must not miss it."""
        self._closed.set()
        try:
            self.store.set(_done(self.rank), "1")
        except dist.DistError:
            pass  # rank 0 has finished, and the store with it

    def _beat(self) -> None:
        """Counts, looks, and may hang for good where the network is gone: that is what `_wait` notices."""
        try:
            while not self._closed.wait(self.interval):
                self.store.add(_beats(self.rank), 1)
                if self.store.check([_MESSAGE]):
                    return self._end(self.store.get(_MESSAGE).decode())
                if self.rank == 0:
                    self._look()
                self._reached_at = time.monotonic()
        except dist.DistError:
            pass  # rank 0 has ended, or its host is lost: `_wait` gives it the time that is allowed

    def _look(self) -> None:
        now = time.monotonic()
        for number, node in enumerate(self.nodes):
            count, since = self._moved[number]
            current = self.store.add(_beats(node.first_rank), 0)
            if current != count or self.store.check([_done(node.first_rank)]):
                self._moved[number] = (current, now)
            elif now - since > self.timeout:
                message = f"{node} has not been heard of for {now - since:.0f} s"
                self.store.set(_MESSAGE, message)
                time.sleep(2 * self.interval)  # the others read it
                return self._end(message)

    def _wait(self) -> None:
        while not self._closed.wait(self.interval / 5):
            silent = time.monotonic() - self._reached_at
            if silent > self.timeout + 3 * self.interval:
                return self._end(f"rank 0's host, {self.nodes[0]}, has not answered for {silent:.0f} s")

    def _end(self, message: str) -> None:
        if not self._closed.is_set():
            here = next(node for node in self.nodes if node.first_rank == self.rank)
            print(f"{here.host}: {message}; the run ends", file=sys.stderr, flush=True)
            self.exit(HOST_LOST)


def _beats(rank: int) -> str:
    return f"beats of {rank}"


def _done(rank: int) -> str:
    return f"done {rank}"
