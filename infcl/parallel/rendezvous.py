"""Rendezvous: before the process group starts, all ranks exchange their host, software and settings through a store.

`join_all` waits for all ranks and reports missing ones. It rejects nodes that differ in software or settings. The nodes
may have different versions of torch.
"""

import errno
import json
import os
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType

import torch.distributed as dist

from infcl.parallel.environment import launcher
from infcl.parallel.host_info import differences, software

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_RUN = "infcl run"  # key in the store: the run and its number of ranks
PATIENCE = 30.0  # seconds between two messages about ranks that have not joined
READING = 5.0  # seconds in which the other ranks read why the run ends


@dataclass(frozen=True)
class Node:
    """A node as the launcher sees it: consecutive ranks, starting with local rank 0."""

    host: str
    first_rank: int
    num_ranks: int

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_ranks)

    def __str__(self) -> str:
        return f"{self.host} (rank{'' if self.num_ranks == 1 else 's'} {_ranges(self.ranks)})"


def open_store(rank: int, world_size: int, *, timeout: timedelta, run: str = "") -> dist.Store:
    """Return the store at MASTER_ADDR:MASTER_PORT. Rank 0 serves it unless torchrun serves it already.

    Args:
        run: identifier that all ranks of this run have in common and other runs rarely have.

    Raises:
        ValueError: the launcher did not set the address or port, or the address has a name that does not exist; the
            port is used by another run on this node (rank 0), or by one that differs in `run` or in size (other ranks).
    """
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if world_size == 1 and not by_launcher:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "0"
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ValueError(f"{' and '.join(missing)} not set: the launcher has to say where rank 0 listens")
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.getaddrinfo(host, port)  # torch would try again until the timeout
        is_master = rank == 0 and not by_launcher
        store = dist.TCPStore(host, port, is_master=is_master, timeout=timeout, wait_for_workers=False)
    except socket.gaierror as error:
        raise ValueError(
            f"MASTER_ADDR={host} has no address on {socket.gethostname()} ({error.strerror}): give the address of rank "
            "0's node, deepspeed --master_addr ADDRESS or torchrun --master-addr ADDRESS"
        ) from error
    except (OSError, dist.DistNetworkError) as error:
        if os.strerror(errno.EADDRINUSE).lower() not in str(error).lower():
            raise
        raise ValueError(
            f"port {port} of {host} is in use, probably by another run: give this one its own, "
            "deepspeed --master_port N or torchrun --master-port N"
        ) from error
    port = store.port
    os.environ["MASTER_PORT"] = str(port)
    _require_own(store, f"{run} of {world_size} ranks".strip(), rank, f"port {port} of {host}", timeout)
    parent = launcher("deepspeed.launcher.launch") if host in LOOPBACK else None  # each of several nodes has its own
    return dist.PrefixStore(f"infcl {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} {parent}", store)


def _require_own(store: dist.Store, run: str, rank: int, where: str, timeout: timedelta) -> None:
    """Raise ValueError if the store belongs to another run, as when two runs were given the same port."""
    if rank == 0:
        store.set(_RUN, run)
        return
    try:
        store.wait([_RUN], timeout)
    except dist.DistStoreError:
        raise _no_rank_0(rank, timeout) from None
    if (other := store.get(_RUN).decode()) != run:
        raise ValueError(
            f"{where} is the rendezvous of another run ({other}, this one is {run}): give this one its own, "
            "deepspeed --master_port N or torchrun --master-port N"
        )


def join_all(
    store: dist.Store,
    rank: int,
    local_rank: int,
    world_size: int,
    *,
    timeout: timedelta,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> list[Node]:
    """Wait until every rank has joined, and compare the nodes. Collective.

    Args:
        settings: {name: value} that must be equal on all nodes; those of each node's first rank are compared.

    Returns:
        All nodes of the run, in the order of ranks.

    Raises:
        ValueError: nodes differ in software or settings.
        RuntimeError: ranks did not join within `timeout`; the message lists them.
    """
    own: dict = {"host": socket.gethostname(), "local_rank": local_rank}
    if local_rank == 0:
        own |= {"software": software(), "settings": dict(settings)}
    store.set(f"rank {rank}", json.dumps(own))
    if rank == 0:  # rank 0 alone compares, since all ranks' data is large with many nodes
        try:
            answer: dict = {"ranks": _compare(_gather(store, world_size, timeout))}
        except (RuntimeError, ValueError) as error:
            answer = {type(error).__name__: str(error)}
        store.set("all", json.dumps(answer))
    try:
        store.wait(["all"], timeout + timedelta(seconds=30))
    except dist.DistStoreError:
        raise _no_rank_0(rank, timeout) from None
    found = json.loads(store.get("all"))
    store.add("have read", 1)
    if "ranks" in found:
        return nodes_of(found["ranks"])
    deadline = time.monotonic() + READING  # rank 0 serves the store, so it exits last
    while rank == 0 and store.add("have read", 0) < world_size and time.monotonic() < deadline:
        time.sleep(0.1)
    raise ValueError(found["ValueError"]) if "ValueError" in found else RuntimeError(found["RuntimeError"])


def _compare(everyone: list[dict]) -> list[tuple[str, int]]:
    """Return [(host, local rank)]. Raise ValueError if nodes differ."""
    ranks = [(one["host"], one["local_rank"]) for one in everyone]
    firsts = {str(node): everyone[node.first_rank] for node in nodes_of(ranks)}
    for kind, what in (("software", "do not run the same"), ("settings", "were not given the same")):
        if lines := differences({node: one[kind] for node, one in firsts.items() if kind in one}):
            raise ValueError(f"the nodes {what}: {'; '.join(lines)}")
    return ranks


def _no_rank_0(rank: int, timeout: timedelta) -> RuntimeError:
    where, limit = socket.gethostname(), timeout.total_seconds()
    return RuntimeError(f"rank {rank} on {where}: rank 0 did not start the rendezvous within {limit:.0f} s")


def _gather(store: dist.Store, world_size: int, timeout: timedelta) -> list[dict]:
    """Return the data of all ranks. Report those that have not joined yet; raise RuntimeError after the timeout."""
    keys = [f"rank {rank}" for rank in range(world_size)]
    began, reported = time.monotonic(), 0.0
    while not store.check(keys):  # not `store.wait`, which cannot be interrupted to print a message
        waited = time.monotonic() - began
        if waited > timeout.total_seconds():
            absent, hosts = _absent(store, keys)
            limit = f"{timeout.total_seconds():.0f} s"
            raise RuntimeError(f"ranks {absent} of {world_size} did not join within {limit}; joined: those on {hosts}")
        if waited - reported > PATIENCE:
            absent, hosts = _absent(store, keys)
            reported = waited
            line = f"waiting for ranks {absent} of {world_size} for {waited:.0f} s; joined: those on {hosts}"
            print(line, file=sys.stderr, flush=True)
        time.sleep(0.05 if waited < 5 else 1.0)
    return [json.loads(text) for text in store.multi_get(keys)]


def _absent(store: dist.Store, keys: list[str]) -> tuple[str, str]:
    """Return the ranks that have not joined, and the hosts of those that have."""
    joined = {rank: json.loads(store.get(key)) for rank, key in enumerate(keys) if store.check([key])}
    hosts = ", ".join(dict.fromkeys(one["host"] for one in joined.values()))
    return _ranges(rank for rank in range(len(keys)) if rank not in joined), hosts


def nodes_of(ranks: list[tuple[str, int]]) -> list[Node]:
    """Return the nodes of [(host, local rank) of every rank]. A local rank of 0 starts a new node."""
    starts = [rank for rank, (_, local_rank) in enumerate(ranks) if local_rank == 0 or rank == 0]
    ends = [*starts[1:], len(ranks)]
    return [Node(ranks[start][0], start, end - start) for start, end in zip(starts, ends)]


def _ranges(numbers: Iterable[int]) -> str:
    """Format numbers as ranges: [0, 1, 2, 5] -> '0-2, 5'."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
