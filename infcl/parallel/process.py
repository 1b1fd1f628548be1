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
import time
from typing import NoReturn

from infcl.parallel.environment import read_environment
from infcl.parallel.groups import Parallel, rank_and_host

PATIENCE = 5.0  # seconds in which a launcher stops the other ranks after the first one has exited


def report_mistake(program: str, error: Exception, *, everywhere: bool = False) -> int:
    """Print one line about an error that ends the run. Return exit code 2.

    Rank 0 prints at once. The others wait, so that the launcher stops them when rank 0 has exited; one that still runs
    then has an error of its own node, and prints it. The first rank of each node prints before the node's others.

    Args:
        everywhere: whether all ranks have this error, so that rank 0 alone prints it.
    """
    rank, _, local_rank = read_environment()
    if rank != 0:
        time.sleep(PATIENCE if local_rank == 0 else 2 * PATIENCE)
    if rank == 0 or not everywhere:
        print(f"{program}: error: {error}", file=sys.stderr, flush=True)
    return 2


def describe_failure(parallel: Parallel, error: Exception) -> str:
    """Return one line about a failed rank in a run over several nodes: its node, the error, and all nodes' ranks."""
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    return f"{rank_and_host(parallel)}: {first_line}; the nodes: {', '.join(map(str, parallel.nodes))}"


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
