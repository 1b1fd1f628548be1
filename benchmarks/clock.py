"""Measurements on GPUs: checks for GPUs, times from CUDA events, the rate of GEMMs, the environment of a row."""

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
    """Exit with a usage error if fewer than `count` GPUs are visible."""
    visible = torch.cuda.device_count()
    if visible == 0 < count:
        usage_error(program, f"it measures on GPUs, and none is visible{why_no_gpu()}")
    if visible < count:
        usage_error(program, f"--gpus {count}: {visible} visible here, and each process takes one")


def usage_error(program: str, why: str) -> NoReturn:
    """Report a usage error in one line, with exit code 2."""
    print(f"{program}: error: {why}", file=sys.stderr)
    sys.exit(2)


def timed(
    step: Callable, repeats: int, group: dist.ProcessGroup | None = None, *, warm_up: int = 2, ahead: int = 0
) -> list[float]:
    """Return the milliseconds of `repeats` calls after `warm_up` calls, of the slowest rank of `group`.

    Args:
        ahead: GPU cycles to wait before each call, so that the host can issue its kernels before the first one runs.
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


def library_tflops() -> float:
    """Return TFLOP/s of an 8192^3 BF16 GEMM, after a third of a second of GEMMs: power limits slow down a warm GPU."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / statistics.median(timed(lambda: a @ b, 50, warm_up=250)) / 1e9


def hardware(commit: str | None) -> dict[str, str]:
    """Return device, versions and commit. The default commit is git's HEAD, "+" with local changes, or empty."""
    found = git_commit() or ""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "triton": metadata.version("triton"),
        "commit": commit or found[:7] + found[40:],
    }
