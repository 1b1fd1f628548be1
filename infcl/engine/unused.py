"""Parameters that the last backward of a step does not reach: a mend of DeepSpeed 0.19.8.

ZeRO 1 to 3 finish a parameter's gradient in a hook of its last backward. Where that does not come, stage 1 (with
overlap_comm) averages nothing and the owner steps with its own rank's gradient; an optimizer state in host memory
misses what the step's earlier micro-batches gave, and keeps the gradient of the step before. So what is left is
finished behind the last backward, with zeros as its gradient, before DeepSpeed closes its buckets.

Ranks send what is left in the order of the parameters, so the same must be left on all of them. That is not compared:
ranks that have nothing left would have to take part too, a collective in every step. The towers decide by flags alone,
which are the same on all ranks (cluster/meeting.py), what a step reaches; a forward that decides by its data must not
be trained so: its ranks would add up gradients of different parameters, or wait for each other until --dist-timeout.
"""

from typing import Any

import torch


def reduce_what_is_left(optimizer: Any, device: torch.device) -> None:
    """Have a ZeRO optimizer of DeepSpeed's reduce every trainable parameter at the end of each step.

    Costs an entry in a set for each parameter and step where nothing is left. BF16_Optimizer (stage 1 in bf16) keeps
    all sums whole until the end, and is left as it is. AttributeError where DeepSpeed is another version.
    """
    if not shards(optimizer):
        return
    reduce = optimizer.reduce_ready_partitions_and_remove_grads
    finish = optimizer.overlapping_partition_gradients_reduce_epilogue
    is_stage_3 = hasattr(optimizer, "fp16_groups")
    groups = optimizer.fp16_groups if is_stage_3 else optimizer.bit16_groups
    trainable = [(p, () if is_stage_3 else (i,)) for i, group in enumerate(groups) for p in group if p.requires_grad]
    reached: set[torch.nn.Parameter] = set()

    def reduce_and_note(parameter: torch.nn.Parameter, *group: int) -> None:
        if optimizer.is_gradient_accumulation_boundary():
            reached.add(parameter)
        reduce(parameter, *group)

    def finish_all() -> None:
        if optimizer.is_gradient_accumulation_boundary():
            for parameter, group in trainable if len(reached) < len(trainable) else ():
                if parameter not in reached:
                    _have_gradient(optimizer, parameter, device)
                    reduce(parameter, *group)
            reached.clear()
        finish()

    optimizer.reduce_ready_partitions_and_remove_grads = reduce_and_note
    optimizer.overlapping_partition_gradients_reduce_epilogue = finish_all


def shards(optimizer: Any) -> bool:
    """Whether it takes a parameter's gradient as soon as a backward has it: not stage 0, and not BF16_Optimizer."""
    return hasattr(optimizer, "overlapping_partition_gradients_reduce_epilogue")


def _have_gradient(optimizer: Any, parameter: Any, device: torch.device) -> None:
    """What stage 1 has summed up of the parameter's gradient, or zeros: all that the other stages lack."""
    if hasattr(optimizer, "fp16_groups"):  # the parameter is not whole now, and its gradient has to be
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad.data = torch.zeros(parameter.ds_shape, dtype=parameter.dtype, device=device)
        return
    optimizer.setup_buckets()
    if optimizer.get_gradient_for_reduction(parameter) is None:
        parameter.grad = torch.zeros_like(parameter)
        if optimizer.use_grad_accum_attribute:
            optimizer._fill_param_grad_accum_attribute(parameter)
