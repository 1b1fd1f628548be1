"""Features of an evaluation set, computed by all ranks.

Every rank takes every world_size-th sample. All ranks run the same number of forwards, because ZeRO-3 gathers
parameters in each: a missing forward would hang the other ranks. A rank without a batch left encodes a filler batch and
drops the result.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist


def in_step(batches: Iterable, filler, group: dist.ProcessGroup, device: torch.device) -> Iterator[tuple[Any, bool]]:
    """Yield (batch, is_real) until every rank is out of batches. Collective: one all-reduce of two numbers per batch.

    Args:
        batches: the batches of this rank.
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
            problems: list[str | None] = [None] * dist.get_world_size(group)
            dist.all_gather_object(problems, problem, group=group)
            raise ValueError(next(p for p in problems if p is not None))
        if not someone_has_one:
            return
        yield (filler, False) if batch is None else (batch, True)


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
