"""The helper that runs functions on ranks reports the rank that failed, not one that waited for it."""

import pytest
import torch
import torch.distributed as dist

from tests.lib.ranks import run_ranks


def second_fails(rank, world_size):
    if rank == 1:
        raise ValueError("the cause")
    dist.all_reduce(torch.ones(1))


def test_the_rank_that_failed_is_reported_first_and_at_once():
    with pytest.raises(RuntimeError, match="^rank 1 of 2 failed:(.|\n)*the cause"):
        run_ranks(second_fails, 2, timeout=60)
    assert run_ranks(max, 2) == [2, 2]  # new ranks: max(rank, 2)
