"""Log a run's progress: phase times, metrics.jsonl, console and sinks.

Only rank 0 writes. The x-axis of all curves is samples_seen.
"""

import json
import math
import os
import resource
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from infcl.checkpoint.run_folder import RunFolder, why_not_written
from infcl.config import TrainConfig, aligned
from infcl.report.records import read_records
from infcl.train.observers import Step
from infcl.train.sinks import Console, open_sinks


class PhaseTimer:
    """Measure the seconds of each phase of a step.

    `mark(name)` begins a phase; `read()` ends the last one and waits for the device. With `named` set, phases are also
    ranges in torch's profiler.
    """

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self.marks: list[tuple[str, Any]] = []  # CUDA events, or seconds
        self.named = False
        self.range: torch.profiler.record_function | None = None

    def mark(self, name: str) -> None:
        if self.range is not None:
            self.range.__exit__(None, None, None)
            self.range = None
        if self.named and name != "end":
            self.range = torch.profiler.record_function(f"phase/{name}")
            self.range.__enter__()
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((name, event))
        else:
            self.marks.append((name, time.perf_counter()))

    def read(self) -> dict[str, float]:
        self.mark("end")
        marks, self.marks = self.marks, []
        if self.on_gpu:
            marks[-1][1].synchronize()
        seconds: dict[str, float] = {}
        for (name, start), (_, end) in zip(marks, marks[1:]):
            elapsed = start.elapsed_time(end) / 1000 if self.on_gpu else end - start
            seconds[name] = seconds.get(name, 0.0) + elapsed
        return seconds


class MetricsWriter:
    """Write metrics.jsonl, the sinks and the console of a run; does nothing on ranks other than 0.

    A record omits missing and non-finite values (a norm of overflowed gradients, the utilisation of an unknown device),
    so that every line is valid JSON.

    A record that cannot be written (full disk, unreachable service) is dropped and counted in `lost`; the first one is
    reported. An exception would end only rank 0, and the other ranks would wait for it.
    """

    def __init__(self, run: RunFolder, config: TrainConfig, *, enabled: bool, total_steps: int, samples_seen: int = 0):
        self.run, self.enabled = run, enabled
        self.lost = 0
        if enabled:
            self.file = open(run.metrics, "a", buffering=1)
            self.sinks = open_sinks(config, run.root, samples_seen=samples_seen)
            self.console = Console(total_steps, config.log_every_n_steps)
            self._end_torn_line()

    def step(self, step: int, samples_seen: int, values: dict[str, float | None]) -> None:
        """Record optimizer step `step` (counted from 1) and show it on the console."""
        if self.enabled:
            known = self._write("train", step, samples_seen, values)
            self._try(self.console.step, step, known)

    def after_step(self, step: Step) -> None:
        """Record a step and print the lines that observers added to it."""
        self.step(step.number, step.samples_seen, step.values)
        for line in step.news:
            self.say(line)

    def _end_torn_line(self) -> None:
        """End the line of a record that a crash cut off; otherwise the next record would be unreadable too."""
        with open(self.file.name, "rb") as before:
            if before.seek(0, os.SEEK_END):
                before.seek(-1, os.SEEK_END)
                if before.read() != b"\n":
                    self._try(self.file.write, "\n")

    def evaluation(self, name: str, step: int, samples_seen: int, values: dict[str, float]) -> None:
        if not self.enabled:
            return
        self._write(name, step, samples_seen, values)
        self.say(f"{name} at step {step}\n{aligned((key, f'{value:.4g}') for key, value in values.items())}")

    def evaluated_at(self, step: int) -> set[str]:
        """Return the names of the evaluations that metrics.jsonl has for this step. Rank 0 only."""
        return {record["kind"] for record in read_records(self.run.metrics) if record["step"] == step} - {"train"}

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self.enabled:
            self._try(self.console.say, text)

    def close(self) -> None:
        if self.enabled:
            self._try(self.file.close)
            for sink in self.sinks:
                self._try(sink.close, of_sink=True)
            self._try(self.console.close)  # last: it prints what the others lost

    def _write(self, kind: str, step: int, samples_seen: int, values: Mapping[str, float | None]) -> dict[str, float]:
        known = {key: value for key, value in values.items() if value is not None and math.isfinite(value)}
        record = {"kind": kind, "step": step, "samples_seen": samples_seen} | known
        self._try(self.file.write, json.dumps(record) + "\n")
        for sink in self.sinks:
            self._try(sink.log, kind, step, samples_seen, known, of_sink=True)
        return known

    def _try(self, write: Callable, *arguments, of_sink: bool = False) -> None:
        expected = Exception if of_sink else OSError  # the sinks' libraries raise their own exception types
        try:
            write(*arguments)
        except expected as error:
            self.lost += 1
            if self.lost == 1:
                self.say(f"metrics could not be written ({why_not_written(error)}); training continues without them")


def peak_memory_mb(device: torch.device) -> float:
    """Return the peak device memory of this process on a GPU, its peak resident memory on a CPU; MiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
