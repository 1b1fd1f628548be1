"""Bytes per rank of single parts of a step's memory: state of ZeRO and buffers of the loss, computed from sizes.

Sizes: P parameters, T trainable ones, N data-parallel ranks, b samples per rank, D embedding width.
"""

from infcl.config.preset import bucket_elements, is_bf16_optimizer, sums_gradients_on_host
from infcl.kernels import WORKSPACE_BYTES

_BUCKETS_AHEAD = 3  # DeepSpeed's stage 3 waits for the third last bucket (max_param_reduce_events)


def state_bytes(
    parameters: int,
    trainable: int,
    *,
    stage: int,
    ranks: int,
    precision: str,
    moments: int = 8,
    offloaded: bool = False,
) -> dict[str, float]:
    """Return the bytes per rank of training state; tests/plan/test_plan_memory.py counts them.

    With fp32 and amp_bf16, parameters and gradients have 4 bytes. With bf16 and fp16, parameters have 2 bytes, and
    gradients are accumulated in FP32; BF16_Optimizer also keeps gradients of 2 bytes. From stage 1 on, the optimizer
    has FP32 master weights of the rank's share.

    Args:
        parameters: number of parameters, P.
        trainable: number of trainable parameters, T.
        stage: ZeRO stage.
        ranks: data-parallel ranks, N.
        precision: "fp32", "amp_bf16", "bf16" or "fp16".
        moments: bytes of optimizer state per element (8: Adam's two moments).
        offloaded: whether the optimizer is in host memory.

    Returns:
        {"parameters", "gradients", "optimizer"}.
    """
    width, share = 2 if precision in ("bf16", "fp16") else 4, 1 / ranks
    whole, own = (
        trainable * (6 if is_bf16_optimizer(stage, precision, offloaded=offloaded) else 4),
        trainable * share * 4,
    )
    return {
        "parameters": parameters * width * (share if stage == 3 else 1),
        "gradients": whole if stage < 2 else own,
        "optimizer": trainable * (moments if stage == 0 else (4 + moments) * share),
    }


def passing_bytes(zero_optimization: dict, trainable: int, *, stage: int, ranks: int, precision: str) -> float:
    """Return the peak bytes per rank of gradients on their way from the GPU to an offloaded optimizer.

    ZeRO-3: the backward runs ahead by up to three buckets, whose gradients wait for the stream that transfers them. The
    bucket in transit exists a second time; in half precision the rank's share of it exists in FP32 too. ZeRO-2 in half
    precision keeps the FP32 sums. ZeRO-1 keeps full gradients until the last micro-batch.
    """
    if stage < 3:
        return 0.0 if sums_gradients_on_host(stage, precision) else trainable * 4 / (ranks if stage == 2 else 1)
    bucket, width = bucket_elements(zero_optimization, 3), 2 if precision in ("bf16", "fp16") else 4
    on_its_way = width + (4 / ranks if width == 2 else 0)
    return min(trainable, _BUCKETS_AHEAD * bucket) * width + min(trainable, bucket) * on_its_way


def bucket_bytes(
    zero_optimization: dict,
    trainable: int,
    *,
    stage: int,
    precision: str,
    offloaded: bool = False,
    graph: float = 0.0,
) -> float:
    """Return the bytes per rank of DeepSpeed's gradient buckets, which it allocates in full for any size of model.

    Stages 1 and 2 have one bucket, or two with overlap_comm; stage 3 has one. An element takes 2 bytes in stages 2 and
    3 with half-precision parameters, else 4. FP32 buckets that fill before the backward ends are flattened while
    activations exist, except for the share of the `graph` bytes that is freed by then.

    Stage 3 without offload has gradients instead of a buffer (engine/reduce.py): the filling bucket, one in transit,
    and its flattened copy. A bucket larger than the model counts in full, like DeepSpeed's own buffer. The actual bytes
    are between zero and twice the model's gradients.
    """
    if stage == 0 or is_bf16_optimizer(stage, precision, offloaded=offloaded):
        return 0.0
    size = bucket_elements(zero_optimization, stage)
    if stage == 3 and not offloaded and zero_optimization.get("reduce_scatter", True):
        return min(3 * size, max(size, trainable)) * (2 if precision in ("bf16", "fp16") else 4)
    if stage > 1 and precision in ("bf16", "fp16"):
        return size * 2 * (2 if stage < 3 and zero_optimization.get("overlap_comm", False) else 1)
    buffers = size * 4 * (2 if stage < 3 and zero_optimization.get("overlap_comm", False) else 1)
    return buffers + (max(0.0, 4 * size - graph * size / trainable) if trainable > size else 0.0)


def gathered_bytes(parameters: int, zero_optimization: dict, *, stage: int, ranks: int, precision: str) -> float:
    """Return the peak bytes per rank of other ranks' parameters that stage 3 has gathered.

    Parameters that are used again within `stage3_max_reuse_distance` stay, and a prefetch bucket is in transit. Above
    `stage3_max_live_parameters`, DeepSpeed 0.19.8 only stops prefetching.
    """
    reach = zero_optimization.get("stage3_max_reuse_distance", 1e9)
    reach += zero_optimization.get("stage3_prefetch_bucket_size", 5e7)
    return (min(parameters, reach) if stage == 3 else 0) * (2 if precision in ("bf16", "fp16") else 4) * (1 - 1 / ranks)


def loss_bytes(
    name: str,
    *,
    rows: int,
    ranks: int,
    width: int,
    precision: str = "amp_bf16",
    two_level: bool = False,
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


def peak_bytes(parts: dict[str, float], *, stage: int, precision: str, offloaded: bool = False) -> float:
    """Return the peak of all parts: the larger of the loss, before any backward, and the replays after it.

    Before the first backward, DeepSpeed's stages 1 and 2 have no buckets. Stage 1 has no gradients either, except the
    FP32 sums of its BF16_Optimizer.
    """
    late = parts["backward"] + (parts["gradient buckets"] if stage in (1, 2) else 0.0)
    if stage == 1:
        late += parts["gradients"] * (1 / 3 if is_bf16_optimizer(stage, precision, offloaded=offloaded) else 1)
    return sum(parts.values()) - min(late, parts["loss"])
