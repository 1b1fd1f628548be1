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
_WHY_NORM = (
    "The norm is computed per tensor, with a copy of each in float64: 1,300 launches for the 446 tensors of ViT-L-14, "
    "while the GPU is idle. It misses a gradient that is not finite in a copy of a parameter that only the first "
    "tensor-parallel rank counts, and the step is made. The engine has the norm already."
)
NORM = Patch("ZeROOptimizer.scaled_global_norm", f"{SOURCE}/zero/stage_1_and_2.py#L2943", _WHY_NORM)
NORM_OF_STAGE_3 = Patch("ZeROOptimizer._get_norm_groups", f"{SOURCE}/zero/stage3.py#L2573", _WHY_NORM)
NORM_OF_BF16 = Patch("BF16_Optimizer.get_grads_for_norm", f"{SOURCE}/bf16_optimizer.py#L547", _WHY_NORM)
NORM_OF_STAGE_0 = Patch("DeepSpeedEngine.clip_fp32_gradients", f"{SOURCE}/engine.py#L3502", _WHY_NORM)
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


def use_norm(engine: Any, norm: Callable[[], torch.Tensor], *, counts: bool) -> None:
    """Make a DeepSpeedEngine clip by `norm`, and in stages 1 to 3 skip a step whose norm is not finite.

    Args:
        engine: changed in place.
        norm: returns the norm of all ranks' gradients times the loss scale, [] f32.
        counts: whether DeepSpeed counts this rank; it adds up the squares of tensor-parallel ranks.
    """
    optimizer = engine.optimizer

    def clip() -> None:
        factor = (engine.gradient_clipping() / (norm() + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([p.grad for p in engine.module.parameters() if p.grad is not None], factor)

    def gradients(get_gradients: Callable[..., Any], for_clipping: bool = False) -> Any:
        return get_gradients(for_clipping=True) if for_clipping else ([norm() * counts], {})

    if not engine.zero_optimization():
        NORM_OF_STAGE_0.apply(engine, lambda installed: clip)
    elif is_stage_3(optimizer):
        NORM_OF_STAGE_3.apply(optimizer, lambda installed: lambda: [norm()])
    elif hasattr(optimizer, "get_grads_for_norm"):
        NORM_OF_BF16.wrap(optimizer, gradients)
    else:
        NORM.apply(optimizer, lambda installed: norm)


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
