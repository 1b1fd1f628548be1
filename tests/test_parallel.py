"""What the launcher says of nodes is read in one place, for each launcher's way to say it."""

import itertools

import pytest
import torch.distributed as dist

from infcl import parallel


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


def test_every_micro_batch_has_a_seed_of_its_own_that_never_changes():
    """Of dropout: a change here breaks the resume of every run that has any."""
    places = list(itertools.product(range(3), range(5), range(4), range(3)))  # seed, step, micro-batch, rank
    assert len({parallel.micro_batch_seed(*place) for place in places}) == len(places)
    assert parallel.micro_batch_seed(1, 2, 3, 4) == 9130766517534196204


def test_a_reported_mistake_leaves_no_group_behind(capsys):
    """gloo's threads, alive when the interpreter ended, turned one exit code 2 in a hundred into an abort."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert parallel.report_mistake("program", ValueError("wrong")) == 2
        assert not dist.is_initialized()
    finally:
        parallel.destroy_parallel()
    assert capsys.readouterr().err == "program: error: wrong\n"
