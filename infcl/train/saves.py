"""When to save: by step count, by the clock, for a signal, at the end; and when to end since no save succeeds.

All ranks decide alike after each step, since beginning and publishing a checkpoint (checkpoint/write.py) are
collective. The trainer decides what a checkpoint holds of the loop.
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from infcl.checkpoint.run_folder import NotWritten
from infcl.checkpoint.write import CheckpointWriter
from infcl.config import TrainConfig
from infcl.parallel import Parallel, max_over
from infcl.train.observers import Step
from infcl.train.signals import Stopped, StopSignals

MAX_FAILED_SAVES = 3  # in a row; more end the run


class Saves:
    """An observer that saves.

    Args:
        state: returns what a checkpoint holds of the loop, JSON-able: "step", the number of steps done, and
            "skipped_in_a_row", the number of last steps that changed nothing, among others.
    """

    def __init__(
        self,
        config: TrainConfig,
        parallel: Parallel,
        *,
        checkpoints: CheckpointWriter,
        signals: StopSignals,
        state: Callable[[], dict],
    ):
        self.config, self.parallel, self.state = config, parallel, state
        self.checkpoints, self.signals = checkpoints, signals
        self.begun_at = time.monotonic()

    def begin(self) -> None:
        """Begin one checkpoint of this step; it is published when all ranks have written. Collective."""
        state = self.state()
        if state["step"] == self.checkpoints.begun_step:
            return
        self.begun_at = time.monotonic()
        self.checkpoints.begin(state["step"], state, prunes=not state["skipped_in_a_row"])

    def finish(self) -> Path | None:
        """Write a checkpoint of this step to the disk; None if it was there, or cannot be written. Collective."""
        self.begin()
        return self.checkpoints.publish()

    def told_to_end(self) -> int:
        """Return the number of a signal that any rank has received, or 0. Collective; waits for late ranks."""
        dist.barrier()  # a rank looks when all are there, not minutes before: rank 0 removes old checkpoints
        return int(max_over(dist.group.WORLD, [self.signals.received], self.parallel.device)[0])

    def after_step(self, step: Step) -> None:
        """Publish what is written, begin what is due by step count, by rank 0's clock or for a signal. Collective.

        Raises:
            Stopped: after a checkpoint, when a rank has received a signal.
            RuntimeError: after more failed checkpoints in a row than MAX_FAILED_SAVES. Not at the last step: a run
                that is trained to the end is exported, saved or not.
        """
        config, minutes = self.config, self.config.save_every_minutes
        overdue = minutes > 0 and self.parallel.rank == 0 and time.monotonic() - self.begun_at > 60 * minutes
        news = [self.signals.received, overdue, self.checkpoints.busy]
        signal, overdue, someone_writes = max_over(dist.group.WORLD, news, self.parallel.device)
        due = signal or overdue or (config.save_every_n_steps and step.number % config.save_every_n_steps == 0)
        if self.checkpoints.pending and (due or not someone_writes):  # whether it failed is known before the next
            self.checkpoints.publish()
        if not signal and not step.is_last:
            self._end_if_nothing_is_kept()
        if due:
            self.begin()
        if signal:
            self.checkpoints.publish()
            raise Stopped(int(signal))

    def _end_if_nothing_is_kept(self) -> None:
        if (failed := self.checkpoints.failed_in_a_row) > MAX_FAILED_SAVES:
            raise NotWritten(
                f"{failed} checkpoints in a row could not be written to {self.checkpoints.run.checkpoints}, more than "
                f"{MAX_FAILED_SAVES}: further training would keep nothing "
                f"({self.checkpoints.problem}). Fix that; {self.checkpoints.hint}"
            )
