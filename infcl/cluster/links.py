"""Measure the speed of GPUs and links on all ranks, and report those that are slower than the others.

    deepspeed --hostfile HOSTS --module infcl.cluster.links         (launch/check.sh does)

Measured:
- a matmul on each rank, alone;
- messages between neighbouring ranks of one host;
- messages between every two hosts, two hosts at a time, so that a slow link does not slow others as in a ring. Ranks
  with the same local rank exchange messages, all at once, as in a two-level ring;
- an all-reduce over all ranks.

The minimum and the median are printed. A rank, link or host below 0.8 of the usual rate is reported; the only link of
two hosts is itself the usual one. GPUs that share a network card share its rate.
"""

import argparse
import functools
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from infcl.config import OneLineParser
from infcl.parallel import Parallel, destroy_parallel, init_parallel
from infcl.parallel.process import end_process
from infcl.parallel.rendezvous import Node, nodes_of

SLOW = 0.8  # share of the usual rate
_KINDS = {
    "tflops": ("GPU or CPU", "TFLOP/s"),
    "within_hosts": ("link", "GB/s"),
    "between_hosts": ("link", "GB/s"),
}  # all values of a kind should be equal
_CPU = {"side": 512, "megabytes": 8}
_GPU = {"side": 8192, "megabytes": 256}


def measure(parallel: Parallel) -> dict:
    """Measure all ranks and links. Collective.

    Returns:
        {"tflops": {rank: TFLOP/s}, "within_hosts": {link: GB/s}, "between_hosts": {link: GB/s}, "all_reduce": GB/s},
        where a rank is "host:local rank" and a link "host:local rank - host:local rank". The rate of a link is per
        direction, with both directions busy. The all-reduce rate is bus bandwidth: 2 (W-1)/W bytes per byte.
    """
    sizes = _GPU if parallel.device.type == "cuda" else _CPU
    everyone: list = [None] * parallel.world_size
    dist.all_gather_object(everyone, (socket.gethostname(), parallel.local_rank))
    nodes, size = nodes_of(everyone), parallel.world_size
    names = [name for node in nodes for name in _names(node, nodes)]
    block = torch.ones(sizes["megabytes"] << 20, dtype=torch.uint8, device=parallel.device)
    inside = [(rank, rank + 1) for rank in range(size - 1) if everyone[rank + 1][1] != 0]
    within = [[pair for pair in inside if pair[0] % 2 == odd] for odd in (0, 1)]
    own = {
        "tflops": {names[parallel.rank]: _matmul_tflops(parallel, sizes["side"])},
        "within_hosts": _exchange(parallel, block, within, names),
        "between_hosts": _exchange(parallel, block, _rounds(nodes), names),
    }
    dist.barrier()
    seconds = _seconds(parallel, lambda: dist.all_reduce(block.view(torch.float32)))
    gathered: list = [None] * size
    dist.all_gather_object(gathered, own)
    result = {kind: {name: value for one in gathered for name, value in one[kind].items()} for kind in own}
    return result | {"all_reduce": 2 * (size - 1) / size * block.numel() / seconds / 1e9}


def extremes(result: dict) -> list[str]:
    """Describe the minimum and the median of each kind: the only clue to the speed of two hosts' single link."""
    return [
        f"least {kind.replace('_', ' ')}: {min(rates.values()):.3g} {unit} "
        f"({min(rates, key=rates.__getitem__)}), median {median(rates.values()):.3g}"
        for kind, (_, unit) in _KINDS.items()
        if (rates := result[kind])
    ]


def slow_ones(result: dict) -> list[str]:
    """Return a line for each GPU, link or host below 0.8 of the usual rate; a host's rate is the median of its links.

    The usual rate is the median of the ranks' best rates. A slow host slows all its links, but no other rank's best
    one. If even the best of a rank's links to other hosts is slow, the rank is reported instead of its links.
    """
    lines = []
    for kind, (what, unit) in _KINDS.items():
        rates = result[kind]
        of_rank: dict[str, dict[str, float]] = defaultdict(dict)
        for name, rate in rates.items():
            for rank in name.split(" - "):
                of_rank[rank][name] = rate
        usual = median([max(own.values()) for own in of_rank.values()] or [0.0])
        blamed = {}
        if kind == "between_hosts":
            several = {rank: own.values() for rank, own in of_rank.items() if len(own) > 1}
            blamed = {rank: median(own) for rank, own in several.items() if max(own) < SLOW * usual}
        links = {n: rate for n, rate in rates.items() if rate < SLOW * usual and not blamed.keys() & n.split(" - ")}
        slow = _by_host(blamed, list(result["tflops"])) | links
        lines += [f"slow {what}: {name}, {value:.3g} {unit} (usual {usual:.3g})" for name, value in slow.items()]
    return lines


def _by_host(ranks: dict[str, float], everyone: list[str]) -> dict[str, float]:
    """Return {"all of NAME": rate}, where a host replaces its ranks if `ranks` has all of those in `everyone`."""
    rates = dict(ranks)
    for host in {rank.rpartition(":")[0] for rank in ranks}:
        its = [rank for rank in everyone if rank.rpartition(":")[0] == host]
        if set(its) <= ranks.keys():
            rates[host] = median(rates.pop(rank) for rank in its)
    return {f"all of {name}": rates[name] for name in sorted(rates)}


def _rounds(nodes: list[Node]) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs of ranks in which every two nodes are paired once (round-robin tournament).

    In a round each node is paired with one other, and its ranks with those of the same local rank.
    """
    seats = [node.ranks for node in nodes]
    if len(seats) % 2:
        seats.append(range(0))
    rounds = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[: len(seats) // 2], reversed(seats))
        rounds.append([(min(pair), max(pair)) for one, other in pairs for pair in zip(one, other)])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def _names(node: Node, nodes: list[Node]) -> list[str]:
    """Return host:local rank of a node's ranks; host@first rank:local rank if nodes have the same hostname."""
    alone = sum(other.host == node.host for other in nodes) == 1
    host = node.host if alone else f"{node.host}@{node.first_rank}"
    return [f"{host}:{local_rank}" for local_rank in range(node.num_ranks)]


def _exchange(
    parallel: Parallel, block: torch.Tensor, rounds: list[list[tuple[int, int]]], names: list[str]
) -> dict[str, float]:
    """Return GB/s per direction of the pairs in which this rank is the lower one.

    All pairs of a round send at once, because one pair of ranks at a time would take too long.
    """
    rates, incoming = {}, torch.empty_like(block)
    for pairs in rounds:
        dist.barrier()
        peer = next((b if a == parallel.rank else a for a, b in pairs if parallel.rank in (a, b)), None)
        if peer is None:
            continue
        seconds = _seconds(parallel, functools.partial(_swap, block, incoming, peer))
        if parallel.rank < peer:
            rates[f"{names[parallel.rank]} - {names[peer]}"] = block.numel() / seconds / 1e9
    return rates


def _swap(block: torch.Tensor, incoming: torch.Tensor, peer: int) -> None:
    ops = [dist.P2POp(dist.isend, block, peer), dist.P2POp(dist.irecv, incoming, peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def _matmul_tflops(parallel: Parallel, side: int) -> float:
    dtype = torch.bfloat16 if parallel.device.type == "cuda" else torch.float32
    a = torch.randn(side, side, device=parallel.device).to(dtype)
    return 2 * side**3 / _seconds(parallel, lambda: a @ a, times=7, warm_up=3) / 1e12


def _seconds(parallel: Parallel, action: Callable[[], object], *, times: int = 3, warm_up: int = 1) -> float:
    """Return the median seconds of `action` on the device."""
    seconds, synchronize = [], torch.get_device_module(parallel.device).synchronize
    for _ in range(warm_up + times):
        synchronize()
        started = time.perf_counter()
        action()
        synchronize()
        seconds.append(time.perf_counter() - started)
    return median(seconds[warm_up:])


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m infcl.cluster.links", description=__doc__.splitlines()[0])
    parser.add_argument("--interface")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    parallel = init_parallel(arguments.device, timeout_minutes=2, interface=arguments.interface)
    result = measure(parallel)
    if parallel.rank == 0:
        print(f"all-reduce over {parallel.world_size} ranks: {result['all_reduce']:.3g} GB/s")
        for line in [*extremes(result), *slow_ones(result)]:
            print(line)
        sys.stdout.flush()
    destroy_parallel(parallel)
    return 0


if __name__ == "__main__":
    end_process(main())
