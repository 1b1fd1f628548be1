"""Small collectives: mean, maximum, gathers, and sharing or comparing of values, results and errors."""

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast
from zlib import crc32

import torch
import torch.distributed as dist

from infcl.parallel.groups import Parallel

# torch 2.13 renamed the two; calling the old names warns on every rank.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_Answer = TypeVar("_Answer")


def gather_objects(own: _Answer, group: dist.ProcessGroup | None = None) -> list[_Answer]:
    """Return the objects of all ranks of `group` (None: all), in their order. They are pickled. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    return everyone


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
    errors = gather_objects((socket.gethostname(), None if error is None else str(error)))
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
    all_gather(whole, part.contiguous(), group=group)
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


def require_equal(
    group: dist.ProcessGroup | None, what: str, values: Mapping[str, int | torch.dtype], device: torch.device
) -> None:
    """Check that all ranks of `group` have equal values; None is a single process. Collective.

    Costs one all-gather of len(values) integers; a dtype is compared by the checksum of its name.

    Raises:
        ValueError: values differ; raised on every rank, with all ranks' values.
        RuntimeError: on CPUs, if a rank does not join.
    """
    if group is None or dist.get_world_size(group) == 1:
        return
    numbers = [crc32(str(v).encode()) if isinstance(v, torch.dtype) else v for v in values.values()]
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    gathered = mine.new_empty(dist.get_world_size(group) * len(values))
    try:
        all_gather(gathered, mine, group=group)
    except RuntimeError as error:
        if device.type == "cuda":  # an error of earlier GPU work; NCCL's timeouts do not raise here
            raise
        raise RuntimeError(
            f"{what}: rank {dist.get_rank()} could not compare its {', '.join(values)} with those of ranks "
            f"{dist.get_process_group_ranks(group)} (global ranks): one of them ended, hangs, or did not get so far. "
            f"{error}"
        ) from error
    for name, per_rank in zip(values, gathered.view(-1, len(values)).T.tolist()):
        if len(set(per_rank)) > 1:
            wanted = name if isinstance(values[name], bool | torch.dtype) else f"number of {name}"
            if isinstance(values[name], torch.dtype):
                per_rank = gather_objects(str(values[name]), group)
            raise ValueError(f"{what} needs the same {wanted} on every rank; ranks 0.. have {per_rank}")
