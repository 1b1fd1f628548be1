"""Features of an evaluation set, computed by all ranks.

Every rank takes every world_size-th sample. All ranks run the same number of forwards, because ZeRO-3 gathers
parameters in each: a missing forward would hang the other ranks. A rank without a batch left encodes a filler batch and
drops the result.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from infcl.parallel import gather_objects

_SHARED_ROWS = 16384  # features that `share_equal` exchanges at once


def in_step(batches: Iterable, filler, group: dist.ProcessGroup, device: torch.device) -> Iterator[tuple[Any, bool]]:
    """Yield (batch, is_real) until every rank is out of batches. Collective: one all-reduce of two numbers per batch.

    Args:
        filler: a batch for ranks that have none left. It is yielded with is_real False.

    Raises:
        ValueError: the data of one rank raised it, for example for a label out of range. All ranks raise it.
    """
    iterator = iter(batches)
    while True:
        batch = problem = None
        try:
            batch = next(iterator, None)
        except ValueError as error:
            problem = str(error)
        news = torch.tensor([batch is not None, problem is not None], dtype=torch.int32, device=device)
        dist.all_reduce(news, op=dist.ReduceOp.MAX, group=group)
        someone_has_one, someone_has_a_problem = news.tolist()
        if someone_has_a_problem:
            raise ValueError(next(p for p in gather_objects(problem, group) if p is not None))
        if not someone_has_one:
            return
        yield (filler, False) if batch is None else (batch, True)


def at_width(width: int, metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics of embeddings of this width under names of their own, without the counts of samples."""
    return {f"width_{width}_{name}": value for name, value in metrics.items() if not name.startswith("num_")}


def keys_of(inputs: torch.Tensor) -> torch.Tensor:
    """Return int64 [n], equal for equal rows of `inputs`, [n, ...] in host memory."""
    digests = (hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in inputs.numpy())
    return torch.tensor([int.from_bytes(digest, "big", signed=True) for digest in digests], dtype=torch.int64)


def share_equal(features: torch.Tensor, keys: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Set `features` to those of the first row of all ranks wherever keys are equal, and return them. Collective.

    The same input gives other last bits in a batch of another size, which would split the ties of its scores.
    Cost: an all-gather of 8 bytes per row, and an all-reduce of the features that occur more than once.

    Args:
        features: f32 [n, D].
        keys: int64 [n], see `keys_of`.
    """
    rank = 0 if group is None else dist.get_rank(group)
    begin = int(gather_rows(torch.tensor([len(keys)], device=keys.device), group)[:rank].sum())
    _, number, counts = gather_rows(keys, group).unique(return_inverse=True, return_counts=True)
    row = torch.arange(len(number), device=keys.device)
    first = torch.full_like(counts, len(number)).scatter_reduce_(0, number, row, "amin") - begin  # among own rows
    number = number[begin : begin + len(keys)]
    for repeated in (counts > 1).nonzero()[:, 0].split(_SHARED_ROWS):
        table = features.new_zeros(len(repeated), features.shape[1])
        own = (first[repeated] >= 0) & (first[repeated] < len(keys))
        table[own] = features[first[repeated][own]]
        if group is not None:
            dist.all_reduce(table, group=group)
        slot = torch.full_like(counts, -1)
        slot[repeated] = torch.arange(len(repeated), device=keys.device)
        slot = slot[number]
        features[slot >= 0] = table[slot[slot >= 0]]
    return features


def gather_rows(rows: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Gather rows [n_r, ...] of all ranks into [sum of n_r, ...] in rank order; n_r may differ. Two all-gathers."""
    if group is None:
        return rows
    gathered_counts = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered_counts, torch.tensor([len(rows)], device=rows.device), group=group)
    counts = [int(count) for count in gathered_counts]
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat([block[:count] for block, count in zip(gathered, counts)])
