"""Decide when to save (by step count, by time, after a signal, at the end) and when failed saves end the run.

All ranks make the same decision after each step, since beginning and publishing a checkpoint (checkpoint/write.py)
are collective. The trainer decides which of the loop's state a checkpoint contains.
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

MAX_FAILED_SAVES = 3  # in a row; one more ends the run


class Saves:
    """An observer that saves checkpoints.

    Args:
        config: the flags.
        parallel: the ranks.
        checkpoints: writes the checkpoints.
        signals: signals received by this process.
        state: returns the loop's state for a checkpoint, JSON-serializable. It includes "step" (completed steps) and
            "skipped_in_a_row" (skipped steps since the last applied one).
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
        """Begin a checkpoint of this step, unless one has begun; a later `publish` completes it. Collective."""
        state = self.state()
        if state["step"] == self.checkpoints.begun_step:
            return
        self.begun_at = time.monotonic()
        self.checkpoints.begin(state["step"], state, prunes=not state["skipped_in_a_row"])

    def finish(self) -> Path | None:
        """Write a checkpoint of this step; None if it exists already or cannot be written. Collective."""
        self.begin()
        return self.checkpoints.publish()

    def told_to_end(self) -> int:
        """Return the number of a signal that any rank has received, or 0. Collective; waits for slow ranks."""
        dist.barrier()  # check only when all ranks arrive: rank 0 may take minutes to remove old checkpoints
        return int(max_over(dist.group.WORLD, [self.signals.received], self.parallel.device)[0])

    def after_step(self, step: Step) -> None:
        """Publish a written checkpoint; begin one if step count, rank 0's clock or a signal requires it. Collective.

        Raises:
            Stopped: after a checkpoint, if a rank has received a signal.
            NotWritten: after more failed checkpoints in a row than MAX_FAILED_SAVES. Not at the last step, since a
                completed run is exported even if no checkpoint could be written.
        """
        config, minutes = self.config, self.config.save_every_minutes
        overdue = minutes > 0 and self.parallel.rank == 0 and time.monotonic() - self.begun_at > 60 * minutes
        news = [self.signals.received, overdue, self.checkpoints.busy]
        signal, overdue, someone_writes = max_over(dist.group.WORLD, news, self.parallel.device)
        due = signal or overdue or (config.save_every_n_steps and step.number % config.save_every_n_steps == 0)
        if self.checkpoints.pending and (due or not someone_writes):  # before the next one begins, to know if it failed
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
