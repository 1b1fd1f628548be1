"""Bytes per GPU, part by part, from sizes alone: of a run's flags (`memory_plan`), of a planned setting (`memory_of`).

An estimate: the allocator's fragments, the CUDA context and the layers that ZeRO-3 gathers come on top (a profile's
`usable` leaves room for them). Within 5% of the peaks measured on H200s (ZeRO-1 and 3, losses that hold their logits
included), but for offload: docs/scaling.md.

Sizes: P parameters, T trainable ones, N data-parallel ranks, m micro-batch size, M micro-batches, b = M m, D embedding
width, S pixels per side, L tokens.
"""

from typing import TYPE_CHECKING, Any

from torch import nn

from infcl.config import BatchPlan, TrainConfig
from infcl.kernels import WORKSPACE_BYTES
from infcl.towers.config import CLIPConfig
from infcl.train.compiled import BLOCKS_OF_A_RUN
from infcl.train.optim import state_bytes_per_element

if TYPE_CHECKING:
    from infcl.plan.setting import Setting

STAGES = (0, 1, 2, 3)


def parameter_counts(model: nn.Module) -> dict[str, tuple[int, int]]:
    """{"image": (parameters, of which trainable), "text": ..., "scalars": ...}."""
    counts = {"image": [0, 0], "text": [0, 0], "scalars": [0, 0]}
    for name, parameter in model.named_parameters():
        part = "image" if name.startswith("visual.") else "scalars" if name.startswith("logit_") else "text"
        counts[part][0] += parameter.numel()
        counts[part][1] += parameter.numel() * parameter.requires_grad
    return {part: (total, trainable) for part, (total, trainable) in counts.items()}


def state_bytes(
    parameters: int, trainable: int, *, stage: int, ranks: int, precision: str, moments: int = 8
) -> dict[str, float]:
    """{"parameters", "gradients", "optimizer"}: bytes per rank of what training keeps between steps.

    fp32 and amp_bf16: parameters and gradients of 4 bytes. bf16 and fp16: of 2, with gradients accumulated in fp32 (in
    stage 1 by DeepSpeed's BF16_Optimizer).
    Optimizer: `moments` bytes an element (8: two of Adam's) and, from stage 1 on, the fp32 master of the rank's share.
    """
    low = precision in ("bf16", "fp16")
    width, share = 2 if low else 4, 1 / ranks
    whole, own = trainable * (width + (4 if low else 0)), trainable * share * 4
    return {
        "parameters": parameters * width * (share if stage == 3 else 1),
        "gradients": whole if stage < 2 else own,
        "optimizer": trainable * (moments if stage == 0 else (4 + moments) * share),
    }


def bucket_bytes(
    zero_optimization: dict, trainable: int, *, stage: int, precision: str, convolution_apart: bool = False
) -> float:
    """Bytes per rank of DeepSpeed's buffers for gradients on their way: allocated whole, whatever the model's size.

    Of each type in which gradients travel it has one of 4 bytes an element, with overlap_comm two; of stage 3 one, in
    that type. Float32 buckets that fill before the backward ends are flattened while activations are there.
    convolution_apart: under autocast, as until 1f7968e: a convolution's gradient travels in 16 bits, all others in 32.
    """
    if stage == 0 or (stage == 1 and precision in ("bf16", "fp16")):  # BF16_Optimizer has none
        return 0.0
    size = zero_optimization.get("reduce_bucket_size", 5e8)
    if precision in ("bf16", "fp16"):
        return size * 2 * (2 if stage < 3 and zero_optimization.get("overlap_comm", False) else 1)
    widths = [4, 2 if stage == 3 else 4] if precision == "amp_bf16" and convolution_apart else [4]
    buffers = size * sum(widths) * (2 if stage < 3 and zero_optimization.get("overlap_comm", False) else 1)
    return buffers + (4 * size if trainable > size else 0.0)


def gathered_bytes(parameters: int, zero_optimization: dict, *, stage: int, ranks: int, precision: str) -> float:
    """Bytes per rank of what stage 3 gathered of the other ranks' parameters: at most.

    What is used again within `stage3_max_reuse_distance` parameters stays, and a prefetch bucket is on its way. Of
    `stage3_max_live_parameters` DeepSpeed 0.19.8 only stops prefetching.
    """
    reach = zero_optimization.get("stage3_max_reuse_distance", 1e9)
    reach += zero_optimization.get("stage3_prefetch_bucket_size", 5e7)
    return (min(parameters, reach) if stage == 3 else 0) * (2 if precision in ("bf16", "fp16") else 4) * (1 - 1 / ranks)


def loss_bytes(name: str, *, rows: int, ranks: int, width: int) -> dict[str, float]:
    """{"feature gradients", "loss"}: bytes per rank, for b `rows` of D `width` a rank.

    fp32 gradients of both sides' features, which stay until the last replay; and what the loss alone needs: features,
    around a ring also two blocks that travel and the gradients that travel with them, a bounded workspace. The
    baselines hold logits and softmax of both directions in fp32, DisCo-CLIP those of one at a time.
    """
    block = rows * width * 4
    matrix = {"clip": 16 * ranks * rows * rows * ranks, "open_clip": 16 * rows * rows * ranks}
    matrix["disco"] = 8 * rows * rows * ranks
    workspace = matrix[name] if name in matrix else min(WORKSPACE_BYTES, 16 * rows * rows)
    return {"feature gradients": 2 * block, "loss": (2 + (4 if ranks > 1 else 0)) * block + workspace}


def peak_bytes(parts: dict[str, float], *, stage: int, precision: str) -> float:
    """The most that is there at once, of two moments: the loss, before a backward has begun, and the replays after it.

    Before the first backward DeepSpeed's stages 1 and 2 have no buckets, and stage 1 no gradients but the float32 sums
    of its BF16_Optimizer.
    """
    late = parts["backward"] + (parts["gradient buckets"] if stage in (1, 2) else 0.0)
    if stage == 1:
        late += parts["gradients"] * (1 / 3 if precision in ("bf16", "fp16") else 1)
    return sum(parts.values()) - min(late, parts["loss"])


# What a block keeps for its backward, bytes per token and width at an MLP ratio of 4: the inputs of both norms and of
# the four linear layers, q, k and v, and what GELU saw; attention keeps no matrix. Under autocast norms work in fp32
# and keep their inputs so, the rest is bf16. tests/test_plan_memory.py counts them.
BLOCK_BYTES = {"fp32": 64, "amp_bf16": 36, "bf16": 32, "fp16": 32}
# The residual stream under autocast: the convolution's 16 bits in the image tower, the embedding's fp32 in the text's.
_STREAM_BYTES = {"fp32": (4, 4), "amp_bf16": (2, 4), "bf16": (2, 2), "fp16": (2, 2)}
# A compiled graph under autocast keeps norms' inputs as they come: 16 bits for 32 in the image tower, in the text tower
# only attention's output, once a graph. tests/test_megatron_saved.py counts them.
_SPARED_BYTES = {"image": 4.0, "text": 2.0}


def activation_bytes(
    cfg: CLIPConfig,
    *,
    micro_batch_size: int,
    precision: str,
    checkpointing: bool,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    towers: tuple[str, ...] = ("image", "text"),
    compiled: bool = True,
    blocks_of_a_graph: int = 1,
) -> float:
    """Bytes that the graph of one micro-batch keeps, of the towers that are trained.

    With activation checkpointing that is the input of every block, and one block whole. Tensor-parallel ranks share
    what lies between the linear layers they split, with sequence parallelism all. Not counted: embeddings and heads.
    blocks_of_a_graph: of compiled tensor-parallel blocks.
    """
    vision, text = cfg.vision_cfg, cfg.text_cfg
    total = 0.0
    image_stream, text_stream = _STREAM_BYTES[precision]
    shapes: dict[str, tuple[int, Any, float]] = {
        "image": (1 + int(vision.num_patches * (1 - vision.patch_dropout)), vision, image_stream),
        "text": (text.context_length, text, text_stream),
    }
    for name in towers:
        tokens, tower, stream = shapes[name]
        inside = (8 + 4 * tower.mlp_ratio) * (2 if precision == "fp32" else 1)  # of it 2 x ratio each around GELU
        outside = BLOCK_BYTES[precision] - 24 * (2 if precision == "fp32" else 1)
        if precision == "amp_bf16" and compiled:
            outside -= _SPARED_BYTES[name] / (blocks_of_a_graph if name == "text" else 1)
        if sequence_parallel:
            outside, stream = outside / tensor_parallel, stream / tensor_parallel
        block = (outside + inside / tensor_parallel) * tokens * tower.width
        total += tower.layers * stream * tokens * tower.width + block if checkpointing else tower.layers * block
    return total * micro_batch_size


def exchange_bytes(
    cfg: CLIPConfig, *, micro_batch_size: int, precision: str, tensor_parallel: int, sequence_parallel: bool
) -> float:
    """Slots for other ranks' rows (megatron_patches/exchange.py): 4 (T - 1) of a rank's. torch's peaks lack them."""
    if not sequence_parallel or tensor_parallel == 1:
        return 0.0
    vision, text = cfg.vision_cfg, cfg.text_cfg
    row = max((1 + vision.num_patches) * vision.width, text.context_length * text.width)
    width = 4 if precision == "fp32" else 2
    return 4 * (tensor_parallel - 1) * micro_batch_size / tensor_parallel * row * width


def cast_bytes(parameters: int, *, precision: str, checkpointing: bool) -> float:
    """The bf16 copies of the weights that autocast leaves in a graph; recomputed blocks keep only their own."""
    return 2.0 * parameters if precision == "amp_bf16" and not checkpointing else 0.0


def graph_bytes(cfg: CLIPConfig, parameters: int, *, resident: int = 1, **sizes: Any) -> dict[str, float]:
    """{"activations", "backward"}: of the graphs that are kept, one at least, and what passes back through a block.

    backward: gradients of GELU and the stream, in a block of the image tower.
    sizes: those of `activation_bytes`. resident: micro-batches that are encoded once.
    """
    cast = cast_bytes(parameters, precision=sizes["precision"], checkpointing=sizes["checkpointing"])
    tower, width = cfg.vision_cfg, 4 if sizes["precision"] == "fp32" else 2
    gradients = width * (tower.mlp_ratio / sizes.get("tensor_parallel", 1) + 2) * (1 + tower.num_patches) * tower.width
    trained = "image" in sizes.get("towers", ("image", "text"))
    return {
        "activations": activation_bytes(cfg, **sizes) * max(1, resident) + cast,
        "backward": sizes["micro_batch_size"] * gradients if trained else 0.0,
    }


def pixel_bytes(cfg: CLIPConfig, batch: BatchPlan, tensor_parallel: int = 1) -> float:
    """Host bytes per rank of a step's images and tokens, which wait there between the two passes."""
    rows = batch.rank_batch_size / tensor_parallel
    return rows * (3 * cfg.vision_cfg.image_size**2 + 8 * cfg.text_cfg.context_length)


def memory_plan(
    cfg: CLIPConfig,
    batch: BatchPlan,
    config: TrainConfig,
    counts: dict[str, tuple[int, int]],
    precision: str,
    zero_optimization: dict,
    *,
    on_cpu: bool = False,
    convolution_apart: bool = False,
) -> dict[str, list[float]]:
    """{part: bytes per rank under ZeRO 0, 1, 2, 3} of device memory; the last, "peak", is what there is at once.

    counts: of the whole model; tensor-parallel ranks share it (but for embeddings and norms, which are left out here).
    Of resident micro-batches `auto` counts one: the run measures how many more there is room for.
    on_cpu: a bucket's pages are taken when a gradient first lies in them, so small models leave most of it alone; and
    blocks are compiled only where that is asked for. convolution_apart: see bucket_bytes.
    """
    share = config.tensor_parallel_size
    parameters, trainable = (sum(column) // share for column in zip(*counts.values()))
    resident = 1 if config.resident_micro_batches == "auto" else int(config.resident_micro_batches)
    alone = share == 1 or config.grad_checkpointing or config.lock_image or config.lock_text
    columns = []
    for stage in STAGES:
        sizes: dict[str, Any] = {"stage": stage, "ranks": batch.dp_size, "precision": precision}
        parts = state_bytes(parameters, trainable, moments=state_bytes_per_element(config), **sizes)
        parts["gradient buckets"] = bucket_bytes(
            zero_optimization, trainable, stage=stage, precision=precision, convolution_apart=convolution_apart
        )
        if on_cpu:
            parts["gradient buckets"] = min(parts["gradient buckets"], (12.0 if stage == 1 else 8.0) * trainable)
        parts["gathered parameters"] = gathered_bytes(parameters, zero_optimization, **sizes)
        rows = batch.rank_batch_size // share
        parts |= loss_bytes(config.loss, rows=rows, ranks=batch.dp_size * share, width=cfg.embed_dim)
        parts |= graph_bytes(
            cfg,
            parameters,
            compiled=config.compile_blocks == "on" or (config.compile_blocks == "auto" and not on_cpu),
            resident=min(resident, batch.num_micro_batches),
            micro_batch_size=batch.micro_batch_size,
            precision=precision,
            checkpointing=config.grad_checkpointing,
            tensor_parallel=share,
            sequence_parallel=config.sequence_parallel,
            blocks_of_a_graph=1 if stage == 3 or alone else BLOCKS_OF_A_RUN,
            towers=tuple(tower for tower in ("image", "text") if counts[tower][1]),
        )
        parts["travelling rows"] = exchange_bytes(
            cfg,
            micro_batch_size=batch.micro_batch_size,
            precision=precision,
            tensor_parallel=share,
            sequence_parallel=config.sequence_parallel,
        )
        columns.append(parts | {"peak": peak_bytes(parts, stage=stage, precision=precision)})
    return {part: [column[part] for column in columns] for part in columns[0]}


def memory_of(setting: "Setting") -> dict[str, float]:
    """{part: bytes per GPU}; the last is the "peak", which is not their sum where parts do not live at once.

    Under tensor parallelism a rank has its share of the parameters and, with sequence parallelism, of all activations.
    """
    from infcl.plan.setting import parameters_of

    model, share = setting.model, setting.tensor_parallel
    parameters = parameters_of(model) // share
    sizes: dict[str, Any] = {"stage": setting.zero, "precision": setting.precision}
    parts = state_bytes(parameters, parameters, ranks=setting.dp_size, **sizes)
    if setting.offload:
        parts["optimizer"] = 0.0
    parts["gradient buckets"] = bucket_bytes(
        {"overlap_comm": setting.overlap_comm}, parameters, convolution_apart=setting.convolution_apart, **sizes
    )
    parts["gathered parameters"] = gathered_bytes(parameters, {}, ranks=setting.dp_size, **sizes)
    parts |= graph_bytes(
        model,
        parameters,
        compiled=setting.compiled,
        resident=min(setting.resident, setting.num_micro_batches),
        micro_batch_size=setting.micro_batch,
        precision=setting.precision,
        checkpointing=setting.checkpointing,
        tensor_parallel=share,
        sequence_parallel=setting.sequence_parallel and share > 1,
        blocks_of_a_graph=1 if share == 1 or setting.zero == 3 or setting.checkpointing else BLOCKS_OF_A_RUN,
    )
    parts["travelling rows"] = exchange_bytes(
        model,
        micro_batch_size=setting.micro_batch,
        precision=setting.precision,
        tensor_parallel=share,
        sequence_parallel=setting.sequence_parallel,
    )
    pixels = 3 * model.vision_cfg.image_size**2 if setting.pixels == "device" else 0
    parts["cached data"] = setting.rank_batch * (pixels + 8.0 * model.text_cfg.context_length) / share
    parts |= loss_bytes(setting.loss, rows=setting.loss_rows, ranks=setting.gpus, width=model.embed_dim)
    parts["feature gradients"] += 2.0 * (setting.rank_batch - setting.loss_rows) * model.embed_dim * 4
    parts["loss"] += 2.0 * (setting.rank_batch - setting.loss_rows) * model.embed_dim * 4
    return parts | {"peak": peak_bytes(parts, stage=setting.zero, precision=setting.precision)}
