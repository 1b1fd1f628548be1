"""Bytes of host memory that a run may take: the host's, or what the control groups leave that a process is confined to.

The kernel ends a process when any of the control groups around it is full (control_groups.py). Page cache is counted as
taken there, but is given back before that.
"""

from collections.abc import Iterator
from pathlib import Path

import psutil

from infcl.parallel import Parallel
from infcl.parallel.control_groups import groups_of

_UNLIMITED = 2.0**62  # bytes: version 1 has its largest number where there is no limit
# file system of a version's mount -> its names of a group's limit, of what is taken, of the page cache in that
_NAMES = {
    "cgroup2": ("memory.max", "memory.current", ("inactive_file", "active_file")),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}


def host_memory_bytes() -> float:
    """All memory of this host, or of the tightest control group that this process is in."""
    return min([float(psutil.virtual_memory().total), *(limit for limit, _, _ in _control_groups())])


def available_host_bytes() -> float:
    """Free memory of this host, or of the control group of this process that has the least left; page cache is free."""
    left = [limit - _taken(group, kind) for limit, group, kind in _control_groups()]
    return min([float(psutil.virtual_memory().available), *left])


def ranks_of_host(parallel: Parallel) -> int:
    """Ranks that share a host's memory; where hosts have different numbers, all."""
    return parallel.ranks_per_node or parallel.world_size


def _taken(group: Path, kind: str) -> float:
    """Bytes that a control group has, without page cache."""
    _, used, caches = _NAMES[kind]
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return float((group / used).read_text()) - sum(int(stat[name]) for name in caches)


def _control_groups() -> Iterator[tuple[float, Path, str]]:
    """(limit, folder, file system) of each group with a limit that this process is in, at any depth."""
    for group, kind in groups_of("memory"):
        limit = group / _NAMES[kind][0]
        if limit.is_file() and (text := limit.read_text().strip()) != "max" and float(text) < _UNLIMITED:
            yield float(text), group, kind
