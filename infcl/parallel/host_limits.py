"""Cores and memory that a process may use: those of the node, or the limits of its control groups.

Containers and schedulers (Docker, Kubernetes, Slurm) set limits by nested control groups, version 1 or 2. The tightest
limit applies. The kernel kills a process when any group around it is full. A group counts page cache as used memory,
but the kernel frees it first.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import psutil

_PROCESS = Path("/proc/self")
_UNLIMITED = 2.0**62  # bytes; without a limit, version 1 reports its largest number
# {file system type: (file of the limit, file of the used bytes, entries of the page cache in memory.stat)}
_MEMORY = {
    "cgroup2": ("memory.max", "memory.current", ("inactive_file", "active_file")),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}


def host_memory_bytes() -> float:
    """Return the memory of this node, or of the tightest control group around this process, in bytes."""
    return min([float(psutil.virtual_memory().total), *(limit for limit, _, _ in _memory_groups())])


def available_host_bytes() -> float:
    """Return the free bytes of this node, or of the tightest control group; page cache counts as free."""
    left = [limit - _used(group, kind) for limit, group, kind in _memory_groups()]
    return min([float(psutil.virtual_memory().available), *left])


def core_quota() -> float:
    """Return the number of cores that the control groups allow all their processes together; inf without a limit."""
    return min((_quota(group, kind) for group, kind in _groups("cpu")), default=math.inf)


def _memory_groups() -> Iterator[tuple[float, Path, str]]:
    """Yield (limit in bytes, folder, file system type) of each memory limit around this process, at any depth."""
    for group, kind in _groups("memory"):
        limit = group / _MEMORY[kind][0]
        if limit.is_file() and (text := limit.read_text().strip()) != "max" and float(text) < _UNLIMITED:
            yield float(text), group, kind


def _used(group: Path, kind: str) -> float:
    """Return the bytes that a control group uses, without page cache."""
    _, used, caches = _MEMORY[kind]
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return float((group / used).read_text()) - sum(int(stat[name]) for name in caches)


def _quota(group: Path, kind: str) -> float:
    try:
        if kind == "cgroup2":
            allowed, period = (group / "cpu.max").read_text().split()
        else:
            allowed, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    except OSError:  # the root has no such files, a group may lack the controller, or the file is not readable
        return math.inf
    return math.inf if allowed == "max" or float(allowed) < 0 else float(allowed) / float(period)


def _groups(controller: str) -> Iterator[tuple[Path, str]]:
    """Yield (folder, "cgroup" or "cgroup2") of each group that may limit this process. `controller`: memory or cpu."""
    for kind, folder, mount in _own_folders(controller):
        for group in (folder, *folder.parents):
            yield group, kind
            if group == mount:
                break


def _own_folders(controller: str) -> Iterator[tuple[str, Path, Path]]:
    """Yield (file system type, folder of this process's group, mount) of each hierarchy that may limit the process.

    A container may see its own group as the mount's root, under the host's path or another one. So a path that is not
    below the mount's root resolves to the mount itself. (So does a mount of a group without this process.)
    """
    files = _PROCESS / "cgroup", _PROCESS / "mountinfo"
    lines, mounts = (file.read_text().splitlines() if file.is_file() else [] for file in files)
    paths = {name: line.split(":", 2)[2] for line in lines for name in line.split(":")[1].split(",")}
    for line in mounts:
        mounted, _, system = line.partition(" - ")
        root, mount = mounted.split()[3:5]
        kind, _, options = system.split(" ", 2)
        name = {"cgroup2": "", "cgroup": controller}.get(kind)
        if name in paths and (kind == "cgroup2" or controller in options.split(",")):
            below = Path(paths[name])
            inside = below.relative_to(root) if below.is_relative_to(root) and ".." not in below.parts else Path()
            own = Path(mount) / inside
            yield kind, own if own.is_dir() else Path(mount), Path(mount)
