"""Inputs of the memory estimate, from a run's flags (`load_of_run`) or a planned setting (`load_of`)."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from infcl.config import BatchPlan, RunSpec, TrainConfig
from infcl.engine.parameter_groups import checkpoint_bytes, state_bytes_per_element
from infcl.loss.contrastive import TILED
from infcl.loss.links import lap_length
from infcl.models.clip import frozen_blocks
from infcl.models.config import CLIPConfig
from infcl.plan.setting import Options, Setting, parameters_of
from infcl.step.offload import UPLOAD_LEAD

STAGES = (0, 1, 2, 3)
# The residual stream's bytes per number (image, text); under autocast it has the type of the convolution's output in
# the image tower (half precision), and of the embedding in the text tower (FP32).
_STREAM_BYTES = {"fp32": (4, 4), "amp_bf16": (2, 4), "bf16": (2, 2), "fp16": (2, 2)}


@dataclass(frozen=True, kw_only=True)
class Load(Options):
    """All inputs of a rank's memory estimate: model, batch and settings."""

    batch: BatchPlan
    parameters: int  # of the rank: its share under tensor parallelism
    trainable: int
    stage: int
    zero: dict = field(default_factory=dict)  # zero_optimization of a preset
    moments: int = 8  # bytes of optimizer state per element: Adam's two moments
    blocks: dict[str, int] | None = None  # trained blocks of each tower, counted from the last; None: all
    trunks: float = 0.0  # bytes per sample of the frozen blocks' output, cached between the two passes
    pixels: float = float("inf")  # bytes of pixels that may be cached between the two passes
    pixels_on_gpu: bool = False  # whether the GPU caches them, instead of the host
    uploads: int = 0  # micro-batches of pixels on their way to the GPU
    two_level: bool = False  # whether the ring has two levels
    offloads: tuple[str, ...] = ()  # "optimizer", "param": in host memory
    checkpoint: float = 0.0  # bytes of the copy from which a checkpoint is written
    on_cpu: bool = False

    @property
    def half(self) -> bool:
        """Whether parameters have half precision."""
        return self.precision in ("bf16", "fp16")

    @property
    def element_bytes(self) -> int:
        """Bytes of a parameter."""
        return 2 if self.half else 4

    @property
    def offloaded(self) -> bool:
        """Whether the optimizer is in host memory."""
        return "optimizer" in self.offloads

    @property
    def cached(self) -> int:
        """Micro-batches with cached activations; at least one graph exists."""
        return max(1, min(self.resident, self.batch.num_micro_batches))

    @property
    def stream_bytes(self) -> dict[str, int]:
        """{"image", "text"}: bytes per number of the residual stream between blocks."""
        return dict(zip(("image", "text"), _STREAM_BYTES[self.precision]))

    @property
    def micro_batch_pixels(self) -> float:
        """Bytes of a micro-batch's pixels on this rank."""
        return self.batch.micro_batch_size * 3.0 * self.model.vision_cfg.image_size**2 / self.tensor_parallel

    @property
    def waiting_pixels(self) -> float:
        """Bytes of pixels cached between the two passes: full micro-batches without cached activations."""
        waiting = self.batch.num_micro_batches - self.cached
        return self.micro_batch_pixels * int(min(waiting, self.pixels / self.micro_batch_pixels))


def parameter_counts(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return {"image": (parameters, trainable parameters), "text": ..., "scalars": ...}."""
    counts = {"image": [0, 0], "text": [0, 0], "scalars": [0, 0]}
    for name, parameter in model.named_parameters():
        part = "image" if name.startswith("visual.") else "scalars" if name.startswith("logit_") else "text"
        counts[part][0] += parameter.numel()
        counts[part][1] += parameter.numel() * parameter.requires_grad
    return {part: (total, trainable) for part, (total, trainable) in counts.items()}


def load_of_run(
    spec: RunSpec,
    cfg: CLIPConfig,
    counts: dict[str, tuple[int, int]],
    *,
    stage: int | None = None,
    ranks_of_host: int | None = None,
) -> Load:
    """Return the inputs of a run's memory estimate.

    With --resident-micro-batches auto, the activations of one micro-batch count. The run measures how many more fit.

    Args:
        spec: the run.
        cfg: config of its model.
        counts: (parameters, trainable parameters) of the full model's parts, as `parameter_counts` returns them.
        stage: ZeRO stage to use instead of the run's, without offload.
        ranks_of_host: ranks per node; None for a single node.
    """
    config, batch, on_cpu = spec.flags, spec.batch, spec.device == "cpu"
    share, ranks = config.tensor_parallel_size, batch.dp_size * config.tensor_parallel_size
    # several texts per image take the memory of one text that is longer by this factor
    cfg = cfg.with_overrides(context_length=cfg.text_cfg.context_length * config.texts_per_image)
    parameters, trainable = (sum(column) // share for column in zip(*counts.values()))
    blocks, trunks = trained_blocks(config, cfg), kept_trunks(config, cfg)
    replays_pixels = not trunks["image"] and not (config.lock_image and config.lock_image_unlocked_groups == 0)
    pixels = float("inf") if config.pixel_cache_gb in ("auto", "gpu") else float(config.pixel_cache_gb) * 1e9
    lap = ranks
    if config.loss in TILED and ranks > 1:
        lap = lap_length(list(range(ranks)), ring="auto", ranks_per_node=ranks_of_host or ranks)
    load = Load(
        model=cfg.with_overrides(patch_dropout=0.0) if config.lock_image else cfg,  # a locked tower drops none
        precision=spec.precision,
        loss=config.loss,
        checkpointing=config.grad_checkpointing,
        compiled=spec.compiles_blocks,
        resident=1 if config.resident_micro_batches == "auto" else int(config.resident_micro_batches),
        tensor_parallel=share,
        sequence_parallel=config.sequence_parallel,
        batch=batch,
        parameters=parameters,
        trainable=trainable,
        stage=spec.zero_stage if stage is None else stage,
        zero=spec.zero_optimization,
        moments=state_bytes_per_element(config),
        blocks=blocks,
        pixels=pixels if replays_pixels else 0.0,
        pixels_on_gpu=config.pixel_cache_gb == "gpu" and not on_cpu,
        uploads=0 if on_cpu else 1 + UPLOAD_LEAD,
        two_level=lap < ranks,
        offloads=spec.offloads if stage is None else (),
        checkpoint=checkpoint_bytes(config, parameters, trainable) / batch.dp_size,
        on_cpu=on_cpu,
    )
    return dataclasses.replace(load, trunks=sum(trunks[tower] * size for tower, size in load.stream_bytes.items()))


def trained_blocks(config: TrainConfig, cfg: CLIPConfig) -> dict[str, int]:
    """Return {"image", "text"}: number of trained blocks per tower, counted from the last."""
    return {name: max(0, layers - frozen) for name, layers, frozen, _ in _locks(config, cfg)}


def kept_trunks(config: TrainConfig, cfg: CLIPConfig) -> dict[str, int]:
    """Return {"image", "text"}: numbers per sample that trunks keep between the passes (CLIP.trunk_numbers)."""
    tokens = {"image": 1 + cfg.vision_cfg.num_patches, "text": cfg.text_cfg.context_length}
    widths = {"image": cfg.vision_cfg.width, "text": cfg.text_cfg.width}
    kept = {}
    for name, layers, frozen, unlocked in _locks(config, cfg):
        keeps = unlocked == 1 or 0 < frozen <= layers
        kept[name] = (1 if frozen > layers else tokens[name]) * widths[name] if unlocked and keeps else 0
    return kept


def _locks(config: TrainConfig, cfg: CLIPConfig) -> list[tuple[str, int, int, int]]:
    """Return (tower, number of blocks, number of frozen blocks, number of unlocked groups if locked) per tower."""
    image, text = cfg.vision_cfg.layers, cfg.text_cfg.layers
    groups = config.lock_image_unlocked_groups, config.lock_text_unlocked_layers
    return [
        ("image", image, frozen_blocks(image, groups[0]) if config.lock_image else 0, groups[0]),
        ("text", text, frozen_blocks(text, groups[1]) if config.lock_text else 0, groups[1]),
    ]


def load_of(setting: Setting) -> Load:
    """Return the inputs of a planned setting's memory estimate; its checkpoints include Adam's two moments.

    Under tensor parallelism a rank has its share of the parameters and, with sequence parallelism, of all activations.
    """
    parameters = parameters_of(setting.model) // setting.tensor_parallel
    zero: dict[str, Any] = {"overlap_comm": setting.overlaps_reductions, "reduce_bucket_size": setting.bucket}
    if setting.offload:
        zero["offload_optimizer"] = {"pin_memory": True}  # as in ds_configs/zero3_offload.json
    return Load(
        **{option.name: getattr(setting, option.name) for option in dataclasses.fields(Options)},
        batch=BatchPlan(setting.dp_size, setting.num_micro_batches, setting.micro_batch),
        parameters=parameters,
        trainable=parameters,
        stage=setting.zero,
        zero=zero,
        pixels_on_gpu=setting.pixels == "device",
        uploads=1 + UPLOAD_LEAD,
        two_level=setting.two_level and setting.loss in TILED,
        offloads=("optimizer",) if setting.offload else (),
        checkpoint=3 * 4 * parameters / setting.dp_size,
    )
