"""The control groups that this process is in, and how many cores they leave it.

Containers and schedulers (Docker, Kubernetes, Slurm) confine by control groups, version 1 or 2, one inside another: the
tightest counts. What they leave of memory: train/host_memory.py.
"""

import math
from collections.abc import Iterator
from pathlib import Path

_PROCESS = Path("/proc/self")


def groups_of(controller: str) -> Iterator[tuple[Path, str]]:
    """(folder, "cgroup" or "cgroup2") of each group that may limit this process; `controller`: memory or cpu."""
    for kind, folder, mount in _own_folders(controller):
        for group in (folder, *folder.parents):
            yield group, kind
            if group == mount:
                break


def core_quota() -> float:
    """Cores that the groups let this process and all others in them keep busy; inf where none says."""
    return min(map(_quota, groups_of("cpu")), default=math.inf)


def _quota(of: tuple[Path, str]) -> float:
    group, kind = of
    try:
        if kind == "cgroup2":
            allowed, period = (group / "cpu.max").read_text().split()
        else:
            allowed, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    except OSError:  # the root has no files of its own, groups inside may lack the controller; or it may not be read
        return math.inf
    return math.inf if allowed == "max" or float(allowed) < 0 else float(allowed) / float(period)


def _own_folders(controller: str) -> Iterator[tuple[str, Path, Path]]:
    """(file system, this process's own folder, mount) of what may limit it.

    A container may see its own group as the mount's root, under the host's or another name: paths that do not lie below
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
