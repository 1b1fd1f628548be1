"""tests/lib/gpus.py: the environment of each rank, and that all ranks end. Needs no GPU."""

import signal
import subprocess
from unittest import mock

import pytest

from tests.lib import gpus


@pytest.mark.parametrize(("share", "expected"), [(1, ["0", "1", "2", "3"]), (2, ["0", "0", "1", "1"]), (4, ["0"] * 4)])
def test_each_rank_has_its_own_gpu_or_appears_as_a_host_with_one(share, expected, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with mock.patch.object(gpus, "RANKS_PER_GPU", share):
        environments = [gpus.environment(rank, 4, 1234) for rank in range(4)]
    assert [one["RANK"] for one in environments] == ["0", "1", "2", "3"]
    if share == 1:
        assert [one["LOCAL_RANK"] for one in environments] == expected
        assert all("NCCL_HOSTID" not in one and one["LOCAL_WORLD_SIZE"] == "4" for one in environments)
    else:
        assert [one["CUDA_VISIBLE_DEVICES"] for one in environments] == expected
        assert all((one["LOCAL_RANK"], one["LOCAL_WORLD_SIZE"]) == ("0", "1") for one in environments)
        assert len({one["NCCL_HOSTID"] for one in environments}) == 4


def test_gpus_are_counted_among_those_that_are_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    with mock.patch.object(gpus, "RANKS_PER_GPU", 2):
        assert [gpus.environment(rank, 4, 1234)["CUDA_VISIBLE_DEVICES"] for rank in range(4)] == ["3", "3", "5", "5"]


def test_run_waits_for_all_ranks_and_returns_their_output():
    program = "import os; print('rank', os.environ['RANK'], os.environ['NAME'])"
    done = gpus.run(["-c", program], 3, 1234, environ={"NAME": "x"})
    assert done.returncode == 0 and done.stdout == "rank 0 x\nrank 1 x\nrank 2 x\n"


@pytest.fixture
def started():
    """Return the list of processes that the test starts."""
    popen, processes = subprocess.Popen, []

    def starting(*arguments, **options):
        processes.append(popen(*arguments, **options))
        return processes[-1]

    with mock.patch("subprocess.Popen", starting):
        yield processes


HANG = "import os, time; print('rank', os.environ['RANK'], flush=True); "


def test_a_rank_that_fails_ends_the_others_and_its_error_is_returned(started):
    done = gpus.run(["-c", HANG + "assert os.environ['RANK'] != '1', 'the cause'; time.sleep(60)"], 2, 1234)
    assert done.returncode == 1 and "AssertionError: the cause" in done.stderr
    assert [process.returncode for process in started] == [-signal.SIGKILL, 1]


def test_ranks_that_hang_are_killed_and_their_output_is_reported(started):
    with pytest.raises(AssertionError, match="did not end within 2 s: rank 0\nrank 1\n"):
        gpus.run(["-c", HANG + "time.sleep(60)"], 2, 1234, seconds=2)
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2
