"""Processes that a benchmark starts: one per GPU, stopped after a time limit or with the benchmark."""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

PATIENCE = 40  # seconds for a launcher to stop its ranks, which are in other sessions


def on_ranks(function: Callable, world_size: int, *arguments: Any) -> None:
    """Call function(rank, *arguments) in one process per rank; with one rank, in this process.

    Each has the environment variables that `init_process_group` and `init_parallel` expect from a launcher.
    """
    shared = (function, world_size, _free_port(), arguments)
    if world_size == 1:
        _start(0, *shared)
    else:
        torch.multiprocessing.spawn(_start, shared, nprocs=world_size)


def _start(rank: int, function: Callable, world_size: int, port: int, arguments: tuple) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    function(rank, *arguments)


def _free_port() -> int:
    """Return a free port below the range that the system uses for outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def exit_on_sigterm(program: str) -> None:
    """Turn SIGTERM into SystemExit, so that a benchmark stops the processes that it started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"{program}: ended by SIGTERM"))


def torchrun(processes: int) -> list[str]:
    """Return the command that starts a Python program in `processes` processes on this node."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [sys.executable, *(launcher if processes > 1 else [])]


def run(command: list[str], seconds: float, **options) -> tuple[str, str]:
    """Run a command in its own session, with a time limit.

    Args:
        command: program and arguments.
        seconds: time limit.
        options: arguments of subprocess.Popen, such as cwd and env.

    Returns:
        Why it failed ("exit code 1", "no result in 120 s"; empty if it succeeded), and its output.
    """
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, **options
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        return f"exit code {process.returncode}" if process.returncode else "", output
    except subprocess.TimeoutExpired:
        return f"no result in {seconds:.0f} s", stop(process)
    except BaseException:  # Ctrl-C and SIGTERM: a process that continues would keep its GPUs
        stop(process)
        raise


def stop(*processes: subprocess.Popen) -> str:
    """Stop processes and their sessions with SIGTERM, then SIGKILL. Return the output of the last process."""
    output = ""
    for process in processes:
        _signal(process, signal.SIGTERM)
    for process in processes:
        try:
            output, _ = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGKILL)
            output, _ = process.communicate()
        _signal(process, signal.SIGKILL)  # the rest of its session
    return output


def _signal(process: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def reason(output: str) -> list[str]:
    """Return the lines of an output that look like the cause of a failure, and the last lines."""
    lines = [line[:300] for line in output.strip().splitlines() if line.strip()]
    causes = [line for line in lines if re.search(r"\w+(Error|Exception)\b.*:", line)]
    return [*causes[:3], "...", *lines[-4:]]
