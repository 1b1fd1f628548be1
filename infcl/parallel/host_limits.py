"""Cores and memory that a process may use: those of the node, or the limits of its control groups (version 2).

Containers and schedulers (Docker, Kubernetes, Slurm) set limits by nested control groups. The tightest limit applies.
The kernel kills a process when any group around it is full. A group counts page cache as used memory, but the kernel
frees it first.
"""

import math
from collections.abc import Iterator
from pathlib import Path

_OWN_GROUP, _ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def host_memory_bytes() -> float:
    """Return the memory of this node, or of the tightest control group around this process, in bytes."""
    import psutil

    return min([float(psutil.virtual_memory().total), *(limit for limit, _ in _memory_limits())])


def available_host_bytes() -> float:
    """Return the free bytes of this node, or of the tightest control group; page cache counts as free."""
    import psutil

    left = [limit - _used(group) for limit, group in _memory_limits()]
    return min([float(psutil.virtual_memory().available), *left])


def core_quota() -> float:
    """Return the number of cores that the control groups allow all their processes together; inf without a limit."""
    return min((_quota(group) for group in _groups()), default=math.inf)


def _memory_limits() -> Iterator[tuple[float, Path]]:
    """Yield (limit in bytes, folder) of each memory limit around this process, at any depth."""
    for group in _groups():
        limit = group / "memory.max"
        if limit.is_file() and (text := limit.read_text().strip()) != "max":
            yield float(text), group


def _used(group: Path) -> float:
    """Return the bytes that a control group uses, without page cache."""
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return float((group / "memory.current").read_text()) - int(stat["inactive_file"]) - int(stat["active_file"])


def _quota(group: Path) -> float:
    try:
        allowed, period = (group / "cpu.max").read_text().split()
    except OSError:  # the root has no such file, a group may lack the controller, or the file is not readable
        return math.inf
    return math.inf if allowed == "max" else float(allowed) / float(period)


def _groups() -> Iterator[Path]:
    """Yield the folder of each group around this process, the innermost first.

    A container may see its own group as the root, under the host's path: then only the root exists.
    """
    if not _OWN_GROUP.is_file():
        return
    path = next((line[len("0::/") :] for line in _OWN_GROUP.read_text().splitlines() if line.startswith("0::/")), "")
    for group in (_ROOT / path, *(_ROOT / path).parents):
        if group.is_dir() and group.is_relative_to(_ROOT) and ".." not in group.parts:
            yield group
