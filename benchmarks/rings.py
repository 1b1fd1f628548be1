"""Flat against two-level rings between hosts whose links are slow: `python -m benchmarks.rings` (root, iproute2).

Hosts are network namespaces (tests/lib/hosts.py) of RANKS ranks with a NIC each; tc holds every NIC to
--nic-mbit in each direction and the loopback, which stands for NVLink, to --ratio times that for each rank. What is
timed is the loss, forward and backward, over gloo: computing it is small beside the messages, so this measures the
rings and what hides behind what only in part.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

from benchmarks.clock import hardware
from benchmarks.rows import append
from benchmarks.spawn import fork_ranks

ROOT = Path(__file__).parent.parent


def main() -> None:
    arguments = _parse()
    if arguments.host is not None:
        sys.exit(fork_ranks(arguments.ranks, partial(_run_rank, arguments)))
    from tests.lib.hosts import Hosts

    rows = []
    with Hosts(arguments.hosts, nics=arguments.ranks) as hosts:
        for host in hosts.all:
            for number in range(arguments.ranks):
                host.shape(f"tbf rate {arguments.nic_mbit}mbit burst 64kb latency 2s", device=f"eth{number}")
            inside = arguments.nic_mbit * arguments.ratio * arguments.ranks
            host.shape(f"tbf rate {inside:.0f}mbit burst 1mb latency 2s", device="lo")
        for ring in ("flat", "two-level", "flat", "two-level"):
            rows.append(_measure(hosts, ring, arguments))
            print(f"{ring:<10}{rows[-1]['median_ms']:>9.0f} ms  (fastest {rows[-1]['fastest_ms']:.0f})", flush=True)
    append(arguments.csv, rows)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=4, help="of each host")
    parser.add_argument("--rows", type=int, default=256, help="pairs of a rank")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--nic-mbit", type=float, default=40)
    parser.add_argument("--ratio", type=float, default=6.4, help="of NVLink to NIC, per rank: 290 to 45 GB/s")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--host", type=int, help=argparse.SUPPRESS)  # the rest is for the processes on the hosts
    parser.add_argument("--ring", help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure(hosts, ring: str, arguments: argparse.Namespace) -> dict:
    store = hosts.folder / f"store-{time.monotonic_ns()}"
    command = [sys.executable, "-m", "benchmarks.rings", "--ring", ring, "--store", store]
    for name in ("hosts", "ranks", "rows", "dim", "repeats"):
        command += [f"--{name}", getattr(arguments, name)]
    started = [
        subprocess.Popen(host.command([*command, "--host", number], ROOT), stdout=subprocess.PIPE, text=True)
        for number, host in enumerate(hosts.all)
    ]
    printed = [process.communicate(timeout=600)[0] for process in started]
    assert all(process.returncode == 0 for process in started), printed
    times = [float(word) for word in printed[0].split()]
    settings = {name: getattr(arguments, name) for name in ("hosts", "ranks", "rows", "dim", "nic_mbit", "ratio")}
    row = {"ring": ring, **settings, "median_ms": statistics.median(times), "fastest_ms": min(times)}
    row |= hardware(None)
    return {name: round(value, 1) if isinstance(value, float) else value for name, value in row.items()}


def _run_rank(arguments: argparse.Namespace, local_rank: int) -> None:
    import torch
    import torch.distributed as dist

    from infcl.loss.inf_cl import inf_cl_loss

    os.environ["GLOO_SOCKET_IFNAME"] = f"eth{local_rank}"
    rank, size = arguments.host * arguments.ranks + local_rank, arguments.hosts * arguments.ranks
    store = dist.FileStore(arguments.store, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=300))
    features = torch.nn.functional.normalize(torch.randn(2, arguments.rows, arguments.dim), dim=-1)
    images, texts = (side.clone().requires_grad_() for side in features)
    times = []
    for _ in range(1 + arguments.repeats):
        dist.barrier()
        started = time.perf_counter()
        loss = inf_cl_loss(
            images, texts, 50.0, group=dist.group.WORLD, ring=arguments.ring, ranks_per_node=arguments.ranks
        )
        loss.backward()
        slowest = torch.tensor(time.perf_counter() - started)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        times.append(1e3 * float(slowest))
    if rank == 0:
        print(*times[1:])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
