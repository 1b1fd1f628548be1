"""A usage error is reported once: by rank 0 where all ranks have it, by its node where it is of one node."""

import contextlib
import io
import time
from unittest import mock

import pytest
import torch.distributed as dist

from infcl.parallel import errors
from tests.lib.ranks import run_ranks


def reported(rank, world_size, makers):
    """What this rank prints of a usage error on the ranks `makers`, rank 0 last."""
    wait, said = errors._wait, io.StringIO()
    patience = 10 if 0 in makers else 0.1
    with (
        mock.patch.object(errors, "_wait", lambda seconds, until: wait(seconds * patience, until)),
        contextlib.redirect_stderr(said),
    ):
        if rank in makers:
            time.sleep(0.3 if rank == 0 else 0)
            assert errors.report_mistake("program", ValueError("wrong")) == 2
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    for key in (errors._REPORTED, errors._HEARD) if rank == 0 else ():
        store.delete_key(key)
    dist.barrier()
    return said.getvalue()


@pytest.mark.parametrize("makers", [(0, 1, 2), (1,)])
def test_a_usage_error_of_all_ranks_is_reported_by_rank_0_and_that_of_one_rank_by_itself(makers):
    said = run_ranks(reported, 3, makers)
    assert [bool(text) for text in said] == [rank == makers[0] for rank in range(3)], said
