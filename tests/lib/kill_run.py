"""Start runs of two ranks, which tests kill, within a second.

`Starter` has a process that imports once: kill_run.py deepspeed.launcher.launch. For each line of JSON, {"arguments",
"port", "folder", "fault"}, it forks a launcher in a new session and prints its process id. The launcher forks the
ranks: pretrain_clip.py with the arguments and its output in FOLDER/log. Like DeepSpeed's launcher, it stops the other
rank when one fails. It writes {rank: exit code} to FOLDER/codes. Ranks notice its death, because they look for a parent
of that name. After each step a rank appends [step, ids of its samples] to FOLDER/ids.RANK.
"""

import concurrent.futures
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import psutil

from tests.lib.checkout import ROOT
from tests.lib.ranks import free_port
from tests.lib.waiting import wait_until

RANKS = 2


class Starter:
    """The process that starts runs."""

    def __init__(self) -> None:
        program = [sys.executable, "tests/lib/kill_run.py", "deepspeed.launcher.launch"]
        self.process = subprocess.Popen(program, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, arguments: list[str], folder: Path, fault: Sequence = ()) -> int:
        """Start a run, with the arguments of a `plant`; return the launcher's process id, which is its session's."""
        order = {"arguments": arguments, "port": free_port(), "folder": str(folder), "fault": list(fault)}
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def finish(self, *arguments) -> tuple[list[int], str]:
        """Start a run and wait until no process of it is left; return the exit codes of its ranks, and its output."""
        session, folder = self.start(*arguments), arguments[1]
        try:
            wait_until(lambda: not members(session), 300, lambda: (folder / "log").read_text()[-3000:])
        finally:
            for process in members(session):
                os.kill(process, signal.SIGKILL)
        codes = json.loads((folder / "codes").read_text())
        return [codes[str(rank)] for rank in range(RANKS)], (folder / "log").read_text()


def members(session: int) -> list[int]:
    """Return the live processes of a session."""
    found = []
    for process in psutil.process_iter(["status"]):
        try:
            if os.getsid(process.pid) == session and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except ProcessLookupError:
            pass
    return found


def plant(rank: int, step: int, phase: str, number: int) -> None:
    """Let rank `rank` send itself a signal when phase `phase` of step `step` begins. Call on all ranks.

    Args:
        number: the signal; 0 kills its loader's first worker instead.
        phase: encode, loss, replay or step.
    """
    from infcl.checkpoint import write as checkpoint_writer
    from infcl.parallel import read_environment
    from infcl.train import diagnostics

    def finish_writing(self):
        if self._writing is not None:
            concurrent.futures.wait([self._writing])
        return False

    checkpoint_writer.CheckpointWriter.busy = property(finish_writing)  # no race for the last checkpoint
    if read_environment()[0] != rank:
        return
    encoded, plain_mark = [], diagnostics.PhaseTimer.mark

    def mark_phase(self, name):
        encoded.extend([name] * (name == "encode"))
        if len(encoded) == step and name == phase:
            if number:
                os.kill(os.getpid(), number)
            else:
                multiprocessing.active_children()[0].kill()
                time.sleep(60)  # until the worker's death is reported
        plain_mark(self, name)

    diagnostics.PhaseTimer.mark = mark_phase


def rank_process(rank: int, arguments: list[str], port: int, folder: Path, fault: list) -> None:
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
    if fault:
        plant(*fault)
    end_process(main(arguments, noted=[]))


def launcher_process(arguments: list[str], port: int, folder: Path, fault: list) -> None:
    os.setsid()
    print(os.getpid(), flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    ranks, codes = {}, {}
    for rank in range(RANKS):
        if (process := os.fork()) == 0:
            rank_process(rank, arguments, port, folder, fault)
        ranks[process] = rank
    while ranks:
        process, status = os.wait()
        codes[ranks.pop(process)] = os.waitstatus_to_exitcode(status)
        if status and ranks:
            time.sleep(1)
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    (folder / "codes").write_text(json.dumps(codes))


if __name__ == "__main__":
    import tests.lib.preload  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies: launchers are not waited for
    for line in sys.stdin:
        order = json.loads(line)
        if os.fork() == 0:
            try:
                launcher_process(order["arguments"], order["port"], Path(order["folder"]), order["fault"])
            except Exception:  # os._exit would hide it
                traceback.print_exc()
            finally:
                os._exit(1)
