"""How a run ends: one table of exit codes, and what is printed on the way out.

0    finished; also --help, --dry-run, and a folder whose run is finished
1    a failure, with its traceback; storage that hangs or a loader that ends, with one line
2    a usage error, data that is of no use, or a later run took the folder
65   the data or the numbers are bad: starting again would end the same way
69   a node is lost (infcl/parallel/heartbeat.py ends the process)
74   storage takes no more: the trained model, or too many checkpoints in a row, could not be written
130  interrupted by Ctrl-C, 138 by SIGUSR1, 143 by SIGTERM, 129 by SIGHUP: 128 + the signal, after a checkpoint; a
     second Ctrl-C some seconds later ends the run without one
"""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

from infcl.checkpoint.run_folder import FolderTaken, NotWritten
from infcl.checkpoint.write import StorageHangs
from infcl.data.loader import TooManyBadSamples
from infcl.data.workers import NoBatch
from infcl.parallel import Parallel, describe_failure, destroy_parallel, read_environment, report_mistake
from infcl.report import summary_table
from infcl.train.finite import Diverged
from infcl.train.signals import Stopped
from infcl.train.trainer import Trainer

EXIT_CODES: dict[type[BaseException], int] = {
    FolderTaken: 2,
    Diverged: 65,  # EX_DATAERR of sysexits.h
    TooManyBadSamples: 65,
    StorageHangs: 1,
    NotWritten: 74,  # EX_IOERR
    KeyboardInterrupt: 130,
}


@dataclass
class NothingToTrain:
    """A run that ends before it begins, and what rank 0 prints of it."""

    parallel: Parallel
    text: str


def run(program: str, build: Callable[[], Trainer | NothingToTrain], *, debug: bool = False) -> int:
    """Build a trainer, fit it and print its summary; return the exit code.

    Args:
        program: what error messages begin with.
        build: returns the trainer. Its ValueErrors are usage errors.
        debug: show their tracebacks.

    Raises:
        RuntimeError: a failure, reported with its node where there are several.
    """
    rank = read_environment()[0]
    try:
        built = build()
    except ValueError as error:
        if debug:
            raise
        return report_mistake(program, error)
    except KeyboardInterrupt as end:
        _say(rank, "interrupted before the first step")
        return EXIT_CODES[type(end)]
    if isinstance(built, NothingToTrain):
        _say(rank, built.text)
        destroy_parallel(built.parallel)
        return 0
    return _fit(program, built, rank)


def _fit(program: str, trainer: Trainer, rank: int) -> int:
    code, parallel = 0, trainer.parallel
    try:
        _say(rank, summary_table(trainer.fit()))
    except Stopped as stop:
        _say(rank, f"{stop} at step {trainer.step}; {trainer.checkpoints.hint}")
        code = stop.exit_code
    except KeyboardInterrupt as end:
        _say(rank, f"interrupted at step {trainer.step}; {trainer.checkpoints.hint}")
        return EXIT_CODES[type(end)]
    except NoBatch as end:  # of this rank: the others wait for it in the ring
        print(f"{program}: error: rank {rank}: {end}", file=sys.stderr, flush=True)
        return end.exit_code
    except (FolderTaken, Diverged, NotWritten, StorageHangs, TooManyBadSamples) as end:
        report_mistake(program, end)
        return EXIT_CODES[type(end)]
    except RuntimeError as error:
        if parallel.hosts > 1:
            print(describe_failure(parallel, error), file=sys.stderr, flush=True)
        raise
    destroy_parallel(parallel)
    return code


def _say(rank: int, text: str) -> None:
    if rank == 0:
        with contextlib.suppress(OSError):  # the terminal is gone
            print(text, flush=True)
