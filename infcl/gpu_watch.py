"""A thread that ends this process where its GPU waits for another one too long, and says before what for.

A stream that waits for a peer's flag or message does so without end, and the host goes on. NCCL's watchdog sees only
what NCCL carries and names the collective, not what it was part of; the process may outlive what it noticed, too.
"""

import atexit
import collections
import ctypes
import os
import sys
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from infcl.loss.links import timeout_of

NOTICE = 0.9  # of the group's timeout: what is missing is said then, before NCCL's watchdog may end the process
TELLING = 10.0  # seconds, at most, which that may take
HasPassed = Callable[[], bool]


class Watch:
    """Ends this process once its GPU has not come past a mark for as long as the group waits for a message.

    describe: what it waits for; called after NOTICE of that time, by a thread, and may use streams of its own.
    grace: seconds after it that others have to end the process and say more.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, describe: Callable[[], str], *, grace: float = 0.0
    ):
        self._seconds, self._device, self._describe = timeout_of(group).total_seconds(), device, describe
        self._grace = grace
        self._newest: HasPassed | None = None
        self._seen: HasPassed | None = None
        self._here: tuple[torch.cuda.Event, HasPassed] | None = None
        self._thread: threading.Thread | None = None
        self._leaving = threading.Event()

    def mark(self, has_passed: HasPassed) -> None:
        """The GPU is to come past this mark, which it does after those marked before. has_passed: asked by a thread."""
        self._newest = has_passed
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="infcl GPU watch", daemon=True)
            self._thread.start()
            atexit.register(self._leave)

    def mark_here(self, stream: torch.cuda.Stream) -> None:
        """The GPU is to come past what the stream has now. Where this is called often, few events are made."""
        if self._here is None or self._here[1] is self._seen:
            event = torch.cuda.Event()
            self._here = event, event.query
        event, has_passed = self._here
        event.record(stream)
        self.mark(has_passed)

    def _leave(self) -> None:
        """A thread that came back from CUDA while the interpreter is taken down would abort the process."""
        self._leaving.set()
        if self._thread is not None:
            self._thread.join(timeout=2)

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        _let_others_capture()
        nap, naps = min(1.0, self._seconds / 40), 0
        ahead = collections.deque[tuple[HasPassed, int]]()
        told: HasPassed | None = None
        while not self._leaving.wait(nap):
            naps += 1  # a clock would count the time in which all ranks were stopped, to go on later
            if (newest := self._newest) is not None and newest is not self._seen:
                self._seen = newest  # an event is not recorded again
                ahead.append((newest, naps))
            try:
                while ahead and ahead[0][0]():
                    ahead.popleft()
            except RuntimeError:
                return  # the GPU or NCCL has failed, which whoever computes or sends is told
            if not ahead:
                continue
            mark, since = ahead[0]
            waited = (naps - since) * nap
            if waited > NOTICE * self._seconds and mark is not told:
                told = mark
                self._tell(waited)
            if waited > self._seconds + self._grace:
                os._exit(1)  # nothing that waits for this GPU can be ended but the process

    def _tell(self, waited: float) -> None:
        def tell() -> None:
            _let_others_capture()
            heading = f"For {waited:.0f} s {self._device} has waited for another GPU; after {self._seconds:.0f} s "
            print(f"{heading}this process ends.", file=sys.stderr, flush=True)
            print(self._describe(), file=sys.stderr, flush=True)

        telling = threading.Thread(target=tell, daemon=True)  # the driver may hold up what asks it, too
        telling.start()
        telling.join(TELLING)


def _let_others_capture() -> None:
    """This thread's questions to CUDA do not make the CUDA graph invalid that another thread captures meanwhile."""
    relaxed = ctypes.c_int(2)
    ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))
