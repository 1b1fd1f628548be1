"""Graceful shutdown: turn SIGTERM, SIGUSR1, SIGHUP and Ctrl-C into a checkpoint and an exit code.

SIGUSR1 is a scheduler's pre-emption; SIGHUP is a closed terminal or a lost connection (ignored under nohup). The
handler only takes a note. After each step all ranks look at it together, save, and raise `Stopped`. So a signal does
not disturb a save, and a signal to one rank ends all.

A start takes a minute or more, and a scheduler's SIGUSR1 may arrive during it. pretrain_clip.py notes it from its first
lines on: the run takes one step, saves and ends, so that each start makes progress. SIGTERM ends a start at once: its
sender may not wait for more.

Ctrl-C is noted as well; a second one, `AGAIN` seconds later, ends a rank at once. (Python drops an exception that is
raised within a destructor or a callback, a KeyboardInterrupt too: then the third does.)

A launcher that is killed leaves its ranks behind (and the `deepspeed` command then reports success), so ranks that it
started ask the kernel for a SIGTERM when it dies. The `deepspeed` command leaves its launcher behind when it is killed,
so ranks on its node look after each step whether it is there. Over several nodes pdsh and ssh stand between the command
and the launchers: after SIGTERM or Ctrl-C the command ends them, after SIGKILL it cannot. One Ctrl-C may end the
command and not the launcher: torch drops an interrupt that comes while it imports numpy. A launcher without its command
is one that was interrupted.
"""

import ctypes
import math
import os
import signal
import time
from types import FrameType
from typing import Any

from infcl.parallel.environment import deepspeed_launcher, deepspeed_runner, parent_of

AGAIN = 3.0  # seconds; torchrun sends a rank the Ctrl-C that the terminal has sent it already
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def end_with_launcher() -> None:
    """Have this process told to end when the deepspeed launcher that started it dies. Linux; elsewhere nothing.

    KeyboardInterrupt where the launcher itself has lost the `deepspeed` that started it.
    """
    if launcher := deepspeed_launcher():
        set_parent_death_signal = 1  # prctl's PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
        if lost_its_parent(launcher):
            raise KeyboardInterrupt


def lost_its_parent(process: int) -> bool:
    """Whether another session's process has taken it over, as happens when its parent ends."""
    try:
        parent, session = parent_of(process), os.getsid(process)
        return bool(parent) and session not in (process, os.getsid(parent or 0))
    except OSError:  # one of them ends just now
        return False


class Stopped(Exception):
    """Raised on every rank after the checkpoint. `exit_code` is the shell's for the signal: 128 + its number."""

    def __init__(self, number: int):
        super().__init__(f"{signal.Signals(number).name} received")
        self.exit_code = 128 + number


class StopSignals:
    """`received` is the number of the signal to act on, 0 before any. Use as a context around the loop.

    noted: what was received so far, by whoever else appends to it. Behind the loop nobody looks there any more, and
    SIGUSR1 ends the process as it does by default; without `noted` it does what it did before.
    """

    def __init__(self, noted: list[int] | None = None):
        self.noted: list[int] = [] if noted is None else noted
        self._taken_over = noted is not None
        self._interrupted_at = math.inf
        self._launcher, self._runner = deepspeed_launcher(), deepspeed_runner()
        if self._launcher and self._runner is None and lost_its_parent(self._launcher):  # during the start
            self.noted.append(signal.SIGHUP)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # nohup: meant to outlive its terminal
        noted = [number for number in SIGNALS if number != signal.SIGHUP or not ignored]
        self._before = {number: signal.signal(number, self._note) for number in noted}
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if number == signal.SIGUSR1 and self._taken_over else handler)

    @property
    def received(self) -> int:
        """SIGINT, though launchers send SIGTERM after it, or the last; SIGHUP where the `deepspeed` command is gone."""
        if not self.noted and self._runner and parent_of(self._launcher or 0) not in (None, self._runner):
            self.noted.append(signal.SIGHUP)
        if signal.SIGINT in self.noted:
            return signal.SIGINT
        return self.noted[-1] if self.noted else 0

    def act_on_late(self) -> None:
        """Behind the loop: what came when all had looked for the last time does what it would do now."""
        if self.received:
            signal.raise_signal(self.received)

    def _note(self, number: int, _frame: object) -> None:
        self.noted.append(number)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() - self._interrupted_at > AGAIN:
            signal.default_int_handler(number, frame)
        self._interrupted_at = min(self._interrupted_at, time.monotonic())
        self.noted.append(number)
