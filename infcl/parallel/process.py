"""How the process of a rank ends: after atexit's functions, and without taking the interpreter down.

Threads of the process group and of its store live in C++ and outlast `main`. One that needs the interpreter while that
is being taken down can only be unwound, which C++ answers with an abort ("terminate called without an active
exception"): the rank has done all its work, ends with code 134, and its launcher calls the run a failure. Seen in two
of a hundred exits that left their process group behind, and on busy hosts a few times after it was destroyed.

A profiler that writes when the interpreter ends (python -m cProfile) writes nothing; one from outside (py-spy) does.
"""

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn


def end_process(code: int) -> NoReturn:
    """Run what was registered with atexit (loaders' workers are ended so), flush the streams, end with `code`.

    Threads are not waited for: after an interrupt the one that writes a checkpoint writes what nothing will publish.
    Exceptions, argparse's SystemExit among them, do not come here and end the process as ever.
    """
    try:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # whoever read it is gone, or it is closed
                stream.flush()
    finally:
        os._exit(code)


@contextlib.contextmanager
def spare_threads(count: int) -> Iterator[None]:
    """Hold `count` more threads. Where a limit of processes allows fewer, a run would hang or end without a reason.

    Raises:
        ValueError: the user's limit (ulimit -u) or the container's (pids.max) has been reached.
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
