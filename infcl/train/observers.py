"""Observers of steps: one interface, called in a fixed order by the trainer's loop.

The packing hint, stragglers and profiler add values and lines; metrics writes them; skips and saves may end the run.
Each of these is a class: here, in stragglers.py, profiler.py, metrics.py, finite.py and saves.py.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch

from infcl.models.captions import longer_when_packed
from infcl.step.grad_cache import StepOutput


@dataclass
class Step:
    """A completed step.

    Attributes:
        number: completed steps of the run, including this one.
        samples_seen: samples of these steps.
        seconds: duration of this step, until its metrics are read.
        phases: {phase: seconds} of this step.
        waited_for_data: seconds that this rank waited for its own loader.
        waited_again: seconds that it waited during the second reading of micro-batches.
        text_share: share of the texts' token positions that the text tower computed.
        loss: loss of the global batch.
        applied: False if the gradients were not finite and the weights did not change.
        is_last: whether this is the last step of the run.
        output: result of the gradient cache; on the device.
        ids: sample numbers of each micro-batch.
        values: record for metrics.jsonl; observers may add to it.
        news: lines that the console prints after the step; observers may add to it.
    """

    number: int
    samples_seen: int
    seconds: float
    phases: dict[str, float]
    waited_for_data: float
    waited_again: float
    text_share: float
    loss: float
    applied: bool
    is_last: bool
    output: StepOutput
    ids: list[torch.Tensor]
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
        if not self.done and (hint := longer_when_packed(step.text_share, masks=self.masks)):
            step.news.append(hint)
        self.done = True
