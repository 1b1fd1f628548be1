"""Workarounds for DeepSpeed. Each is one Patch, and nothing else replaces methods of DeepSpeed.

A patch replaces a method of one engine's objects, never of a class. So other engines of the process are unaffected.
step/zero.py has those that the public step needs too, zero3.py those with state, and this file the rest.
"""

from collections.abc import Callable, Iterable
from functools import _lru_cache_wrapper
from typing import Any

import torch

from infcl.step.zero import SOURCE, Patch, is_stage_3

FORWARD = Patch(
    "Module.forward",
    f"{SOURCE}/zero/parameter_offload.py#L445",
    "Stage 3 gathers a block's parameters in hooks around its forward. block.compile() compiles the call with its "
    "hooks, which break the graph. Compiling only the forward leaves them outside.",
)
SCALE = Patch(
    "DynamicLossScaler.update_scale",
    f"{SOURCE}/fp16/loss_scaler.py#L253",
    "When the loss scale grows, it grows before the step's gradients are divided by it. They are halved, and under "
    "stage 3 so is their norm.",
)
LEAST_SCALE = Patch(
    "DynamicLossScaler.raise_error_at_min_scale",
    "https://github.com/deepspeedai/DeepSpeed/pull/1958",
    "At the smallest scale, a step that is not finite raises an error, after which no checkpoint is written. "
    "The trainer counts such steps.",
)
TRACE = Patch(
    "PartitionedParameterCoordinator._invalidate_trace",
    f"{SOURCE}/zero/partitioned_param_coordinator.py#L195",
    "DeepSpeed caches which parameters each module of the trace releases, and keeps the cache when the trace changes. "
    "A pass without a backward caches that nothing is used again. Later passes then gather each block three times.",
)
NORM = Patch(
    "ZeROOptimizer.get_grad_norm_direct",
    f"{SOURCE}/zero/stage3.py#L2419",
    "The norm is computed per tensor, with a copy of each in float64: 1,300 launches for the 446 tensors of ViT-L-14, "
    "while the GPU is idle.",
)
NORM_OVER_PARTS = Patch(
    "ZeROOptimizer._model_parallel_all_reduce",
    f"{SOURCE}/zero/stage3.py#L2412",
    "The norm counts a parameter that tensor-parallel ranks share on the first of them only. It misses a gradient that "
    "is not finite on another rank, and the step is made.",
)
NORM_OF_BF16 = Patch(
    "BF16_Optimizer.get_grads_for_norm",
    f"{SOURCE}/bf16_optimizer.py",
    "As NORM_OVER_PARTS, for stage 1 in BF16.",
)
RELEASE = Patch(
    "PartitionedParameterCoordinator._PartitionedParameterCoordinator__release_param",
    f"{SOURCE}/zero/partitioned_param_coordinator.py#L624",
    "Each of the 2M passes of a gradient cache gathers and releases all parameters again.",
)
RELEASE_ALL = Patch(
    "PartitionedParameterCoordinator.release_and_reset_all",
    f"{SOURCE}/zero/partitioned_param_coordinator.py#L537",
    "As RELEASE. Before the update, the kept parameters must be released.",
)
PRE_FORWARD, POST_FORWARD, PRE_BACKWARD, POST_BACKWARD = (
    Patch(
        f"DeepSpeedZeRoOffload.{when}_sub_module_{pass_}_function",
        f"{SOURCE}/zero/parameter_offload.py#L{line}",
        "Before and after each module the host counts its parameters, whether they are gathered or not.",
    )
    for pass_, when, line in (
        ("forward", "pre", 531), ("forward", "post", 555), ("backward", "pre", 573), ("backward", "post", 594),
    )
)  # fmt: skip
MEMORY_REPORT = Patch(
    "bf16_optimizer.see_memory_usage", f"{SOURCE}/bf16_optimizer.py#L54", "It prints at any log level."
)


def scale_between_steps(scaler: Any) -> Callable[[], None]:
    """Make a dynamic loss scaler defer its update after a finite step.

    Returns:
        A function that makes the deferred update.
    """
    finite_steps: list[Callable[[], None]] = []

    def update_later(update: Callable[[bool], None], overflow: bool) -> None:
        if overflow:  # the step is skipped, so nothing is divided by the scale
            update(True)
        else:
            finite_steps.append(lambda: update(False))

    def settle() -> None:
        while finite_steps:
            finite_steps.pop()()

    LEAST_SCALE.apply(scaler, lambda raises: False)
    SCALE.wrap(scaler, update_later)
    return settle


def release_by_the_present_trace(optimizer: Any) -> None:
    """Make a stage-3 optimizer clear its cache of released parameters whenever it invalidates the trace."""
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    cache = _cached_function(type(coordinator)._PartitionedParameterCoordinator__params_to_release)

    def invalidate_and_clear(invalidate: Callable[[], None]) -> None:
        invalidate()
        cache.cache_clear()

    TRACE.wrap(coordinator, invalidate_and_clear)


def _cached_function(function: Any) -> _lru_cache_wrapper:
    """Return the function with lru_cache inside the wrappers of a method."""
    while not isinstance(function, _lru_cache_wrapper):
        function = next(cell.cell_contents for cell in function.__closure__ if callable(cell.cell_contents))
    return function


def take_norm_together(optimizer: Any) -> None:
    """Make a ZeRO optimizer compute the gradient norm in a few launches, in float32.

    Optimizers with state in host memory, and BF16_Optimizer (stage 1 in BF16), are not patched.
    """
    in_host_memory = getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False)
    if not hasattr(optimizer, "get_grad_norm_direct") or in_host_memory:
        return
    stage_3 = is_stage_3(optimizer)
    from deepspeed.runtime.utils import is_model_parallel_parameter

    def norm_of(gradients: list[torch.Tensor], parameters: list[torch.nn.Parameter]):
        """Return the norm over all ranks' gradients as get_grad_norm_direct does: [] f32, -1 if it is not finite."""
        present = (gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False))
        group, everywhere = optimizer.dp_process_group, False
        if stage_3:
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

    NORM.apply(optimizer, lambda installed: norm_of)


def square_of(tensors: Iterable[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """Return the sum of the squares of the tensors that are not None, [] f32 on `device`.

    A GPU adds up in parts, all tensors in a few launches. A CPU adds up in sequence, so it uses float64: float32 would
    be half a percent off at 4e7 elements.
    """
    present = [tensor for tensor in tensors if tensor is not None and tensor.numel()]
    if not present:
        return torch.zeros((), device=device)
    if present[0].is_cpu:
        norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in present]
        return torch.stack(norms).square().sum().to(device, torch.float32)
    return torch.nn.utils.get_total_norm([tensor.float() for tensor in present]).to(device).square()


def add_to_norm(optimizer: Any, flag: torch.Tensor) -> None:
    """Add `flag` [1] f32 to the norm of a ZeRO optimizer: 0 leaves the norm unchanged, NaN makes it NaN.

    The engine all-reduces the flag over all ranks before the step. The flag stays on the device. DeepSpeed reads the
    norm anyway and skips the step itself.
    """

    def all_reduce_and_add(all_reduce: Callable[..., None], tensor: torch.Tensor, op: Any) -> None:
        all_reduce(tensor=tensor, op=op)
        if tensor.is_floating_point():  # the other calls pass bytes, the overflow flags
            tensor.add_(flag.view_as(tensor))

    def get_gradients_and_flag(get_gradients: Callable[..., Any], for_clipping: bool = False):
        if for_clipping:
            return get_gradients(for_clipping=True)
        gradients, of_experts = get_gradients()
        return [*gradients, flag], of_experts

    if hasattr(optimizer, "_model_parallel_all_reduce"):  # DeepSpeed calls it with a group's sum of squares
        NORM_OVER_PARTS.wrap(optimizer, all_reduce_and_add)
    else:
        NORM_OF_BF16.wrap(optimizer, get_gradients_and_flag)
