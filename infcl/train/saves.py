"""When a run saves a checkpoint, and when a signal or failed saves end it.

SIGTERM, SIGUSR1 (a scheduler's pre-emption), SIGHUP (a closed terminal; ignored under nohup) and Ctrl-C are only
recorded. After each step all ranks check them together, save, and raise `Stopped`. So a signal never interrupts a save,
and a signal to one rank stops all of them. A second Ctrl-C, `AGAIN` seconds after the first, ends a rank at once.

If SIGUSR1 arrives during the start, pretrain_clip.py records it. The run then takes one step, saves and exits, so that
each start makes progress. SIGTERM ends a start at once, since its sender may not wait that long.

A launcher that is killed does not stop its ranks, and the `deepspeed` command then reports success. So ranks ask the
kernel for a SIGTERM when their launcher dies.
"""

import ctypes
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from infcl.checkpoint.run_folder import NotWritten
from infcl.checkpoint.write import CheckpointWriter
from infcl.config import TrainConfig
from infcl.parallel import Parallel, max_over
from infcl.parallel.environment import launcher
from infcl.train.observers import Step

MAX_FAILED_SAVES = 3  # in a row; one more ends the run
AGAIN = 3.0  # seconds; torchrun forwards the Ctrl-C that the terminal has sent to the rank already
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Stopped(Exception):
    """Raised on every rank after the checkpoint. `exit_code` follows the shell: 128 + the signal's number."""

    def __init__(self, number: int):
        super().__init__(f"{signal.Signals(number).name} received")
        self.exit_code = 128 + number


class Saves:
    """An observer that saves checkpoints. All its methods are collective.

    Args:
        signals: signals received by this process.
        state: returns the loop's state for a checkpoint, JSON-serializable. It includes "step" (completed steps) and
            "skipped_in_a_row" (skipped steps since the last applied one).
    """

    def __init__(
        self,
        config: TrainConfig,
        steps_per_epoch: int,
        parallel: Parallel,
        *,
        checkpoints: CheckpointWriter,
        signals: "StopSignals",
        state: Callable[[], dict],
    ):
        self.every = [n for n in (config.save_every_n_steps, config.save_frequency * steps_per_epoch) if n]  # steps
        self.parallel, self.state = parallel, state
        self.checkpoints, self.signals = checkpoints, signals

    def finish(self, *, diverged: bool = False) -> Path | None:
        """Complete the checkpoint that has begun, and write one of this step if there is none yet.

        Args:
            diverged: the last steps were skipped; a checkpoint of one of them has the same weights and suffices.

        Returns:
            The checkpoint of this step; None if it existed already or cannot be written.
        """
        if diverged:
            state = self.state()
            self.checkpoints.publish()
            if (self.checkpoints.begun_step or 0) > state["step"] - state["skipped_in_a_row"]:
                return None
        self._begin()
        return self.checkpoints.publish()

    def end(self) -> int:
        """Write the checkpoint of the last step, in two attempts. Return the signal that any rank has received, or 0.

        Raises:
            Stopped: after the checkpoint, if there is a signal: the next start evaluates and exports. Without the
                checkpoint this start does.
        """
        if self.finish() is None:
            self.finish()
        dist.barrier()  # check only when all ranks arrive: rank 0 may take minutes to remove old checkpoints
        number = int(max_over(dist.group.WORLD, [self.signals.received], self.parallel.device)[0])
        if number and self.checkpoints.begun_step == self.state()["step"]:
            raise Stopped(number)
        return number

    def after_step(self, step: Step) -> None:
        """Publish a written checkpoint; begin one if the step count or a signal requires it.

        Raises:
            Stopped: after a checkpoint, if a rank has received a signal.
            NotWritten: after more failed checkpoints in a row than MAX_FAILED_SAVES. Not at the last step, since a
                completed run is exported even if no checkpoint could be written.
        """
        own = [self.signals.received, self.checkpoints.busy]
        number, someone_writes = max_over(dist.group.WORLD, own, self.parallel.device)
        due = number or (not step.is_last and any(step.number % every == 0 for every in self.every))
        if self.checkpoints.pending and (due or not someone_writes):  # before the next one begins, to know if it failed
            self.checkpoints.publish()
        failed = self.checkpoints.failed_in_a_row
        if failed > MAX_FAILED_SAVES and not number and not step.is_last:
            raise NotWritten(
                f"{failed} checkpoints in a row could not be written to {self.checkpoints.run.checkpoints}, more than "
                f"{MAX_FAILED_SAVES}: further training would keep nothing "
                f"({self.checkpoints.problem}). Fix that; {self.checkpoints.hint}"
            )
        if due:
            self._begin()
        if number:
            self.checkpoints.publish()
            raise Stopped(int(number))

    def _begin(self) -> None:
        """Begin a checkpoint of this step, unless one has begun."""
        state = self.state()
        if state["step"] != self.checkpoints.begun_step:
            self.checkpoints.begin(state["step"], state, prunes=not state["skipped_in_a_row"])


class StopSignals:
    """Context manager around the loop that records signals; `received` is the number of the one to act on, or 0.

    Args:
        noted: the list to which pretrain_clip.py's handler of SIGUSR1 appends. With it SIGUSR1 has its default effect
            after the loop; without it the previous handler is restored.
    """

    def __init__(self, noted: list[int] | None = None):
        self.noted: list[int] = [] if noted is None else noted
        self._taken_over = noted is not None
        self._interrupted_at = math.inf

    def __enter__(self) -> "StopSignals":
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # by nohup: the run must outlive its terminal
        noted = [number for number in SIGNALS if number != signal.SIGHUP or not ignored]
        self._before: dict[int, Any] = {number: signal.signal(number, self._note) for number in noted}
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if number == signal.SIGUSR1 and self._taken_over else handler)

    @property
    def received(self) -> int:
        """The last signal; SIGINT if it was received, since launchers send SIGTERM after it."""
        return signal.SIGINT if signal.SIGINT in self.noted else next(reversed(self.noted), 0)

    def act_on_late(self) -> None:
        """After the loop, raise a signal that arrived after the last common check."""
        if self.received:
            signal.raise_signal(self.received)

    def _note(self, number: int, _frame: object) -> None:
        self.noted.append(number)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() - self._interrupted_at > AGAIN:
            signal.default_int_handler(number, frame)
        self._interrupted_at = min(self._interrupted_at, time.monotonic())
        self.noted.append(number)


def end_with_launcher() -> None:
    """Have the kernel send SIGTERM when the launcher that started this process dies (Linux).

    Raises:
        KeyboardInterrupt: it has died already.
    """
    if parent := launcher("deepspeed.launcher.launch", "infcl.cluster.torchrun"):
        set_parent_death_signal = 1  # prctl's PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
        if os.getppid() != parent:
            raise KeyboardInterrupt
