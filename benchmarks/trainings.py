"""Many trainings of pretrain_clip.py, several at once on one machine.

In:  trainings (a name, flags of pretrain_clip.py). Out: a call for each run folder as soon as it is finished.
One rank runs as plain `python pretrain_clip.py`, several under torchrun. On GPUs the runs take turns: run k gets the
next --ranks of the machine's GPUs, and several runs may share one.
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
    name: str  # of its run folder
    flags: list[str]
    key: dict = field(default_factory=dict)  # columns of its row that say what it is


@dataclass(frozen=True)
class Machine:
    """jobs: runs at once. device: cuda or cpu. ranks: of each run. gpus: that the runs share out."""

    jobs: int
    device: str
    ranks: int = 1
    gpus: int = 1

    def __post_init__(self):
        if self.device == "cuda" and self.ranks > self.gpus:
            raise ValueError(f"{self.ranks} ranks of a run need as many GPUs, there are {self.gpus}: --ranks, --gpus")

    def environment(self, slot: int) -> dict[str, str]:
        """Environment of the run in place `slot` of the `jobs`."""
        processes = self.jobs * self.ranks
        threads = max(1, len(os.sched_getaffinity(0)) // processes) if self.device == "cpu" else 1
        result = os.environ | {"OMP_NUM_THREADS": str(threads)}
        if self.device == "cpu":
            return result | {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        own = [(slot * self.ranks + i) % self.gpus for i in range(self.ranks)]
        return result | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, own))}

    def command(self, flags: list[str]) -> list[str]:
        # without "--", torchrun takes --logs for an abbreviation of its own flags
        return [*torchrun(self.ranks), *(["--"] if self.ranks > 1 else []), "pretrain_clip.py", *flags]


def train_all(
    trainings: Sequence[Training],
    machine: Machine,
    folder: Path,
    finished: Callable[[Training, Path, float], None],
    *,
    time_out: float,
) -> list[str]:
    """Call `finished(training, run folder, seconds)` for each training that succeeds; return the others' names.

    Each run has `time_out` seconds. Runs stop with this process (SIGTERM, Ctrl-C).
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
    """SIGTERM becomes an exception, and whatever ends this block stops the runs."""

    def interrupt(*_):
        raise KeyboardInterrupt("SIGTERM")

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        stop(*(process for _, process, _ in running.values()))
