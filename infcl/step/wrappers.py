"""Support of training wrappers in a step with several backwards: accumulate, then reduce over the ranks once.

In: a plain module, a module that is or contains DistributedDataParallel or FSDP2 modules, or a DeepSpeed engine.
The wrappers average gradients over their ranks. For the losses of `infcl.loss` the average is the exact gradient.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from infcl.step.zero import reduce_what_is_left, zero_backward


def is_deepspeed(module: nn.Module) -> bool:
    """Return whether `module` is a DeepSpeed engine, without importing DeepSpeed."""
    return hasattr(module, "set_gradient_accumulation_boundary")


def is_ddp(module: nn.Module) -> bool:
    """Return whether `module` is or contains DistributedDataParallel."""
    return any(isinstance(part, DistributedDataParallel) for part in module.modules())


@contextmanager
def accumulating(module: Any) -> Iterator[None]:
    """Disable gradient reduction inside this context; the first backward after it reduces the accumulated sum.

    ZeRO-2 and ZeRO-3 still reduce and shard gradients at every backward.

    Raises:
        ValueError: DistributedDataParallel has a static graph, or ZeRO-3 cannot gather a parameter.
    """
    with ExitStack() as stack:
        if is_deepspeed(module):
            reduce_what_is_left(module, compare_ranks=True)
            module.set_gradient_accumulation_boundary(False)
            stack.callback(module.set_gradient_accumulation_boundary, True)
        for part in module.modules():
            if isinstance(part, DistributedDataParallel):
                if part.static_graph:
                    raise ValueError(
                        "DistributedDataParallel(static_graph=True) allows one backward per step, and contrastive_step "
                        "has one per micro-batch; leave static_graph out (with gradient checkpointing use_reentrant="
                        "False needs none)"
                    )
                stack.enter_context(part.no_sync())
            elif hasattr(part, "set_requires_gradient_sync"):  # FSDP2
                for switch in (partial(part.set_requires_gradient_sync, recurse=False), part.set_is_last_backward):
                    switch(False)
                    stack.callback(switch, True)
        yield


def backward_of(module: Any) -> Callable[[Tensor], object]:
    """Return the function that runs a surrogate's backward, without scaling by accumulation steps."""
    return partial(zero_backward, module) if is_deepspeed(module) else Tensor.backward


def average_unwrapped(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Average the gradients of the parameters that no wrapper reduces over `group`. Collective.

    Raises:
        ValueError: such parameters and several ranks exist, but group is None.
    """
    names = [] if is_deepspeed(module) else list(_unwrapped(module))
    if not names or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if group is None:
        raise ValueError(
            f"{type(module).__name__}: no wrapper averages the gradients of {names[0]}"
            f"{f' and {len(names) - 1} more parameters' if len(names) > 1 else ''} over the ranks; wrap the module in "
            "DistributedDataParallel, fully_shard or DeepSpeed, or pass group="
        )
    parameters: list[Any] = [module.get_parameter(name) for name in names]
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    parameters = [parameter for parameter, on_any_rank in zip(parameters, used.tolist()) if on_any_rank]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for dtype in sorted({parameter.dtype for parameter in parameters}, key=str):
        gradients = [parameter.grad for parameter in parameters if parameter.dtype == dtype]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
            gradient.copy_(mean.view_as(gradient))


def _unwrapped(module: nn.Module) -> Iterator[str]:
    """Yield the names of trainable parameters outside of all DistributedDataParallel and FSDP2 modules."""
    wrapped = {
        id(parameter)
        for part in module.modules()
        if isinstance(part, DistributedDataParallel)
        for parameter in part.parameters()
    }
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and id(parameter) not in wrapped and not hasattr(parameter, "full_tensor"):
            yield name
