"""Contrastive pre-training: deepspeed [--hostfile hosts] pretrain_clip.py --train-data SHARDS --tokenizer FILE ...

Where the package is installed: infcl-train FLAGS for one rank, deepspeed --module pretrain_clip FLAGS for several.

    parse the flags -> join the process group -> resolve the run -> claim its folder -> build -> fit

infcl/train/ending.py lists the exit codes. During the start SIGTERM and SIGHUP end the process at once; SIGUSR1 ends it
after the first step, with a checkpoint.
"""

import logging
import signal
import sys
from typing import NoReturn

# Before the slow imports, as a scheduler's signal may arrive at any time.
if __name__ == "__main__" or sys.argv[0].endswith("infcl-train"):
    noted: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: noted.append(number))

from infcl.checkpoint.run_folder import claim_run_folder
from infcl.config import parse_args
from infcl.config.open_clip_flags import notes_on_ignored
from infcl.config.redaction import redact_output
from infcl.parallel import read_environment
from infcl.parallel.process import end_process
from infcl.train.build import join, resolve_inputs
from infcl.train.dry_run import describe_plan
from infcl.train.ending import NothingToTrain, run
from infcl.train.fit import fit_to_memory
from infcl.train.results import describe_finished
from infcl.train.saves import end_with_launcher
from infcl.train.trainer import Trainer


def main(argv: list[str] | None = None, *, noted: list[int] | None = None) -> int:
    """Train with the flags in `argv` and return the exit code.

    Args:
        argv: command-line flags; None: those of sys.argv.
        noted: list of received signals, to which handlers append. The run saves and exits when it is not empty.
    """
    argv = sys.argv[1:] if argv is None else argv
    if read_environment()[0] != 0 and {"-h", "--help"} & set(argv):
        return 0  # rank 0 prints it
    redact_output()
    return run("pretrain_clip.py", lambda: build(argv, noted), debug="--debug" in argv)


def build(argv: list[str], noted: list[int] | None) -> Trainer | NothingToTrain:
    """Build the trainer for these flags; a ValueError is a usage error."""
    end_with_launcher()
    flags = parse_args(argv)
    logging.basicConfig(level=logging.DEBUG if flags.debug else logging.WARNING)
    parallel = join(flags)
    if parallel.rank == 0:
        print("".join(f"{note}\n" for note in notes_on_ignored(argv)), end="", flush=True)
    inputs = fit_to_memory(resolve_inputs(flags, parallel), parallel)
    if flags.dry_run:
        return NothingToTrain(parallel, describe_plan(inputs, parallel))
    folder = claim_run_folder(inputs.spec.flags, parallel)
    if folder.is_finished:
        return NothingToTrain(parallel, describe_finished(folder) if parallel.rank == 0 else "")
    return Trainer(inputs, parallel, folder, noted=noted)


def command() -> NoReturn:
    """Train with the flags of the command line, and exit."""
    end_process(main(noted=noted))


if __name__ == "__main__":
    command()
