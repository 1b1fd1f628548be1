"""Bytes of host memory that a run may take: the host's, or what the control groups leave that a process is confined to.

Containers and schedulers (Docker, Kubernetes, Slurm) confine by control groups, version 1 or 2, one inside another; the
kernel ends a process when any of them is full. Page cache is counted as taken there, but is given back before that.
"""

from collections.abc import Iterator
from pathlib import Path

import psutil

from infcl.parallel import Parallel

_PROCESS = Path("/proc/self")
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
    for kind, folder, mount in _own_folders():
        limit = _NAMES[kind][0]
        for group in (folder, *folder.parents):
            if (group / limit).is_file() and (text := (group / limit).read_text().strip()) != "max":
                if float(text) < _UNLIMITED:
                    yield float(text), group, kind
            if group == mount:
                break


def _own_folders() -> Iterator[tuple[str, Path, Path]]:
    """(file system, this process's own folder, mount) of what may limit its memory.

    A container may see its own group as the mount's root, under the host's or another name: paths that do not lie below
    the mount's root lead to the mount. (So would a mount of a group that this process is not in.)
    """
    files = _PROCESS / "cgroup", _PROCESS / "mountinfo"
    lines, mounts = (file.read_text().splitlines() if file.is_file() else [] for file in files)
    paths = {controller: line.split(":", 2)[2] for line in lines for controller in line.split(":")[1].split(",")}
    for line in mounts:
        mounted, _, system = line.partition(" - ")
        root, mount = mounted.split()[3:5]
        kind, _, options = system.split(" ", 2)
        controller = {"cgroup2": "", "cgroup": "memory"}.get(kind)
        if controller in paths and (kind == "cgroup2" or "memory" in options.split(",")):
            below = Path(paths[controller])
            inside = below.relative_to(root) if below.is_relative_to(root) and ".." not in below.parts else Path()
            own = Path(mount) / inside
            yield kind, own if own.is_dir() else Path(mount), Path(mount)
