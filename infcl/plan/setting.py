"""A setting: how a model is trained and on what. Memory and time are computed from it, for a plan and for a run."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import nn

from infcl.config import RunSpec, TrainConfig
from infcl.config.precision import PRECISIONS, Precision
from infcl.engine.parameter_groups import checkpoint_bytes, state_bytes_per_element
from infcl.loss.contrastive import TILED
from infcl.models.clip import frozen_blocks
from infcl.models.config import CLIPConfig
from infcl.models.packing import row_length
from infcl.plan.profile import Gpu, Link, load_gpu, load_link

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to train. Sizes: W GPUs, T tensor-parallel ranks, W/T data-parallel ranks, B global batch."""

    model: CLIPConfig
    gpus: int
    global_batch: int
    micro_batch: int
    tensor_parallel: int = 1
    zero: int = 1
    offloads: tuple[str, ...] = ()  # state in host memory: "optimizer", "param"
    precision: Precision = PRECISIONS["amp_bf16"]
    loss: str = "inf_cl"
    widths: tuple[int, ...] = ()  # of --matryoshka-widths
    ring: str = "auto"
    checkpointing: bool = False
    compiled: bool = True
    attention: str = "auto"  # kernels of the towers, as --attention: "torch" is cuDNN's
    resident: int = 1  # micro-batches that cache their activations between the two passes; 0: as many as fit
    pixels: str = "host"  # memory that caches a step's pixels, one byte per value: "host" or "device"
    caption_row: int | None = None  # token positions of a row of packed captions; None: padded captions
    # the machine
    gpu: Gpu = dataclasses.field(default_factory=lambda: load_gpu("h200"))
    gpus_per_node: int = 8
    link: Link = dataclasses.field(default_factory=lambda: load_link("nic-400"))  # between nodes
    teacher: tuple[int, int] = (0, 0)  # parameters of a distillation's model, and the width of its embeddings
    # the state
    zero_optimization: dict  # of the preset
    counts: tuple[int, int]  # (parameters, trainable parameters) of all T ranks
    moments: int = 8  # bytes of optimizer state per element: Adam's two moments
    blocks: dict[str, int]  # trained blocks of each tower, counted from the last
    pixel_bytes: float = float("inf")  # limit of the cached pixels
    checkpoint: float  # bytes of the copy from which all ranks write a checkpoint
    on_cpu: bool = False

    # ---- batch ----

    @property
    def dp_size(self) -> int:
        return self.gpus // self.tensor_parallel

    @property
    def rank_batch(self) -> int:
        """Samples per data-parallel rank."""
        return self.global_batch // self.dp_size

    @property
    def loss_rows(self) -> int:
        """Samples per rank in the loss; tensor-parallel ranks divide theirs."""
        return self.global_batch // self.gpus

    @property
    def num_micro_batches(self) -> int:
        return self.rank_batch // self.micro_batch

    @property
    def cached(self) -> int:
        """Micro-batches with cached activations; at least one graph exists."""
        return max(1, min(self.resident, self.num_micro_batches))

    # ---- state ----

    @property
    def parameters(self) -> int:
        """Parameters of a rank: its share under tensor parallelism."""
        return self.counts[0] // self.tensor_parallel

    @property
    def trainable(self) -> int:
        return self.counts[1] // self.tensor_parallel

    @property
    def element_bytes(self) -> int:
        """Bytes of a parameter."""
        return self.precision.parameter_dtype.itemsize

    @property
    def offload(self) -> bool:
        """Whether the optimizer is in host memory."""
        return "optimizer" in self.offloads

    @property
    def bf16_optimizer(self) -> bool:
        """Whether DeepSpeed takes its BF16_Optimizer: no buckets, FP32 sums that are reduced after the backward."""
        return self.zero == 1 and self.precision == PRECISIONS["bf16"] and not self.offload

    # ---- nodes ----

    @property
    def nodes(self) -> int:
        return max(1, self.gpus // self.gpus_per_node)

    @property
    def ranks_of_host(self) -> int:
        return min(self.gpus, self.gpus_per_node)

    @property
    def two_level(self) -> bool:
        """Whether the ring has two levels. On one node, or with one GPU per node, it is always flat."""
        fills = self.gpus % self.gpus_per_node == 0
        return self.loss in TILED and self.ring != "flat" and self.nodes > 1 and self.gpus_per_node > 1 and fills

    # ---- towers ----

    @property
    def matmul_rate(self) -> float:
        """Flops per second of large GEMMs."""
        return 1e12 * (self.gpu.matmul_tflops if self.precision.half_matmuls else self.gpu.fp32_tflops)

    @property
    def stream_bytes(self) -> dict[str, int]:
        """{"image", "text"}: bytes per number of the residual stream between blocks.

        It has the dtype of the convolution's output in the image tower, and of the embedding in the text tower.
        """
        return {"image": self.precision.matmul_dtype.itemsize, "text": self.precision.parameter_dtype.itemsize}

    @property
    def micro_batch_pixels(self) -> float:
        """Bytes of a micro-batch's pixels on this rank."""
        return self.micro_batch * 3.0 * self.model.vision_cfg.image_size**2 / self.tensor_parallel

    @property
    def waiting_pixels(self) -> float:
        """Bytes of pixels cached between the two passes: full micro-batches without cached activations."""
        waiting = self.num_micro_batches - self.cached
        return self.micro_batch_pixels * int(min(waiting, self.pixel_bytes / self.micro_batch_pixels))

    def with_(self, **changes) -> "Setting":
        return dataclasses.replace(self, **changes)


def captions_of(model: CLIPConfig, tokens: int | None) -> dict[str, Any]:
    """Return a Setting's `model` and `caption_row`. Packed captions count as shorter ones that attend within rows.

    Args:
        tokens: tokens per caption on average; None for padded captions.

    Raises:
        ValueError: the text tower does not support packed captions.
    """
    if tokens is None:
        return {"model": model}
    if model.text_cfg.why_unpackable:
        raise ValueError("captions are packed only for a causal text tower that pools the last token")
    row = row_length(model.text_cfg.context_length)
    return {"model": model.with_overrides(context_length=tokens), "caption_row": row}


# ---- the setting of a run ----


def parameter_counts(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return {"image": (parameters, trainable parameters), "text": ..., "scalars": ...}."""
    counts = dict.fromkeys(("image", "text", "scalars"), (0, 0))
    for name, parameter in model.named_parameters():
        part = "image" if name.startswith("visual.") else "scalars" if name.startswith("logit_") else "text"
        total, trainable = counts[part]
        counts[part] = total + parameter.numel(), trainable + parameter.numel() * parameter.requires_grad
    return counts


def setting_of_run(
    spec: RunSpec,
    cfg: CLIPConfig,
    counts: dict[str, tuple[int, int]],
    *,
    ranks_of_host: int | None = None,
    teacher: tuple[int, int] = (0, 0),
) -> Setting:
    """Return the setting of a run, for its memory. With --resident-micro-batches auto, one micro-batch counts.

    Args:
        counts: (parameters, trainable parameters) of the full model's parts, as `parameter_counts` returns them.
        ranks_of_host: ranks per node; None for a single node.
        teacher: see Setting.
    """
    flags, batch, on_cpu = spec.flags, spec.batch, spec.device == "cpu"
    # several texts per image take the memory of one text that is longer by this factor
    cfg = cfg.with_overrides(context_length=cfg.text_cfg.context_length * flags.texts_per_image)
    parameters, trainable = (sum(column) for column in zip(*counts.values()))
    share = flags.tensor_parallel_size
    replays_pixels = not (flags.lock_image and flags.lock_image_unlocked_groups == 0)
    limit = float("inf") if flags.pixel_cache_gb in ("auto", "gpu") else float(flags.pixel_cache_gb) * 1e9
    return Setting(
        model=cfg.with_overrides(patch_dropout=0.0) if flags.lock_image else cfg,  # a locked tower drops none
        gpus=batch.dp_size * share,
        global_batch=batch.global_batch_size,
        micro_batch=batch.micro_batch_size,
        tensor_parallel=share,
        zero=spec.zero_stage,
        offloads=spec.offloads,
        precision=spec.precision,
        loss=flags.loss,
        widths=tuple(flags.matryoshka_widths),
        checkpointing=flags.grad_checkpointing,
        compiled=spec.compiles_blocks,
        resident=1 if flags.resident_micro_batches == "auto" else int(flags.resident_micro_batches),
        pixels="device" if flags.pixel_cache_gb == "gpu" and not on_cpu else "host",
        gpus_per_node=ranks_of_host or batch.dp_size * share,
        teacher=teacher,
        zero_optimization=spec.zero_optimization,
        counts=(parameters, trainable),
        moments=state_bytes_per_element(flags),
        blocks=trained_blocks(flags, cfg),
        pixel_bytes=limit if replays_pixels else 0.0,
        checkpoint=checkpoint_bytes(flags, parameters // share, trainable // share),
        on_cpu=on_cpu,
    )


def trained_blocks(flags: TrainConfig, cfg: CLIPConfig) -> dict[str, int]:
    """Return {"image", "text"}: how many blocks of each tower the flags leave to train, counted from the last."""
    image, text = cfg.vision_cfg.layers, cfg.text_cfg.layers
    return {
        "image": image - (frozen_blocks(image, flags.lock_image_unlocked_groups) if flags.lock_image else 0),
        "text": text - (frozen_blocks(text, flags.lock_text_unlocked_layers) if flags.lock_text else 0),
    }
