"""The end of a run: its exit code and final message.

0    finished; also --help, --dry-run, and a folder whose run is finished
1    a failure, with its traceback; a failed loader, with one line
2    a usage error, data without a sample, or another run took over the folder
65   too many bad samples or non-finite values: a restart would end the same way
69   a node is lost (infcl/parallel/heartbeat.py ends the process)
74   storage failed: the trained model, or too many checkpoints in a row, could not be written
130  interrupted by Ctrl-C, 138 by SIGUSR1, 143 by SIGTERM, 129 by SIGHUP: 128 + the signal, after a checkpoint. A
     second Ctrl-C a few seconds later ends the run without one
"""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

from infcl.checkpoint.run_folder import FolderTaken, NotWritten
from infcl.data.loader import TooManyBadSamples
from infcl.data.workers import NoBatch
from infcl.parallel import Parallel, describe_failure, destroy_parallel, read_environment, report_mistake
from infcl.report import summary_table
from infcl.train.finite import Diverged
from infcl.train.saves import Stopped
from infcl.train.trainer import Trainer

EXIT_CODES: dict[type[Exception], int] = {
    FolderTaken: 2,
    Diverged: 65,  # EX_DATAERR of sysexits.h
    TooManyBadSamples: 65,
    NotWritten: 74,  # EX_IOERR
}
INTERRUPTED = 130


@dataclass
class NothingToTrain:
    """The result of a start that does not train, with the text that rank 0 prints."""

    parallel: Parallel
    text: str


def run(program: str, build: Callable[[], Trainer | NothingToTrain], *, debug: bool = False) -> int:
    """Build a trainer, fit it and print its summary; return the exit code.

    Args:
        build: returns the trainer. Its ValueErrors are usage errors.
        debug: show the tracebacks of usage errors.

    Raises:
        RuntimeError: for a failure, after a message with its node if the run has several.
    """
    rank = read_environment()[0]
    try:
        trainer = build()
    except ValueError as error:
        if debug:
            raise
        return report_mistake(program, error)
    except KeyboardInterrupt:
        _say(rank, "interrupted before the first step")
        return INTERRUPTED
    code, parallel = 0, trainer.parallel
    if isinstance(trainer, NothingToTrain):
        _say(rank, trainer.text)
        destroy_parallel(parallel)
        return 0
    try:
        _say(rank, summary_table(trainer.fit()))
    except Stopped as stop:
        _say(rank, f"{stop} at step {trainer.step}; {trainer.checkpoints.hint}")
        code = stop.exit_code
    except KeyboardInterrupt:
        _say(rank, f"interrupted at step {trainer.step}; {trainer.checkpoints.hint}")
        return INTERRUPTED
    except NoBatch as end:  # on this rank only: the others wait for it in the ring
        print(f"{program}: error: rank {rank}: {end}", file=sys.stderr, flush=True)
        return end.exit_code
    except tuple(EXIT_CODES) as end:
        report_mistake(program, end, everywhere=True)
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
