"""Observers of steps: one interface, called in a fixed order by the trainer's loop.

Stragglers and the profiler (here) add values, metrics.py writes them, finite.py and saves.py may end the run.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median_low
from typing import Protocol

import torch

from infcl.config import counted
from infcl.config.words import reason
from infcl.parallel import Parallel, all_gather
from infcl.step.batches import StepBatches
from infcl.step.grad_cache import StepOutput

WARM_UP_STEPS = 5  # before a profile
COLLAPSED_STEPS, COLLAPSED_SPREAD = 20, 0.01


@dataclass
class Step:
    """A completed step.

    Attributes:
        number: completed steps of the run, including this one.
        samples_seen: samples of these steps.
        seconds: duration of this step, until its metrics are read.
        phases: {phase: seconds} of this step.
        loss: loss of the global batch.
        applied: False if the gradients were not finite and the weights did not change.
        is_last: whether this is the last step of the run.
        output: result of the gradient cache; on the device.
        batches: the micro-batches' ids, waiting times and share of token positions, until the next step begins.
        values: record for metrics.jsonl; observers may add to it.
        news: lines that the console prints after the step; observers may add to it.
    """

    number: int
    samples_seen: int
    seconds: float
    phases: dict[str, float]
    loss: float
    applied: bool
    is_last: bool
    output: StepOutput
    batches: StepBatches
    values: dict[str, float | None]
    news: list[str] = field(default_factory=list)


class Observer(Protocol):
    """An object that is called after every step, on all ranks in the same order. It may be collective or end the run.

    To end the run, `after_step` raises on every rank.
    """

    def after_step(self, step: Step) -> None: ...


class Stragglers:
    """An observer that adds the slowest rank and its seconds to logged steps, since all other ranks wait for it.

    Step times are equal on all ranks, since the first message of a step waits for the slowest rank. Only the time
    before that message differs, in which a rank reads and encodes its samples. Each rank sums up that time, and logged
    steps gather one float per rank. Under ZeRO-3 and tensor parallelism encoding itself waits for other ranks, so the
    ranks compare only the wait for data.

    Args:
        encoding_waits: whether encoding waits for other ranks.
    """

    def __init__(self, parallel: Parallel, *, every: int, encoding_waits: bool = False):
        self.parallel, self.every, self.encoding_waits = parallel, every, encoding_waits
        self._seconds: list[float] = []

    def after_step(self, step: Step) -> None:
        """Add the ranks' usual and largest seconds to a logged step. Collective at logged steps."""
        if self.parallel.world_size == 1:
            return
        until_encoded = step.phases.get("data", 0.0) + step.phases.get("encode", 0.0) + step.batches.waited_again
        self._seconds.append(step.batches.waited_for_data if self.encoding_waits else until_encoded)
        if step.number % self.every:
            return
        own = torch.tensor(fmean(self._seconds), dtype=torch.float64, device=self.parallel.device).view(1)
        self._seconds = []
        everyone = own.new_empty(self.parallel.world_size)
        all_gather(everyone, own)
        owns = everyone.tolist()
        # the low median: of two ranks the faster one is usual
        step.values |= {"seconds_own_usual": median_low(owns), "seconds_own_slowest": max(owns)}
        step.values["slowest_rank"] = owns.index(max(owns))


class Collapse:
    """An observer that reports once that a run has collapsed: its loss stays at chance and its features are equal.

    It looks at the losses of the sample (`SampledLoss`), which are softmax cross entropies for every --loss. Before the
    loss was lower, steps of the warm-up do not count.

    Args:
        rows: m, the samples of the rank's sample.
        advice: what the line suggests.
    """

    def __init__(self, rows: int, *, warmup: int, advice: str):
        self.chance, self.warmup, self.advice = math.log(rows), warmup, advice
        self.was_lower, self.in_a_row = False, 0

    def after_step(self, step: Step) -> None:
        names = ("micro_loss_image_to_text", "micro_loss_text_to_image", "feature_spread")
        *losses, spread = (step.values.get(name) for name in names)
        if spread is None or None in losses or self.chance == 0:
            return
        lowest = min(loss for loss in losses if loss is not None)
        self.was_lower |= lowest < 0.9 * self.chance
        at_chance = lowest > 0.99 * self.chance and spread < COLLAPSED_SPREAD
        counts = at_chance and (self.was_lower or step.number > self.warmup)
        self.in_a_row = self.in_a_row + 1 if counts else 0
        if self.in_a_row == COLLAPSED_STEPS:
            step.news.append(
                f"collapsed: for {COLLAPSED_STEPS} steps the loss is that of guessing ({lowest:.4g} among "
                f"{round(math.exp(self.chance)):,} samples), and all features are nearly equal (spread {spread:.2g}). "
                f"{self.advice}"
            )


class StepProfiler:
    """An observer that profiles `steps` steps of this process after WARM_UP_STEPS, and slows down only these.

    It writes trace_rank0.json.gz (for ui.perfetto.dev) and table.txt: the phases' seconds as the trainer measures them,
    then the slowest operators.
    """

    def __init__(self, steps: int, folder: Path, *, on_gpu: bool, enabled: bool):
        self.steps, self.folder, self.on_gpu = steps if enabled else 0, Path(folder), on_gpu
        self.done = 0
        self.phases: list[dict[str, float]] = []

    def after_step(self, step: Step) -> None:
        if not self.steps:
            return
        self.done += 1
        if self.done == WARM_UP_STEPS:
            gpu = [torch.profiler.ProfilerActivity.CUDA] if self.on_gpu else []
            self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, *gpu])
            self.profile.start()
        elif self.done > WARM_UP_STEPS:
            self.phases.append(step.phases)
            if len(self.phases) == self.steps:
                step.news.append(self.close() or "")

    def close(self) -> str | None:
        """End the profile and return a line about it, or why there is none; None if there is nothing to report."""
        steps, self.steps = self.steps, 0
        if not steps:
            return None
        if self.done >= WARM_UP_STEPS:
            self.profile.stop()
        if not self.phases:
            return f"no profile: the run ended after {counted(self.done, 'step')}, {WARM_UP_STEPS} are warm-up"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            trace, table = self.folder / "trace_rank0.json.gz", self.folder / "table.txt"
            self.profile.export_chrome_trace(str(trace))
            order = "self_cuda_time_total" if self.on_gpu else "self_cpu_time_total"
            operators = self.profile.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=70)
            table.write_text(f"{phase_table(self.phases)}\n\n{operators}\n")
        except OSError as error:  # an exception on rank 0 would end the run
            return f"the profile could not be written ({reason(error)})"
        return f"profile of {counted(len(self.phases), 'step')}: {trace}, {table}"


def phase_table(steps: list[dict[str, float]]) -> str:
    """Return lines with the mean milliseconds and the share of each phase over the profiled steps."""
    means = {name: sum(step.get(name, 0.0) for step in steps) / len(steps) for name in steps[0]}
    total = sum(means.values())
    lines = [f"{'phase':<10}{'ms a step':>12}{'share':>9}   (mean of {counted(len(steps), 'step')})"]
    lines += [f"{name:<10}{1000 * n:>12.2f}{n / total if total else 0:>9.1%}" for name, n in means.items()]
    return "\n".join(lines)
