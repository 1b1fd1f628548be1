"""GPUs for tests over several ranks: one per rank, or INFCL_RANKS_PER_GPU ranks per GPU.

Ranks that share a GPU can test that NCCL's results are correct, but not its speed. NCCL treats each rank as a separate
host (NCCL_HOSTID) and sends messages over sockets. The GPU runs one process after another or, under CUDA's MPS, all at
the same time.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from typing import IO

import torch

RANKS_PER_GPU = int(os.environ.get("INFCL_RANKS_PER_GPU", "1"))


def num_ranks(most: int = 8) -> int:
    """Return the number of ranks that the GPUs can run."""
    return min(torch.cuda.device_count() * RANKS_PER_GPU, most)


def take(rank: int) -> torch.device:
    """Select this process's GPU and return it. Call it before the process group is made."""
    os.environ.update(_seems_alone(rank))
    device = torch.device("cuda", rank // RANKS_PER_GPU)
    torch.cuda.set_device(device)
    return device


def environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the environment of a rank on this node. Ranks that share a GPU appear as separate hosts."""
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
    """Run a program on `world_size` ranks that share GPUs, which no launcher supports.

    As under a launcher, the first rank that fails ends the others. After `seconds`, all ranks are killed and an
    AssertionError has their output.

    Returns:
        The first exit code that is not 0, and the output of all ranks.
    """
    with contextlib.ExitStack() as stack:
        files = [[stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)] for _ in range(world_size)]
        ranks = []
        for rank, (out, err) in enumerate(files):
            given = os.environ | (environ or {}) | environment(rank, world_size, port)
            process = subprocess.Popen([sys.executable, *arguments], env=given, stdout=out, stderr=err, **options)
            stack.callback(process.wait)
            stack.callback(process.kill)  # runs before process.wait
            ranks.append(process)
        deadline, code = time.monotonic() + seconds, None
        while code is None and time.monotonic() < deadline:
            codes = [process.poll() for process in ranks]
            code = next(filter(None, codes), None if None in codes else 0)
            time.sleep(0.1)
        stdout, stderr = ("".join(map(_read, column)) for column in zip(*files))
        assert code is not None, f"ranks that did not end within {seconds} s: {stdout}{stderr}"
    return subprocess.CompletedProcess(arguments, code, stdout, stderr)


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _seems_alone(rank: int) -> dict[str, str]:
    return {"NCCL_HOSTID": f"rank {rank}", "NCCL_MNNVL_ENABLE": "0"} if RANKS_PER_GPU > 1 else {}
