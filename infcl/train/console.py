"""What a terminal shows while a run goes on: a progress bar, or one line per N steps where there is no terminal."""

import math
import sys
import time
from collections import deque

SMOOTHED_STEPS = 20  # time left and data wait are means over so many steps


class Console:
    """Rank 0's view: loss, samples/s, MFU where it is known, share of the time spent waiting for data, time left."""

    def __init__(self, total_steps: int, log_every_n_steps: int, *, terminal: bool | None = None):
        self.total_steps, self.log_every_n_steps = total_steps, log_every_n_steps
        self.recent: deque[tuple[float, float]] = deque(maxlen=SMOOTHED_STEPS)  # (wall seconds, share waited) of steps
        self.progress = self.task = None
        self.last: float | None = None  # when the step before ended
        if terminal is None:
            terminal = sys.stdout is not None and sys.stdout.isatty()  # None: closed by whoever started this
        if terminal:
            self.progress = _progress_bar()
            self.task = self.progress.add_task("train", total=total_steps, text="")

    def step(self, step: int, values: dict[str, float]) -> None:
        """`values` are those of metrics.jsonl; what is not a finite number is missing."""
        now = time.perf_counter()
        if self.last is not None:  # the first step warms up and would spoil the time left
            self.recent.append((now - self.last, values["data_wait"]))
        self.last = now
        if self.progress is not None:
            self.progress.start()
            self.progress.update(self.task, completed=step, text=self._text(step, values))
        elif step % self.log_every_n_steps == 0 or step == self.total_steps:
            print(
                f"step {step}/{self.total_steps}  {self._text(step, values)}  "
                f"lr {values['lr']:.2e}  scale {values.get('logit_scale', math.nan):.1f}",
                flush=True,
            )

    def say(self, text: str) -> None:
        """A line above the progress bar."""
        if self.progress is not None:
            self.progress.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()

    def _text(self, step: int, values: dict[str, float]) -> str:
        parts = [f"loss {values.get('loss', math.nan):.4f}", f"{values['samples_per_second']:,.0f} samples/s"]
        if "mfu" in values:
            parts.append(f"MFU {values['mfu']:.1%}")
        if self.recent:
            seconds, waits = (sum(column) / len(self.recent) for column in zip(*self.recent))
            parts += [f"data wait {waits:.0%}", f"left {clock(seconds * (self.total_steps - step))}"]
        return "  ".join(parts)


def clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _progress_bar():
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    return Progress(BarColumn(bar_width=16), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
