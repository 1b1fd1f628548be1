"""Bytes of host memory, part by part: ZeRO's offloaded state, cached pixels, and the copy for a checkpoint.

The count follows the allocations of DeepSpeed 0.19.8 (tests/plan/test_plan_host.py). Not counted: the process itself,
the loader's workers and prefetched data, evaluations.

Sizes: T trainable parameters, N data-parallel ranks; a rank owns T / N of the state.
"""

import math

from infcl.config.preset import sums_gradients_on_host
from infcl.plan.memory import Load

_SUB_GROUP = 1e9  # elements: DeepSpeed's sub_group_size


def host_parts(load: Load) -> dict[str, float]:
    """Return {"optimizer", "gradients", "parameters", "pixels", "checkpoint"}: host bytes per rank.

    With an offloaded optimizer, ZeRO-3 stores per element the FP32 master weight, the optimizer's state and two
    gradients: the sum over micro-batches and the optimizer's input. ZeRO-1 and 2 store one gradient and, instead of the
    sum, a copy of the new parameter on its way to the GPU. ZeRO-2 with FP32 parameters also sums on the host. On a CPU
    these bytes are in the same memory as those of `parts_of`.
    """
    width, own = 2 if load.precision in ("bf16", "fp16") else 4, load.trainable / load.batch.dp_size
    parts = dict.fromkeys(("optimizer", "gradients", "parameters"), 0.0)
    if "optimizer" in load.offloads:
        size = _pinned if _pins(load, "optimizer") else float
        if load.stage == 3:
            group = load.zero.get("sub_group_size", _SUB_GROUP)
            groups = int(own // group) * size(4 * group) + size(4 * (own % group))
            parts["optimizer"], parts["gradients"] = (4 + load.moments) * own, groups + size(4 * own)
        else:
            parts["optimizer"] = size(4 * own) + load.moments * own
            parts["gradients"], parts["parameters"] = size(4 * own), size(width * own)
            if sums_gradients_on_host(load.stage, load.precision) and load.batch.num_micro_batches > 1:
                parts["gradients"] += 4 * own
    if "param" in load.offloads:
        size = _pinned if _pins(load, "param") else float
        parts["parameters"] += size(width * load.parameters / load.batch.dp_size)
    return parts | {"pixels": 0.0 if load.pixels_on_gpu else load.waiting_pixels, "checkpoint": load.checkpoint}


def host_bytes(load: Load, ranks: int) -> float:
    """Return the peak bytes of the node that has the run's first rank.

    The first rank begins with FP32 copies of half-precision parameters. They are freed before pixels are cached and
    checkpoints are written.

    Args:
        load: inputs of the estimate.
        ranks: ranks per node.
    """
    parts = host_parts(load)
    later = parts["pixels"] + parts["checkpoint"]
    first = 4.0 * load.trainable * load.tensor_parallel if load.precision in ("bf16", "fp16") else 0.0
    return ranks * (sum(parts.values()) - later) + max(first, ranks * later)


def _pins(load: Load, part: str) -> bool:
    return not load.on_cpu and load.zero.get(f"offload_{part}", {}).get("pin_memory", False)


def _pinned(size: float) -> float:
    """Return the bytes that torch allocates for pinned memory: the next power of 2."""
    return 2.0 ** math.ceil(math.log2(size)) if size > 0 else 0.0
