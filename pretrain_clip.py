"""Contrastive pre-training: deepspeed [--hostfile hosts] pretrain_clip.py --train-data SHARDS --tokenizer FILE ...

    parse the flags -> join the process group -> claim the run folder -> build the parts -> fit -> say what came out

Exit codes: 0 finished; 2 a mistake in the command (one line says which, printed by one rank), or a later run has taken
the folder; 65 more steps in a row than --max-skipped-steps were not finite; 130 interrupted, 143, 138 told to end by
SIGTERM, SIGUSR1 (129: SIGHUP), after a checkpoint; any other is a failure, with its traceback unless it is the storage
that hangs (1). While a run starts SIGTERM and SIGHUP end the process at once, SIGUSR1 behind the first step, with a
checkpoint.
"""

import contextlib
import json
import logging
import signal
import sys

if __name__ == "__main__":  # before what takes long to import: a scheduler's warning may come at any time
    noted: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: noted.append(number))

from infcl.checkpoint.run_folder import FolderTaken, claim_run_folder
from infcl.checkpoint.write import StorageHangs
from infcl.config import may_pack, parse_args, settings_of
from infcl.data.loader import TooManyBadSamples
from infcl.data.workers import NoBatch
from infcl.parallel import (
    describe_failure,
    destroy_parallel,
    init_parallel,
    read_environment,
    report_mistake,
)
from infcl.parallel.process import end_process, require_threads
from infcl.report import summary_table
from infcl.train.build import resolve_inputs
from infcl.train.dry_run import describe_plan
from infcl.train.finite import Diverged
from infcl.train.fit import fit_to_memory
from infcl.train.signals import Stopped, end_with_launcher
from infcl.train.trainer import Trainer


def main(argv: list[str] | None = None, *, noted: list[int] | None = None) -> int:
    """noted: signals that have come, and will, for which this run is to save and end."""
    rank, argv = read_environment()[0], sys.argv[1:] if argv is None else argv
    if rank != 0 and {"-h", "--help"} & set(argv):
        return 0  # rank 0 prints it
    try:
        end_with_launcher()
        config = parse_args(argv)
        logging.basicConfig(level=logging.DEBUG if config.debug else logging.WARNING)
        require_threads(16 + 4 * config.workers)  # of the process group and the store; of each worker
        parallel = init_parallel(
            config.device,
            timeout_minutes=config.dist_timeout,
            host_timeout=config.host_timeout,
            interface=config.interface,
            run=config.name or config.model,
            settings=settings_of(config),
        )
        if config.tensor_parallel_size > 1:
            from megatron_patches.groups import init_tensor_parallel

            parallel = init_tensor_parallel(parallel, config.tensor_parallel_size, on_host=may_pack(config))
        inputs = fit_to_memory(resolve_inputs(config, parallel), parallel)
        config = inputs.spec.flags
        if config.dry_run:
            say(rank, describe_plan(inputs, parallel))
            destroy_parallel(parallel)
            return 0
        run = claim_run_folder(config, parallel)
        if run.is_finished:
            if rank == 0:
                summary = json.loads(run.summary.read_text())
                say(rank, f"{run.root} is finished; --overwrite trains it again\n{summary_table(summary)}")
            destroy_parallel(parallel)
            return 0
        trainer = Trainer(inputs, parallel, run, noted=noted)
    except ValueError as error:
        if "--debug" in argv:
            raise
        return report_mistake("pretrain_clip.py", error)
    except KeyboardInterrupt:
        say(rank, "interrupted before the first step")
        return 130
    try:
        summary = trainer.fit()
    except KeyboardInterrupt:
        say(rank, f"interrupted at step {trainer.step}; {trainer.checkpoints.hint}")
        return 130
    except Stopped as stop:
        say(rank, f"{stop} at step {trainer.step}; {trainer.checkpoints.hint}")
        destroy_parallel(parallel)
        return stop.exit_code
    except FolderTaken as taken:
        return report_mistake("pretrain_clip.py", taken)
    except (Diverged, StorageHangs) as end:
        report_mistake("pretrain_clip.py", end)
        return end.exit_code
    except (TooManyBadSamples, NoBatch) as end:  # of this rank: the others wait for it in the ring
        print(f"pretrain_clip.py: error: rank {parallel.rank}: {end}", file=sys.stderr, flush=True)
        return end.exit_code
    except RuntimeError as error:
        if parallel.hosts > 1:
            print(describe_failure(parallel, error), file=sys.stderr, flush=True)
        raise
    say(rank, summary_table(summary))
    destroy_parallel(parallel)
    return 0


def say(rank: int, text: str) -> None:
    if rank == 0:
        with contextlib.suppress(OSError):  # the terminal is gone
            print(text, flush=True)


if __name__ == "__main__":
    end_process(main(noted=noted))
