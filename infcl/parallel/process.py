"""Exit of a rank's process: run atexit's functions, then exit without shutting the interpreter down.

C++ threads of the process group and of its store outlive `main`. A thread that needs the interpreter during its
shutdown can only be unwound, and C++ then aborts ("terminate called without an active exception"). The rank has done
all its work but exits with code 134, so its launcher reports a failed run. This happened in two of a hundred exits
that did not destroy the process group, and on busy nodes a few times after it was destroyed.

A profiler that writes when the interpreter exits (python -m cProfile) writes nothing. An external one (py-spy) works.
"""

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn


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
