"""Losses of CASES on many gloo ranks: python tests/lib/many_ranks.py WORLD_SIZE FOLDER CASES.

One process imports torch and forks the ranks, because starting each as a new process takes seconds. CASES is a pickle
of [(Case, options), ...]. Rank RANK writes its evaluations to FOLDER/RANK.pt.
"""

import os
import pickle
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

from tests.lib.loss_oracle import evaluate


def run_rank(rank: int, world_size: int, folder: Path, cases: list) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=120))
    torch.save([evaluate(case, rank, world_size, **options) for case, options in cases], folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def main(world_size: int, folder: Path, cases: list) -> int:
    return fork_ranks(world_size, lambda rank: run_rank(rank, world_size, folder, cases))


def fork_ranks(count: int, run: Callable[[int], None]) -> int:
    """Run run(0) to run(count - 1) in forks of this process, which has imported torch; return the largest exit code."""
    torch.set_num_threads(1)
    children = []
    for rank in range(count):
        if (child := os.fork()) == 0:
            code = 1
            try:
                run(rank)
                sys.stdout.flush()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    sys.exit(main(int(sys.argv[1]), folder, pickle.loads(Path(sys.argv[3]).read_bytes())))
