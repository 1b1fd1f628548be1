"""How a rank's process ends: it reports an error in one line, on one rank, runs atexit's functions and exits.

`end_process` does not shut the interpreter down. C++ threads of the process group and of its store outlive `main`. A
thread that needs the interpreter during its shutdown makes C++ abort ("terminate called without an active exception"),
and a rank that has done all its work exits with code 134. This happened in two of a hundred exits.

A profiler that writes when the interpreter exits (python -m cProfile) writes nothing. An external one (py-spy) works.
"""

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch.distributed as dist

from infcl.parallel.environment import read_environment
from infcl.parallel.groups import Parallel, rank_and_host

_REPORTED, _HEARD = "usage error is reported", "usage error was heard"  # keys in the group's store


def report_mistake(program: str, error: Exception) -> int:
    """Print one line about a usage error, on one rank. Return exit code 2 on all ranks.

    After the rendezvous, rank 0 notifies the other ranks that it reports the error. Before the rendezvous, the others
    wait, since launchers stop them within seconds after the first rank has exited. A rank that is still running then
    reports the error itself, since only its node has it. The first rank of each node reports before the node's others.
    """
    rank, world_size, local_rank = read_environment()
    store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
    if rank == 0:
        print(f"{program}: error: {error}", file=sys.stderr, flush=True)
        if store is not None:
            store.set(_REPORTED, "")
            _wait(5, lambda: store.add(_HEARD, 0) >= world_size - 1)  # the store may end with this process
    elif not _wait(5 if local_rank == 0 else 10, lambda: store is not None and store.check([_REPORTED])):
        print(f"{program}: error: {error}", file=sys.stderr, flush=True)
    elif store is not None:
        store.add(_HEARD, 1)
    return 2


def describe_failure(parallel: Parallel, error: Exception) -> str:
    """Return one line about a failed rank in a run over several nodes: its node, the error, and all nodes' ranks."""
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    return f"{rank_and_host(parallel)}: {first_line}; the nodes: {', '.join(map(str, parallel.nodes))}"


def _wait(seconds: float, until: Callable[[], bool]) -> bool:
    """Wait until `until()` is true; return whether it became true in time. Errors of a closed store are ignored."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(dist.DistError):
            if until():
                return True
        time.sleep(0.1)
    return False


def end_process(code: int) -> NoReturn:
    """Run the functions registered with atexit (which stop loader workers), flush the streams, exit with `code`.

    Threads are not joined: after an interrupt, the checkpoint thread writes a checkpoint that is never published.
    Exceptions, including argparse's SystemExit, do not reach this function and end the process as usual.
    """
    try:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the reader has exited, or the stream is closed
                stream.flush()
    finally:
        os._exit(code)


@contextlib.contextmanager
def spare_threads(count: int) -> Iterator[None]:
    """Check that `count` more threads can start, and hold them inside the context.

    If a process limit allows fewer, a run would hang or exit without a reason.

    Raises:
        ValueError: the user's limit (ulimit -u) or the container's (pids.max) is reached.
    """
    release = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(count):
            thread = threading.Thread(target=release.wait, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise ValueError(
                    f"only {len(started)} more threads can be started, a rank may need {count}: raise the limit of "
                    "processes (ulimit -u, or the container's), or use fewer --workers"
                ) from error
            started.append(thread)
        yield
    finally:
        release.set()
        for thread in started:
            thread.join()
