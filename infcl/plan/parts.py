"""Bytes per rank of single parts of a step's memory, from sizes alone: what ZeRO and the loss hold, and when.

Sizes: P parameters, T trainable ones, N data-parallel ranks, b pairs of a rank, D embedding width.
"""

from infcl.config.preset import bucket_elements, is_bf16_optimizer, sums_gradients_on_host
from infcl.kernels import WORKSPACE_BYTES

_BUCKETS_AHEAD = 3  # of DeepSpeed's stage 3: it waits for the third last (max_param_reduce_events)


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
    """{"parameters", "gradients", "optimizer"}: bytes per rank of what training keeps between steps.

    fp32 and amp_bf16: parameters and gradients of 4 bytes. bf16 and fp16: parameters of 2, gradients accumulated in
    fp32; BF16_Optimizer also keeps those of 2 bytes. tests/plan/test_plan_memory.py counts them.
    Optimizer: `moments` bytes an element (8: two of Adam's) and, from stage 1 on, the fp32 master of the rank's share.
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
    """Bytes per rank of gradients on a GPU under an offloaded optimizer: at most, while they are on their way to it.

    ZeRO-3: the backward runs ahead by up to three buckets whose gradients wait for the stream that carries them away,
    and the bucket that is on its way is there a second time, its rank's share of half precision in FP32 too. ZeRO-2
    keeps the FP32 sums of half precision, ZeRO-1 full gradients until the last micro-batch.
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
    """Bytes per rank of DeepSpeed's buffers for gradients on their way: allocated whole, whatever the model's size.

    Of each type in which gradients travel it has one of 4 bytes an element, with overlap_comm two; of stage 3 one, in
    that type, which with half-precision parameters stage 2 has as well. FP32 buckets that fill before the backward ends
    are flattened while activations are there: all but the share of the `graph` bytes that is gone by then. Of stage 3
    it is gradients instead (engine/reduce.py): of the bucket that fills, of one on its way, and flattened. A bucket
    that is larger than the model counts whole, as DeepSpeed's own buffer did: what is there is between none and twice
    the model's gradients.
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
    """Bytes per rank of what stage 3 gathered of the other ranks' parameters: at most.

    What is used again within `stage3_max_reuse_distance` parameters stays, and a prefetch bucket is on its way. Of
    `stage3_max_live_parameters` DeepSpeed 0.19.8 only stops prefetching.
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
    """{"feature gradients", "loss"}: bytes per rank, for b `rows` of D `width` a rank.

    fp32 gradients of both sides' features, which stay until the last replay; and what the loss alone needs: features,
    around a ring also two blocks that travel, two of the gradients that travel with them and what is added to these,
    a bounded workspace. A two-level ring has two blocks more, on their way to the next node, three of the gradients,
    and each later lap's first part. The baselines hold logits and softmax of both directions in fp32, DisCo-CLIP those
    of one at a time, and gather no less than travels around a ring.
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
    """The most that is there at once, of two moments: the loss, before a backward has begun, and the replays after it.

    Before the first backward DeepSpeed's stages 1 and 2 have no buckets, and stage 1 no gradients but the float32 sums
    of its BF16_Optimizer.
    """
    late = parts["backward"] + (parts["gradient buckets"] if stage in (1, 2) else 0.0)
    if stage == 1:
        late += parts["gradients"] * (1 / 3 if is_bf16_optimizer(stage, precision, offloaded=offloaded) else 1)
    return sum(parts.values()) - min(late, parts["loss"])
