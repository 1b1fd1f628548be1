"""GPUs for tests over several ranks: one each, or INFCL_RANKS_PER_GPU ranks on each.

Ranks that share a GPU show that what NCCL carries is right, not how fast: to NCCL each seems to be on a host of its own
(NCCL_HOSTID), whose messages go over sockets, and the GPU serves one process after the other. Not there: memory that
peers write into, which torch shares between GPUs only (`one_each`).
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from typing import IO

import pytest
import torch

RANKS_PER_GPU = int(os.environ.get("INFCL_RANKS_PER_GPU", "1"))
one_each = pytest.mark.skipif(RANKS_PER_GPU > 1, reason="ranks that share a GPU cannot write into each other's memory")


def num_ranks(most: int = 8) -> int:
    """For how many ranks there is a GPU, or a part of one."""
    return min(torch.cuda.device_count() * RANKS_PER_GPU, most)


def take(rank: int) -> torch.device:
    """This process's GPU, from now on its current one. Before the process group is made."""
    os.environ.update(_seems_alone(rank))
    device = torch.device("cuda", rank // RANKS_PER_GPU)
    torch.cuda.set_device(device)
    return device


def environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What a launcher says to a rank of this host; ranks that share a GPU are told that each has a host for itself."""
    if RANKS_PER_GPU > 1:
        local = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "CUDA_VISIBLE_DEVICES": rank // RANKS_PER_GPU}
    else:
        local = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    names = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} | local
    return {name: str(value) for name, value in names.items()} | _seems_alone(rank)


def run(arguments: list[str], world_size: int, port: int, *, seconds=400, **options) -> subprocess.CompletedProcess:
    """A program on so many ranks that share GPUs, which no launcher would start: the first code that is not 0, all that
    they said. subprocess.TimeoutExpired after `seconds`; then, too, no rank is left."""
    with contextlib.ExitStack() as stack:
        files = [[stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)] for _ in range(world_size)]
        ranks = []
        for rank, (out, err) in enumerate(files):
            told = os.environ | environment(rank, world_size, port)
            process = subprocess.Popen([sys.executable, *arguments], env=told, stdout=out, stderr=err, **options)
            stack.callback(process.wait)
            stack.callback(process.kill)  # before it is waited for
            ranks.append(process)
        deadline = time.monotonic() + seconds
        codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in ranks]
        stdout, stderr = ("".join(_read(pair[place]) for pair in files) for place in range(2))
    return subprocess.CompletedProcess(arguments, next(filter(None, codes), 0), stdout, stderr)


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _seems_alone(rank: int) -> dict[str, str]:
    return {"NCCL_HOSTID": f"rank {rank}", "NCCL_MNNVL_ENABLE": "0"} if RANKS_PER_GPU > 1 else {}
