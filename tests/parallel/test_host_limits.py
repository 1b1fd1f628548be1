"""A host's memory and cores are what the process's control groups leave: of a made-up /sys/fs/cgroup."""

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
def root(tmp_path, monkeypatch):
    """The root of the control groups of a made-up host whose process is in no group yet."""
    monkeypatch.setattr(host_limits, "_OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(host_limits, "_ROOT", tmp_path / "cgroup")
    return tmp_path / "cgroup"


def confine(root: Path, cgroup: str) -> None:
    (root.parent / "own").write_text(f"{cgroup}\n")


def group(folder: Path, limit: int | None, used: int, inactive: int = 0, active: int = 0) -> None:
    """Write the files of a control group; sizes in MiB."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text("max" if limit is None else f"{limit * MIB}\n")
    (folder / "memory.current").write_text(f"{used * MIB}\n")
    stat = f"anon {used}\nfile 1\ninactive_file {inactive * MIB}\nactive_file {active * MIB}\n"
    (folder / "memory.stat").write_text(stat)


def test_without_a_limit_all_memory_and_cores_are_the_process_s(root):
    for cgroup in (None, "0::/user.slice", "4:memory:/"):  # no control groups, no limit, those of version 1
        if cgroup is not None:
            confine(root, cgroup)
            group(root / "user.slice", None, 5)  # the root has no files of its own
        assert host_memory_bytes() == psutil.virtual_memory().total and core_quota() == math.inf
        assert available_host_bytes() == pytest.approx(psutil.virtual_memory().available, rel=0.1)


@pytest.mark.parametrize("own", ["/", "/docker/abc", "/../def"])
def test_a_container_sees_its_group_as_the_root_and_page_cache_is_given_back(root, own):
    """Under the host's path where it has no namespace of its own for groups."""
    confine(root, f"0::{own}")
    group(root, 16, 15, inactive=4, active=8)
    assert host_memory_bytes() == 16 * MIB and available_host_bytes() == 13 * MIB
    parallel = SimpleNamespace(device=torch.device("cpu"), ranks_per_node=2, world_size=4)
    assert memory_of_device(parallel) == 8 * MIB


@pytest.mark.parametrize(
    ("limits", "total", "free"),
    [
        ((None, 24, 32), 24, 24 - 10),  # the tightest is in the middle
        ((22, None, 16), 16, 22 - 20),  # the smallest has more to spare than the one around it
    ],
)
def test_of_nested_groups_the_tightest_counts(root, limits, total, free):
    confine(root, "1:name=systemd:/x\n0::/slurm/job_1/step_0")
    for folder, limit, used in zip(("slurm", "slurm/job_1", "slurm/job_1/step_0"), limits, (20, 10, 5)):
        group(root / folder, limit, used)
    group(root / "slurm" / "job_2", 1, 1)  # another's
    assert host_memory_bytes() == total * MIB and available_host_bytes() == free * MIB


def test_cores_are_those_of_the_tightest_quota(root):
    confine(root, "0::/pod/container")
    for folder, said in (("pod", "1600000 100000"), ("pod/container", "150000 100000")):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / "cpu.max").write_text(f"{said}\n")
    assert core_quota() == 1.5
    (root / "pod" / "container" / "cpu.max").write_text("max 100000\n")
    assert core_quota() == 16
    (root / "pod" / "container" / "cpu.max").unlink()
    (root / "pod" / "container" / "cpu.max").mkdir()  # cannot be read
    assert core_quota() == 16


def test_this_process_s_own_groups_raise_nothing():
    assert core_quota() > 0
    assert 0 < available_host_bytes() <= host_memory_bytes() <= psutil.virtual_memory().total
