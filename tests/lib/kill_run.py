"""Start runs of two ranks, which tests kill, within a second: kill_run.py deepspeed.launcher.launch

Imports once. For each line of JSON, {"arguments", "port", "folder"}, it forks a launcher in a new session and prints
its process id. The launcher forks the ranks: pretrain_clip.py with the arguments and its output in FOLDER/log. Like
DeepSpeed's launcher, it stops the other rank when one fails. Ranks notice its death, because they look for a parent of
that name. After each step a rank appends [step, ids of its samples] to FOLDER/ids.RANK.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import tests.lib.preload  # noqa: F401

RANKS = 2


def rank_process(rank: int, arguments: list[str], port: int, folder: Path) -> None:
    import torch

    from infcl.parallel.process import end_process
    from infcl.train.trainer import Trainer
    from pretrain_clip import main

    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_SIZE": RANKS, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    plain_step = Trainer.train_step

    def step(self, micro_batches):
        done = plain_step(self, micro_batches)
        with open(folder / f"ids.{rank}", "a") as file:
            file.write(json.dumps([self.step, torch.cat(self.batches.ids).tolist()]) + "\n")
        return done

    Trainer.train_step = step  # type: ignore[method-assign]
    end_process(main(arguments, noted=[]))


def launcher_process(arguments: list[str], port: int, folder: Path) -> None:
    os.setsid()
    print(os.getpid(), flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    ranks = {}
    for rank in range(RANKS):
        if (process := os.fork()) == 0:
            rank_process(rank, arguments, port, folder)
        ranks[process] = rank
    while ranks:
        process, status = os.wait()
        del ranks[process]
        if status and ranks:
            time.sleep(1)
            for other in ranks:
                os.kill(other, signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies: launchers are not waited for
    for line in sys.stdin:
        order = json.loads(line)
        if os.fork() == 0:
            try:
                launcher_process(order["arguments"], order["port"], Path(order["folder"]))
            finally:
                os._exit(1)
