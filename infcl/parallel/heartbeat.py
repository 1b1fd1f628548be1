"""Heartbeat: a lost node ends the run on every other node within `timeout`, with its name.

A collective that waits for a node without power or network sees no closed connection: only the process group's
time-out, half an hour, would end it, without a name. So the first rank of each node counts up in the run's store every
few seconds, in a thread, and rank 0 checks that all counters move. When a counter stands still for `timeout` seconds,
rank 0 reports the node in the log and in the store. Each node's first rank then exits, and its launcher ends the
others. A node that cannot reach the store for as long ends by itself.

A thread cannot end what the main thread waits for, so the process exits at once, with code 69 (EX_UNAVAILABLE). Work
since the last checkpoint is lost; a checkpoint half-written is not used.
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
LEAVING = 20.0  # seconds, at most, in which a call of the store comes back: on a busy node two were too few
_MESSAGE = "lost host"


class Heartbeat:
    """Runs from construction until `close`, on the first rank of a node.

    Args:
        store: of the run, served by rank 0.
        nodes: all nodes.
        rank: this process's.
        timeout: seconds of silence after which a node is lost.
        exit: called with HOST_LOST where the run has to end.
    """

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

    def close(self) -> None:
        """Tell the others that this node has finished."""
        self._closed.set()
        try:
            self.store.set(_done(self.rank), "1")
        except dist.DistError:
            pass  # rank 0 has finished, and the store with it

    def _leave(self) -> None:
        """At the end of the process: stop without telling the others, who are to miss this node after a failure.

        A thread that returns from the store's C++ while the interpreter is taken down would abort the process and
        lose its exit code (process.py).
        """
        self._closed.set()
        for thread in self.threads:
            thread.join(timeout=LEAVING)

    def _beat(self) -> None:
        """Counts and checks; hangs for good where the network is gone, which `_wait` notices."""
        try:
            while not self._closed.wait(self.interval):
                self.store.add(_beats(self.rank), 1)
                if self.store.check([_MESSAGE]):
                    return self._end(self.store.get(_MESSAGE).decode())
                if self.rank == 0:
                    self._look()
                self._reached_at = time.monotonic()
        except dist.DistError:
            pass  # rank 0 has ended, or its node is lost: `_wait` gives it the time that is allowed

    def _look(self) -> None:
        now = time.monotonic()
        for number, node in enumerate(self.nodes):
            count, since = self._moved[number]
            current = self.store.add(_beats(node.first_rank), 0)
            if current != count or self.store.check([_done(node.first_rank)]):
                self._moved[number] = (current, now)
            elif now - since > self.timeout:
                message = f"no heartbeat from {node} for {now - since:.0f} s"
                self.store.set(_MESSAGE, message)
                time.sleep(2 * self.interval)  # the others read it
                return self._end(message)

    def _wait(self) -> None:
        while not self._closed.wait(self.interval / 5):
            silent = time.monotonic() - self._reached_at
            if silent > self.timeout + 3 * self.interval:
                return self._end(f"no answer from rank 0's node, {self.nodes[0]}, for {silent:.0f} s")

    def _end(self, message: str) -> None:
        if not self._closed.is_set():
            here = next(node for node in self.nodes if node.first_rank == self.rank)
            print(f"{here.host}: {message}; the run ends", file=sys.stderr, flush=True)
            self.exit(HOST_LOST)


def _beats(rank: int) -> str:
    return f"beats of {rank}"


def _done(rank: int) -> str:
    return f"done {rank}"
