"""Locate non-finite gradients: rank, tower, micro-batch, sample numbers.

DeepSpeed skips an update whose gradient norm is not finite, but not in every stage and never with a reason. Here the
device records two kinds of flags during a step, at no cost. The host reads them only after a skipped step.

    features     non-finite rows of pass 1: the forward of a tower failed. With torch's attention, a packed caption
                 makes its neighbours in the row non-finite too, so they are reported with it
    backward     non-finite gradient at the input of a tower's blocks, per micro-batch: the tower's backward failed
                 (not for towers that open_clip builds)
"""

import math
from collections.abc import Callable

import torch

from infcl.engine.engine import Engine
from infcl.parallel import Parallel, gather_objects, join_parts
from infcl.train.observers import Step
from infcl.train.saves import Saves

_TOWERS = ("image", "text")
MAX_SKIPPED = 20  # in a row; one more ends the run
_MOST = 8  # sample numbers per line, lines about one skipped step


class Diverged(RuntimeError):
    """More steps in a row were skipped than MAX_SKIPPED."""


class Skips:
    """An observer that explains each skipped step and ends the run after more in a row than MAX_SKIPPED.

    It saves a checkpoint first, unless one of the skipped steps has one already: the weights are still the same.
    It also ends a run whose last loss is not finite, without a checkpoint of that step. A restart then continues from
    an earlier checkpoint, and a diverged model is not exported.

    Attributes:
        total: skipped steps of the run.
        in_a_row: skipped steps since the last applied one.
        say: prints lines on the console.
    """

    def __init__(self, engine: Engine, parallel: Parallel, saves: Saves, say: Callable[[str], None]):
        self.engine, self.parallel, self.saves, self.say = engine, parallel, saves, say
        self.total = self.in_a_row = 0
        self.begin()
        for tower, blocks in engine.module.transformers.items():
            blocks.on_input_gradient = lambda gradient, tower=tower: self.sums[tower].append(
                gradient.sum(dtype=torch.float32)
            )

    def begin(self) -> None:
        """Forget the gradients of the last step."""
        self.sums: dict[str, list[torch.Tensor]] = {tower: [] for tower in _TOWERS}

    def count(self, applied: bool) -> None:
        self.total += not applied
        self.in_a_row = 0 if applied else self.in_a_row + 1

    def after_step(self, step: Step) -> None:
        """Report a skipped step. Collective if the step was skipped.

        Raises:
            Diverged: after too many skipped steps in a row, or if the last loss is not finite.
        """
        if step.applied:
            return
        shown = self._explain(step)
        # in fp16 an occasional skipped step is normal: the loss scale was too large
        scale = f"; loss scale now {self.engine.loss_scale():g}" if self.engine.precision.scales_loss else ""
        self.say(f"step {step.number} was skipped, its gradients are not finite{scale}:\n  {shown}")
        checkpoints = self.saves.checkpoints
        if step.is_last and not math.isfinite(step.loss):
            checkpoints.publish()
            raise Diverged(f"the last loss is {step.loss}: nothing is exported; {checkpoints.hint}. {shown}")
        if self.in_a_row > MAX_SKIPPED:
            self.saves.finish(diverged=True)
            raise Diverged(
                f"{self.in_a_row} steps in a row had gradients that are not finite, more than {MAX_SKIPPED}; "
                f"{checkpoints.hint}. Step {step.number}:\n  {shown}"
            )

    def _explain(self, step: Step) -> str:
        """Return which rank, tower and micro-batch is not finite; the same text on every rank."""
        everyone = gather_objects(self._own(step))
        found = [f"rank {rank}, {line}" for rank, lines in enumerate(everyone) for line in lines]
        if not found and math.isfinite(step.loss):
            norms = {tower: step.values[f"grad_norm_{tower}"] for tower in _TOWERS}
            found = [
                f"{tower} tower: the norm of its gradients over all ranks is {norm:g}; a gradient, a sum or a square "
                "overflows"
                for tower, norm in norms.items()
                if norm is not None and not math.isfinite(norm)
            ]
            return "; ".join(found) or "in no tower alone: logit_scale or logit_bias, or the sum of the towers' squares"
        return "\n  ".join([*found[:_MOST], *["..."] * (len(found) > _MOST)]) or f"in no tower: the loss is {step.loss}"

    def _own(self, step: Step) -> list[str]:
        """Return lines about this rank's non-finite values. Collective if tensor-parallel; waits for the device."""
        found = []
        ids = [join_parts(self.parallel, own.to(self.parallel.device)).cpu() for own in step.batches.ids]
        sizes = [len(numbers) for numbers in ids]
        for tower in _TOWERS:
            wrong = ~step.output.finite_rows[f"{tower}_features"].cpu()
            wrong = wrong.view(sum(sizes), -1).any(1)  # a sample may have several texts
            for index, (rows, numbers) in enumerate(zip(wrong.split(sizes), ids)):
                if samples := numbers[rows].tolist():
                    more = f" and {len(samples) - _MOST} more" if len(samples) > _MOST else ""
                    listed = ", ".join(map(str, samples[:_MOST])) + more
                    found.append(f"{tower} tower, micro-batch {index}: features of samples {listed} are not finite")
            for index, total in zip(step.output.replayed, self.sums[tower]):
                if not total.isfinite():
                    found.append(f"{tower} tower, micro-batch {index}: gradients are not finite")
        return found
