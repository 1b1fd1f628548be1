"""Workarounds for DeepSpeed's ZeRO-3 with a gradient cache: gather parameters once per step, and reduce full buckets.

Gather. DeepSpeed gathers a block's parameters in each of the 2M passes over M micro-batches, but they do not change
before the update. Models with at most `stage3_max_reuse_distance` and `stage3_max_live_parameters` parameters keep what
the first forward of a step gathered until the update or an evaluation; the hooks then do nothing for gathered modules.
The first forward runs DeepSpeed's hooks in every module, so that the trace for prefetching remains that of a forward.
Larger models, and offloaded parameters, are handled as without the patch.

Reduce. DeepSpeed copies each gradient into a bucket, splits the bucket, and adds each rank's part to its sums one
parameter at a time: about twenty launches per parameter and micro-batch, and the host waits after every backward
(docs/concepts/engine.md). Here a bucket takes a few launches, and the host waits once per step. The sums, their layout
and their rounding are DeepSpeed's:

    gradients [n] of a bucket -> [ranks, n / ranks], side by side -> / ranks -> reduce-scatter -> += float32 sums

A parameter whose size is not a multiple of the ranks is padded with zeros, which are added to DeepSpeed's own padding.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from infcl.engine.patches import (
    POST_BACKWARD,
    POST_FORWARD,
    PRE_BACKWARD,
    PRE_FORWARD,
    RELEASE,
    RELEASE_ALL,
)
from infcl.parallel import reduce_scatter
from infcl.step.zero import EPILOGUE, GRADIENT

SUMS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
IN_FLIGHT = 2  # buckets whose gradients may wait for their reduction


class KeptParameters:
    """Patches of an optimizer's stage-3 hooks. While `on`, parameters are released only at the update.

    Attributes:
        fits: whether the model is small enough to stay gathered.
        on: whether parameters are kept now.
        gathered: whether a full forward has gathered all parameters since the last update.
    """

    def __init__(self, optimizer: Any, *, in_host_memory: bool):
        from deepspeed.runtime.zero import parameter_offload
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        hooks = optimizer.parameter_offload
        total = sum(parameter.ds_numel for parameter in hooks.module.parameters())
        limit = min(hooks._max_available_parameters_in_numel, hooks._max_reuse_distance_in_numel)
        self.fits = total <= limit and not in_host_memory
        self.on = self.fits
        self.gathered = False
        self._root = hooks.module
        self._available, self._stack = ZeroParamStatus.AVAILABLE, parameter_offload.FWD_MODULE_STACK
        self._iterate, self._is_leaf = parameter_offload.iter_params, parameter_offload.z3_leaf_module
        self._parameters: dict[Any, list[Any]] = {}  # parameters per module, or per unit that is gathered as one
        self._entered: set[tuple[Any, str]] = set()  # (module, pass) whose DeepSpeed hook was entered and not left
        if not self.fits:
            return
        coordinator = hooks.get_param_coordinator()
        RELEASE.wrap(coordinator, self._release)
        RELEASE_ALL.wrap(coordinator, self._release_for_the_update)
        PRE_FORWARD.wrap(hooks, partial(self._enter, "forward"))
        POST_FORWARD.wrap(hooks, partial(self._leave, "forward"))
        PRE_BACKWARD.wrap(hooks, partial(self._enter, "backward"))
        POST_BACKWARD.wrap(hooks, partial(self._leave, "backward"))

    def keep(self, wanted: bool) -> None:
        """Keep parameters or not. With False, forwards between steps release as DeepSpeed does."""
        self.on = wanted and self.fits
        self.gathered = self.gathered and self.on

    def _release(self, release: Callable[..., None], parameter: Any, *args: Any, **options: Any) -> None:
        if not self.on:
            release(parameter, *args, **options)

    def _release_for_the_update(self, release_all: Callable[[Any], None], module: Any) -> None:
        kept, self.on = self.on, False
        self.gathered = False
        self._entered.clear()
        try:
            release_all(module)
        finally:
            self.on = kept

    def _enter(self, pass_: str, fetch: Callable[[Any], None], module: Any) -> None:
        if self.gathered and self._is_gathered(module):
            if pass_ == "forward":
                self._stack.append(module)  # the hook after the forward pops it
            return
        self._entered.add((module, pass_))
        fetch(module)

    def _leave(self, pass_: str, leave: Callable[[Any], None], module: Any) -> None:
        if (module, pass_) in self._entered:
            self._entered.discard((module, pass_))
            leave(module)
        if module is self._root and pass_ == "forward":
            self.gathered = self.on

    def _is_gathered(self, module: Any) -> bool:
        if module not in self._parameters:
            self._parameters[module] = list(self._iterate(module, recurse=self._is_leaf(module)))
        return all(parameter.ds_status is self._available for parameter in self._parameters[module])


def reduce_in_few_launches(optimizer: Any) -> None:
    """Make DeepSpeed's stage-3 optimizer reduce full buckets of `reduce_bucket_size` elements at once.

    It remains as it is if it offloads its state or sums to host memory, communicates gradients in several dtypes or
    groups, predivides them, or does not use reduce-scatter.
    """
    parameters = [p for group in optimizer.fp16_groups for p in group if p.requires_grad]
    types = {optimizer.get_param_comm_dtype(p) for p in parameters}
    groups = {optimizer._get_param_partition_group(p) for p in parameters}
    if optimizer.offload_optimizer or len(types) != 1 or len(groups) != 1 or not optimizer.reduce_scatter:
        return
    if optimizer.gradient_predivide_factor != 1.0 or optimizer.all2all_process_group is not None or optimizer.zenflow:
        return
    reducer = _Reducer(optimizer, getattr(optimizer, SUMS), types.pop(), groups.pop())

    def finish_backward(finish: Callable[[], None]) -> None:
        reducer.reduce()
        if optimizer.is_gradient_accumulation_boundary():
            finish()  # the host waits for the stream
            reducer.in_flight.clear()
        else:  # the rest of `finish` is for the update
            optimizer._epilogue_ran_this_backward = True

    GRADIENT.apply(optimizer, lambda installed: reducer.take)
    EPILOGUE.wrap(optimizer, finish_backward)
    for bucket in optimizer.ipg_buckets.values():
        bucket.buffer = None  # unused


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
