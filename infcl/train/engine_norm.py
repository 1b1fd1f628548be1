"""What is not finite on a later tensor-parallel rank reaches the norm: a mend of DeepSpeed 0.19.8.

The norm counts a whole parameter on tensor-parallel rank 0 only, and it is by the norm that stages 1 and 3, and 2 in
fp32, find gradients that are not finite. Another rank's copy could then take a step that rank 0 does not know of. The
engine has an all-reduce over all ranks before the step, which carries a flag; the flag is added to the norm here, so
that DeepSpeed itself leaves the step out. It stays on the device: DeepSpeed reads the norm anyway.
"""

from typing import Any

import torch


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
