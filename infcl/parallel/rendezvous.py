"""Rendezvous: before the process group starts, every rank tells through the launcher's store where and what it runs.

`open_store` listens on one address only where it can. `meet` waits for all ranks, reports those that have not joined,
and rejects nodes that run other software, have other settings, or whose ranks share a GPU. Nothing here needs the same
version of torch on all nodes.
"""

import errno
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType

import torch.distributed as dist

from infcl.parallel.environment import deepspeed_launcher
from infcl.parallel.host_info import differences, software
from infcl.parallel.network import LOOPBACK, listen, listen_address

_RUN = "infcl run"  # key in the store: what its ranks are
PATIENCE = 30.0  # seconds between two lines about ranks that have not joined


@dataclass(frozen=True)
class Node:
    """A node as the launcher sees it: consecutive ranks, from the one whose local rank is 0."""

    host: str
    first_rank: int
    num_ranks: int

    def __str__(self) -> str:
        last = self.first_rank + self.num_ranks - 1
        return f"{self.host} (rank{'' if self.num_ranks == 1 else 's'} {_span(self.first_rank, last)})"


def open_store(rank: int, world_size: int, *, interface: str | None, timeout: timedelta, run: str = "") -> dist.Store:
    """Return the store at MASTER_ADDR:MASTER_PORT. Rank 0 serves it unless torchrun serves it already.

    It listens on the loopback where MASTER_ADDR is that, on `interface` alone where one is given, else on all.

    Args:
        interface: network interface on which rank 0 listens.
        timeout: of waits in the store.
        run: what all ranks of this run, and few others, call it.

    Raises:
        ValueError: the launcher gave no place to meet; the port serves another run of this node (rank 0), or one that
            differs in `run` or in size (other ranks).
    """
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if world_size == 1 and not by_launcher:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "0"
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ValueError(f"{' and '.join(missing)} not set: the launcher has to say where rank 0 listens")
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listening = None
    try:
        if rank == 0 and not by_launcher and (address := listen_address(host, interface)):
            listening = listen(address, port)
            port = listening.getsockname()[1]
            os.environ["MASTER_PORT"] = str(port)
        store = dist.TCPStore(
            host, port, is_master=rank == 0 and not by_launcher, timeout=timeout, wait_for_workers=False,
            master_listen_fd=None if listening is None else listening.detach(),
        )  # fmt: skip
    except (OSError, dist.DistNetworkError) as error:
        if os.strerror(errno.EADDRINUSE).lower() not in str(error).lower():
            raise
        raise ValueError(
            f"port {port} of {host} is in use, probably by another run: give this one its own, "
            "deepspeed --master_port N or torchrun --master-port N"
        ) from error
    _require_own(store, f"{run} of {world_size} ranks".strip(), rank, f"port {port} of {host}", timeout)
    launcher = deepspeed_launcher() if host in LOOPBACK else None  # of several nodes each has its own
    return dist.PrefixStore(f"infcl {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} {launcher}", store)


def _require_own(store: dist.Store, run: str, rank: int, where: str, timeout: timedelta) -> None:
    """ValueError where the store is another run's, as where the nodes of two were given one port."""
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


def meet(
    store: dist.Store,
    rank: int,
    local_rank: int,
    world_size: int,
    *,
    timeout: timedelta,
    settings: Mapping[str, str] = MappingProxyType({}),
    gpu: str | None = None,
) -> list[Node]:
    """Return all nodes of the run, in the order of ranks, once every rank has joined.

    Args:
        settings: {name: value} that must be equal on all nodes; the first rank of a node speaks for it.
        gpu: identity of this rank's GPU, which no other rank of its node may have; None on CPUs.

    Raises:
        ValueError: nodes run different software, have different settings, or ranks of a node share a GPU.
        RuntimeError: with the ranks that did not join within `timeout`.
    """
    own: dict = {"host": socket.gethostname(), "local_rank": local_rank, "gpu": gpu}
    if local_rank == 0:
        own |= {"software": software(), "settings": dict(settings)}
    store.set(f"rank {rank}", json.dumps(own))
    if rank == 0:  # it compares: the others' answers are long where nodes are many
        store.set("all", json.dumps(_compare(_gather(store, world_size, timeout))))
    try:
        store.wait(["all"], timeout + timedelta(seconds=30))
    except dist.DistStoreError:
        raise _no_rank_0(rank, timeout) from None
    found = json.loads(store.get("all"))
    store.add("have read", 1)
    if "ranks" in found:
        return nodes_of(found["ranks"])
    if rank == 0:
        _wait_for_readers(store, world_size if "conflict" in found else 0)
    raise ValueError(found["conflict"]) if "conflict" in found else RuntimeError(found["absent"])


def _compare(everyone: list[dict] | str) -> dict:
    """{"ranks": [(host, local rank)]}, or {"conflict": what differs where}, or {"absent": who did not join}."""
    if isinstance(everyone, str):
        return {"absent": everyone}
    ranks = [(one["host"], one["local_rank"]) for one in everyone]
    nodes = nodes_of(ranks)
    firsts = {str(node): everyone[node.first_rank] for node in nodes}
    for kind, what in (("software", "do not run the same"), ("settings", "were not given the same")):
        if lines := differences({node: one[kind] for node, one in firsts.items() if kind in one}):
            return {"conflict": f"the nodes {what}: {'; '.join(lines)}"}
    if shared := [line for node in nodes for line in _shared_gpus(node, everyone)]:
        return {"conflict": "; ".join(shared)}
    return {"ranks": ranks}


def _shared_gpus(node: Node, everyone: list[dict]) -> list[str]:
    ranks: dict[str, list[int]] = {}
    for rank in range(node.first_rank, node.first_rank + node.num_ranks):
        ranks.setdefault(everyone[rank]["gpu"] or f"CPU of rank {rank}", []).append(rank)
    return [
        f"ranks {_ranges(some)} on {node.host} have one GPU, {gpu}: start at most {len(ranks)} per node, "
        "or let the scheduler give each rank its own"
        for gpu, some in ranks.items()
        if len(some) > 1
    ]


def _no_rank_0(rank: int, timeout: timedelta) -> RuntimeError:
    where, limit = socket.gethostname(), timeout.total_seconds()
    return RuntimeError(f"rank {rank} on {where}: rank 0 did not start the rendezvous within {limit:.0f} s")


def _gather(store: dist.Store, world_size: int, timeout: timedelta) -> list[dict] | str:
    """What all ranks say, or who did not join; prints whom it waits for meanwhile."""
    keys = [f"rank {rank}" for rank in range(world_size)]
    began, reported = time.monotonic(), 0.0
    while not store.check(keys):  # not `wait`: torch's cannot be interrupted to print anything
        waited = time.monotonic() - began
        if waited > timeout.total_seconds():
            absent, hosts = _absent(store, keys)
            limit = f"{timeout.total_seconds():.0f} s"
            return f"ranks {absent} of {world_size} did not join within {limit}; joined: those on {hosts}"
        if waited - reported > PATIENCE:
            absent, hosts = _absent(store, keys)
            reported = waited
            line = f"waiting for ranks {absent} of {world_size} for {waited:.0f} s; joined: those on {hosts}"
            print(line, file=sys.stderr, flush=True)
        time.sleep(0.05 if waited < 5 else 1.0)
    return [json.loads(text) for text in store.multi_get(keys)]


def _absent(store: dist.Store, keys: list[str]) -> tuple[str, str]:
    """The numbers of the ranks that have not joined, the hosts of those that have."""
    joined = {rank: json.loads(store.get(key)) for rank, key in enumerate(keys) if store.check([key])}
    hosts = ", ".join(dict.fromkeys(one["host"] for one in joined.values()))
    return _ranges([rank for rank in range(len(keys)) if rank not in joined]), hosts


def _wait_for_readers(store: dist.Store, readers: int) -> None:
    """The store ends with rank 0, so it leaves last: when all have read, or after some seconds."""
    deadline = time.monotonic() + 5
    while (not readers or store.add("have read", 0) < readers) and time.monotonic() < deadline:
        time.sleep(0.1)


def nodes_of(ranks: list[tuple[str, int]]) -> list[Node]:
    """[(host, local rank) of every rank] -> nodes; a local rank of 0 begins one."""
    starts = [rank for rank, (_, local_rank) in enumerate(ranks) if local_rank == 0 or rank == 0]
    ends = [*starts[1:], len(ranks)]
    return [Node(ranks[start][0], start, end - start) for start, end in zip(starts, ends)]


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> '0-2, 5'."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(_span(*span) for span in spans)


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
