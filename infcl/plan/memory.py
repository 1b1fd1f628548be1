"""Bytes of a rank's memory, part by part: on the GPU (`parts_of`) and in host memory (`host_parts`).

These are estimates from the sizes in a `Load`. They exclude the allocator's fragments, the CUDA context and the layers
that ZeRO-3 gathers; a profile's `usable_bytes` leaves room for them. They are within 5% of the peaks measured on H200s
(ZeRO-1 and 3, including offload and losses that store their logits): docs/benchmarks/planner.md. Host memory follows
the allocations of DeepSpeed 0.19.8 (tests/plan/test_plan_host.py) and excludes the process itself, the loader's workers
and prefetched data, and evaluations.

Sizes: P parameters, T trainable ones, N data-parallel ranks, b samples per rank, D embedding width.
"""

import math

from infcl.config.preset import bucket_elements, is_bf16_optimizer, sums_gradients_on_host
from infcl.kernels import WORKSPACE_BYTES
from infcl.plan.activations import graph_bytes
from infcl.plan.loads import Load, load_of
from infcl.plan.setting import Setting

HEADROOM = 0.08  # share of device memory that cached activations leave for fragments and library workspaces
_BUCKETS_AHEAD = 3  # DeepSpeed's stage 3 waits for the third last bucket (max_param_reduce_events)
_SUB_GROUP = 1e9  # elements: DeepSpeed's sub_group_size


def memory_of(setting: Setting) -> dict[str, float]:
    """Return {part: bytes per GPU} of a planned setting; the last entry is the "peak"."""
    return parts_of(load_of(setting))


def parts_of(load: Load) -> dict[str, float]:
    """Return {part: bytes per rank}.

    The last entry is the "peak". It is less than the sum, because some parts do not exist at the same time: it is the
    larger of the loss, before any backward, and the replays after it.
    """
    graphs, batch = graph_bytes(load), load.batch
    buckets = bucket_bytes(load, graph=graphs["activations"] / load.cached)
    if load.on_cpu:  # a bucket's pages are allocated when a gradient is first written to them
        buckets = min(buckets, (12.0 if load.stage == 1 else 8.0) * load.trainable)
    parts = state_bytes(load) | {"gradient buckets": buckets, "gathered parameters": gathered_bytes(load)} | graphs
    tokens = 8.0 * load.model.text_cfg.context_length
    parts["cached data"] = pixels_on_device(load) + batch.rank_batch_size * (tokens + load.trunks)
    parts |= _loss_of(load)
    # Before the first backward, DeepSpeed's stages 1 and 2 have no buckets. Stage 1 has no gradients either, except the
    # FP32 sums of its BF16_Optimizer.
    late = parts["backward"] + (parts["gradient buckets"] if load.stage in (1, 2) else 0.0)
    if load.stage == 1:
        late += parts["gradients"] * (1 / 3 if _is_bf16_optimizer(load) else 1)
    return parts | {"peak": sum(parts.values()) - min(late, parts["loss"])}


def reserved_bytes(load: Load) -> float:
    """Return the bytes that cached activations must leave free, besides HEADROOM, parameters and optimizer.

    These are gradients and a bucket of them, the loss and its workspace, the bytes that a backward adds to the graphs
    (with recomputation more than half a graph), trunks of frozen blocks, and pixels on the device or in transit.
    """
    passing = graph_bytes(load)["backward"] + pixels_on_device(load) + load.batch.rank_batch_size * load.trunks
    return 8 * load.trainable + sum(_loss_of(load).values()) + WORKSPACE_BYTES + passing


# ---- on the GPU ----


def state_bytes(load: Load) -> dict[str, float]:
    """Return {"parameters", "gradients", "optimizer"}: bytes per rank of training state.

    With fp32 and amp_bf16, parameters and gradients have 4 bytes. With bf16 and fp16, parameters have 2 bytes, and
    gradients are accumulated in FP32; BF16_Optimizer also keeps gradients of 2 bytes. From stage 1 on, the optimizer
    has FP32 master weights of the rank's share.
    """
    share, sharded = 1 / load.batch.dp_size, load.stage > 0
    parts = {
        "parameters": load.parameters * load.element_bytes * (share if load.stage == 3 else 1),
        "gradients": load.trainable * (6.0 if _is_bf16_optimizer(load) else 4.0),
        "optimizer": load.trainable * ((4 + load.moments) * share if sharded else load.moments),
    }
    if load.stage > 1:
        parts["gradients"] = load.trainable * 4 * share
    if load.offloaded:
        parts |= {"gradients": _passing_bytes(load), "optimizer": 0.0}
    if "param" in load.offloads:
        parts["parameters"] = 0.0
    return parts


def _is_bf16_optimizer(load: Load) -> bool:
    return is_bf16_optimizer(load.stage, load.precision, offloaded=load.offloaded)


def _passing_bytes(load: Load) -> float:
    """Return the peak bytes of gradients on their way from the GPU to an offloaded optimizer.

    ZeRO-3: the backward runs ahead by up to three buckets, whose gradients wait for the stream that transfers them; on
    a CPU it does not. The bucket in transit exists a second time; in half precision the rank's share of it exists in
    FP32 too. ZeRO-2 in half precision keeps the FP32 sums. ZeRO-1 keeps full gradients until the last micro-batch.
    """
    ranks, trainable, width = load.batch.dp_size, load.trainable, load.element_bytes
    if load.stage < 3:
        on_host = sums_gradients_on_host(load.stage, load.precision)
        return 0.0 if on_host else trainable * 4 / (ranks if load.stage == 2 else 1)
    if load.on_cpu:
        return 0.0
    bucket = bucket_elements(load.zero, 3)
    in_transit = width + (4 / ranks if load.half else 0)
    return min(trainable, _BUCKETS_AHEAD * bucket) * width + min(trainable, bucket) * in_transit


def bucket_bytes(load: Load, *, graph: float = 0.0) -> float:
    """Return the bytes per rank of DeepSpeed's gradient buckets, which it allocates in full for any size of model.

    Stages 1 and 2 have one bucket, or two with overlap_comm; stage 3 has one. An element takes 2 bytes in stages 2 and
    3 with half-precision parameters, else 4. FP32 buckets that fill before the backward ends are flattened while
    activations exist, except for the share of the `graph` bytes that is freed by then.

    Stage 3 without offload has gradients instead of a buffer (engine/zero3.py): the filling bucket, one in transit,
    and its flattened copy. A bucket larger than the model counts in full, like DeepSpeed's own buffer. The actual bytes
    are between zero and twice the model's gradients.
    """
    if load.stage == 0 or _is_bf16_optimizer(load):
        return 0.0
    size, trainable = bucket_elements(load.zero, load.stage), load.trainable
    if load.stage == 3 and not load.offloaded and load.zero.get("reduce_scatter", True):
        return min(3 * size, max(size, trainable)) * load.element_bytes
    count = 2 if load.stage < 3 and load.zero.get("overlap_comm", False) else 1
    if load.stage > 1 and load.half:
        return size * 2 * count
    return size * 4 * count + (max(0.0, 4 * size - graph * size / trainable) if trainable > size else 0.0)


def gathered_bytes(load: Load) -> float:
    """Return the peak bytes per rank of other ranks' parameters that stage 3 has gathered.

    Parameters that are used again within `stage3_max_reuse_distance` stay, and a prefetch bucket is in transit. Above
    `stage3_max_live_parameters`, DeepSpeed 0.19.8 only stops prefetching.
    """
    if load.stage < 3:
        return 0.0
    reach = load.zero.get("stage3_max_reuse_distance", 1e9) + load.zero.get("stage3_prefetch_bucket_size", 5e7)
    return min(load.parameters, reach) * load.element_bytes * (1 - 1 / load.batch.dp_size)


def pixels_on_device(load: Load) -> float:
    """Return the bytes of pixels on the device: in transit to it, and cached there."""
    return load.micro_batch_pixels * load.uploads + load.pixels_on_gpu * load.waiting_pixels


def loss_bytes(
    name: str, *, rows: int, ranks: int, width: int, precision: str = "amp_bf16", two_level: bool = False
) -> dict[str, float]:
    """Return the bytes per rank of the loss.

    The ring loss needs features and a bounded workspace. With several ranks it also needs two blocks in transit, their
    two gradient blocks, and the terms that are added to these. A two-level ring needs two more blocks in transit to the
    next node, three more gradient blocks, and the first part of each later lap. The baselines store logits and softmax
    of both directions in FP32, DisCo-CLIP those of one direction at a time. They gather at least as much as a ring
    sends.

    Args:
        name: the loss.
        rows: samples per rank, b.
        ranks: ranks of the loss.
        width: embedding width, D.
        precision: "fp32", "amp_bf16", "bf16" or "fp16".
        two_level: whether the ring has two levels.

    Returns:
        {"feature gradients": FP32 gradients of both sides' features, which stay until the last replay; "loss": bytes
        that only the loss needs}.
    """
    block = rows * width * 4
    matrix = {"clip": 16 * ranks * rows * rows * ranks, "open_clip": 16 * rows * rows * ranks}
    matrix["disco"] = 8 * rows * rows * ranks
    workspace = matrix[name] if name in matrix else min(WORKSPACE_BYTES, 16 * rows * rows)
    around = (4 + two_level if ranks > 1 else 0) * block
    if two_level:
        around += 2 * (4 if precision == "fp32" else 2) * rows * width + 3 * block
    return {"feature gradients": 2 * block, "loss": 2 * block + around + workspace}


def _loss_of(load: Load) -> dict[str, float]:
    """Return {"feature gradients", "loss"}, including the rows of the other tensor-parallel ranks."""
    samples, width = load.batch.rank_batch_size, load.model.embed_dim
    rows, ranks = samples // load.tensor_parallel, load.batch.dp_size * load.tensor_parallel
    sizes = {"rows": rows, "ranks": ranks, "width": width}
    parts = loss_bytes(load.loss, **sizes, precision=load.precision, two_level=load.two_level)
    others = 2.0 * (samples - rows) * width * 4
    parts["feature gradients"] += others
    parts["loss"] += max(others, samples * load.trunks)  # trunks are concatenated at its start
    return parts


# ---- in host memory ----


def host_parts(load: Load) -> dict[str, float]:
    """Return {"optimizer", "gradients", "parameters", "pixels", "checkpoint"}: host bytes per rank.

    With an offloaded optimizer, ZeRO-3 stores per element the FP32 master weight, the optimizer's state and two
    gradients: the sum over micro-batches and the optimizer's input. ZeRO-1 and 2 store one gradient and, instead of the
    sum, a copy of the new parameter on its way to the GPU. ZeRO-2 with FP32 parameters also sums on the host. On a CPU
    these bytes are in the same memory as those of `parts_of`.
    """
    width, own = load.element_bytes, load.trainable / load.batch.dp_size
    parts = dict.fromkeys(("optimizer", "gradients", "parameters"), 0.0)
    if load.offloaded:
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
    first = 4.0 * load.trainable * load.tensor_parallel if load.half else 0.0
    return ranks * (sum(parts.values()) - later) + max(first, ranks * later)


def _pins(load: Load, part: str) -> bool:
    return not load.on_cpu and load.zero.get(f"offload_{part}", {}).get("pin_memory", False)


def _pinned(size: float) -> float:
    """Return the bytes that torch allocates for pinned memory: the next power of 2."""
    return 2.0 ** math.ceil(math.log2(size)) if size > 0 else 0.0
