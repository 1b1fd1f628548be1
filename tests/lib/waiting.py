"""Wait for other processes, with time limits."""

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
    """Return when `reached()` is true.

    Raises:
        AssertionError: not within `seconds`, with the message `otherwise` (or its return value), or `process` ended
            before, with its output.
    """
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
    """Wait for the process; return its exit code and output."""
    output, _ = process.communicate(timeout=seconds)
    return process.returncode, output
