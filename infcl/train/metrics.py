"""What a run says about itself while it goes on: progress bar or lines, metrics.jsonl, TensorBoard events.

Everything happens on rank 0; the x-axis is samples_seen everywhere.
"""

import json
import resource
import sys
import time

import torch

from infcl.train.checkpoint import RunFolder


class PhaseTimer:
    """Seconds per phase of a step: `mark(name)` begins a phase, `read()` ends the last one and waits for the device."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self.marks: list[tuple[str, object]] = []

    def mark(self, name: str) -> None:
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
    """metrics.jsonl, TensorBoard and the console of a run; silent on ranks other than 0."""

    def __init__(self, run: RunFolder, *, enabled: bool, tensorboard: bool, total_steps: int, log_every_n_steps: int):
        self.enabled = enabled
        self.run = run
        self.total_steps = total_steps
        self.log_every_n_steps = log_every_n_steps
        self.first_step: int | None = None
        self.progress = self.file = self.events = None
        if not enabled:
            return
        self.file = open(run.metrics, "a", buffering=1)
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.events = SummaryWriter(run.root / "tensorboard")
        if sys.stdout.isatty():
            self.progress = _progress_bar()
            self.task = self.progress.add_task("train", total=total_steps, loss=float("nan"), rate=0.0)
            self.progress.start()

    def step(self, step: int, samples_seen: int, values: dict[str, float]) -> None:
        """Record optimizer step `step` (counted from 1). `values` has at least loss and samples_per_second."""
        if not self.enabled:
            return
        self._write("train", step, samples_seen, values)
        if self.first_step is None:
            self.first_step, self.start = step - 1, time.perf_counter()
        if self.progress is not None:
            self.progress.update(self.task, completed=step, loss=values["loss"], rate=values["samples_per_second"])
        elif step % self.log_every_n_steps == 0 or step == self.total_steps:
            done = step - self.first_step
            left = (time.perf_counter() - self.start) / max(1, done) * (self.total_steps - step)
            print(
                f"step {step}/{self.total_steps}  loss {values['loss']:.4f}  "
                f"{values['samples_per_second']:.0f} samples/s  lr {values['lr']:.2e}  "
                f"scale {values['logit_scale']:.1f}  left {_clock(left)}",
                flush=True,
            )

    def evaluation(self, name: str, step: int, samples_seen: int, values: dict[str, float]) -> None:
        if not self.enabled:
            return
        self._write(name, step, samples_seen, values)
        shown = "  ".join(f"{key} {value:.4g}" for key, value in values.items())
        self.say(f"{name} at step {step}: {shown}")

    def say(self, text: str) -> None:
        """A line above the progress bar."""
        if self.enabled:
            (self.progress.console.print if self.progress is not None else print)(text)
            sys.stdout.flush()

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()
        if self.events is not None:
            self.events.close()
        if self.file is not None:
            self.file.close()

    def _write(self, kind: str, step: int, samples_seen: int, values: dict[str, float]) -> None:
        record = {"kind": kind, "step": step, "samples_seen": samples_seen} | values
        self.file.write(json.dumps(record) + "\n")
        if self.events is not None:
            for key, value in values.items():
                self.events.add_scalar(f"{kind}/{key}", value, samples_seen)


def peak_memory_mb(device: torch.device) -> float:
    """Peak device memory of this process on a GPU, peak resident memory on a CPU; MiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _progress_bar():
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[rate]:.0f} samples/s"),
        TimeRemainingColumn(),
    )


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
