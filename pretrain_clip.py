"""Contrastive pre-training: deepspeed [--hostfile hosts] pretrain_clip.py --train-data SHARDS --tokenizer FILE ...

    parse the flags -> join the process group -> claim the run folder -> build the parts -> fit -> say what came out

Exit codes: 0 finished; 2 a mistake in the command (one line says which, printed by one rank); 130 interrupted; 143, 138
told to end by SIGTERM, SIGUSR1, after a checkpoint; any other is a failure with its traceback.
"""

import json
import logging
import sys
import time

from infcl.config import parse_args
from infcl.parallel import destroy_parallel, init_parallel, read_environment
from infcl.plan import describe_plan
from infcl.report import summary_table
from infcl.train.run_folder import claim_run_folder
from infcl.train.stop import Stopped, end_with_launcher
from infcl.train.trainer import Trainer


def main(argv: list[str] | None = None) -> int:
    rank = read_environment()[0]
    end_with_launcher()
    try:
        config = parse_args(argv)
        logging.basicConfig(level=logging.DEBUG if config.debug else logging.WARNING)
        parallel = init_parallel(config.device, timeout_minutes=config.dist_timeout)
        if config.dry_run:
            say(rank, describe_plan(config, parallel))
            destroy_parallel()
            return 0
        run = claim_run_folder(config, parallel)
        if run.summary.is_file():
            summary = json.loads(run.summary.read_text())
            say(rank, f"{run.root} is finished; --overwrite trains it again\n{summary_table(summary)}")
            return 0
        trainer = Trainer(config, parallel, run)
    except ValueError as error:
        return refuse(error, rank, sys.argv[1:] if argv is None else argv)
    try:
        summary = trainer.fit()
    except KeyboardInterrupt:
        say(rank, f"interrupted at step {trainer.step}; --resume latest continues from the last checkpoint")
        return 130
    except Stopped as stop:
        say(rank, f"{stop} at step {trainer.step}; --resume latest continues from here")
        return stop.exit_code
    say(rank, summary_table(summary))
    destroy_parallel()
    return 0


def say(rank: int, text: str) -> None:
    if rank == 0:
        print(text, flush=True)


def refuse(error: ValueError, rank: int, argv: list[str]) -> int:
    """One line from rank 0, exit code 2 from all; the other ranks wait, since launchers kill the rest when one ends."""
    if "--debug" in argv:
        raise error
    if rank != 0:
        time.sleep(5)
    else:
        print(f"pretrain_clip.py: error: {error}", file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())
