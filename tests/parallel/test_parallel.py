"""What the launcher says of nodes is read in one place, for each launcher's way to say it."""

import contextlib
import io
import itertools
import math
import os
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from infcl import parallel
from infcl.parallel.rendezvous import Node
from tests.lib.ranks import run_ranks


@pytest.mark.parametrize(
    "environment, ranks_per_node",
    [
        ({}, None),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),  # torchrun
        ({"LOCAL_SIZE": "4"}, 4),  # deepspeed
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"SLURM_TASKS_PER_NODE": "8(x16)"}, 8),
        ({"SLURM_TASKS_PER_NODE": "8(x2),4"}, None),  # unequal nodes
    ],
)
def test_ranks_per_node_are_read_from_every_launcher(monkeypatch, environment, ranks_per_node):
    for name in parallel._NODE_SIZES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert parallel.read_ranks_per_node() == ranks_per_node


@pytest.mark.parametrize(
    ("ranks", "cores", "threads", "bound", "quota", "left"),
    [
        (1, 96, 96, False, math.inf, 96),
        (5, 96, 96, False, math.inf, 19),
        (100, 96, 96, False, math.inf, 1),
        (2, 96, 1, False, math.inf, 1),
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
    monkeypatch.setattr(parallel.os, "cpu_count", lambda: 96)
    monkeypatch.setattr(parallel.os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr(parallel, "core_quota", lambda: quota)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with mock.patch.object(torch, "set_num_threads") as set_num_threads:
        parallel._share_cores(ranks, bound=bound)
        set_num_threads.assert_called_once_with(left)
        monkeypatch.setenv("OMP_NUM_THREADS", "96")
        parallel._share_cores(ranks, bound=bound)
        set_num_threads.assert_called_once()


@pytest.mark.parametrize("bound", [False, True])
def test_a_rank_shares_the_cores_of_its_own_host(monkeypatch, bound):
    """srun binds ranks, deepspeed does not."""
    nodes = [Node("a", 0, 2), Node("b", 2, 3)]
    names = parallel._ENVIRONMENTS[2 if bound else 0]
    for name in itertools.chain(*parallel._ENVIRONMENTS):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**dict(zip(names, (3, 5, 1))), "DS_ACCELERATOR": "cpu"}.items():
        monkeypatch.setenv(name, str(value))
    for name in ("require_hostfile", "open_store", "_use_interface", "HostWatch"):
        monkeypatch.setattr(parallel, name, mock.Mock())
    monkeypatch.setattr(parallel, "meet", lambda *_, **__: nodes)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", mock.Mock())
    monkeypatch.setattr(type(dist.group), "WORLD", mock.Mock())
    with mock.patch.object(parallel, "_share_cores") as share, mock.patch.dict(os.environ):  # it sets RANK and others
        parallel.init_parallel("cpu")
    share.assert_called_once_with(3, bound=bound)


def test_every_micro_batch_has_a_seed_of_its_own_that_never_changes():
    """Of dropout: a change here breaks the resume of every run that has any."""
    places = list(itertools.product(range(3), range(5), range(4), range(3)))  # seed, step, micro-batch, rank
    assert len({parallel.micro_batch_seed(*place) for place in places}) == len(places)
    assert parallel.micro_batch_seed(1, 2, 3, 4) == 9130766517534196204


def reported(rank, world_size, makers):
    """What this rank prints of a mistake that the ranks `makers` make, rank 0 last."""
    wait, said = parallel._wait, io.StringIO()
    patience = 10 if 0 in makers else 0.1
    with (
        mock.patch.object(parallel, "_wait", lambda seconds, until: wait(seconds * patience, until)),
        contextlib.redirect_stderr(said),
    ):
        if rank in makers:
            time.sleep(0.3 if rank == 0 else 0)
            assert parallel.report_mistake("program", ValueError("wrong")) == 2
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    for key in (parallel._SPOKEN, parallel._HEARD) if rank == 0 else ():
        store.delete_key(key)
    dist.barrier()
    return said.getvalue()


@pytest.mark.parametrize("makers", [(0, 1, 2), (1,)])
def test_a_mistake_of_all_is_told_by_rank_0_and_that_of_one_by_itself(makers):
    said = run_ranks(reported, 3, makers)
    assert [bool(text) for text in said] == [rank == makers[0] for rank in range(3)], said
