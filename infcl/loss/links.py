"""Laps and process groups of a ring, computed from the group and the ranks' nodes.

A flat ring is one lap over all ranks. A two-level ring makes a lap over the ranks of a node; then every rank sends to
the same local rank of the next node. This module does not read the environment: the number of ranks per node is an
argument.
"""

from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

RINGS = ("auto", "flat", "two-level")


def lap_length(ranks: list[int], *, ring: str, ranks_per_node: int | None) -> int:
    """Return the number of ranks in a lap: all of them (flat), or those of one node (two-level).

    Args:
        ranks: global ranks of the group.
        ring: "auto" is two-level if the group is on several nodes, each with the same number (above 1) of consecutive
            ranks.
        ranks_per_node: number of ranks that the launcher started on each node (LOCAL_WORLD_SIZE).

    Raises:
        ValueError: unknown ring, or two-level, but the ranks per node are unknown, uneven or not in order.
    """
    if ring not in RINGS:  # checked on a single rank too, so the error shows before the run on a cluster
        raise ValueError(f"unknown ring '{ring}'; one of {RINGS}")
    if ranks_per_node is not None and ranks_per_node < 1:
        raise ValueError(f"ranks_per_node {ranks_per_node} must be at least 1")
    if len(ranks) == 1:
        return 1
    if ring == "flat" or (ring == "auto" and ranks_per_node is None):
        return len(ranks)
    if ranks_per_node is None:
        raise ValueError("a two-level ring needs ranks_per_node: how many ranks each node has")
    nodes = [rank // ranks_per_node for rank in ranks]
    lap = nodes.count(nodes[0])
    even = len(ranks) % lap == 0 and nodes == [node for node in nodes[::lap] for _ in range(lap)]
    if not even or len(set(nodes)) * lap != len(ranks):
        if ring == "auto":
            return len(ranks)
        raise ValueError(
            f"a two-level ring needs the same number of neighbouring ranks on every node; with {ranks_per_node} ranks "
            f"per node the group's ranks {ranks} are on nodes {nodes}"
        )
    return len(ranks) if lap == 1 else lap  # one rank per node: the flat ring is the ring of nodes


def global_ranks(group: dist.ProcessGroup | None) -> list[int]:
    """Return the global ranks of a group, [0] for None (a single process)."""
    return [0] if group is None else dist.get_process_group_ranks(group)


_second_groups: WeakKeyDictionary = WeakKeyDictionary()


def second_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of the same ranks with its own connections, created once. Collective over the group.

    NCCL sends the messages of one group one after another. On the group's own connections, the hops within a node would
    wait for the hop between nodes, which they should overlap. If WORLD was started with a device_id, PyTorch creates a
    group by splitting WORLD's communicator. Then every rank of WORLD must call this with its own group, as the
    data-parallel groups of a run do. If only part of WORLD calls it, all its ranks must be in as many groups: PyTorch
    names the new group after its ranks and that number.
    """
    if group not in _second_groups:
        ranks = dist.get_process_group_ranks(group)
        _second_groups[group] = dist.new_group(
            ranks,
            timeout=timeout_of(group),
            backend=dist.get_backend(group),
            use_local_synchronization=len(ranks) < dist.get_world_size(),
            group_desc="infcl ring between nodes",
        )
    return _second_groups[group]


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of the group's messages."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    return group._get_backend(torch.device(device)).options._timeout
