"""Cores and bytes of memory that this node leaves to a process: the machine's, or those of its control groups.

Containers and schedulers (Docker, Kubernetes, Slurm) confine by control groups, version 1 or 2, one inside another: the
tightest counts. The kernel ends a process when any of the groups around it is full. Page cache counts as used there,
but the kernel gives it back before that.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import psutil

_PROCESS = Path("/proc/self")
_UNLIMITED = 2.0**62  # bytes: version 1 has its largest number where there is no limit
# file system of a version's mount -> its names of a group's limit, of the bytes in use, of the page cache among those
_MEMORY = {
    "cgroup2": ("memory.max", "memory.current", ("inactive_file", "active_file")),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}


def host_memory_bytes() -> float:
    """Return the memory of this node, or of the tightest control group around this process, in bytes."""
    return min([float(psutil.virtual_memory().total), *(limit for limit, _, _ in _memory_groups())])


def available_host_bytes() -> float:
    """Return the free memory of this node, or of the control group with the least left; page cache is free."""
    left = [limit - _used(group, kind) for limit, group, kind in _memory_groups()]
    return min([float(psutil.virtual_memory().available), *left])


def core_quota() -> float:
    """Return how many cores the control groups let their processes keep busy together; inf without a limit."""
    return min((_quota(group, kind) for group, kind in _groups("cpu")), default=math.inf)


def _memory_groups() -> Iterator[tuple[float, Path, str]]:
    """(limit, folder, file system) of each group with a memory limit around this process, at any depth."""
    for group, kind in _groups("memory"):
        limit = group / _MEMORY[kind][0]
        if limit.is_file() and (text := limit.read_text().strip()) != "max" and float(text) < _UNLIMITED:
            yield float(text), group, kind


def _used(group: Path, kind: str) -> float:
    """Bytes that a control group uses, without page cache."""
    _, used, caches = _MEMORY[kind]
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return float((group / used).read_text()) - sum(int(stat[name]) for name in caches)


def _quota(group: Path, kind: str) -> float:
    try:
        if kind == "cgroup2":
            allowed, period = (group / "cpu.max").read_text().split()
        else:
            allowed, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    except OSError:  # the root has no files of its own, groups inside may lack the controller; or it may not be read
        return math.inf
    return math.inf if allowed == "max" or float(allowed) < 0 else float(allowed) / float(period)


def _groups(controller: str) -> Iterator[tuple[Path, str]]:
    """(folder, "cgroup" or "cgroup2") of each group that may limit this process; `controller`: memory or cpu."""
    for kind, folder, mount in _own_folders(controller):
        for group in (folder, *folder.parents):
            yield group, kind
            if group == mount:
                break


def _own_folders(controller: str) -> Iterator[tuple[str, Path, Path]]:
    """(file system, this process's own folder, mount) of each hierarchy that may limit it.

    A container may see its own group as the mount's root, under the host's or another name: paths that are not below
    the mount's root lead to the mount. (So would a mount of a group that this process is not in.)
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
