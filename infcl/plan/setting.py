"""A planned setting: all inputs of the estimates of memory and time."""

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from infcl.config.preset import BUCKET, STAGE_1_BUCKET, STAGE_3_BUCKET, check_stage
from infcl.models import CLIP
from infcl.models.config import CLIPConfig, check_divides
from infcl.models.packing import packs, row_length
from infcl.plan.profile import Gpu, Link, load_link


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options that a run and a planned setting have in common."""

    model: CLIPConfig
    precision: str = "amp_bf16"
    loss: str = "inf_cl"
    checkpointing: bool = False
    compiled: bool = True
    resident: int = 1  # micro-batches that cache their activations between the two passes; 0: as many as fit
    tensor_parallel: int = 1
    sequence_parallel: bool = False  # with tensor_parallel > 1


@dataclass(frozen=True, kw_only=True)
class Setting(Options):
    """One way to train. Sizes: W GPUs, T tensor-parallel ranks, W/T data-parallel ranks, B global batch."""

    gpu: Gpu
    gpus: int
    global_batch: int
    micro_batch: int
    zero: int = 1
    offload: bool = False  # optimizer state in host memory
    pixels: str = "host"  # memory that caches a step's pixels, one byte per value: "host" or "device"
    ring: str = "auto"
    gpus_per_node: int = 8
    host_memory_gib: float | None = None  # per node; None: unknown, so everything fits
    link: Link = dataclasses.field(default_factory=lambda: load_link("nic-400"))  # between nodes
    overlap_comm: bool | None = None  # None: like "auto" in ds_configs, see config/preset.py
    reduce_bucket_size: float | None = None  # elements; None: as in the presets of ds_configs
    attention: str = "auto"  # kernels of the towers, as --attention: "torch" is cuDNN's
    caption_row: int | None = None  # token positions of a row of packed captions; None: padded captions

    @property
    def matmul_rate(self) -> float:
        """Flops per second of large GEMMs."""
        return 1e12 * (self.gpu.fp32_tflops if self.precision == "fp32" else self.gpu.matmul_tflops)

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
    def overlaps_reductions(self) -> bool:
        if self.overlap_comm is not None:
            return self.overlap_comm
        return self.zero == 3 or self.zero > 0 and self.nodes > 1

    @property
    def bucket(self) -> float:
        """Elements of a gradient bucket."""
        if self.reduce_bucket_size is not None:
            return self.reduce_bucket_size
        if self.zero == 3:
            return BUCKET if self.offload else STAGE_3_BUCKET
        return STAGE_1_BUCKET

    @property
    def nodes(self) -> int:
        return max(1, self.gpus // self.gpus_per_node)

    @property
    def ranks_of_host(self) -> int:
        return min(self.gpus, self.gpus_per_node)

    @property
    def two_level(self) -> bool:
        """Whether the ring has two levels. On one node, or with one GPU per node, it is always flat."""
        return self.ring != "flat" and self.nodes > 1 and self.gpus_per_node > 1

    def check(self) -> None:
        """Check the setting.

        Raises:
            ValueError: the setting is impossible, or the trainer would reject it.
        """
        for name in ("gpus", "gpus_per_node", "tensor_parallel", "micro_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name.replace('_', '-')} {getattr(self, name)} must be greater than 0")
        if self.host_memory_gib is not None and not 0 < self.host_memory_gib < float("inf"):
            raise ValueError(f"--host-memory-gib {self.host_memory_gib} must be a number above 0")
        if not self.gpu.bf16 and self.precision in ("amp_bf16", "bf16"):
            raise ValueError(f"{self.gpu.name} does not compute bf16: use --precision fp16 or fp32")
        if self.gpus % self.tensor_parallel:
            raise ValueError(f"{self.gpus} GPUs are no multiple of tensor-parallel {self.tensor_parallel}")
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError("--sequence-parallel shares rows over tensor-parallel ranks: --tensor-parallel-size is 1")
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise ValueError(f"{self.gpus} GPUs do not fill nodes of {self.gpus_per_node}: set --gpus-per-node")
        if self.nodes > 1 and self.gpus_per_node % self.tensor_parallel:
            within = [str(size) for size in range(1, self.gpus_per_node + 1) if self.gpus_per_node % size == 0]
            raise ValueError(
                f"tensor-parallel {self.tensor_parallel} spans nodes of {self.gpus_per_node} GPUs, which is not "
                f"planned: use {', '.join(within)} or ZeRO-3"
            )
        check_divides(self.model, self.tensor_parallel)
        check_stage(self.zero, self.precision, offloads=self.offload, source="the plan")
        if self.micro_batch % self.tensor_parallel:
            raise ValueError(f"tensor-parallel {self.tensor_parallel} does not divide micro-batch {self.micro_batch}")
        unit = self.dp_size * self.micro_batch
        if self.global_batch % unit:
            raise ValueError(
                f"a global batch of {self.global_batch} is no multiple of {self.dp_size} data-parallel ranks x "
                f"micro-batch {self.micro_batch}; the next multiple is {-(-self.global_batch // unit) * unit}"
            )

    def with_(self, **changes) -> "Setting":
        return dataclasses.replace(self, **changes)


def captions_of(model: CLIPConfig, tokens: int | None) -> dict[str, Any]:
    """Return a Setting's `model` and `caption_row` for packed captions.

    Packed captions count as shorter captions that attend within rows.

    Args:
        model: the model's config.
        tokens: tokens per caption on average; None for padded captions.

    Raises:
        ValueError: the text tower does not support packed captions.
    """
    if tokens is None:
        return {"model": model}
    if not packs(model.text_cfg):
        raise ValueError("captions are packed only for a causal text tower that pools the last token")
    row = row_length(model.text_cfg.context_length)
    return {"model": model.with_overrides(context_length=tokens), "caption_row": row}


@lru_cache
def parameters_of(model: CLIPConfig) -> int:
    """Return the number of parameters of a model."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in CLIP(model).parameters())
