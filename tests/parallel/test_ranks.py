"""The helper that runs functions on ranks reports the rank that failed, not one that waited for it."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.lib.ranks import run_ranks


def second_fails(rank, world_size, dies):
    if rank == 1 and dies:
        os._exit(3)
    if rank == 1:
        raise ValueError("the cause")
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("dies", "message"), [(True, "rank 1 of 2 failed:\nit died with exit code 3"), (False, "the cause")]
)
def test_the_rank_that_failed_is_reported_first_and_at_once(dies, message):
    with pytest.raises(RuntimeError) as failure:
        run_ranks(second_fails, 2, dies, timeout=60)
    assert str(failure.value).startswith("rank 1 of 2 failed:") and message in str(failure.value)
    assert run_ranks(max, 2) == [2, 2]  # new ranks: max(rank, 2)
