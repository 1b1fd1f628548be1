"""Being told to end: SIGTERM and SIGUSR1 (a scheduler's pre-emption) become a checkpoint and an orderly end.

The handler only takes a note; the training loop looks at it after each step, all ranks together, saves, and raises
`Stopped`. So a signal during a save does not touch the save, and one rank's signal ends all.
"""

import signal

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Stopped(Exception):
    """Raised on every rank after the checkpoint. `exit_code` is the shell's for the signal: 128 + its number."""

    def __init__(self, number: int):
        super().__init__(f"{signal.Signals(number).name} received")
        self.exit_code = 128 + number


class StopSignals:
    """`received` is the number of the last signal, 0 before any. Use as a context around the loop."""

    def __init__(self):
        self.received = 0
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopSignals":
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: object) -> None:
        self.received = number
