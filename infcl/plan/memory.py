"""Bytes per GPU, part by part, from the sizes in a `Load`. loads.py creates it from a run's flags or a planned setting.

This is an estimate. It excludes the allocator's fragments, the CUDA context and the layers that ZeRO-3 gathers; a
profile's `usable` leaves room for them. It is within 5% of the peaks measured on H200s (ZeRO-1 and 3, including offload
and losses that store their logits): docs/benchmarks/planner.md. host.py counts host memory.

Sizes: P parameters, T trainable ones, N data-parallel ranks, m micro-batch size, M micro-batches, b = M m, D embedding
width, S pixels per side, L tokens.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from infcl.config import BatchPlan
from infcl.kernels import WORKSPACE_BYTES
from infcl.models.config import CLIPConfig
from infcl.plan.activations import graph_bytes
from infcl.plan.parts import (
    bucket_bytes,
    gathered_bytes,
    loss_bytes,
    passing_bytes,
    peak_bytes,
    state_bytes,
)

HEADROOM = 0.08  # share of device memory that cached activations leave for fragments and library workspaces


def parameter_counts(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return {"image": (parameters, trainable parameters), "text": ..., "scalars": ...}."""
    counts = {"image": [0, 0], "text": [0, 0], "scalars": [0, 0]}
    for name, parameter in model.named_parameters():
        part = "image" if name.startswith("visual.") else "scalars" if name.startswith("logit_") else "text"
        counts[part][0] += parameter.numel()
        counts[part][1] += parameter.numel() * parameter.requires_grad
    return {part: (total, trainable) for part, (total, trainable) in counts.items()}


@dataclass(frozen=True)
class Load:
    """All inputs of a rank's memory estimate: model, batch and settings."""

    cfg: CLIPConfig
    batch: BatchPlan
    parameters: int  # of the rank: its share under tensor parallelism
    trainable: int
    stage: int
    precision: str
    loss: str
    checkpointing: bool
    compiled: bool
    zero: dict  # zero_optimization of a preset
    resident: int = 1  # micro-batches with cached activations
    moments: int = 8  # bytes of optimizer state per element, as in state_bytes
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    blocks: dict[str, int] | None = None  # trained blocks of each tower; None: all
    trunks: float = 0.0  # bytes per sample of the frozen blocks' output, cached between the two passes
    pixels: float = float("inf")  # bytes of pixels that may be cached between the two passes
    pixels_on_gpu: bool = False  # whether the GPU caches them, instead of the host
    uploads: int = 0  # micro-batches of pixels on their way to the GPU
    two_level: bool = False  # whether the ring has two levels
    offloads: tuple[str, ...] = ()  # "optimizer", "param": in host memory
    checkpoint: float = 0.0  # bytes of the copy from which a checkpoint is written
    on_cpu: bool = False

    @property
    def micro_batch_pixels(self) -> float:
        """Bytes of a micro-batch's pixels on this rank."""
        return self.batch.micro_batch_size * 3.0 * self.cfg.vision_cfg.image_size**2 / self.tensor_parallel

    @property
    def waiting_pixels(self) -> float:
        """Bytes of pixels cached between the two passes: full micro-batches without cached activations."""
        waiting = self.batch.num_micro_batches - min(self.resident, self.batch.num_micro_batches)
        return self.micro_batch_pixels * int(min(waiting, self.pixels / self.micro_batch_pixels))


def _layout(load: Load) -> dict[str, Any]:
    return {
        "precision": load.precision,
        "tensor_parallel": load.tensor_parallel,
        "sequence_parallel": load.sequence_parallel and load.tensor_parallel > 1,
        "micro_batch_size": load.batch.micro_batch_size,
    }


def graphs_of(load: Load) -> dict[str, float]:
    """Return {"activations", "backward"}: bytes of the cached graphs, and bytes that a backward adds."""
    whole = {"image": load.cfg.vision_cfg.layers, "text": load.cfg.text_cfg.layers}
    trained = load.blocks or whole
    return graph_bytes(
        load.cfg,
        load.trainable,
        resident=min(load.resident, load.batch.num_micro_batches),
        checkpointing=load.checkpointing,
        compiled=load.compiled,
        blocks=trained,
        **_layout(load),
    )


def pixels_on_device(load: Load) -> float:
    """Return the bytes of pixels on the device: in transit to it, and cached there."""
    return load.micro_batch_pixels * load.uploads + load.pixels_on_gpu * load.waiting_pixels


def parts_of(load: Load) -> dict[str, float]:
    """Return {part: bytes per rank}.

    The last entry is the "peak". It is less than the sum, because some parts do not exist at the same time.
    """
    cfg, batch = load.cfg, load.batch
    sizes: dict[str, Any] = {
        "stage": load.stage,
        "precision": load.precision,
        "offloaded": "optimizer" in load.offloads,
    }
    parts = state_bytes(load.parameters, load.trainable, ranks=batch.dp_size, moments=load.moments, **sizes)
    for name, part in (("optimizer", "optimizer"), ("parameters", "param")):
        if part in load.offloads:
            parts[name] = 0.0
    if "optimizer" in load.offloads:
        passing = passing_bytes(
            load.zero, load.trainable, stage=load.stage, ranks=batch.dp_size, precision=load.precision
        )
        parts["gradients"] = 0.0 if load.on_cpu and load.stage == 3 else passing  # no backward runs ahead there
    graphs = graphs_of(load)
    graph = graphs["activations"] / max(1, min(load.resident, batch.num_micro_batches))
    buckets = bucket_bytes(load.zero, load.trainable, graph=graph, **sizes)
    if load.on_cpu:  # a bucket's pages are allocated when a gradient is first written to them
        buckets = min(buckets, (12.0 if load.stage == 1 else 8.0) * load.trainable)
    parts["gradient buckets"] = buckets
    parts["gathered parameters"] = gathered_bytes(
        load.parameters, load.zero, stage=load.stage, ranks=batch.dp_size, precision=load.precision
    )
    parts |= graphs
    parts["cached data"] = pixels_on_device(load)
    parts["cached data"] += batch.rank_batch_size * (8.0 * cfg.text_cfg.context_length + load.trunks)
    parts |= _loss_of(load)
    return parts | {"peak": peak_bytes(parts, **sizes)}


def _loss_of(load: Load) -> dict[str, float]:
    """Return {"feature gradients", "loss"}, including the rows of the other tensor-parallel ranks."""
    batch, width = load.batch, load.cfg.embed_dim
    rows = batch.rank_batch_size // load.tensor_parallel
    parts = loss_bytes(
        load.loss,
        rows=rows,
        ranks=batch.dp_size * load.tensor_parallel,
        width=width,
        precision=load.precision,
        two_level=load.two_level,
    )
    others = 2.0 * (batch.rank_batch_size - rows) * width * 4
    parts["feature gradients"] += others
    parts["loss"] += max(others, batch.rank_batch_size * load.trunks)  # trunks are concatenated at its start
    return parts


def bytes_beside_graphs(load: Load) -> float:
    """Return the bytes that cached activations must leave free, besides HEADROOM, parameters and optimizer.

    These are gradients and a bucket of them, the loss and its workspace, the bytes that a backward adds to the graphs
    (with recomputation more than half a graph), trunks of frozen blocks, and pixels on the device or in transit.
    """
    trunks = load.batch.rank_batch_size * load.trunks
    passing = graphs_of(load)["backward"] + pixels_on_device(load) + trunks
    return 8 * load.trainable + sum(_loss_of(load).values()) + WORKSPACE_BYTES + passing
