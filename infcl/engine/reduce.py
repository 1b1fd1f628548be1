"""Sum ZeRO-3's gradients over ranks and micro-batches with fewer launches than DeepSpeed (patches.py).

DeepSpeed copies each gradient into a bucket, splits the bucket, and adds each rank's part to its sums one parameter
at a time. After every backward the host waits for the GPU. This takes about twenty launches per parameter and
micro-batch, a large part of the host's time with a gradient cache (docs/concepts/engine.md). Here a bucket takes a
few launches, plus one per parameter whose size is not a multiple of the ranks. The host waits once per step. The
sums, their layout and their rounding are the same as DeepSpeed's:

    gradients [n] of a bucket -> [ranks, n / ranks], side by side -> / ranks -> reduce-scatter -> += float32 sums

A parameter whose size is not a multiple of the ranks is padded with zeros, which are added to DeepSpeed's own padding.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from infcl.engine.patches import EPILOGUE, GRADIENT, TESTED
from infcl.loss.ring import reduce_scatter

SUMS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
IN_FLIGHT = 2  # buckets whose gradients may wait for their reduction


def reduce_in_few_launches(optimizer: Any) -> bool:
    """Make DeepSpeed's stage-3 optimizer reduce full buckets of `reduce_bucket_size` elements at once.

    Returns:
        Whether the optimizer was patched. It is not if it offloads its state or sums to host memory, communicates
        gradients in several dtypes or groups, predivides them, or does not use reduce-scatter.

    Raises:
        AttributeError: this version of DeepSpeed stores its sums elsewhere.
    """
    sums = getattr(optimizer, SUMS, None)
    if sums is None:
        raise AttributeError(f"this DeepSpeed's stage 3 has no {SUMS}: tested with DeepSpeed {TESTED}")
    parameters = [p for group in optimizer.fp16_groups for p in group if p.requires_grad]
    types = {optimizer.get_param_comm_dtype(p) for p in parameters}
    groups = {optimizer._get_param_partition_group(p) for p in parameters}
    if optimizer.offload_optimizer or len(types) != 1 or len(groups) != 1 or not optimizer.reduce_scatter:
        return False
    if optimizer.gradient_predivide_factor != 1.0 or optimizer.all2all_process_group is not None or optimizer.zenflow:
        return False
    reducer = _Reducer(optimizer, sums, types.pop(), groups.pop())

    def reducing(finish: Callable[[], None]) -> Callable[[], None]:
        def finish_backward() -> None:
            reducer.reduce()
            if optimizer.is_gradient_accumulation_boundary():
                finish()  # the host waits for the stream
                reducer.in_flight.clear()
            else:  # the rest of `finish` is for the update
                optimizer._epilogue_ran_this_backward = True

        return finish_backward

    GRADIENT.apply(optimizer, lambda installed: reducer.take)
    EPILOGUE.apply(optimizer, reducing)
    for bucket in optimizer.ipg_buckets.values():
        bucket.buffer = None  # unused
    return True


class _Reducer:
    def __init__(self, optimizer: Any, sums: dict[int, torch.Tensor], travels_as: torch.dtype, group: Any):
        self.optimizer, self.sums, self.travels_as, self.group = optimizer, sums, travels_as, group
        self.ranks = dist.get_world_size(group)
        self.stream = optimizer.reduce_and_partition_stream  # None on a CPU
        self.waiting: dict[int, Any] = {}  # parameters in the bucket, by DeepSpeed's id
        self.elements = 0
        self.in_flight: deque[tuple[torch.cuda.Event, list[torch.Tensor]]] = deque()

    def take(self, parameter: Any) -> None:
        """Add a parameter to the bucket. Its full gradient of this micro-batch is complete."""
        if self.waiting and self.elements + parameter.ds_numel > self.optimizer.reduce_bucket_size:
            self.reduce()
        if parameter.ds_id in self.waiting:
            raise RuntimeError(f"the gradient of {parameter.ds_summary()} came twice in one backward")
        self.waiting[parameter.ds_id] = parameter
        self.elements += parameter.ds_numel

    def reduce(self) -> None:
        """Reduce the gradients in the bucket, on a separate stream."""
        parameters = [self.waiting[number] for number in sorted(self.waiting)]
        self.waiting, self.elements = {}, 0
        if not parameters:
            return
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        if self.stream is None:
            self._add_to_sums(parameters, gradients)
            return
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            self._add_to_sums(parameters, gradients)
        self.in_flight.append((self.stream.record_event(), gradients))
        while len(self.in_flight) > IN_FLIGHT:  # the stream that owns their memory waits, not the host
            reduced, gradients = self.in_flight.popleft()
            current.wait_event(reduced)
            del gradients

    @torch.no_grad()
    def _add_to_sums(self, parameters: list[Any], gradients: list[torch.Tensor]) -> None:
        flat = torch.cat([_rows(gradient, self.ranks) for gradient in gradients], dim=1).to(self.travels_as)
        own = flat.view(-1)
        if self.ranks > 1:
            own = torch.empty_like(flat[0])
            reduce_scatter(own, flat.div_(self.ranks).view(-1), group=self.group)
        sums = [self.sums[parameter.ds_id] for parameter in parameters]
        pieces = own.to(sums[0].dtype).split([len(its) for its in sums])
        if self.optimizer.micro_step_id == 0:
            torch._foreach_copy_(sums, pieces)
        else:
            torch._foreach_add_(sums, pieces)


def _rows(gradient: torch.Tensor, ranks: int) -> torch.Tensor:
    """Pad with zeros and split over the ranks: [n] -> [ranks, ceil(n / ranks)]."""
    flat = gradient.reshape(-1)
    if padding := -len(flat) % ranks:
        flat = torch.nn.functional.pad(flat, (0, padding))
    return flat.view(ranks, -1)
