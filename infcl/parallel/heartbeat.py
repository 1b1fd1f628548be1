"""Heartbeat: detect a lost node within `timeout`, report its name, and end the run on all other nodes.

A collective that waits for a node without power or network sees no closed connection. It would end only after the
process group's timeout of half an hour, without the name of the node. So a thread on each node's first rank increments
a counter in the run's store every few seconds. If a counter has not changed for `timeout` seconds, rank 0 reports the
node in the log and in the store. Each node's first rank then exits, and its launcher stops the others. A node that
cannot reach the store for about as long exits by itself.

A thread cannot interrupt the call that the main thread waits for. So the process exits at once, with code 69
(EX_UNAVAILABLE). Work since the last checkpoint is lost, and a half-written checkpoint is not used.
"""

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from infcl.parallel.rendezvous import Node

HOST_LOST = 69
LEAVING = 20.0  # seconds to wait for a call of the store at exit; 2 s were too few on a busy node
_MESSAGE = "lost host"


class Heartbeat:
    """Heartbeat threads on the first rank of a node, from construction until `close`.

    Args:
        store: the run's store, served by rank 0.
        timeout: seconds without a heartbeat after which a node counts as lost.
        exit: function that ends the process; called with HOST_LOST.
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
        self._moved = [(0, time.monotonic())] * len(nodes)  # rank 0: (counter, time of its last change) per node
        self.threads = [threading.Thread(target=run, daemon=True) for run in (self._beat, self._wait)]
        for thread in self.threads:
            thread.start()
        atexit.register(self._leave)

    def close(self) -> None:
        """Notify the other nodes that this one has finished, and stop."""
        self._closed.set()
        with contextlib.suppress(dist.DistError):  # rank 0 has finished, so its store is closed
            self.store.set(f"done {self.rank}", "1")

    def _leave(self) -> None:
        """Stop at exit without notifying the other nodes, so that they detect a failure of this one.

        A thread that returns from the store's C++ code while the interpreter shuts down would abort the process and
        lose its exit code (process.py).
        """
        self._closed.set()
        for thread in self.threads:
            thread.join(timeout=LEAVING)

    def _beat(self) -> None:
        """Send heartbeats and check for a lost node. A lost network blocks this thread, which `_wait` detects."""
        try:
            while not self._closed.wait(self.interval):
                self.store.add(f"beats of {self.rank}", 1)
                if self.store.check([_MESSAGE]):
                    return self._end(self.store.get(_MESSAGE).decode())
                if self.rank == 0:
                    self._look()
                self._reached_at = time.monotonic()
        except dist.DistError:
            pass  # rank 0 has exited or its node is lost: `_wait` ends the run after the time limit

    def _look(self) -> None:
        now = time.monotonic()
        for number, node in enumerate(self.nodes):
            count, since = self._moved[number]
            current = self.store.add(f"beats of {node.first_rank}", 0)
            if current != count or self.store.check([f"done {node.first_rank}"]):
                self._moved[number] = (current, now)
            elif now - since > self.timeout:
                message = f"no heartbeat from {node} for {now - since:.0f} s"
                self.store.set(_MESSAGE, message)
                time.sleep(2 * self.interval)  # for the other nodes to read it
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
