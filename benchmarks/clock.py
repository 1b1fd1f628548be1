"""Measurements on GPUs: checks for GPUs, times from CUDA events, the rate of GEMMs, the record of the environment."""

import statistics
import sys
from collections.abc import Callable
from importlib import metadata
from typing import NoReturn

import torch
import torch.distributed as dist

from infcl.parallel import why_no_gpu
from infcl.parallel.host_info import git_commit


def require_gpus(program: str, count: int = 1) -> None:
    """Reject the command where fewer GPUs than `count` are visible."""
    visible = torch.cuda.device_count()
    if visible == 0 < count:
        refuse(program, f"it measures on GPUs, and none is visible{why_no_gpu()}")
    if visible < count:
        refuse(program, f"--gpus {count}: {visible} visible here, and each process takes one")


def refuse(program: str, why: str) -> NoReturn:
    """Report a usage error in one line, with exit code 2."""
    print(f"{program}: error: {why}", file=sys.stderr)
    sys.exit(2)


def timed(
    step: Callable, repeats: int, group: dist.ProcessGroup | None = None, *, warm_up: int = 2, ahead: int = 0
) -> list[float]:
    """Milliseconds of `repeats` calls after `warm_up` ones; of the slowest rank of `group`.

    ahead: cycles that the GPU waits before each, so that the host has issued what is shorter than that by then.
    """
    times = []
    for repeat in range(warm_up + repeats):
        if group is not None:
            dist.barrier(group)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        if ahead:
            torch.cuda._sleep(ahead)
        start.record()
        step()
        end.record()
        end.synchronize()
        milliseconds = torch.tensor(start.elapsed_time(end), device="cuda")
        if group is not None:
            dist.all_reduce(milliseconds, dist.ReduceOp.MAX, group=group)
        if repeat >= warm_up:
            times.append(milliseconds.item())
    return times


def affordable(seconds: float, milliseconds: float, warm_up: int, repeats: int) -> tuple[int, int, int] | None:
    """(steps to compile, to warm up, to time) within `seconds`, if one takes about so long; None: not even one.

    Three compile (the third call of a loss records a graph), or none where `warm_up` is 0 and one step alone is asked
    for. Where not all have room, compiling is left out first, then repeats, then warming up.
    """
    compiling = 3 if warm_up else 0
    if (compiling + warm_up + repeats) * milliseconds <= 1000 * seconds:
        return compiling, warm_up, repeats
    steps = int(1000 * seconds / milliseconds)
    warm_up = max(0, min(warm_up, steps - 1))
    return (0, warm_up, min(repeats, steps - warm_up)) if steps else None


def library_tflops() -> float:
    """TFLOP/s of an 8192^3 bf16 product, after a third of a second of them: at its power limit a GPU runs slower."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / statistics.median(timed(lambda: a @ b, 50, warm_up=250)) / 1e9


def hardware(commit: str | None) -> dict[str, str]:
    """Device, versions and commit: git's HEAD unless given, "+" with local changes, empty outside a checkout."""
    found = git_commit() or ""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "triton": metadata.version("triton"),
        "commit": commit or found[:7] + found[40:],
    }
