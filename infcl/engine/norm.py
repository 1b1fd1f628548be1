"""The norm of the gradients under ZeRO: two mends of DeepSpeed 0.19.8.

`take_together`: it is taken tensor by tensor, each copied into float64 first. That is 1,300 launches for the 446
tensors of ViT-L-14, while the GPU has nothing else to do.

`add_to_norm`: what is not finite on a later tensor-parallel rank reaches the norm. It counts a whole parameter on
tensor-parallel rank 0 only, and it is by the norm that stages 1 and 3, and 2 in fp32, find gradients that are not
finite. Another rank's copy could then take a step that rank 0 does not know of. The engine has an all-reduce over all
ranks before the step, which carries a flag; the flag is added to the norm, so that DeepSpeed itself leaves the step
out. It stays on the device: DeepSpeed reads the norm anyway.
"""

from collections.abc import Iterable
from typing import Any

import torch


def take_together(optimizer: Any) -> None:
    """Have a ZeRO optimizer of DeepSpeed's take the norm in a few launches, in float32.

    State in host memory, and BF16_Optimizer (stage 1 in bf16), are left as they are.
    """
    in_host_memory = getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False)
    if not hasattr(optimizer, "get_grad_norm_direct") or in_host_memory:
        return
    is_stage_3 = hasattr(optimizer, "fp16_groups")
    from deepspeed.runtime.utils import is_model_parallel_parameter

    def norm_of(gradients: list[torch.Tensor], parameters: list[torch.nn.Parameter]):
        """[] f32, as get_grad_norm_direct: of these and all other ranks' gradients; -1 where it is not finite."""
        present = (gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False))
        group, everywhere = optimizer.dp_process_group, False
        if is_stage_3:
            group = optimizer._get_param_partition_group(parameters[0])
            everywhere = optimizer._grad_norm_counts_every_rank(parameters, group)
        all_count = everywhere or optimizer.model_parallel_rank == 0
        counted = [g for g, p in zip(present, parameters) if all_count or is_model_parallel_parameter(p)]
        square = square_of(counted, optimizer.device)
        torch.distributed.all_reduce(square, group=group)
        if not everywhere:
            optimizer._model_parallel_all_reduce(tensor=square, op=torch.distributed.ReduceOp.SUM)
        norm = square.sqrt()
        return torch.where(norm.isfinite(), norm, -1.0)

    optimizer.get_grad_norm_direct = norm_of


def square_of(tensors: Iterable[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """[] f32 on the device: the sum of the squares of what is there.

    A GPU adds up in parts, all tensors in a few launches; a CPU one by one, half a percent off at 4e7 elements were it
    not in float64.
    """
    present = [tensor for tensor in tensors if tensor is not None and tensor.numel()]
    if not present:
        return torch.zeros((), device=device)
    if present[0].is_cpu:
        norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in present]
        return torch.stack(norms).square().sum().to(device, torch.float32)
    return torch.nn.utils.get_total_norm([tensor.float() for tensor in present]).to(device).square()


def add_to_norm(optimizer: Any, flag: torch.Tensor) -> None:
    """Have the norm of a ZeRO optimizer of DeepSpeed's be what it is where `flag` [1] f32 is 0, NaN where it is NaN.

    AttributeError where DeepSpeed is another version.
    """
    if hasattr(optimizer, "_model_parallel_all_reduce"):  # stages 1 to 3: called with the sum of squares of a group
        all_reduce = optimizer._model_parallel_all_reduce

        def all_reduce_and_add(tensor: torch.Tensor, op: Any) -> None:
            all_reduce(tensor=tensor, op=op)
            if tensor.is_floating_point():  # else bytes: whether something overflowed
                tensor.add_(flag.view_as(tensor))

        optimizer._model_parallel_all_reduce = all_reduce_and_add
        return
    get_gradients = optimizer.get_grads_for_norm  # BF16_Optimizer: stage 1 in bf16

    def get_gradients_and_flag(for_clipping: bool = False):
        if for_clipping:
            return get_gradients(for_clipping=True)
        gradients, of_experts = get_gradients()
        return [*gradients, flag], of_experts

    optimizer.get_grads_for_norm = get_gradients_and_flag
