"""Measure the speed of GPUs and links on all ranks, and report those that are slower than the others.

    deepspeed --hostfile HOSTS --module infcl.cluster.links [--json FILE]         (launch/check.sh does)

Measured:
- a matmul on each rank, alone;
- messages between neighbouring ranks of one host;
- messages between every two hosts, two hosts at a time, so that a slow link does not slow others as in a ring. Ranks
  with the same local rank exchange messages, all at once, as in a two-level ring;
- one ring of all ranks at once;
- an all-reduce over all ranks.

The minimum and the median are printed. A rank, link or host below 0.8 of the median is reported. The only link of two
hosts with one rank each is its own median and is never reported. GPUs that share a network card share its rate. A rank
whose local rank exists on no other host is measured between hosts only in the ring, of which only the minimum and the
median are printed.
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
from infcl.parallel.process import end_process
from infcl.parallel.rendezvous import Node, nodes_of

SLOW = 0.8
_BESIDE_A_RUN = {"cpu": 1 << 18, "cuda": 1 << 24}  # bytes; the fewest that show a link's rate
_KINDS = {
    "tflops": ("GPU or CPU", "TFLOP/s"),
    "within_hosts": ("link", "GB/s"),
    "between_hosts": ("link", "GB/s"),
}  # all values of a kind should be equal; the ring is missing because its links are of two kinds
_CPU = {"side": 512, "megabytes": 8}
_GPU = {"side": 8192, "megabytes": 256}


def measure(parallel: Parallel) -> dict:
    """Measure all ranks and links. Collective.

    Returns:
        {"tflops": {rank: TFLOP/s}, "within_hosts": {link: GB/s}, "between_hosts": {link: GB/s}, "ring": {rank: GB/s},
        "all_reduce": GB/s}, where a rank is "host:local rank" and a link "host:local rank - host:local rank".
        The rate of a link is per direction, with both directions busy. The rate of a rank in the ring is that to the
        next rank, while it receives from the previous one. The all-reduce rate is bus bandwidth: 2 (W-1)/W bytes per
        byte.
    """
    sizes = _GPU if parallel.device.type == "cuda" else _CPU
    everyone: list = [None] * parallel.world_size
    dist.all_gather_object(everyone, (socket.gethostname(), parallel.local_rank))
    nodes, size = nodes_of(everyone), parallel.world_size
    names = [name for node in nodes for name in _names(node, nodes)]
    block = torch.ones(sizes["megabytes"] << 20, dtype=torch.uint8, device=parallel.device)
    inside = [(rank, rank + 1) for rank in range(size - 1) if everyone[rank + 1][1] != 0]
    within = [[pair for pair in inside if pair[0] % 2 == odd] for odd in (0, 1)]
    around = {names[parallel.rank]: _send_around(parallel, block)} if size > 1 else {}
    own = {
        "tflops": {names[parallel.rank]: _matmul_tflops(parallel, sizes["side"])},
        "within_hosts": _exchange(parallel, block, within, names),
        "between_hosts": _exchange(parallel, block, _meetings(nodes), names),
        "ring": around,
    }
    rate = _all_reduce(parallel, block)
    gathered: list = [None] * size
    dist.all_gather_object(gathered, own)
    result = {kind: {name: value for one in gathered for name, value in one[kind].items()} for kind in own}
    return result | {"all_reduce": rate}


def neighbours(parallel: Parallel) -> tuple[dict[str, float], list[str]]:
    """Measure the links between neighbouring nodes, in rank order. Collective.

    Measures two hosts at a time, as `measure` does, with messages that are small enough to send during a run.

    Returns:
        {link: GB/s}, and the names of all ranks.
    """
    nodes = list(parallel.nodes)
    names = [name for node in nodes for name in _names(node, nodes)]
    block = torch.ones(_BESIDE_A_RUN[parallel.device.type], dtype=torch.uint8, device=parallel.device)
    own = _exchange(parallel, block, _meet(nodes, _circle(len(nodes))), names, of_several=min)
    gathered: list = [None] * parallel.world_size
    dist.all_gather_object(gathered, own)
    return {name: rate for one in gathered for name, rate in one.items()}, names


def extremes(result: dict) -> list[str]:
    """Describe the minimum and the median of each kind: the only clue to the speed of two hosts' single link."""
    units = {kind: unit for kind, (_, unit) in _KINDS.items()} | {"ring": "GB/s"}
    return [
        f"least {'in the ring' if kind == 'ring' else kind.replace('_', ' ')}: {min(rates.values()):.3g} {unit} "
        f"({min(rates, key=rates.__getitem__)}), median {median(rates.values()):.3g}"
        for kind, unit in units.items()
        if (rates := result[kind])
    ]


def slow_ones(result: dict) -> list[str]:
    """Return a line for each GPU, link or host below 0.8 of the median; a host's rate is the median of its links."""
    lines = []
    for kind, (what, unit) in _KINDS.items():
        everyone = list(result["tflops"]) if kind == "between_hosts" else []
        slow, usual = slower_than_usual(result[kind], everyone)
        lines += [f"slow {what}: {name}, {value:.3g} {unit} (usual {usual:.3g})" for name, value in slow.items()]
    return lines


def slower_than_usual(rates: dict[str, float], everyone: list[str]) -> tuple[dict[str, float], float]:
    """Find the slow ranks or links.

    Args:
        rates: {name of a rank or link: rate}.
        everyone: for links, the names of all ranks: a rank or host that several slow links share replaces them.

    Returns:
        {name: rate} of the slow ones, and the usual rate.
    """
    usual = _usual(rates)
    slow = {name: rate for name, rate in rates.items() if rate < SLOW * usual}
    return (_blame(rates, slow, everyone) if everyone else slow), usual


def _usual(rates: dict[str, float]) -> float:
    """Return the median of the ranks' best rates. A slow host slows all its links, but no other rank's best one."""
    ends = {end for name in rates for end in name.split(" - ")}
    return median([max(rate for name, rate in rates.items() if end in name.split(" - ")) for end in ends] or [0.0])


def _blame(links: dict[str, float], slow: dict[str, float], everyone: list[str]) -> dict[str, float]:
    """Attribute slow links to ranks and hosts, the worst rank first.

    A rank is slow if most of its links (two or more) are slow, and a host if all its ranks are. `everyone` has the
    names of all ranks, some of which may have no link.
    """
    blamed: dict[str, float] = {}
    ranks = sorted({end for name in links for end in name.split(" - ")})
    left = dict(links)
    while True:
        own = {rank: [name for name in left if rank in name.split(" - ")] for rank in set(ranks) - set(blamed)}
        shares = {rank: sum(name in slow for name in its) / len(its) for rank, its in own.items() if len(its) > 1}
        rates = {rank: median(links[name] for name in own[rank]) for rank in shares}
        worst = max(sorted(shares), key=lambda rank: (shares[rank], -rates[rank]), default=None)
        if worst is None or shares[worst] <= 0.5:
            break
        blamed[worst] = median(links[name] for name in links if worst in name.split(" - "))
        left = {name: value for name, value in left.items() if worst not in name.split(" - ")}
    for host in sorted({_host(rank) for rank in ranks}):
        its = [rank for rank in everyone if _host(rank) == host]
        if set(its) <= set(blamed):
            blamed[host] = median(blamed.pop(rank) for rank in its)
    return {f"all of {name}": blamed[name] for name in sorted(blamed)} | {n: v for n, v in slow.items() if n in left}


def _meetings(nodes: list[Node]) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs of ranks in which every two nodes are paired once."""
    return _meet(nodes, _rounds(list(range(len(nodes)))))


def _meet(nodes: list[Node], rounds: list[list[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
    """Map pairs of nodes to pairs of their ranks with the same local rank."""
    ranks = [range(node.first_rank, node.first_rank + node.num_ranks) for node in nodes]
    return [[pair for one, other in pairs for pair in zip(ranks[one], ranks[other])] for pairs in rounds]


def _circle(count: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs: each of `count` >= 3 nodes with the next one, and the last with the first."""
    line = [(place, place + 1) for place in range(count - 1)]
    rounds, closing = [line[::2], line[1::2]], (0, count - 1)
    return [rounds[0], [*rounds[1], closing]] if count % 2 == 0 else [*rounds, [closing]]


def _names(node: Node, nodes: list[Node]) -> list[str]:
    """Return the names of a node's ranks.

    host:local rank, or host@first rank:local rank if several nodes (for example containers) have the same hostname.
    """
    alone = sum(other.host == node.host for other in nodes) == 1
    host = node.host if alone else f"{node.host}@{node.first_rank}"
    return [f"{host}:{local_rank}" for local_rank in range(node.num_ranks)]


def _rounds(hosts: list[int]) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs in which every two hosts are paired once (round-robin tournament)."""
    ring: list[int | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    rounds = []
    for _ in range(len(ring) - 1):
        pairs = [(ring[i], ring[-1 - i]) for i in range(len(ring) // 2)]
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def _exchange(
    parallel: Parallel, block, rounds: list[list[tuple[int, int]]], names: list[str], *, of_several=median
) -> dict[str, float]:
    """Return GB/s of the pairs in which this rank is the lower one.

    All pairs of a round send at once, because one pair of ranks at a time would take too long. `of_several` reduces the
    seconds of a few messages to one value: use min if others may use the link.
    """
    rates = {}
    for pairs in rounds:
        dist.barrier()
        peer = next((b if a == parallel.rank else a for a, b in pairs if parallel.rank in (a, b)), None)
        if peer is None:
            continue
        rate = _send_and_receive(parallel, block, to=peer, source=peer, of_several=of_several)
        if parallel.rank < peer:
            rates[f"{names[parallel.rank]} - {names[peer]}"] = rate
    return rates


def _send_around(parallel: Parallel, block: torch.Tensor) -> float:
    """Return this rank's GB/s while all ranks send to the next one, as in a flat ring."""
    rank, size = parallel.rank, parallel.world_size
    dist.barrier()
    return _send_and_receive(parallel, block, to=(rank + 1) % size, source=(rank - 1) % size)


def _send_and_receive(parallel: Parallel, block: torch.Tensor, *, to: int, source: int, of_several=median) -> float:
    """Return GB/s per direction."""
    incoming, seconds = torch.empty_like(block), []
    for _ in range(4):
        started = time.perf_counter()
        ops = [dist.P2POp(dist.isend, block, to), dist.P2POp(dist.irecv, incoming, source)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        _synchronize(parallel)
        seconds.append(time.perf_counter() - started)
    return block.numel() / of_several(seconds[1:]) / 1e9


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


def _host(rank: str) -> str:
    return rank.rpartition(":")[0]


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
    end_process(main())
