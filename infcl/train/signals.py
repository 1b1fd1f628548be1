"""Graceful shutdown: turn SIGTERM, SIGUSR1, SIGHUP and Ctrl-C into a checkpoint and an exit code.

SIGUSR1 is a scheduler's pre-emption; SIGHUP is a closed terminal or a lost connection (ignored under nohup). The
handler only records the number. After each step all ranks check it together, save, and raise `Stopped`. So a signal
never interrupts a save, and a signal to one rank stops all of them.

A start takes a minute or more. If SIGUSR1 arrives during it, pretrain_clip.py records it. The run then takes one
step, saves and exits, so that each start makes progress. SIGTERM ends a start at once, since its sender may not wait
that long.

A second Ctrl-C, `AGAIN` seconds after the first, ends a rank at once.

A launcher that is killed does not stop its ranks, and the `deepspeed` command then reports success. So ranks ask the
kernel for a SIGTERM when their launcher dies. A `deepspeed` command that is killed does not stop its launcher, so
ranks on its node check after each step whether it still runs. Ranks on other nodes, behind pdsh or ssh, cannot.
"""

import ctypes
import math
import os
import signal
import time
from types import FrameType
from typing import Any

from infcl.parallel.environment import deepspeed_launcher, deepspeed_runner, parent_of

AGAIN = 3.0  # seconds; torchrun forwards the Ctrl-C that the terminal has sent to the rank already
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def end_with_launcher() -> None:
    """Have the kernel send SIGTERM when the deepspeed launcher that started this process dies (Linux).

    Raises:
        KeyboardInterrupt: the `deepspeed` command that started the launcher is gone already.
    """
    if launcher := deepspeed_launcher():
        set_parent_death_signal = 1  # prctl's PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
        if lost_its_parent(launcher):
            raise KeyboardInterrupt


def lost_its_parent(process: int) -> bool:
    """Return whether a process of another session has adopted `process`, as happens when its parent exits."""
    try:
        parent, session = parent_of(process), os.getsid(process)
        return bool(parent) and session not in (process, os.getsid(parent or 0))
    except OSError:  # one of the processes exits during the check
        return False


class Stopped(Exception):
    """Raised on every rank after the checkpoint. `exit_code` follows the shell: 128 + the signal's number."""

    def __init__(self, number: int):
        super().__init__(f"{signal.Signals(number).name} received")
        self.exit_code = 128 + number


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
        self._launcher, self._runner = deepspeed_launcher(), deepspeed_runner()
        if self._launcher and self._runner is None and lost_its_parent(self._launcher):  # during the start
            self.noted.append(signal.SIGHUP)

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
        """The signal to act on: SIGINT if received, since launchers send SIGTERM after it, else the last one; or 0.

        SIGHUP if the `deepspeed` command is gone.
        """
        if not self.noted and self._runner and parent_of(self._launcher or 0) not in (None, self._runner):
            self.noted.append(signal.SIGHUP)
        if signal.SIGINT in self.noted:
            return signal.SIGINT
        return self.noted[-1] if self.noted else 0

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
