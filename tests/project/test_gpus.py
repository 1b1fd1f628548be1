"""Ranks of tests that share a GPU: the environment of each, and that none is lost. Needs no GPU."""

import signal
import subprocess
from unittest import mock

import pytest

from tests.lib import gpus


@pytest.mark.parametrize(("share", "places"), [(1, ["0", "1", "2", "3"]), (2, ["0", "0", "1", "1"]), (4, ["0"] * 4)])
def test_a_rank_has_its_own_gpu_or_a_host_of_its_own_with_one(share, places, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with mock.patch.object(gpus, "RANKS_PER_GPU", share):
        told = [gpus.environment(rank, 4, 1234) for rank in range(4)]
    assert [one["RANK"] for one in told] == ["0", "1", "2", "3"]
    if share == 1:
        assert [one["LOCAL_RANK"] for one in told] == places
        assert all("NCCL_HOSTID" not in one and one["LOCAL_WORLD_SIZE"] == "4" for one in told)
    else:
        assert [one["CUDA_VISIBLE_DEVICES"] for one in told] == places
        assert all((one["LOCAL_RANK"], one["LOCAL_WORLD_SIZE"]) == ("0", "1") for one in told)
        assert len({one["NCCL_HOSTID"] for one in told}) == 4


def test_gpus_are_counted_among_those_that_are_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    with mock.patch.object(gpus, "RANKS_PER_GPU", 2):
        assert [gpus.environment(rank, 4, 1234)["CUDA_VISIBLE_DEVICES"] for rank in range(4)] == ["3", "3", "5", "5"]


def test_programs_of_all_ranks_are_waited_for_and_heard():
    said = "import os; print('rank', os.environ['RANK'], os.environ['TOLD'])"
    done = gpus.run(["-c", said], 3, 1234, environ={"TOLD": "x"})
    assert done.returncode == 0 and done.stdout == "rank 0 x\nrank 1 x\nrank 2 x\n"


@pytest.fixture
def started():
    """All processes that are started."""
    popen, processes = subprocess.Popen, []

    def starting(*arguments, **options):
        processes.append(popen(*arguments, **options))
        return processes[-1]

    with mock.patch("subprocess.Popen", starting):
        yield processes


HANG = "import os, time; print('rank', os.environ['RANK'], flush=True); "


def test_one_that_fails_ends_the_others_and_is_heard(started):
    done = gpus.run(["-c", HANG + "assert os.environ['RANK'] != '1', 'the cause'; time.sleep(60)"], 2, 1234)
    assert done.returncode == 1 and "AssertionError: the cause" in done.stderr
    assert [process.returncode for process in started] == [-signal.SIGKILL, 1]


def test_programs_that_hang_are_ended_and_heard(started):
    with pytest.raises(AssertionError, match="did not end within 2 s: rank 0\nrank 1\n"):
        gpus.run(["-c", HANG + "time.sleep(60)"], 2, 1234, seconds=2)
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2
