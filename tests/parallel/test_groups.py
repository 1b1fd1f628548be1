"""Devices and cores of a rank, before and after the rendezvous."""

import math
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch

from infcl.parallel import groups
from tests.lib.checkout import ROOT


def chosen(monkeypatch, local_rank: int, visible: int, **environment: str) -> tuple[torch.device, dict[str, str]]:
    """The device of a rank that sees so many GPUs, and what DeepSpeed then reads."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", mock.Mock())
    names = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    with mock.patch.dict(os.environ, environment):
        device = groups._choose_device("cuda", local_rank)
        torch.cuda.set_device.assert_called_once_with(device.index)
        return device, {name: os.environ[name] for name in names if name in os.environ}


@pytest.mark.parametrize(("local_rank", "visible", "index"), [(3, 8, 3), (3, 1, 0)])
def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one_that_it_sees(monkeypatch, local_rank, visible, index):
    """srun --gpus-per-task=1 shows each rank its own GPU alone, as number 0."""
    device, said = chosen(monkeypatch, local_rank, visible, LOCAL_RANK=str(local_rank))
    assert device == torch.device("cuda", index) and said == {"LOCAL_RANK": str(index)}


def test_deepspeed_reads_the_gpu_of_a_rank_under_mpirun_too(monkeypatch):
    """It asserts that both names say the same."""
    both = {"LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert chosen(monkeypatch, 2, 1, OMPI_COMM_WORLD_LOCAL_RANK="2")[1] == both


def test_a_rank_without_a_gpu_is_rejected_with_the_numbers(monkeypatch):
    with pytest.raises(ValueError, match="local rank 3 has no GPU: it sees 2; start at most 2 ranks per node"):
        chosen(monkeypatch, 3, 2)
    with pytest.raises(ValueError, match="no GPU is visible"):
        chosen(monkeypatch, 0, 0)


ONE_VISIBLE = """
import os
import deepspeed
import torch
from infcl.parallel import destroy_parallel, init_parallel

parallel = init_parallel("cuda")
engine, *_ = deepspeed.initialize(
    model=torch.nn.Linear(4, 4), config={"train_batch_size": 1, "zero_optimization": {"stage": 3}},
    model_parameters=None, optimizer=None, dist_init_required=False,
)
print("devices", parallel.local_rank, parallel.device, engine.device)
destroy_parallel(parallel)
"""


@pytest.mark.gpu
def test_deepspeed_trains_on_the_only_gpu_that_a_rank_of_any_number_sees():
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "0"}
    command = [sys.executable, "-c", ONE_VISIBLE]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | ranks, capture_output=True, text=True, timeout=300)
    assert "devices 3 cuda:0 cuda:0" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("ranks", "cores", "threads", "bound", "quota", "left"),
    [
        (5, 96, 96, False, math.inf, 19),
        (100, 96, 96, False, math.inf, 1),
        (8, 12, 12, True, math.inf, 12),  # each has its own twelve
        (8, 16, 16, False, math.inf, 2),  # a container of sixteen, in which all are
        (8, 96, 96, False, 20.5, 2),
        (2, 96, 96, False, 0.5, 1),
        (8, 96, 96, True, 32.0, 4),  # mpirun in such a container, that binds none
    ],
)
def test_the_ranks_of_a_host_share_its_cores(monkeypatch, ranks, cores, threads, bound, quota, left):
    """cores: that a process may run on; threads: that torch would take."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(groups.os, "cpu_count", lambda: 96)
    monkeypatch.setattr(groups.os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr(groups, "core_quota", lambda: quota)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with mock.patch.object(torch, "set_num_threads") as set_num_threads:
        groups._share_cores(ranks, bound=bound)
        set_num_threads.assert_called_once_with(left)
        monkeypatch.setenv("OMP_NUM_THREADS", "96")
        groups._share_cores(ranks, bound=bound)
        set_num_threads.assert_called_once()
