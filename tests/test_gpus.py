"""Ranks of tests that share a GPU: what each is told, and that none is lost. Needs no GPU."""

import signal
import subprocess
from unittest import mock

import pytest

from tests import gpus


@pytest.mark.parametrize(("share", "places"), [(1, ["0", "1", "2", "3"]), (2, ["0", "0", "1", "1"]), (4, ["0"] * 4)])
def test_a_rank_has_its_own_gpu_or_a_host_of_its_own_with_one(share, places):
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


def test_programs_of_all_ranks_are_waited_for_and_heard():
    code = "import os, sys; rank = int(os.environ['RANK']); print('rank', rank); sys.exit(5 * (rank == 2))"
    done = gpus.run(["-c", code], 3, 1234)
    assert done.returncode == 5 and done.stdout == "rank 0\nrank 1\nrank 2\n"
    assert gpus.run(["-c", "pass"], 2, 1234).returncode == 0


def test_programs_that_hang_are_ended():
    started, popen = [], subprocess.Popen

    def starting(*arguments, **options):
        started.append(popen(*arguments, **options))
        return started[-1]

    with mock.patch("subprocess.Popen", starting), pytest.raises(subprocess.TimeoutExpired):
        gpus.run(["-c", "import time; time.sleep(60)"], 2, 1234, seconds=1)
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2
