"""Several backwards of one step through a DeepSpeed engine, exact for parameters that some micro-batches do not use.

In: the surrogate of a micro-batch. Out: its gradient in DeepSpeed's sums. Left to itself, DeepSpeed keeps the sums of
an earlier step for a parameter that the first backward of a step does not reach, and does not reduce one that the last
backward does not reach. The trainer's engine and the public step call the same function, `zero_backward`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

TESTED = "0.19.8"
_LEFT = "infcl_reduces_what_is_left"  # attribute of optimizers that `reduce_what_is_left` has changed
SOURCE = f"https://github.com/deepspeedai/DeepSpeed/blob/v{TESTED}/deepspeed/runtime"


@dataclass(frozen=True)
class Patch:
    """A replaced symbol of DeepSpeed.

    Attributes:
        symbol: "Class.attribute".
        link: its upstream source, or an issue about it.
        why: what happens without the patch.
    """

    symbol: str
    link: str
    why: str

    def apply(self, owner: Any, make: Callable[[Any], Any]) -> None:
        """Replace the symbol of `owner` by make(the installed one).

        Raises:
            AttributeError: this version of DeepSpeed does not have the symbol.
        """
        name = self.symbol.rpartition(".")[2]
        if not hasattr(owner, name):
            raise AttributeError(f"this DeepSpeed has no {self.symbol}: tested with DeepSpeed {TESTED}")
        setattr(owner, name, make(getattr(owner, name)))

    def wrap(self, owner: Any, replacement: Callable[..., Any]) -> None:
        """Replace the symbol of `owner` by a call of `replacement`, with the installed function as first argument."""
        self.apply(owner, lambda installed: partial(replacement, installed))


GRADIENT = Patch(
    "ZeROOptimizer.reduce_ready_partitions_and_remove_grads",
    f"{SOURCE}/zero/stage_1_and_2.py#L2293",
    "A parameter that a step's last backward does not reach is not reduced. Stage 1 with overlap_comm updates it with "
    "the rank's own gradient, and an optimizer in host memory lacks the earlier micro-batches. Stage 3 needs about "
    "twenty launches per parameter (zero3.py).",
)
EPILOGUE = Patch(
    "ZeROOptimizer.overlapping_partition_gradients_reduce_epilogue",
    f"{SOURCE}/zero/stage_1_and_2.py#L1211",
    "It ends a backward, and is the last chance to reduce parameters that the backward did not reach. Under stage 3 "
    "the host waits for the GPU there, after each micro-batch (zero3.py).",
)


def zero_backward(engine: Any, surrogate: torch.Tensor) -> None:
    """Add d surrogate / d parameters to the sums of a DeepSpeedEngine, without scaling by accumulation steps.

    The engine's gradient accumulation boundary says whether this is the last backward of a step.
    """
    optimizer = engine.optimizer
    if shards(optimizer):
        optimizer.clear_backward_seen_flag()  # else a backward without a forward before it starts a new step
        if optimizer.micro_step_id == (0 if is_stage_3(optimizer) else -1):
            _forget_last_step(optimizer)
    engine.backward(surrogate, scale_wrt_gas=False)


def shards(optimizer: Any) -> bool:
    """Return whether the optimizer reduces each gradient during the backward: not stage 0, not BF16_Optimizer."""
    return hasattr(optimizer, "overlapping_partition_gradients_reduce_epilogue")


def is_stage_3(optimizer: Any) -> bool:
    return hasattr(optimizer, "fp16_groups")


def _forget_last_step(optimizer: Any) -> None:
    """Zero the sums of the step before. DeepSpeed overwrites them only for parameters of the first backward."""
    if is_stage_3(optimizer):
        if optimizer.grad_partitions_flat_buffer is not None:
            optimizer.grad_partitions_flat_buffer.zero_()
    elif optimizer.cpu_offload:
        optimizer.averaged_gradients.update(dict.fromkeys(optimizer.averaged_gradients))  # left by a skipped step
        for sums in optimizer.accumulated_grads_in_cpu.values():
            sums.zero_()


def reduce_what_is_left(engine: Any, *, compare_ranks: bool) -> None:
    """Make a DeepSpeedEngine reduce every trainable parameter in each step, with zeros for missing gradients.

    Ranks must reach the same parameters in the same order, since stages 1 and 2 reduce gradients side by side in that
    order, and stage 3 gathers the parameters of a forward. The cost is one set entry per parameter and step if the step
    reaches all parameters. BF16_Optimizer (stage 1 in BF16) has full sums until the end and is not patched.

    Args:
        engine: changed in place, once.
        compare_ranks: compare the order before ranks reduce: an all-reduce of two integers that the host waits for, per
            step in stage 1 and per backward in stage 2. Where the order depends on flags alone it is not needed.

    Raises:
        ValueError: stage 3 cannot gather a parameter.
    """
    optimizer, device = engine.optimizer, engine.device
    if not shards(optimizer) or _LEFT in vars(optimizer):
        return
    several = dist.get_world_size(optimizer.dp_process_group) > 1
    empty = [n for n, p in engine.module.named_parameters() if several and getattr(p, "ds_numel", 1) == 0]
    if empty:
        raise ValueError(f"{', '.join(empty)}: no elements, which ZeRO-3 cannot gather; remove them, or use stage 2")
    setattr(optimizer, _LEFT, True)
    stage_3 = is_stage_3(optimizer)
    groups = optimizer.fp16_groups if stage_3 else optimizer.bit16_groups
    trainable = [(p, () if stage_3 else (i,)) for i, group in enumerate(groups) for p in group if p.requires_grad]
    numbers = {parameter: number for number, (parameter, _) in enumerate(trainable)}
    reached: dict[torch.nn.Parameter, int] = {}  # in order
    reduce = optimizer.reduce_ready_partitions_and_remove_grads
    compares = compare_ranks and not stage_3 and several
    each_time = compares and optimizer.partition_gradients

    def reduce_and_note(parameter: torch.nn.Parameter, *group: int) -> None:
        if each_time or optimizer.is_gradient_accumulation_boundary():
            reached[parameter] = numbers[parameter]
        reduce(parameter, *group)

    def finish_all(finish: Callable[[], None]) -> None:
        if compares:
            _require_same_order(tuple(reached.values()), optimizer.dp_process_group, device)
        if optimizer.is_gradient_accumulation_boundary():
            for parameter, group in trainable if len(reached) < len(trainable) else ():
                if parameter not in reached:
                    _have_gradient(optimizer, parameter, device)
                    reduce(parameter, *group)
        reached.clear()
        finish()

    GRADIENT.apply(optimizer, lambda installed: reduce_and_note)
    EPILOGUE.wrap(optimizer, finish_all)


def _require_same_order(order: tuple[int, ...], group: Any, device: torch.device) -> None:
    """Raise ValueError on all ranks if a backward reached parameters in different orders. Collective."""
    digest = hash(order)
    extremes = torch.tensor([digest, -digest], device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes[0].item(), -extremes[1].item()
    if largest != smallest:
        raise ValueError(
            f"a backward reached {len(order)} parameters on this rank, and others (or in another order) on another "
            "rank. ZeRO 1-3 reduces them side by side, so the micro-batches of an index must use the same parameters "
            "on all ranks; stage 0 and DistributedDataParallel(find_unused_parameters=True) allow it"
        )


def _have_gradient(optimizer: Any, parameter: Any, device: torch.device) -> None:
    """Give the parameter a gradient to reduce: what stage 1 has summed up so far, or zeros."""
    if is_stage_3(optimizer):  # the parameter is a shard now, and its gradient has to be full
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad.data = torch.zeros(parameter.ds_shape, dtype=parameter.dtype, device=device)
        return
    optimizer.setup_buckets()
    if optimizer.get_gradient_for_reduction(parameter) is None:
        parameter.grad = torch.zeros_like(parameter)
        if optimizer.use_grad_accum_attribute:
            optimizer._fill_param_grad_accum_attribute(parameter)
