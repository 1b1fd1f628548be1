"""How the process of a rank ends: at once, after all that Python does at exit, and without taking the interpreter down.

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
from collections.abc import Callable
from typing import NoReturn


def run_program(main: Callable[[], int]) -> NoReturn:
    """End this process with main's exit code, with 1 and a traceback where it raises.

    Threads are joined and atexit's functions run, in Python's own order; multiprocessing ends its processes so too.
    argparse's SystemExit, which comes before there is a process group, passes.
    """
    failure = None  # its frames, and what lives in them, outlast atexit: loaders' workers are told to end there
    try:
        code = main()
    except Exception:
        failure, code = sys.exc_info(), 1
    except KeyboardInterrupt:
        failure, code = sys.exc_info(), 130
    try:
        if failure is not None:
            sys.excepthook(*failure)
        with contextlib.suppress(KeyboardInterrupt):  # a second one ends the wait for threads, as ever
            threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # whoever read it is gone, or it is closed
                stream.flush()
    finally:
        os._exit(code)
