"""Waiting for other processes, never without end."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(
    reached: Callable[[], object],
    seconds: float,
    otherwise: str | Callable[[], object],
    process: subprocess.Popen | None = None,
) -> None:
    """Return when `reached()` is true. After `seconds` an AssertionError that says `otherwise`, or what it returns
    then; where `process` ends before, one with its output."""
    deadline = time.monotonic() + seconds
    while not reached():
        assert process is None or process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < deadline, otherwise() if callable(otherwise) else otherwise
        time.sleep(0.1)


def wait_for_checkpoint(logs: Path, process: subprocess.Popen) -> None:
    """Return when the run named `run` has a checkpoint to resume from."""
    latest = logs / "run" / "checkpoints" / "latest"
    wait_until(latest.exists, 300, "no checkpoint was written", process)


def finish(process: subprocess.Popen, seconds: float = 600) -> tuple[int, str]:
    """(exit code, what it printed)"""
    output, _ = process.communicate(timeout=seconds)
    return process.returncode, output
