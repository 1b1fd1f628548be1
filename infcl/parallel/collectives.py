"""Small collectives: mean, maximum, gather over tensor-parallel ranks, and sharing of a result or an error."""

import socket
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from infcl.parallel.groups import Parallel

_Answer = TypeVar("_Answer")


def from_first_rank(own: Callable[[], _Answer]) -> _Answer:
    """Call `own` on rank 0 and return its result on every rank. Collective.

    Raises:
        Exception: on every rank, the exception that `own` raised on rank 0.
    """
    shared: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            shared[0] = own()
        except Exception as error:  # the other ranks wait for the broadcast
            shared[1] = error
    dist.broadcast_object_list(shared, src=0)
    if shared[1] is not None:
        raise shared[1]
    return cast(_Answer, shared[0])


def on_every_rank(own: Callable[[], _Answer]) -> _Answer:
    """Call `own` on each rank and return its result there. Collective.

    Raises:
        ValueError: on every rank, if `own` raised one on any rank. It has the message of the lowest such rank.
    """
    result, error = None, None
    try:
        result = own()
    except ValueError as raised:  # the other ranks wait for the gather
        error = raised
    errors: list[tuple[str, str | None]] = [("", None)] * dist.get_world_size()
    dist.all_gather_object(errors, (socket.gethostname(), None if error is None else str(error)))
    if errors[0][1] is not None:
        raise ValueError(errors[0][1]) from error
    for rank, (host, text) in enumerate(errors):
        if text is not None:
            raise ValueError(f"rank {rank} on {host}: {text}") from error
    return cast(_Answer, result)


def join_parts(parallel: Parallel, part: torch.Tensor) -> torch.Tensor:
    """Concatenate the [n, ...] tensors of the T tensor-parallel ranks to [T n, ...], like `part` pinned or on a GPU.

    Collective. In host memory the group is `tp_host_group`.
    """
    if parallel.tp_size == 1:
        return part
    group = parallel.tp_group if part.is_cuda else parallel.tp_host_group
    assert group is not None, "None would be all ranks"
    shape = parallel.tp_size * len(part), *part.shape[1:]
    whole = torch.empty(shape, dtype=part.dtype, device=part.device, pin_memory=part.is_pinned())
    dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole


def mean_over(group: dist.ProcessGroup | None, value: torch.Tensor) -> torch.Tensor:
    """Return the mean of a float tensor over the ranks of `group` (None: all), as a new tensor. Collective."""
    total = value.detach().clone()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)


def max_over(group: dist.ProcessGroup | None, values: Sequence[float], device: torch.device) -> list[float]:
    """Return the elementwise maximum over the ranks of `group` (None: all). Collective."""
    largest = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest.tolist()
