"""Before the process group: every rank says on which host it is and what that host runs, through the launcher's store.

`open_store` listens on one address only where it can; `meet` waits for all ranks, names those that do not come while
it waits and in the end, and refuses hosts that run something else or were given other settings. Nothing here needs
torch to be of one version.
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
from pathlib import Path
from types import MappingProxyType

import torch.distributed as dist

from infcl.parallel.host_info import differences, software

_RUN = "infcl run"  # in the store: what its ranks are
PATIENCE = 30.0  # seconds between two lines about ranks that have not come
LOOPBACK = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class Node:
    """A host as the launcher sees it: consecutive ranks, from the one whose local rank is 0."""

    host: str
    first_rank: int
    num_ranks: int

    def __str__(self) -> str:
        last = self.first_rank + self.num_ranks - 1
        return f"{self.host} (rank{'' if self.num_ranks == 1 else 's'} {_span(self.first_rank, last)})"


def open_store(rank: int, world_size: int, *, interface: str | None, timeout: timedelta, run: str = "") -> dist.Store:
    """The store at MASTER_ADDR:MASTER_PORT, served by rank 0 unless torchrun serves it already.

    It listens on the loopback where MASTER_ADDR is that, on `interface` alone where one is given, else on all. Two runs
    of one host may be given one port: the second's rank 0 raises ValueError, and no other rank of it meets the first's.
    Of two runs over several hosts the second's other ranks raise it too, where the runs differ in `run`, which says
    what a run is, or in their size.
    """
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if world_size == 1 and not by_launcher:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "0"
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ValueError(f"{' and '.join(missing)} not set: the launcher has to say where rank 0 listens")
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listening = None
    try:
        if rank == 0 and not by_launcher and (address := _listen_address(host, interface)):
            listening = socket.create_server((address, port), backlog=4096)
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
    launcher = deepspeed_launcher() if host in LOOPBACK else None  # of several hosts each has its own
    return dist.PrefixStore(f"infcl {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} {launcher}", store)


def _require_own(store: dist.Store, run: str, rank: int, where: str, timeout: timedelta) -> None:
    """ValueError where the store is another run's, as where the hosts of two were given one port."""
    if rank == 0:
        store.set(_RUN, run)
        return
    try:
        store.wait([_RUN], timeout)
    except dist.DistStoreError:
        raise _no_rank_0(rank, timeout) from None
    if (other := store.get(_RUN).decode()) != run:
        raise ValueError(
            f"{where} is where another run meets ({other}, this one is {run}): give this one its own, "
            "deepspeed --master_port N or torchrun --master-port N"
        )


def deepspeed_launcher() -> int | None:
    """The process of DeepSpeed's launcher that started this one, where there is one. Linux; elsewhere None."""
    parent = os.getppid()
    try:
        command = Path(f"/proc/{parent}/cmdline").read_bytes()
    except OSError:
        return None
    return parent if b"deepspeed.launcher.launch" in command else None


def require_hostfile() -> None:
    """ValueError where DeepSpeed was given a hostfile that is not there: it warns, and trains on this host alone."""
    launcher = deepspeed_launcher()
    if launcher is None:
        return
    try:
        status = Path(f"/proc/{launcher}/status").read_text()
        runner = Path("/proc") / status.split("PPid:")[1].split()[0]
        hostfile = _hostfile_of((runner / "cmdline").read_bytes().decode(errors="replace").split("\0"))
        if hostfile is None or (runner / "cwd" / hostfile).is_file():
            return
    except OSError:  # the process has ended, or is another user's
        return
    raise ValueError(f"deepspeed was given --hostfile {hostfile}, which is not there: it started this host alone")


def _hostfile_of(words: list[str]) -> str | None:
    """What the command line of a `deepspeed` says."""
    for word, following in zip(words, [*words[1:], ""]):
        if word in ("-H", "--hostfile"):
            return following
        if word.startswith("--hostfile="):
            return word.removeprefix("--hostfile=")
    return None


def meet(
    store: dist.Store,
    rank: int,
    local_rank: int,
    world_size: int,
    *,
    timeout: timedelta,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> list[Node]:
    """All nodes of the run, in the order of ranks, once every rank is there.

    settings: {name: value} of what this host was given, which must be equal on all; a host speaks through its first
    rank. ValueError when hosts run different software or have different settings, with who has what; RuntimeError
    naming the ranks that did not come within `timeout`.
    """
    told: dict = {"host": socket.gethostname(), "local_rank": local_rank}
    if local_rank == 0:
        told |= {"software": software(), "settings": dict(settings)}
    store.set(f"rank {rank}", json.dumps(told))
    if rank == 0:  # it compares: what all say is long where the hosts are many
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
        _wait_for_readers(store, world_size if "mistake" in found else 0)
    raise ValueError(found["mistake"]) if "mistake" in found else RuntimeError(found["absent"])


def _compare(everyone: list[dict] | str) -> dict:
    """{"ranks": [(host, local rank)]}, or {"mistake": who differs in what}, or {"absent": who did not come}."""
    if isinstance(everyone, str):
        return {"absent": everyone}
    ranks = [(said["host"], said["local_rank"]) for said in everyone]
    firsts = {str(node): everyone[node.first_rank] for node in nodes_of(ranks)}
    for kind, what in (("software", "do not run the same"), ("settings", "were not given the same")):
        if lines := differences({node: said[kind] for node, said in firsts.items() if kind in said}):
            return {"mistake": f"the hosts {what}: {'; '.join(lines)}"}
    return {"ranks": ranks}


def _no_rank_0(rank: int, timeout: timedelta) -> RuntimeError:
    return RuntimeError(f"rank {rank} on {socket.gethostname()}: rank 0 has not opened the run within {timeout}")


def _gather(store: dist.Store, world_size: int, timeout: timedelta) -> list[dict] | str:
    """What all ranks say, or who did not come; who is waited for is printed while it lasts."""
    keys = [f"rank {rank}" for rank in range(world_size)]
    began, told = time.monotonic(), 0.0
    while not store.check(keys):  # not `wait`: torch's cannot be interrupted to say anything
        waited = time.monotonic() - began
        if waited > timeout.total_seconds():
            absent, hosts = _absent(store, keys)
            return f"ranks {absent} of {world_size} did not come within {timeout}; here are those on {hosts}"
        if waited - told > PATIENCE:
            absent, hosts = _absent(store, keys)
            told = waited
            line = f"waiting for ranks {absent} of {world_size} for {waited:.0f} s; here are those on {hosts}"
            print(line, file=sys.stderr, flush=True)
        time.sleep(0.05 if waited < 5 else 1.0)
    return [json.loads(said) for said in store.multi_get(keys)]


def _absent(store: dist.Store, keys: list[str]) -> tuple[str, str]:
    """The numbers of the ranks that have not come, the hosts of those that have."""
    here = {rank: json.loads(store.get(key)) for rank, key in enumerate(keys) if store.check([key])}
    hosts = ", ".join(dict.fromkeys(said["host"] for said in here.values()))
    return _ranges([rank for rank in range(len(keys)) if rank not in here]), hosts


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


def interface_address(interface: str) -> str:
    """The IPv4 address of a network interface. ValueError with the names that there are."""
    import psutil

    addresses = psutil.net_if_addrs()
    found = [entry.address for entry in addresses.get(interface, ()) if entry.family == socket.AF_INET]
    if not found:
        with_address = [name for name in addresses if any(e.family == socket.AF_INET for e in addresses[name])]
        raise ValueError(
            f"--interface {interface}: no such interface with an IPv4 address on {socket.gethostname()} "
            f"(there are: {', '.join(sorted(with_address))})"
        )
    return found[0]


def _listen_address(master: str, interface: str | None) -> str | None:
    at_master = socket.gethostbyname(master)
    if interface is None or at_master.startswith("127."):
        return at_master if at_master.startswith("127.") else None
    address = interface_address(interface)
    if at_master != address:
        raise ValueError(
            f"--interface {interface} has the address {address} on rank 0's host, but the launcher told the others "
            f"{master} ({at_master}): start it with --master_addr {address}"
        )
    return address


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
