"""Observers of steps: one interface, called in one order by the trainer's loop.

stragglers, profiler and the packing hint add values and lines; metrics writes them; skips and saves may end the run.
Each is a class in the file of its noun: stragglers.py, profiler.py, metrics.py, finite.py, saves.py.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch

from infcl.models.captions import longer_when_packed
from infcl.step.grad_cache import StepOutput


@dataclass
class Step:
    """A step that is done.

    Attributes:
        number: steps done, with this one.
        samples_seen: samples of all of them.
        seconds: how long it took, until its numbers were read.
        phases: {phase: seconds} of it.
        waited_for_data: seconds that this rank waited for its own loader.
        waited_again: of them, in the second reading.
        text_share: share of the texts' token positions that the text tower computed.
        loss: of the global batch.
        applied: False where the gradients were not finite and the weights stayed as they were.
        is_last: whether it is the last one of the run.
        output: what the gradient cache returned; on the device.
        ids: sample numbers of each micro-batch.
        values: for metrics.jsonl; observers may add to it.
        news: lines for the console after the step's own; observers may add to it.
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
    """Sees every step, on all ranks in the same order: it may be collective, and may raise to end the run."""

    def after_step(self, step: Step) -> None: ...


class PackingHint:
    """Report once, at the first step, that captions fill their token positions so well that packing costs time.

    masks: the text tower's attention is torch's.
    """

    def __init__(self, *, masks: bool):
        self.masks, self.done = masks, False

    def after_step(self, step: Step) -> None:
        if not self.done and (hint := longer_when_packed(step.text_share, masks=self.masks)):
            step.news.append(hint)
        self.done = True
