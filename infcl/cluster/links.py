"""How fast GPUs and links are, started by a launcher on every rank: finds the slow one among many that should be equal.

    deepspeed --hostfile HOSTS --module infcl.cluster.links [--json FILE]         (launch/check.sh does)

Measured: a matrix product on each rank, alone; messages between the first ranks of every two hosts, two hosts at a time
(so that a slow link is seen by itself, whoever waits for whom in a ring), between neighbours of one host, and an
all-reduce of all. The least and the median are printed; a rank, link or host below 0.8 of the median is named. The one
link of two hosts is its own median and never named.
"""

import argparse
import json
import socket
import sys
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from infcl.parallel import Parallel, destroy_parallel, init_parallel

SLOW = 0.8
_KINDS = {
    "tflops": ("GPU or CPU", "TFLOP/s"),
    "within_hosts": ("link", "GB/s"),
    "between_hosts": ("link", "GB/s"),
}
_CPU = {"side": 512, "megabytes": 8}
_GPU = {"side": 8192, "megabytes": 256}


def measure(parallel: Parallel) -> dict:
    """{"tflops": {rank name: ...}, "between_hosts": {"a - b": GB/s}, "within_hosts": {...}, "all_reduce": GB/s}.

    GB/s in each direction, both at once; the all-reduce counts bus bandwidth, 2 (W-1)/W bytes a byte.
    """
    sizes = _GPU if parallel.device.type == "cuda" else _CPU
    everyone: list = [None] * parallel.world_size
    dist.all_gather_object(everyone, (socket.gethostname(), parallel.local_rank))
    firsts = [rank for rank, (_, local_rank) in enumerate(everyone) if local_rank == 0]
    block = torch.ones(sizes["megabytes"] << 20, dtype=torch.uint8, device=parallel.device)
    neighbours = [(rank, rank + 1) for rank in range(parallel.world_size - 1) if rank + 1 not in firsts]
    within = [[pair for pair in neighbours if (pair[0] % 2) == odd] for odd in (0, 1)]
    own = {
        "tflops": {_name(everyone[parallel.rank]): _matmul_tflops(parallel, sizes["side"])},
        "between_hosts": _exchange(parallel, block, _rounds(firsts), [host for host, _ in everyone]),
        "within_hosts": _exchange(parallel, block, within, [_name(who) for who in everyone]),
    }
    rate = _all_reduce(parallel, block)
    gathered: list = [None] * parallel.world_size
    dist.all_gather_object(gathered, own)
    result = {kind: {name: value for one in gathered for name, value in one[kind].items()} for kind in own}
    return result | {"all_reduce": rate}


def extremes(result: dict) -> list[str]:
    """The least and the median of each kind: of two hosts' one link nothing else says whether it is slow."""
    return [
        f"least {kind.replace('_', ' ')}: {min(rates.values()):.3g} {_KINDS[kind][1]} "
        f"({min(rates, key=rates.__getitem__)}), median {median(rates.values()):.3g}"
        for kind in _KINDS
        if (rates := result[kind])
    ]


def slow_ones(result: dict) -> list[str]:
    """What is below 0.8 of the median: GPUs, links, and hosts by the median of their links."""
    lines = []
    for kind, (what, unit) in _KINDS.items():
        usual = _usual(result[kind])
        slow = {name: value for name, value in result[kind].items() if value < SLOW * usual}
        if kind == "between_hosts":
            slow = _blame_hosts(result[kind], slow)
        lines += [f"slow {what}: {name}, {value:.3g} {unit} (usual {usual:.3g})" for name, value in slow.items()]
    return lines


def _usual(rates: dict[str, float]) -> float:
    """The median over ranks or hosts of the best that each shows: a slow host slows all its links, but nobody else."""
    ends = {end for name in rates for end in name.split(" - ")}
    return median([max(rate for name, rate in rates.items() if end in name.split(" - ")) for end in ends] or [0.0])


def _blame_hosts(links: dict[str, float], slow: dict[str, float]) -> dict[str, float]:
    """Where most links of a host are slow it is the host's, and its links are named once."""
    hosts = {host for name in links for host in name.split(" - ")}
    if len(hosts) < 3:
        return slow
    blamed = {}
    for host in sorted(hosts):
        own = {name: value for name, value in links.items() if host in name.split(" - ")}
        if sum(name in slow for name in own) > len(own) / 2:
            blamed[f"all of {host}"] = median(own.values())
    named = {host.removeprefix("all of ") for host in blamed}
    return blamed | {name: value for name, value in slow.items() if not named & set(name.split(" - "))}


def _rounds(ranks: list[int]) -> list[list[tuple[int, int]]]:
    """Every two of `ranks` meet once; the pairs of a round have no rank in common (round-robin tournament)."""
    ring: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    rounds = []
    for _ in range(len(ring) - 1):
        pairs = [(ring[i], ring[-1 - i]) for i in range(len(ring) // 2)]
        rounds.append([(min(pair), max(pair)) for pair in pairs if None not in pair])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def _exchange(parallel: Parallel, block, rounds: list[list[tuple[int, int]]], names: list[str]) -> dict[str, float]:
    """GB/s of this rank's pairs, told by the lower rank; one pair at a time between hosts would take too long."""
    rates, incoming = {}, torch.empty_like(block)
    for pairs in rounds:
        dist.barrier()
        peer = next((b if a == parallel.rank else a for a, b in pairs if parallel.rank in (a, b)), None)
        if peer is None:
            continue
        seconds = []
        for _ in range(4):
            started = time.perf_counter()
            ops = [dist.P2POp(dist.isend, block, peer), dist.P2POp(dist.irecv, incoming, peer)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            _synchronize(parallel)
            seconds.append(time.perf_counter() - started)
        if parallel.rank < peer:
            rates[f"{names[parallel.rank]} - {names[peer]}"] = block.numel() / median(seconds[1:]) / 1e9
    return rates


def _all_reduce(parallel: Parallel, block: torch.Tensor) -> float:
    values = block.view(torch.float32)
    seconds = []
    for _ in range(4):
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(values)
        _synchronize(parallel)
        seconds.append(time.perf_counter() - started)
    size = parallel.world_size
    return 2 * (size - 1) / size * block.numel() / median(seconds[1:]) / 1e9


def _matmul_tflops(parallel: Parallel, side: int) -> float:
    dtype = torch.bfloat16 if parallel.device.type == "cuda" else torch.float32
    a = torch.randn(side, side, device=parallel.device).to(dtype)
    seconds = []
    for _ in range(10):
        _synchronize(parallel)
        started = time.perf_counter()
        a @ a
        _synchronize(parallel)
        seconds.append(time.perf_counter() - started)
    return 2 * side**3 / median(seconds[3:]) / 1e12


def _synchronize(parallel: Parallel) -> None:
    if parallel.device.type == "cuda":
        torch.cuda.synchronize(parallel.device)


def _name(who: tuple[str, int]) -> str:
    return f"{who[0]}:{who[1]}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m infcl.cluster.links", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--interface")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    parallel = init_parallel(arguments.device, timeout_minutes=2, interface=arguments.interface)
    result = measure(parallel)
    if parallel.rank == 0:
        if arguments.json:
            arguments.json.write_text(json.dumps(result) + "\n")
        print(f"all-reduce over {parallel.world_size} ranks: {result['all_reduce']:.3g} GB/s")
        for line in [*extremes(result), *slow_ones(result)]:
            print(line)
        sys.stdout.flush()
    destroy_parallel(parallel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
