"""Processes that a benchmark starts: one per GPU, stopped after a time limit or with the benchmark."""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

PATIENCE = 40  # seconds for a launcher to stop its ranks, which are in other sessions


def on_ranks(function: Callable, world_size: int, *arguments: Any) -> None:
    """Call function(rank, *arguments) in one process per rank; with one rank, in this process.

    Each has the environment variables that `init_process_group` and `init_parallel` expect from a launcher.
    """
    shared = (function, world_size, _free_port(), arguments)
    if world_size == 1:
        _start(0, *shared)
    else:
        torch.multiprocessing.spawn(_start, shared, nprocs=world_size)


def _start(rank: int, function: Callable, world_size: int, port: int, arguments: tuple) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    function(rank, *arguments)


def _free_port() -> int:
    """Return a free port below the range that the system uses for outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def exit_on_sigterm(program: str) -> None:
    """Turn SIGTERM into SystemExit, so that a benchmark stops the processes that it started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"{program}: ended by SIGTERM"))


def torchrun(processes: int) -> list[str]:
    """Return the command that starts a Python program in `processes` processes on this node."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [sys.executable, *(launcher if processes > 1 else [])]


def run(command: list[str], seconds: float, **options) -> tuple[str, str]:
    """Run a command in its own session, with a time limit.

    Args:
        command: program and arguments.
        seconds: time limit.
        options: arguments of subprocess.Popen, such as cwd and env.

    Returns:
        Why it failed ("exit code 1", "no result in 120 s"; empty if it succeeded), and its output.
    """
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, **options
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        return f"exit code {process.returncode}" if process.returncode else "", output
    except subprocess.TimeoutExpired:
        return f"no result in {seconds:.0f} s", stop(process)
    except BaseException:  # Ctrl-C and SIGTERM: a process that continues would keep its GPUs
        stop(process)
        raise


def stop(*processes: subprocess.Popen) -> str:
    """Stop processes and their sessions with SIGTERM, then SIGKILL. Return the output of the last process."""
    output = ""
    for process in processes:
        _signal(process, signal.SIGTERM)
    for process in processes:
        try:
            output, _ = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGKILL)
            output, _ = process.communicate()
        _signal(process, signal.SIGKILL)  # the rest of its session
    return output


def _signal(process: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def reason(output: str) -> list[str]:
    """Return the lines of an output that look like the cause of a failure, and the last lines."""
    lines = [line[:300] for line in output.strip().splitlines() if line.strip()]
    causes = [line for line in lines if re.search(r"\w+(Error|Exception)\b.*:", line)]
    return [*causes[:3], "...", *lines[-4:]]


# ---- many trainings ----


@dataclass(frozen=True)
class Training:
    name: str  # name of its run folder
    flags: list[str]
    key: dict = field(default_factory=dict)  # columns that identify its row


@dataclass(frozen=True)
class Machine:
    """Resources for the runs.

    Attributes:
        jobs: runs at a time.
        device: cuda or cpu.
        ranks: processes per run.
        gpus: GPUs that the runs share.
    """

    jobs: int
    device: str
    ranks: int = 1
    gpus: int = 1

    def __post_init__(self):
        if self.device == "cuda" and self.ranks > self.gpus:
            raise ValueError(f"{self.ranks} ranks of a run need as many GPUs, there are {self.gpus}: --ranks, --gpus")

    def environment(self, slot: int) -> dict[str, str]:
        """Return the environment of the run in slot `slot` of `jobs`."""
        processes = self.jobs * self.ranks
        threads = max(1, len(os.sched_getaffinity(0)) // processes) if self.device == "cpu" else 1
        result = os.environ | {"OMP_NUM_THREADS": str(threads)}
        if self.device == "cpu":
            return result | {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        own = [(slot * self.ranks + i) % self.gpus for i in range(self.ranks)]
        return result | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, own))}

    def command(self, flags: list[str]) -> list[str]:
        # Without "--", torchrun reads --logs as an abbreviation of its own flags.
        return [*torchrun(self.ranks), *(["--"] if self.ranks > 1 else []), "pretrain_clip.py", *flags]


def train_all(
    trainings: Sequence[Training],
    machine: Machine,
    folder: Path,
    finished: Callable[[Training, Path, float], None],
    *,
    time_out: float,
) -> list[str]:
    """Run all trainings, several at a time. They are stopped if this process is (SIGTERM, Ctrl-C).

    A run with one rank is a plain `python pretrain_clip.py`; with several ranks it uses torchrun. GPUs are assigned in
    turn: run k gets the next `ranks` GPUs of the machine. Several runs may share a GPU.

    Args:
        finished: called as finished(training, run folder, seconds) for each training that succeeds.
        time_out: seconds per run.

    Returns:
        The names of the trainings that failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    waiting, failed = list(trainings), []
    running: dict[int, tuple[Training, subprocess.Popen, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < machine.jobs:
                slot = min(set(range(machine.jobs)) - set(running))
                running[slot] = _start_training(waiting.pop(0), machine, slot, folder)
            time.sleep(0.2)
            for slot, (training, process, start) in list(running.items()):
                seconds = time.monotonic() - start
                if process.poll() is None and seconds < time_out:
                    continue
                del running[slot]
                if process.poll() == 0:
                    finished(training, folder / training.name, seconds)
                    continue
                stop(process)
                failed.append(training.name)
                tail = (folder / f"{training.name}.log").read_text(errors="replace").splitlines()[-5:]
                print(f"{training.name}: no result after {seconds:.0f} s\n  " + "\n  ".join(tail), flush=True)
    finally:
        stop(*(process for _, process, _ in running.values()))
    return failed


def _start_training(
    training: Training, machine: Machine, slot: int, folder: Path
) -> tuple[Training, subprocess.Popen, float]:
    flags = [*training.flags, "--device", machine.device, "--logs", str(folder), "--name", training.name, "--overwrite"]
    with (folder / f"{training.name}.log").open("w") as log:
        process = subprocess.Popen(
            machine.command(flags),
            env=machine.environment(slot),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return training, process, time.monotonic()
