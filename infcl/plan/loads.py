"""Inputs of the memory estimate, from a run's flags (`load_of_run`) or a planned setting (`load_of`)."""

from typing import Any

from infcl.config import BatchPlan, RunSpec, TrainConfig
from infcl.engine.optim import checkpoint_bytes, state_bytes_per_element
from infcl.loss.contrastive import TILED
from infcl.loss.links import lap_length
from infcl.models.clip import frozen_blocks
from infcl.models.config import CLIPConfig, with_overrides
from infcl.plan.activations import stream_bytes
from infcl.plan.memory import Load, parts_of
from infcl.plan.setting import Setting, parameters_of
from infcl.step.offload import UPLOAD_LEAD

STAGES = (0, 1, 2, 3)


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
    config, batch, precision, on_cpu = spec.flags, spec.batch, spec.precision, spec.device == "cpu"
    share, ranks = config.tensor_parallel_size, batch.dp_size * config.tensor_parallel_size
    on_host = ranks_of_host or ranks
    # several texts per image take the memory of one text that is longer by this factor
    cfg = with_overrides(cfg, context_length=cfg.text_cfg.context_length * config.texts_per_image)
    parameters, trainable = (sum(column) // share for column in zip(*counts.values()))
    blocks, trunks = trained_blocks(config, cfg), kept_trunks(config, cfg)
    replays_pixels = not trunks["image"] and not (config.lock_image and config.lock_image_unlocked_groups == 0)
    pixels = float("inf") if config.pixel_cache_gb in ("auto", "gpu") else float(config.pixel_cache_gb) * 1e9
    if config.lock_image:
        cfg = with_overrides(cfg, patch_dropout=0.0)  # a locked tower drops none
    return Load(
        cfg=cfg,
        batch=batch,
        parameters=parameters,
        trainable=trainable,
        stage=spec.zero_stage if stage is None else stage,
        precision=precision,
        loss=config.loss,
        checkpointing=config.grad_checkpointing,
        compiled=spec.compiles_blocks,
        zero=spec.zero_optimization,
        resident=1 if config.resident_micro_batches == "auto" else int(config.resident_micro_batches),
        moments=state_bytes_per_element(config),
        tensor_parallel=share,
        sequence_parallel=config.sequence_parallel,
        blocks=blocks,
        trunks=sum(trunks[tower] * size for tower, size in stream_bytes(precision).items()),
        pixels=pixels if replays_pixels else 0.0,
        pixels_on_gpu=config.pixel_cache_gb == "gpu" and not on_cpu,
        uploads=0 if on_cpu else 1 + UPLOAD_LEAD,
        two_level=has_two_levels(config, ranks, on_host),
        offloads=spec.offloads if stage is None else (),
        checkpoint=checkpoint_bytes(config, parameters, trainable) / batch.dp_size,
        on_cpu=on_cpu,
    )


def has_two_levels(config: TrainConfig, ranks: int, ranks_of_host: int) -> bool:
    """Return whether the loss over `ranks` ranks uses a two-level ring."""
    if config.loss not in TILED or ranks == 1:
        return False
    return lap_length(list(range(ranks)), ring="auto", ranks_per_node=ranks_of_host) < ranks


def trained_blocks(config: TrainConfig, cfg: CLIPConfig) -> dict[str, int]:
    """Return {"image", "text"}: number of trained blocks per tower, counted from the last."""
    return {name: max(0, layers - frozen) for name, layers, frozen, _ in _locks(config, cfg)}


def kept_trunks(config: TrainConfig, cfg: CLIPConfig) -> dict[str, int]:
    """Return {"image", "text"}: numbers per sample that trunks keep between the passes (CLIP.trunk_numbers)."""
    tokens = {"image": 1 + cfg.vision_cfg.num_patches, "text": cfg.text_cfg.context_length}
    widths = {"image": cfg.vision_cfg.width, "text": cfg.text_cfg.width}
    kept = {}
    for name, layers, frozen, unlocked in _locks(config, cfg):
        keeps = unlocked == 1 or (config.frozen_trunk == "keep" and 0 < frozen <= layers)
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


def memory_of(setting: Setting) -> dict[str, float]:
    """Return {part: bytes per GPU} of a planned setting; the last entry is the "peak"."""
    return parts_of(load_of(setting))


def load_of(setting: Setting) -> Load:
    """Return the inputs of a planned setting's memory estimate; its checkpoints include Adam's two moments.

    Under tensor parallelism a rank has its share of the parameters and, with sequence parallelism, of all activations.
    """
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
        two_level=setting.two_level and setting.loss in TILED,
        offloads=("optimizer",) if setting.offload else (),
        checkpoint=3 * 4 * parameters / setting.dp_size,
    )
