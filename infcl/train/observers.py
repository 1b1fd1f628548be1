"""Observers of steps: one interface, called in a fixed order by the trainer's loop.

The packing hint, stragglers and profiler add values and lines; metrics writes them; skips and saves may end the run.
"""

from dataclasses import dataclass, field
from typing import Protocol

from infcl.models.packing import longer_when_packed
from infcl.step.grad_cache import StepOutput
from infcl.step.offload import PixelCache


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
        pixels: the micro-batches' ids, waiting times and share of token positions, until the next step begins.
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
    pixels: PixelCache
    values: dict[str, float | None]
    news: list[str] = field(default_factory=list)


class Observer(Protocol):
    """An object that is called after every step, on all ranks in the same order. It may be collective or end the run.

    To end the run, `after_step` raises on every rank.
    """

    def after_step(self, step: Step) -> None: ...


class PackingHint:
    """Report at the first step if captions have so little padding that packing costs time.

    Args:
        masks: whether the text tower uses torch's attention, which needs masks.
    """

    def __init__(self, *, masks: bool):
        self.masks, self.done = masks, False

    def after_step(self, step: Step) -> None:
        if not self.done and (hint := longer_when_packed(step.pixels.text_share, masks=self.masks)):
            step.news.append(hint)
        self.done = True
