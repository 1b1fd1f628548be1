"""The ring moves what it is given, on any process group, and rejects unequal ranks with the numbers."""

import os
import signal
import weakref
from contextlib import nullcontext
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from infcl import inf_cl_loss
from infcl.loss.links import global_ranks, lap_length
from infcl.loss.ring import RingExchange
from tests.lib.loss_oracle import LIBRARY, features
from tests.lib.ranks import run_ranks


def _ring(group, *, ring="flat", ranks_per_node=None):
    return RingExchange(group, lap_length(global_ranks(group), ring=ring, ranks_per_node=ranks_per_node))


def _go_round(ring: RingExchange, rank: int) -> tuple[list, list]:
    """(blocks and labels in the order seen, what came home)"""
    mine = torch.full((3, 2), float(rank))
    seen = []
    for hop, (block, label) in ring.blocks(mine, torch.tensor([rank])):
        seen.append((block.tolist(), label.tolist()))
        # Every rank adds 10^rank to each block it meets: home comes one 1 per rank.
        part = ring.part("sum", block, torch.float64).fill_(10.0**rank)
        landing = any(part is buffer for buffer in ring._buffers.get("sum", []))
        assert landing == (hop == 0 and ring.world_size > 1), "only the first part has no memory of its own"
        ring.carry("sum", hop, part, torch.Tensor.add_)
    return seen, ring.home("sum", torch.Tensor.add_).tolist()


def _go_round_world(rank, world_size, options):
    return _go_round(_ring(dist.group.WORLD, **options), rank)


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), (1, 3), (1, 4), (2, 2), (2, 4), (4, 2)])
def test_every_block_visits_every_rank_and_its_sum_comes_home(nodes, ranks_per_node):
    """Round the ranks of a node, once per node."""
    world_size = nodes * ranks_per_node
    options = {"ring": "two-level", "ranks_per_node": ranks_per_node} if nodes > 1 else {}
    for rank, (seen, total) in enumerate(run_ranks(_go_round_world, world_size, options)):
        node, place = divmod(rank, ranks_per_node)
        visitors = [
            (node - lap) % nodes * ranks_per_node + (place - turn) % ranks_per_node
            for lap in range(nodes)
            for turn in range(ranks_per_node)
        ]
        assert seen == [([[float(v)] * 2] * 3, [v]) for v in visitors]
        assert total == [[float("1" * world_size)] * 2] * 3


@pytest.mark.parametrize("nodes, ranks_per_node", [(2, 2), (3, 2), (3, 3)])
def test_nothing_is_received_into_a_tensor_that_is_still_being_sent(nodes, ranks_per_node, monkeypatch):
    """Messages between nodes are slow: the sum of a node is on its way during the next lap."""
    sending: list[int] = []  # a tensor may be sent to two ranks

    def exchange(messages):
        sent, received = messages
        assert id(received) not in sending
        sending.append(id(sent))
        return [mock.Mock(wait=lambda: sending.remove(id(sent)))]

    monkeypatch.setattr(dist, "batch_isend_irecv", exchange)
    monkeypatch.setattr(dist, "P2POp", lambda _, tensor, *peer, **group: tensor)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr("infcl.loss.ring.global_ranks", lambda group: list(range(nodes * ranks_per_node)))
    monkeypatch.setattr("infcl.loss.ring.second_group", lambda group: group)
    _go_round(RingExchange(mock.Mock(), ranks_per_node), 0)
    assert not sending


def _live_parts(rank, world_size, name):
    """How many parts of a loss's travelling gradient that lie in memory of their own are there, when one is made."""
    live, found, part = weakref.WeakSet(), [], RingExchange.part

    def counted(ring, *arguments):
        made = part(ring, *arguments)
        if all(made is not buffer for buffers in ring._buffers.values() for buffer in buffers):
            live.add(made)
            found.append(len(live))
        return made

    pair = [side.requires_grad_() for side in features("random", 12, 8, seed=rank)]
    with mock.patch.object(RingExchange, "part", counted):
        LIBRARY[name](*pair, group=dist.group.WORLD).backward()
    return found


@pytest.mark.parametrize("name", LIBRARY)
def test_one_part_at_a_time_has_memory_of_its_own(name):
    """In addition to two buffers, in which the first is computed: as many float32 blocks as the planner counts."""
    for found in run_ranks(_live_parts, 3, name):
        assert found == [1, 1]


def _count_messages(rank, world_size, options):
    """(to a rank of the same node, to another node) of one pass with a block and a result."""
    ring = _ring(dist.group.WORLD, **options)
    sent = []
    post = ring.post

    def counting_post(name, tensor, link=None):
        sent.append((link or ring.next).to // 2)
        post(name, tensor, link)

    ring.post = counting_post
    _go_round(ring, rank)
    return sum(node == rank // 2 for node in sent), sum(node != rank // 2 for node in sent)


def test_messages_between_nodes_are_as_few_as_the_docstring_says_and_the_same_on_every_rank():
    two_level = run_ranks(_count_messages, 4, {"ring": "two-level", "ranks_per_node": 2})
    # two tensors travel (N - 1 times between nodes), one result (N times); within: N (G - 1) and N G
    assert two_level == [(2 * 2 * 1 + 2 * 2, 2 * 1 + 2)] * 4
    flat = run_ranks(_count_messages, 4, {})
    assert flat == [(2 * 3 + 4, 0), (0, 2 * 3 + 4)] * 2


@pytest.mark.parametrize(
    "ranks, ranks_per_node, lap",
    [
        (range(8), 4, 4),
        (range(8), None, 8),  # not known: flat
        (range(8), 8, 8),  # one node
        (range(4), 1, 4),  # one rank per node: the ring of nodes is flat
        (range(0, 8, 2), 4, 2),  # every other rank, as under tensor parallelism
        (range(6), 4, 6),  # nodes of 4 and 2: flat
        ([0, 4, 1, 5], 4, 4),  # not in the order of nodes: flat
    ],
)
def test_auto_makes_laps_of_nodes_where_the_group_fills_them_evenly(ranks, ranks_per_node, lap):
    assert lap_length(list(ranks), ring="auto", ranks_per_node=ranks_per_node) == lap


def test_an_impossible_two_level_ring_is_rejected_with_the_numbers():
    with pytest.raises(ValueError, match=r"4 ranks per node .* \[0, 1, 2, 3, 4, 5\] are on nodes \[0, 0, 0, 0, 1, 1\]"):
        lap_length(list(range(6)), ring="two-level", ranks_per_node=4)
    with pytest.raises(ValueError, match="needs ranks_per_node"):
        lap_length(list(range(6)), ring="two-level", ranks_per_node=None)
    with pytest.raises(ValueError, match="ranks_per_node 0 must be"):
        lap_length([0], ring="auto", ranks_per_node=0)


def _leave(rank, world_size, folder, how):
    """Rank 1 goes one hop and hangs or dies; what the others say after three seconds."""
    dist.barrier()
    ring = RingExchange(dist.new_group(list(range(world_size)), timeout=timedelta(seconds=3)))
    ring.post("block 0", torch.zeros(3))
    ring.wait("block 0")
    if rank == 1 and how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        return
    try:
        for _ in ring.blocks(torch.zeros(3)):
            pass
    except RuntimeError as error:
        (folder / str(rank)).write_text(str(error))


@pytest.mark.parametrize("how", ["hangs", "dies"])
def test_a_rank_that_leaves_ends_in_an_error_that_names_the_step_and_the_peer(how, tmp_path):
    died = "rank 1 of 3 failed:\nit died with exit code -9"
    with pytest.raises(RuntimeError, match=died) if how == "dies" else nullcontext():
        run_ranks(_leave, 3, tmp_path, how)
    messages = {rank: (tmp_path / str(rank)).read_text() for rank in ((0,) if how == "dies" else (0, 2))}
    for rank, message in messages.items():
        assert f"ring step 1 of 3: rank {rank} could not pass 'block 0'" in message
    # Whoever gives up first names the culprit; the other may be told by the one that gave up.
    assert "to rank 1" in messages[0] or "from rank 1" in messages.get(2, "")


def _never_come(rank, world_size):
    """Rank 1 does not call the loss; what rank 0's call says after three seconds."""
    dist.barrier()
    group = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=3))
    if rank == 1:
        return None
    with pytest.raises(RuntimeError) as error:
        inf_cl_loss(*features("random", 5, 24), 10.0, group=group)
    return str(error.value)


def test_a_rank_that_does_not_call_the_loss_is_reported():
    message, _ = run_ranks(_never_come, 2)
    assert "inf_cl: rank 0 could not compare its rows, " in message and "of ranks [0, 1]" in message
