"""Write a run's metrics: metrics.jsonl, TensorBoard, Weights & Biases and the console.

Only rank 0 writes. A sink receives (kind, samples_seen, values) and draws a curve kind/key over samples_seen:
train/loss, retrieval/image_to_text_r1.
"""

import json
import math
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean

from infcl.checkpoint.run_folder import RunFolder
from infcl.config import TrainConfig, aligned, shown_seconds
from infcl.config.redaction import redacted
from infcl.config.words import reason
from infcl.report.records import read_records
from infcl.train.observers import Step

FIRST_STEPS = 3  # each of these steps after a start has a line
SMOOTHED_STEPS = 20  # steps over which the data wait is averaged


class MetricsWriter:
    """Write metrics.jsonl, the sinks and the console of a run; does nothing on ranks other than 0.

    A record omits missing and non-finite values (a norm of overflowed gradients, the utilisation of an unknown device),
    so that every line is valid JSON.

    A record that cannot be written (full disk, unreachable service) is dropped and counted in `lost`; the first one is
    reported. An exception would end only rank 0, and the other ranks would wait for it.
    """

    def __init__(
        self,
        run: RunFolder,
        config: TrainConfig,
        *,
        enabled: bool,
        total_steps: int,
        samples_seen: int = 0,
    ):
        self.run, self.enabled = run, enabled
        self.lost = 0
        if enabled:
            self.file = open(run.metrics, "a", buffering=1)
            self.sinks: list[TensorBoardSink | WandbSink] = []
            if config.report_to in ("tensorboard", "all"):
                self.sinks.append(TensorBoardSink(run.root, samples_seen))
            if config.report_to in ("wandb", "all"):
                self.sinks.append(WandbSink(run.root, config.wandb_project_name))
            self.console = Console(total_steps, config.log_every_n_steps)
            if run.metrics.read_bytes()[-1:] not in (b"", b"\n"):  # a crash cut a record off
                self._try(self.file.write, "\n")

    def after_step(self, step: Step) -> None:
        """Record a step, show it on the console and print the lines that observers added to it."""
        if self.enabled:
            known = self._write("train", step.number, step.samples_seen, step.values)
            self._try(self.console.step, step.number, known)
            for line in step.news:
                self.say(line)

    def evaluation(
        self,
        name: str,
        step: int,
        samples_seen: int,
        values: dict[str, float],
        about: Mapping[str, str | int] | None = None,
    ) -> None:
        """Record and print the metrics of an evaluation, and what they are `about`."""
        if not self.enabled:
            return
        self._write(name, step, samples_seen, values, about)
        rows = {key: str(value) for key, value in (about or {}).items()}
        rows |= {key: f"{value:.4g}" for key, value in values.items()}
        self.say(f"{name} at step {step}\n{aligned(rows.items())}")

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

    def _write(
        self,
        kind: str,
        step: int,
        samples_seen: int,
        values: Mapping[str, float | None],
        about: Mapping[str, str | int] | None = None,
    ) -> dict[str, float]:
        known = {key: value for key, value in values.items() if value is not None and math.isfinite(value)}
        record = {"kind": kind, "step": step, "samples_seen": samples_seen, **(about or {}), **known}
        self._try(self.file.write, json.dumps(record) + "\n")
        for sink in self.sinks:
            self._try(sink.log, kind, samples_seen, known, of_sink=True)
        return known

    def _try(self, write: Callable, *arguments, of_sink: bool = False) -> None:
        expected = Exception if of_sink else OSError  # the sinks' libraries raise their own exception types
        try:
            write(*arguments)
        except expected as error:
            self.lost += 1
            if self.lost == 1:
                self.say(f"metrics could not be written ({reason(error)}); training continues without them")


class TensorBoardSink:
    """Write RUN/tensorboard. Older points after `samples_seen` are hidden, since a resumed run repeats these steps."""

    def __init__(self, run: Path, samples_seen: int):
        from torch.utils.tensorboard import SummaryWriter

        self.events = SummaryWriter(run / "tensorboard", purge_step=samples_seen + 1)

    def log(self, kind: str, samples_seen: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            self.events.add_scalar(f"{kind}/{key}", value, samples_seen)

    def close(self) -> None:
        self.events.close()


class WandbSink:
    """Log to a W&B run named after the run folder; a resumed run continues it. WANDB_MODE=offline keeps it local.

    Curves are drawn over samples_seen, not over W&B's step counter.
    """

    def __init__(self, run: Path, project: str):
        import wandb

        identity = run / "wandb_id"
        if not identity.is_file():
            identity.write_text(uuid.uuid4().hex[:12] + "\n")
        self.run = wandb.init(
            project=project,
            name=run.resolve().name,
            id=identity.read_text().strip(),
            resume="allow",
            dir=str(run),
            config=json.loads(redacted(json.dumps(RunFolder(run).flags()))),
        )
        self.run.define_metric("samples_seen")
        self.run.define_metric("*", step_metric="samples_seen")

    def log(self, kind: str, samples_seen: int, values: dict[str, float]) -> None:
        self.run.log({f"{kind}/{key}": value for key, value in values.items()} | {"samples_seen": samples_seen})

    def close(self) -> None:
        self.run.finish()


class Console:
    """Show a progress bar on a terminal, else a line every n steps. Rank 0 only.

    Both show the loss, samples/s, MFU if known, share of data wait and time left. The time left is that of the
    remaining steps, at the mean rate since the first step of this start, evaluations and saves included.

    Args:
        terminal: whether to show a progress bar; None: if the output is a terminal.
    """

    def __init__(self, total_steps: int, log_every_n_steps: int, *, terminal: bool | None = None):
        self.total_steps, self.log_every_n_steps = total_steps, log_every_n_steps
        self.waits: deque[float] = deque(maxlen=SMOOTHED_STEPS)  # share of data wait per step
        self.first: tuple[int, float] | None = None  # the first step and the time of its end
        self.progress = None
        self.shown = 0
        if terminal is None:
            terminal = sys.stdout is not None and sys.stdout.isatty()  # None: the parent closed it
        if terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            self.progress = Progress(BarColumn(bar_width=16), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
            self.task = self.progress.add_task("train", total=total_steps, text="")

    def step(self, step: int, values: dict[str, float]) -> None:
        """Show a step. `values` are those of metrics.jsonl, without non-finite ones."""
        parts = [f"loss {values.get('loss', math.nan):.4f}", f"{values['samples_per_second']:,.0f} samples/s"]
        if "mfu" in values:
            parts.append(f"MFU {values['mfu']:.1%}")
        if self.first is None:  # it includes the warm-up
            self.first = step, time.perf_counter()
        else:
            self.waits.append(values["data_wait"])
            first, ended = self.first
            left = (time.perf_counter() - ended) / (step - first) * (self.total_steps - step)
            parts += [f"data wait {fmean(self.waits):.0%}", f"left {shown_seconds(left)}"]
        if self.progress is not None:
            self.progress.start()
            self.progress.update(self.task, completed=step, text="  ".join(parts))
        elif self.shown < FIRST_STEPS or step % self.log_every_n_steps == 0 or step == self.total_steps:
            self.shown += 1
            parts += [f"lr {values['lr']:.2e}", f"scale {values.get('logit_scale', math.nan):.1f}"]
            print(f"step {step}/{self.total_steps}", *parts, sep="  ", flush=True)

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self.progress is not None:
            self.progress.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()
