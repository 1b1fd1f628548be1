"""A host's memory and cores are what the process's control groups leave: of a made-up /proc and /sys/fs/cgroup."""

import math
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from infcl.parallel import host_limits
from infcl.parallel.host_limits import available_host_bytes, core_quota, host_memory_bytes
from infcl.train.fit import memory_of_device

MIB = 2**20


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A made-up host whose process is in no group yet."""
    monkeypatch.setattr(host_limits, "_PROCESS", tmp_path / "proc")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "mountinfo").write_text("22 1 0:1 / / rw - ext4 /dev/sda1 rw\n")
    return tmp_path


def confine(host: Path, mounts: str, cgroup: str) -> None:
    (host / "proc" / "mountinfo").write_text(f"22 1 0:1 / / rw - ext4 /dev/sda1 rw\n{mounts}\n")
    (host / "proc" / "cgroup").write_text(f"{cgroup}\n")


def group(folder: Path, limit: str, used: int, inactive: int = 0, active: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in (("memory.max", limit), ("memory.current", used)):
        (folder / name).write_text(f"{value}\n")
    stat = f"anon {used}\nfile 1\ninactive_file {inactive}\nactive_file {active}\n"
    (folder / "memory.stat").write_text(stat)


def without_limit() -> bool:
    total, free = psutil.virtual_memory().total, psutil.virtual_memory().available
    return host_memory_bytes() == total and available_host_bytes() == pytest.approx(free, rel=0.1)


def test_without_a_limit_all_memory_is_the_process_s(host):
    assert without_limit()  # no control groups
    (host / "proc" / "mountinfo").unlink()
    assert without_limit()
    confine(host, f"30 22 0:2 / {host}/cg rw - cgroup2 cgroup2 rw", "0::/user.slice")
    group(host / "cg" / "user.slice", "max", 5 * MIB)  # the root has no files of its own
    assert without_limit()
    confine(host, f"30 22 0:2 / {host}/v1 rw - cgroup cgroup rw,memory", "4:memory:/")
    assert without_limit()


def test_a_container_s_own_root_and_page_cache_that_is_given_back(host):
    confine(host, f"30 22 0:2 / {host}/cg ro,nosuid - cgroup2 cgroup rw", "0::/")
    group(host / "cg", str(16 * MIB), 15 * MIB, inactive=4 * MIB, active=8 * MIB)
    assert host_memory_bytes() == 16 * MIB and available_host_bytes() == 13 * MIB
    parallel = SimpleNamespace(device=torch.device("cpu"), ranks_per_node=2, world_size=4)
    assert memory_of_device(parallel) == 8 * MIB


@pytest.mark.parametrize(
    ("limits", "total", "free"),
    [
        (("max", "24", "32"), 24, 24 - 10),  # the tightest is in the middle
        (("22", "max", "16"), 16, 22 - 20),  # the smallest has more to spare than the one around it
    ],
)
def test_of_nested_groups_the_tightest_counts(host, limits, total, free):
    confine(
        host, f"30 22 0:2 / {host}/cg rw shared:9 - cgroup2 cgroup2 rw", "1:name=systemd:/x\n0::/slurm/job_1/step_0"
    )
    folders = host / "cg" / "slurm", host / "cg" / "slurm" / "job_1", host / "cg" / "slurm" / "job_1" / "step_0"
    for folder, limit, used in zip(folders, limits, (20, 10, 5)):
        group(folder, limit if limit == "max" else str(int(limit) * MIB), used * MIB)
    group(host / "cg" / "slurm" / "job_2", str(MIB), MIB)  # another's
    assert host_memory_bytes() == total * MIB and available_host_bytes() == free * MIB


@pytest.mark.parametrize(("root", "own"), [("/docker/abc", "/docker/abc"), ("/", "/docker/abc"), ("/..", "/../def")])
def test_a_container_that_sees_its_group_as_the_mount_s_root_under_another_name(host, root, own):
    """Docker without a namespace of its own for groups; a mount that was made in another one."""
    confine(host, f"30 22 0:2 {root} {host}/cg rw - cgroup2 cgroup2 rw", f"0::{own}")
    group(host / "cg", str(16 * MIB), 5 * MIB)
    assert host_memory_bytes() == 16 * MIB and available_host_bytes() == 11 * MIB


def test_cores_are_those_of_the_tightest_quota(host):
    assert core_quota() == math.inf
    confine(host, f"30 22 0:2 / {host}/cg rw - cgroup2 cgroup2 rw", "0::/pod/container")
    for folder, said in (("pod", "1600000 100000"), ("pod/container", "150000 100000")):
        (host / "cg" / folder).mkdir(parents=True, exist_ok=True)
        (host / "cg" / folder / "cpu.max").write_text(f"{said}\n")
    assert core_quota() == 1.5
    (host / "cg" / "pod" / "container" / "cpu.max").write_text("max 100000\n")
    assert core_quota() == 16
    (host / "cg" / "pod" / "container" / "cpu.max").unlink()
    (host / "cg" / "pod" / "container" / "cpu.max").mkdir()  # cannot be read
    assert core_quota() == 16


def test_this_process_s_own_groups_raise_nothing():
    assert core_quota() > 0
    assert 0 < available_host_bytes() <= host_memory_bytes() <= psutil.virtual_memory().total
