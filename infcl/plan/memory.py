"""Bytes per GPU, part by part, from sizes alone: of a run's flags (`memory_plan`), of a planned setting (`memory_of`).

An estimate: the allocator's fragments, the CUDA context and the layers that ZeRO-3 gathers come on top (a profile's
`usable` leaves room for them). Within 5% of the peaks measured on H200s (ZeRO-1 and 3, offload and losses that hold
their logits included): docs/scaling.md. What lies in host memory is counted in host.py.

Sizes: P parameters, T trainable ones, N data-parallel ranks, m micro-batch size, M micro-batches, b = M m, D embedding
width, S pixels per side, L tokens.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from infcl.config import BatchPlan, TrainConfig
from infcl.kernels import WORKSPACE_BYTES
from infcl.loss.contrastive import TILED
from infcl.loss.links import lap_length
from infcl.plan.activations import exchange_bytes, graph_bytes, stream_bytes
from infcl.plan.parts import (
    bucket_bytes,
    gathered_bytes,
    landing_bytes,
    loss_bytes,
    passing_bytes,
    peak_bytes,
    state_bytes,
)
from infcl.step.offload import UPLOAD_LEAD
from infcl.towers.clip import frozen_blocks
from infcl.towers.config import CLIPConfig, with_overrides
from infcl.train.compiled import BLOCKS_OF_A_RUN
from infcl.train.optim import checkpoint_bytes, state_bytes_per_element

if TYPE_CHECKING:
    from infcl.plan.setting import Setting

STAGES = (0, 1, 2, 3)
HEADROOM = 0.08  # of the device's memory, which graphs that stay leave for fragments and the library's workspaces


def parameter_counts(model: nn.Module) -> dict[str, tuple[int, int]]:
    """{"image": (parameters, of which trainable), "text": ..., "scalars": ...}."""
    counts = {"image": [0, 0], "text": [0, 0], "scalars": [0, 0]}
    for name, parameter in model.named_parameters():
        part = "image" if name.startswith("visual.") else "scalars" if name.startswith("logit_") else "text"
        counts[part][0] += parameter.numel()
        counts[part][1] += parameter.numel() * parameter.requires_grad
    return {part: (total, trainable) for part, (total, trainable) in counts.items()}


@dataclass(frozen=True)
class Load:
    """A rank's model, batch and ways: all that its memory follows from."""

    cfg: CLIPConfig
    batch: BatchPlan
    parameters: int  # of the rank, whose part it is under tensor parallelism
    trainable: int
    stage: int
    precision: str
    loss: str
    checkpointing: bool
    compiled: bool
    zero: dict  # zero_optimization of a preset
    resident: int = 1  # micro-batches that keep their graphs
    moments: int = 8  # bytes of optimizer state, as state_bytes
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    blocks: dict[str, int] | None = None  # trained ones of each tower; None: all
    trunks: float = 0.0  # bytes a sample that frozen blocks give and the passes keep
    pixels: float = float("inf")  # bytes that may wait between the passes
    pixels_on_gpu: bool = False  # that is where they wait
    uploads: int = 0  # micro-batches of pixels on their way to the GPU
    copies: bool = False  # the ring's messages go by copy engines
    two_level: bool = False  # the ring is one of nodes
    offloads: tuple[str, ...] = ()  # "optimizer", "param": in host memory
    checkpoint: float = 0.0  # bytes of the copy that one is written from
    on_cpu: bool = False
    past: frozenset[str] = frozenset()

    @property
    def micro_batch_pixels(self) -> float:
        """Bytes."""
        return self.batch.micro_batch_size * 3.0 * self.cfg.vision_cfg.image_size**2 / self.tensor_parallel

    @property
    def waiting_pixels(self) -> float:
        """Bytes of whole micro-batches' pixels that wait between the two passes: not those of kept graphs."""
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
    """{"activations", "backward"}: bytes of the graphs that are kept, and of what a backward makes beside them."""
    whole = {"image": load.cfg.vision_cfg.layers, "text": load.cfg.text_cfg.layers}
    trained = load.blocks or whole
    alone = load.tensor_parallel == 1 or load.stage == 3 or load.checkpointing or trained != whole
    return graph_bytes(
        load.cfg,
        load.trainable,
        resident=min(load.resident, load.batch.num_micro_batches),
        checkpointing=load.checkpointing,
        compiled=load.compiled,
        blocks=trained,
        blocks_of_a_graph=1 if alone else BLOCKS_OF_A_RUN,
        **_layout(load),
    )


def pixels_on_device(load: Load) -> float:
    """Bytes of those on their way, and of those that wait there."""
    return load.micro_batch_pixels * load.uploads + load.pixels_on_gpu * load.waiting_pixels


def parts_of(load: Load) -> dict[str, float]:
    """{part: bytes per rank}; the last is the "peak", which is not their sum where parts do not live at once."""
    cfg, batch, share = load.cfg, load.batch, load.tensor_parallel
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
        parts["gradients"] = 0.0 if load.on_cpu and load.stage == 3 else passing  # nothing runs ahead there
    graphs = graphs_of(load)
    graph = graphs["activations"] / max(1, min(load.resident, batch.num_micro_batches))
    options: dict[str, Any] = {"convolution_apart": "convolution apart" in load.past, "graph": graph}
    buckets = bucket_bytes(load.zero, load.trainable, **options, **sizes)
    if load.on_cpu:  # a bucket's pages are taken when a gradient first lies in them: small models leave most of it
        buckets = min(buckets, (12.0 if load.stage == 1 else 8.0) * load.trainable)
    parts["gradient buckets"] = buckets
    parts["gathered parameters"] = gathered_bytes(
        load.parameters, load.zero, stage=load.stage, ranks=batch.dp_size, precision=load.precision
    )
    parts |= graphs
    parts["travelling rows"] = exchange_bytes(cfg, **_layout(load))
    rows = batch.rank_batch_size // share
    parts["cached data"] = pixels_on_device(load)
    parts["cached data"] += batch.rank_batch_size * (8.0 * cfg.text_cfg.context_length + load.trunks)
    parts |= _loss_of(load)
    kept = landing_bytes(rows, cfg.embed_dim, precision=load.precision) if load.copies else 0.0
    parts["landing buffers"], parts["loss"] = kept, parts["loss"] - kept
    return parts | {"peak": peak_bytes(parts, **sizes)}


def _loss_of(load: Load) -> dict[str, float]:
    """{"feature gradients", "loss"}, with the rows of the tensor-parallel ranks beside this one."""
    batch, width = load.batch, load.cfg.embed_dim
    rows = batch.rank_batch_size // load.tensor_parallel
    parts = loss_bytes(
        load.loss,
        rows=rows,
        ranks=batch.dp_size * load.tensor_parallel,
        width=width,
        precision=load.precision,
        two_level=load.two_level,
        first_part_apart="first part apart" in load.past,
    )
    others = 2.0 * (batch.rank_batch_size - rows) * width * 4
    parts["feature gradients"] += others
    parts["loss"] += max(others, batch.rank_batch_size * load.trunks)  # trunks are copied together where it begins
    return parts


def bytes_beside_graphs(load: Load) -> float:
    """What graphs that stay have to leave, beside HEADROOM and what is there before a step: parameters and optimizer.

    Gradients and a bucket of them, the loss and its workspace, what a backward makes beside the graphs (of recomputed
    blocks, more than half of one), trunks of frozen blocks, pixels on their way and those that wait on the device.
    """
    trunks = load.batch.rank_batch_size * load.trunks
    passing = graphs_of(load)["backward"] + pixels_on_device(load) + trunks
    return 8 * load.trainable + sum(_loss_of(load).values()) + WORKSPACE_BYTES + passing


def counted_by_torch(parts: dict[str, float]) -> float:
    """The peak that torch's allocator tells, which knows nothing of memory that GPUs share with each other."""
    return parts["peak"] - parts["travelling rows"] - parts["landing buffers"]


def memory_plan(
    cfg: CLIPConfig,
    batch: BatchPlan,
    config: TrainConfig,
    counts: dict[str, tuple[int, int]],
    precision: str,
    zero_optimization: dict,
    **options: Any,
) -> dict[str, list[float]]:
    """{part: bytes per rank under ZeRO 0, 1, 2, 3}, nothing offloaded; `options` of `memory_of_run`."""
    arguments = (cfg, batch, config, counts, precision, zero_optimization)
    columns = [memory_of_run(*arguments, stage=stage, **options) for stage in STAGES]
    return {part: [column[part] for column in columns] for part in columns[0]}


def memory_of_run(*arguments: Any, **options: Any) -> dict[str, float]:
    """{part: bytes per rank} of device memory under a run's flags, those of `load_of_run`; the last, "peak", is what
    there is at once.
    """
    return parts_of(load_of_run(*arguments, **options))


def load_of_run(
    cfg: CLIPConfig,
    batch: BatchPlan,
    config: TrainConfig,
    counts: dict[str, tuple[int, int]],
    precision: str,
    zero_optimization: dict,
    *,
    stage: int,
    offloads: tuple[str, ...] = (),
    on_cpu: bool = False,
    ranks_of_host: int | None = None,
    past: frozenset[str] = frozenset(),
) -> Load:
    """What memory follows from under a run's flags.

    counts: of the whole model; tensor-parallel ranks share it (but for embeddings and norms, which are left out here).
    Of resident micro-batches `auto` counts one: the run measures how many more there is room for.
    on_cpu: blocks are compiled only where that is asked for, and pixels are where they are. ranks_of_host: None where
    there is one host. past: see Setting.
    """
    share, ranks = config.tensor_parallel_size, batch.dp_size * config.tensor_parallel_size
    on_host = ranks_of_host or ranks
    parameters, trainable = (sum(column) // share for column in zip(*counts.values()))
    blocks, trunks = trained_blocks(config, cfg), kept_trunks(config, cfg)
    replays_pixels = not trunks["image"] and not (config.lock_image and config.lock_image_unlocked_groups == 0)
    pixels = float("inf") if config.pixel_cache_gb == "auto" else float(config.pixel_cache_gb) * 1e9
    if config.lock_image:
        cfg = with_overrides(cfg, patch_dropout=0.0)  # a locked tower drops none
    return Load(
        cfg=cfg,
        batch=batch,
        parameters=parameters,
        trainable=trainable,
        stage=stage,
        precision=precision,
        loss=config.loss,
        checkpointing=config.grad_checkpointing,
        compiled=config.compile_blocks == "on" or (config.compile_blocks == "auto" and not on_cpu),
        zero=zero_optimization,
        resident=1 if config.resident_micro_batches == "auto" else int(config.resident_micro_batches),
        moments=state_bytes_per_element(config),
        tensor_parallel=share,
        sequence_parallel=config.sequence_parallel,
        blocks=blocks,
        trunks=sum(trunks[tower] * size for tower, size in stream_bytes(precision).items()),
        pixels=pixels if replays_pixels else 0.0,
        pixels_on_gpu=config.pixel_cache == "gpu" and not on_cpu,
        uploads=0 if on_cpu else config.encode_micro_batches + UPLOAD_LEAD,
        copies=not on_cpu and 1 < ranks <= on_host and config.loss in TILED and config.ring_overlap == "on",
        two_level=has_two_levels(config, ranks, on_host),
        offloads=offloads,
        checkpoint=checkpoint_bytes(config, parameters, trainable) / batch.dp_size,
        on_cpu=on_cpu,
        past=past,
    )


def has_two_levels(config: TrainConfig, ranks: int, ranks_of_host: int) -> bool:
    """Whether the loss of so many ranks has a ring of nodes. ValueError where --ring asks for one that cannot be."""
    if config.loss not in TILED or ranks == 1:
        return False
    return lap_length(list(range(ranks)), ring=config.ring, ranks_per_node=ranks_of_host) < ranks


def trained_blocks(config: TrainConfig, cfg: CLIPConfig) -> dict[str, int]:
    """{"image", "text"}: how many of a tower's blocks are trained, its last ones."""
    return {name: max(0, layers - frozen) for name, layers, frozen, _ in _locks(config, cfg)}


def kept_trunks(config: TrainConfig, cfg: CLIPConfig) -> dict[str, int]:
    """{"image", "text"}: numbers a sample that partly frozen towers keep between the passes (CLIP.trunk_numbers)."""
    tokens = {"image": 1 + cfg.vision_cfg.num_patches, "text": cfg.text_cfg.context_length}
    widths = {"image": cfg.vision_cfg.width, "text": cfg.text_cfg.width}
    kept = {}
    for name, layers, frozen, unlocked in _locks(config, cfg):
        keeps = unlocked == 1 or (config.frozen_trunk == "keep" and 0 < frozen <= layers)
        kept[name] = (1 if frozen > layers else tokens[name]) * widths[name] if unlocked and keeps else 0
    return kept


def _locks(config: TrainConfig, cfg: CLIPConfig) -> list[tuple[str, int, int, int]]:
    """(tower, its blocks, how many of them are frozen, groups that a locked one has unlocked)."""
    image, text = cfg.vision_cfg.layers, cfg.text_cfg.layers
    groups = config.lock_image_unlocked_groups, config.lock_text_unlocked_layers
    return [
        ("image", image, frozen_blocks(image, groups[0]) if config.lock_image else 0, groups[0]),
        ("text", text, frozen_blocks(text, groups[1]) if config.lock_text else 0, groups[1]),
    ]


def memory_of(setting: "Setting") -> dict[str, float]:
    """{part: bytes per GPU} of a planned setting; the last is the "peak"."""
    return parts_of(load_of(setting))


def load_of(setting: "Setting") -> Load:
    """What memory follows from in a planned setting, which saves Adam's two moments.

    Under tensor parallelism a rank has its share of the parameters and, with sequence parallelism, of all activations.
    """
    from infcl.plan.setting import parameters_of

    share = setting.tensor_parallel
    parameters = parameters_of(setting.model) // share
    zero: dict[str, Any] = {"overlap_comm": setting.overlaps_reductions, "reduce_bucket_size": setting.bucket}
    if setting.offload:
        zero["offload_optimizer"] = {"pin_memory": True}  # as in ds_configs/zero3_offload.json
    return Load(
        cfg=setting.model,
        batch=BatchPlan(setting.dp_size, setting.num_micro_batches, setting.micro_batch),
        parameters=parameters,
        trainable=parameters,
        stage=setting.zero,
        precision=setting.precision,
        loss=setting.loss,
        checkpointing=setting.checkpointing,
        compiled=setting.compiled,
        zero=zero,
        resident=setting.resident,
        tensor_parallel=share,
        sequence_parallel=setting.sequence_parallel,
        pixels_on_gpu=setting.pixels == "device",
        uploads=1 + UPLOAD_LEAD,
        copies=setting.nodes == 1 and setting.gpus > 1 and setting.loss in TILED,
        two_level=setting.two_level and setting.loss in TILED,
        offloads=("optimizer",) if setting.offload else (),
        checkpoint=3 * 4 * parameters / setting.dp_size,
        past=setting.past,
    )
