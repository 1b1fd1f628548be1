"""Run many trainings of pretrain_clip.py, several at a time on one machine.

In:  trainings (a name, flags of pretrain_clip.py). Out: a callback for each run folder as soon as it is finished.
A run with one rank is a plain `python pretrain_clip.py`; with several ranks it uses torchrun. GPUs are assigned in
turn: run k gets the next --ranks GPUs of the machine. Several runs may share a GPU.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.processes import stop, torchrun


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
    """Run all trainings. They are stopped if this process is (SIGTERM, Ctrl-C).

    Args:
        finished: called as finished(training, run folder, seconds) for each training that succeeds.
        time_out: seconds per run.

    Returns:
        The names of the trainings that failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    waiting, failed = list(trainings), []
    running: dict[int, tuple[Training, subprocess.Popen, float]] = {}
    with _terminating(running):
        while waiting or running:
            while waiting and len(running) < machine.jobs:
                slot = min(set(range(machine.jobs)) - set(running))
                running[slot] = _start(waiting.pop(0), machine, slot, folder)
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
    return failed


def _start(training: Training, machine: Machine, slot: int, folder: Path) -> tuple[Training, subprocess.Popen, float]:
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


@contextlib.contextmanager
def _terminating(running: dict):
    """Turn SIGTERM into an exception, and stop the runs at the end of the block."""

    def interrupt(*_):
        raise KeyboardInterrupt("SIGTERM")

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        stop(*(process for _, process, _ in running.values()))
