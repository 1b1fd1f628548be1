"""GPUs for tests over several ranks: one each, or INFCL_RANKS_PER_GPU ranks on each.

Ranks that share a GPU show that what NCCL carries is right, not how fast: to NCCL each seems to be on a host of its own
(NCCL_HOSTID), whose messages go over sockets, and the GPU serves one process after the other, or, under CUDA's MPS, all
at once. Not there: memory that peers write into, which torch shares between GPUs only (`one_each`).
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
    """Environment of a rank of this host; ranks that share a GPU each seem to have a host of their own."""
    local = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    if RANKS_PER_GPU > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(world_size)))).split(",")
        own = visible[rank // RANKS_PER_GPU]
        local = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "CUDA_VISIBLE_DEVICES": own}
    names = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} | local
    return {name: str(value) for name, value in names.items()} | _seems_alone(rank)


def run(
    arguments: list[str], world_size: int, port: int, *, seconds: float = 400, environ: dict | None = None, **options
) -> subprocess.CompletedProcess:
    """A program on so many ranks that share GPUs, which no launcher would start: the first code that is not 0, all that
    they said. As under a launcher, the others are ended after that one; after `seconds` all are, and what they said is
    in the AssertionError.
    """
    with contextlib.ExitStack() as stack:
        files = [[stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)] for _ in range(world_size)]
        ranks = []
        for rank, (out, err) in enumerate(files):
            told = os.environ | (environ or {}) | environment(rank, world_size, port)
            process = subprocess.Popen([sys.executable, *arguments], env=told, stdout=out, stderr=err, **options)
            stack.callback(process.wait)
            stack.callback(process.kill)  # before it is waited for
            ranks.append(process)
        deadline, code = time.monotonic() + seconds, None
        while code is None and time.monotonic() < deadline:
            codes = [process.poll() for process in ranks]
            code = next(filter(None, codes), None if None in codes else 0)
            time.sleep(0.1)
        stdout, stderr = ("".join(_read(pair[place]) for pair in files) for place in range(2))
        assert code is not None, f"ranks that did not end within {seconds} s: {stdout}{stderr}"
    return subprocess.CompletedProcess(arguments, code, stdout, stderr)


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _seems_alone(rank: int) -> dict[str, str]:
    return {"NCCL_HOSTID": f"rank {rank}", "NCCL_MNNVL_ENABLE": "0"} if RANKS_PER_GPU > 1 else {}
