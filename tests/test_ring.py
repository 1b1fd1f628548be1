"""The ring moves what it is given, on any process group, and refuses unequal ranks with the numbers."""

import pytest
import torch
import torch.distributed as dist

from infcl.loss.ring import RingExchange, checked_group
from tests.ranks import run_ranks


def _go_round(ring: RingExchange, rank: int) -> tuple[list, list]:
    mine = torch.full((3, 2), float(rank))
    seen = []
    for hop, (block, label) in ring.blocks(mine, torch.tensor([rank])):
        seen.append((block.tolist(), label.tolist()))
        # Every rank adds 10^rank to each block it meets: home comes one 1 per rank.
        ring.carry("sum", hop, torch.full((3, 2), 10.0**rank), torch.Tensor.add_)
    return seen, ring.wait("sum").tolist()


def _go_round_world(rank, world_size):
    return _go_round(RingExchange(dist.group.WORLD), rank)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_block_visits_every_rank_and_its_sum_comes_home(world_size):
    for rank, (seen, total) in enumerate(run_ranks(_go_round_world, world_size)):
        visitors = [(rank - hop) % world_size for hop in range(world_size)]
        assert seen == [([[float(v)] * 2] * 3, [v]) for v in visitors]
        assert total == [[float("1" * world_size)] * 2] * 3


def test_ring_of_one_rank_is_a_no_op():
    ring = RingExchange(None)
    block = torch.ones(2)
    ring.post("block", block)
    assert ring.wait("block") is block
    assert _go_round(ring, 0) == ([([[0.0, 0.0]] * 3, [0])], [[1.0, 1.0]] * 3)


def _go_round_subgroup(rank, world_size):
    group = dist.new_group([3, 1])  # group ranks 0, 1 are global ranks 1, 3
    return _go_round(RingExchange(group), dist.get_rank(group)) if rank in (1, 3) else None


def test_ring_runs_over_a_subgroup_whose_ranks_are_not_global_ranks():
    results = run_ranks(_go_round_subgroup, 4)
    assert results[0] is None and results[2] is None
    assert [label for _, label in results[1][0]] == [[0], [1]]
    assert [label for _, label in results[3][0]] == [[1], [0]]
    assert results[1][1] == [[11.0, 11.0]] * 3


def _message(function, *args) -> str:
    try:
        function(*args)
    except ValueError as error:
        return str(error)
    return "no error"


def _unequal(rank, world_size):
    ring = RingExchange(dist.group.WORLD)
    return _message(ring.require_equal, "the loss", {"rows": 5 + rank % 2, "columns": 4}, torch.device("cpu"))


def test_unequal_ranks_are_refused_with_the_numbers_on_every_rank():
    for message in run_ranks(_unequal, 3):
        assert "number of rows" in message and "[5, 6, 5]" in message


def _missing_group(rank, world_size):
    return _message(checked_group, None)


def test_a_missing_group_is_refused_where_several_ranks_run():
    for message in run_ranks(_missing_group, 2):
        assert "group=torch.distributed.group.WORLD" in message


def test_no_group_is_right_for_one_process():
    assert checked_group(None) is None
