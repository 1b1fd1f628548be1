"""Time and memory of steps: the seconds of each phase, and a profile of a few steps.

The profile is RUN/profile/trace_rank0.json.gz (for ui.perfetto.dev) and table.txt.

The table lists the phases of the step (times measured by the trainer), then the slowest operators. Only rank 0 is
profiled. The profiler slows down only the profiled steps.
"""

import resource
import time
from pathlib import Path
from typing import Any

import torch

from infcl.checkpoint.run_folder import why_not_written
from infcl.train.observers import Step

WARM_UP_STEPS = 5
ROWS = 25


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


def peak_memory_mb(device: torch.device) -> float:
    """Return the peak device memory of this process on a GPU, its peak resident memory on a CPU; MiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class StepProfiler:
    """An observer that profiles steps 6 to 5 + `steps` of this process."""

    def __init__(self, steps: int, folder: Path, timer: PhaseTimer, *, enabled: bool):
        self.steps, self.folder, self.timer = steps if enabled else 0, Path(folder), timer
        self.done = 0
        self.profile: torch.profiler.profile | None = None
        self.phases: list[dict[str, float]] = []

    def after_step(self, step: Step) -> None:
        if not self.steps:
            return
        self.done += 1
        if self.profile is not None:
            self.phases.append(step.phases)
        if self.done == WARM_UP_STEPS:
            self._start()
        elif self.done == WARM_UP_STEPS + self.steps:
            self.steps = 0
            step.news.append(self._stop())

    def close(self) -> str | None:
        """End a running profile and return a line about it, or why there is none; None if it was reported before."""
        if self.profile is not None:
            return self._stop()
        if self.steps:
            return f"no profile: the run ended after {self.done} steps, {WARM_UP_STEPS} are warm-up"
        return None

    def _start(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.timer.on_gpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profile = torch.profiler.profile(activities=activities)
        self.profile.start()
        self.timer.named = True

    def _stop(self) -> str:
        profile, self.profile = self.profile, None
        assert profile is not None, "_start comes first"
        self.timer.named = False
        profile.stop()
        try:
            return self._write(profile)
        except OSError as error:  # an exception on rank 0 would end the run
            return f"the profile could not be written ({why_not_written(error)})"

    def _write(self, profile: torch.profiler.profile) -> str:
        self.folder.mkdir(parents=True, exist_ok=True)
        trace, table = self.folder / "trace_rank0.json.gz", self.folder / "table.txt"
        profile.export_chrome_trace(str(trace))
        order = "self_cuda_time_total" if self.timer.on_gpu else "self_cpu_time_total"
        operators = profile.key_averages().table(sort_by=order, row_limit=ROWS, max_name_column_width=70)
        table.write_text(f"{phase_table(self.phases)}\n\n{operators}\n")
        return f"profile of {len(self.phases)} steps: {trace}, {table}"


def phase_table(steps: list[dict[str, float]]) -> str:
    """Return lines with the mean milliseconds and the share of each phase over the profiled steps."""
    if not steps:
        return "no full step was profiled"
    means = {name: sum(step.get(name, 0.0) for step in steps) / len(steps) for name in steps[0]}
    total = sum(means.values())
    lines = [f"{'phase':<10}{'ms a step':>12}{'share':>9}   (mean of {len(steps)} steps)"]
    rows = [*means.items(), ("total", total)]
    lines += [f"{name:<10}{1000 * value:>12.2f}{value / total if total else 0:>9.1%}" for name, value in rows]
    return "\n".join(lines)
