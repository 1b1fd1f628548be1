"""Bytes of a rank's memory, part by part: on the GPU (`memory_of`) and in host memory (`host_parts`).

These are estimates from the sizes in a `Setting`. They exclude the allocator's fragments, the CUDA context and the
layers that ZeRO-3 gathers; a profile's `usable_bytes` leaves room for them. They are within 5% of the peaks measured on
H200s (ZeRO-1 and 3, including offload and losses that store their logits): docs/benchmarks/planner.md. Host memory
follows the allocations of DeepSpeed 0.19.8 (tests/plan/test_plan_host.py) and excludes the process itself, the loader's
workers and prefetched data, and evaluations.

Sizes: P parameters, T trainable ones, N data-parallel ranks, b samples per rank, D embedding width.
"""

import math

from infcl.config.precision import Precision
from infcl.config.preset import bucket_elements, sums_gradients_on_host
from infcl.kernels import WORKSPACE_BYTES
from infcl.models.config import VisionConfig, kept_patches
from infcl.plan.setting import Setting
from infcl.step.pixels import UPLOAD_LEAD

HEADROOM = 0.08  # share of device memory that cached activations leave for fragments and library workspaces
_BUCKETS_AHEAD = 3  # DeepSpeed's stage 3 waits for the third last bucket (max_param_reduce_events)
_SUB_GROUP = 1e9  # elements: DeepSpeed's sub_group_size
# Bytes that a compiled graph spares under autocast, because it keeps the inputs of norms in their own dtype: half
# precision in the image tower, and in the text tower only for attention's output, once per graph.
_SPARED_BYTES = {"image": 4.0, "text": 2.0}


def memory_of(setting: Setting) -> dict[str, float]:
    """Return {part: bytes per rank}; the last entry is the "peak".

    The peak is less than the sum, because the loss is over before the first backward.
    """
    graphs = graph_bytes(setting)
    buckets = bucket_bytes(setting, graph=graphs["activations"] / setting.cached)
    if setting.on_cpu:  # a bucket's pages are allocated when a gradient is first written to them
        buckets = min(buckets, (12.0 if setting.zero == 1 else 8.0) * setting.trainable)
    tokens = 8.0 * setting.model.text_cfg.context_length
    parts = state_bytes(setting) | {"gradient buckets": buckets, "gathered parameters": gathered_bytes(setting)}
    parts |= graphs | {"cached data": pixels_on_device(setting) + setting.rank_batch * tokens}
    parts |= _loss_of(setting) | _teacher_of(setting)
    # Before the first backward, DeepSpeed's stages 1 and 2 have no buckets. Stage 1 has no gradients either, except the
    # FP32 sums of its BF16_Optimizer.
    late = parts["backward"] + (buckets if setting.zero in (1, 2) else 0.0)
    if setting.zero == 1:
        late += parts["gradients"] * (1 / 3 if setting.bf16_optimizer else 1)
    return parts | {"peak": sum(parts.values()) - min(late, parts["loss"])}


def reserved_bytes(setting: Setting) -> float:
    """Return the bytes that cached activations must leave free, besides HEADROOM, parameters and optimizer.

    These are gradients and a bucket of them, the loss, what a backward adds to the graphs, and pixels on the device or
    in transit.
    """
    passing = graph_bytes(setting)["backward"] + pixels_on_device(setting)
    losses = sum((_loss_of(setting) | _teacher_of(setting)).values())
    return 8 * setting.trainable + losses + WORKSPACE_BYTES + passing


# ---- training state on the GPU ----


def state_bytes(setting: Setting) -> dict[str, float]:
    """Return {"parameters", "gradients", "optimizer"}: bytes per rank of training state.

    With fp32 and amp_bf16, parameters and gradients have 4 bytes. With bf16 and fp16, parameters have 2 bytes, and
    gradients are accumulated in FP32; BF16_Optimizer also keeps gradients of 2 bytes. From stage 1 on, the optimizer
    has FP32 master weights of the rank's share.
    """
    share, stage, trainable = 1 / setting.dp_size, setting.zero, setting.trainable
    parts = {
        "parameters": setting.parameters * setting.element_bytes * (share if stage == 3 else 1),
        "gradients": trainable * (4 * share if stage > 1 else 6.0 if setting.bf16_optimizer else 4.0),
        "optimizer": trainable * ((4 + setting.moments) * share if stage else setting.moments),
    }
    if setting.offload:
        parts |= {"gradients": _passing_bytes(setting), "optimizer": 0.0}
    if "param" in setting.offloads:
        parts["parameters"] = 0.0
    return parts


def _passing_bytes(setting: Setting) -> float:
    """Return the peak bytes of gradients on their way from the GPU to an offloaded optimizer.

    ZeRO-3: on a GPU the backward runs ahead by up to three buckets. The bucket in transit exists a second time; in half
    precision the rank's share of it exists in FP32 too. ZeRO-2 in half precision keeps the FP32 sums, ZeRO-1 full
    gradients until the last micro-batch.
    """
    ranks, trainable, width = setting.dp_size, setting.trainable, setting.element_bytes
    if setting.zero < 3:
        on_host = sums_gradients_on_host(setting.zero, setting.precision)
        return 0.0 if on_host else trainable * 4 / (ranks if setting.zero == 2 else 1)
    if setting.on_cpu:
        return 0.0
    bucket = bucket_elements(setting.zero_optimization, 3)
    in_transit = width + (4 / ranks if setting.precision.half_parameters else 0)
    return min(trainable, _BUCKETS_AHEAD * bucket) * width + min(trainable, bucket) * in_transit


def bucket_bytes(setting: Setting, *, graph: float = 0.0) -> float:
    """Return the bytes per rank of DeepSpeed's gradient buckets, which it allocates in full for any size of model.

    Stages 1 and 2 have one bucket, or two with overlap_comm; stage 3 has one. An element takes 2 bytes in stages 2 and
    3 with half-precision parameters, else 4. FP32 buckets that fill before the backward ends are flattened while
    activations exist, except for the share of the `graph` bytes that is freed by then. Stage 3 without offload has
    gradients instead of a buffer (engine/zero3.py): the filling bucket, one in transit, and its flattened copy.
    """
    if setting.zero == 0 or setting.bf16_optimizer:
        return 0.0
    options, trainable = setting.zero_optimization, setting.trainable
    size = bucket_elements(options, setting.zero)
    if setting.zero == 3 and not setting.offload and options.get("reduce_scatter", True):
        return min(3 * size, max(size, trainable)) * setting.element_bytes
    count = 2 if setting.zero < 3 and options.get("overlap_comm", False) else 1
    if setting.zero > 1 and setting.precision.half_parameters:
        return size * 2 * count
    return size * 4 * count + (max(0.0, 4 * size - graph * size / trainable) if trainable > size else 0.0)


def gathered_bytes(setting: Setting) -> float:
    """Return the peak bytes per rank of other ranks' parameters that stage 3 has gathered.

    Parameters that are used again within `stage3_max_reuse_distance` stay, and a prefetch bucket is in transit. Above
    `stage3_max_live_parameters`, DeepSpeed 0.19.8 only stops prefetching.
    """
    if setting.zero < 3:
        return 0.0
    options = setting.zero_optimization
    reach = options.get("stage3_max_reuse_distance", 1e9) + options.get("stage3_prefetch_bucket_size", 5e7)
    return min(setting.parameters, reach) * setting.element_bytes * (1 - 1 / setting.dp_size)


def pixels_on_device(setting: Setting) -> float:
    """Return the bytes of pixels on the device: in transit to it, and cached there."""
    cached = setting.waiting_pixels if setting.pixels == "device" else 0.0
    uploads = 0 if setting.on_cpu else 1 + UPLOAD_LEAD
    return setting.micro_batch_pixels * uploads + cached


# ---- the loss ----


def loss_bytes(
    name: str, *, rows: int, ranks: int, width: int, feature_bytes: int = 2, two_level: bool = False
) -> dict[str, float]:
    """Return {"feature gradients", "loss"}: bytes per rank. FP32 feature gradients stay until the last replay.

    The ring loss needs features and a bounded workspace. With several ranks it also needs two blocks in transit, their
    two gradient blocks, and the terms that are added to these. A two-level ring needs two more blocks in transit to the
    next node, three more gradient blocks, and the first part of each later lap. The baselines store logits and softmax
    of both directions in FP32, DisCo-CLIP those of one direction at a time.

    Args:
        rows: samples per rank, b.
        width: embedding width, D.
        feature_bytes: bytes per number of the features that the tile multiplies.
    """
    block = rows * width * 4
    matrix = {"clip": 16 * ranks * rows * rows * ranks, "open_clip": 16 * rows * rows * ranks}
    matrix["disco"] = 8 * rows * rows * ranks
    workspace = matrix[name] if name in matrix else min(WORKSPACE_BYTES, 16 * rows * rows)
    around = (4 + two_level if ranks > 1 else 0) * block
    if two_level:
        around += 2 * feature_bytes * rows * width + 3 * block
    return {"feature gradients": 2 * block, "loss": 2 * block + around + workspace}


def _loss_of(setting: Setting) -> dict[str, float]:
    """Return {"feature gradients", "loss"}, including the rows of the other tensor-parallel ranks.

    With Matryoshka widths, prefixes of the features and their gradients are FP32 copies.
    """
    rows, width = setting.loss_rows, setting.model.embed_dim
    sizes = {"rows": rows, "ranks": setting.gpus, "width": width}
    size = setting.precision.matmul_dtype.itemsize
    parts = loss_bytes(setting.loss, **sizes, feature_bytes=size, two_level=setting.two_level)
    others = 2.0 * (setting.rank_batch - rows) * width * 4
    parts["feature gradients"] += others
    parts["loss"] += others
    if setting.widths:
        parts["loss"] += 2.0 * rows * (sum(setting.widths) + width) * 4
    return parts


def _teacher_of(setting: Setting) -> dict[str, float]:
    """Return {"teacher"}: bytes per rank of a teacher's FP32 model and of what its loss adds; {} without one.

    These are its FP32 embeddings of all samples, their operands, two blocks of these in transit, and two more sets of
    FP32 feature gradients: those that wait for the backward, and their sum with those of --loss.
    """
    parameters, width = setting.teacher
    if not width:
        return {}
    rows, size = setting.loss_rows, setting.precision.matmul_dtype.itemsize
    operands = 2 * rows * width * size * (1 if setting.gpus == 1 else 2)
    gradients = 2 * (2 * rows * setting.model.embed_dim * 4)
    return {"teacher": 4.0 * parameters + 2 * setting.rank_batch * width * 4 + operands + gradients}


# ---- activations ----


def activation_bytes(setting: Setting) -> float:
    """Return the bytes that the graph of one micro-batch keeps between forward and backward."""
    return sum(kept for kept, _ in _graphs(setting).values())


def graph_bytes(setting: Setting) -> dict[str, float]:
    """Return {"activations": bytes of the cached graphs, "backward": most bytes that a backward adds}.

    The text tower is last in the forward and first in the backward. Its graph is freed before the backward of the image
    tower's blocks.
    """
    # Autocast keeps half-precision copies of the weights in a graph; with recomputation only those of one block.
    cast = 2.0 * setting.trainable if setting.precision.autocast and not setting.checkpointing else 0.0
    graphs = _graphs(setting)
    return {
        "activations": activation_bytes(setting) * setting.cached + cast,
        "backward": max(graphs["text"][1], graphs["image"][1] - graphs["text"][0]),
    }


def _graphs(setting: Setting) -> dict[str, tuple[float, float]]:
    """Return {"image", "text"}: (bytes that the forward of a micro-batch keeps, bytes that its backward adds).

    With activation checkpointing the forward keeps each block's input, and the backward recomputes one full block. In
    any case the backward adds the gradients of GELU and of the residual stream in one block. Tensor-parallel ranks
    divide the activations between the linear layers that they split. The image tower also keeps its pixels, the first
    norm's input, and the last block's full output, of which the head takes a view.
    """
    vision, text, width = setting.model.vision_cfg, setting.model.text_cfg, setting.precision.matmul_dtype.itemsize
    parts, size = setting.tensor_parallel, setting.micro_batch
    trained = setting.blocks
    patches = 1 + kept_patches(vision.num_patches, vision.patch_dropout)
    graphs = {}
    for name, tokens, tower in (("image", patches, vision), ("text", text.context_length, text)):
        stream: float = setting.stream_bytes[name]
        inside = (8 + 4 * tower.mlp_ratio) * width / 2  # of which 2 x ratio before GELU and 2 x ratio after it
        outside = block_bytes(setting.precision) - 24 * width / 2
        if setting.precision.autocast and setting.compiled:
            outside -= _SPARED_BYTES[name]
        block, passing = outside + inside / parts, width * (tower.mlp_ratio / parts + 2)
        kept, added = (stream, block + passing) if setting.checkpointing else (block, passing)
        numbers = size * tokens * tower.width
        graphs[name] = trained[name] * kept * numbers, added * numbers if trained[name] else 0.0
    stream = patches * vision.width * setting.stream_bytes["image"]
    around = stream if trained["image"] else 0.0
    if trained["image"] == vision.layers:
        around += stream + (3 * vision.image_size**2 + _stem_numbers(vision)) * width
    return graphs | {"image": (graphs["image"][0] + size * around, graphs["image"][1])}


def block_bytes(precision: Precision) -> int:
    """Return the bytes that a block keeps for its backward, per token and unit of width at an MLP ratio of 4.

    They are the inputs of both norms, of the four linear layers and of GELU, and q, k and v. Attention keeps no matrix.
    Under autocast, both norms keep their inputs in FP32.
    """
    return 16 * precision.matmul_dtype.itemsize + 4 * precision.autocast


def _stem_numbers(vision: VisionConfig) -> int:
    """Return how many numbers per image a convolutional stem keeps: inputs and outputs of its GELUs, not recomputed."""
    numbers, side = 0, vision.image_size
    for channels, _, stride in (vision.conv_stem or ())[:-1]:
        side //= stride
        numbers += 2 * channels * side**2
    return numbers


# ---- in host memory ----


def host_parts(setting: Setting) -> dict[str, float]:
    """Return {"optimizer", "gradients", "parameters", "pixels", "checkpoint"}: host bytes per rank.

    With an offloaded optimizer, ZeRO-3 stores per element the FP32 master weight, the optimizer's state and two
    gradients: the sum over micro-batches and the optimizer's input. ZeRO-1 and 2 store one gradient and, instead of the
    sum, a copy of the new parameter on its way to the GPU. ZeRO-2 with FP32 parameters also sums on the host. On a CPU
    these bytes are in the same memory as those of `memory_of`.
    """
    width, own, moments = setting.element_bytes, setting.trainable / setting.dp_size, setting.moments
    parts = dict.fromkeys(("optimizer", "gradients", "parameters"), 0.0)
    if setting.offload:
        size = _pinned if _pins(setting, "optimizer") else float
        if setting.zero == 3:
            group = setting.zero_optimization.get("sub_group_size", _SUB_GROUP)
            groups = int(own // group) * size(4 * group) + size(4 * (own % group))
            parts["optimizer"], parts["gradients"] = (4 + moments) * own, groups + size(4 * own)
        else:
            parts["optimizer"] = size(4 * own) + moments * own
            parts["gradients"], parts["parameters"] = size(4 * own), size(width * own)
            if sums_gradients_on_host(setting.zero, setting.precision) and setting.num_micro_batches > 1:
                parts["gradients"] += 4 * own
    if "param" in setting.offloads:
        size = _pinned if _pins(setting, "param") else float
        parts["parameters"] += size(width * setting.parameters / setting.dp_size)
    pixels = 0.0 if setting.pixels == "device" else setting.waiting_pixels
    return parts | {"pixels": pixels, "checkpoint": setting.checkpoint / setting.dp_size}


def host_bytes(setting: Setting, ranks: int) -> float:
    """Return the peak bytes of the node of the run's first rank, which has `ranks` ranks.

    The first rank begins with FP32 copies of half-precision parameters. They are freed before pixels are cached and
    checkpoints are written.
    """
    parts = host_parts(setting)
    later = parts["pixels"] + parts["checkpoint"]
    first = 4.0 * setting.trainable * setting.tensor_parallel if setting.precision.half_parameters else 0.0
    return ranks * (sum(parts.values()) - later) + max(first, ranks * later)


def _pins(setting: Setting, part: str) -> bool:
    return not setting.on_cpu and setting.zero_optimization.get(f"offload_{part}", {}).get("pin_memory", False)


def _pinned(size: float) -> float:
    """Return the bytes that torch allocates for pinned memory: the next power of 2."""
    return 2.0 ** math.ceil(math.log2(size)) if size > 0 else 0.0
