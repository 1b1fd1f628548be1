"""What a run would do and need, from its flags alone: the text of `pretrain_clip.py --dry-run`.

Nothing here builds an engine, reads an image or writes a file (but shard indexes, which the run needs anyway). Memory
is an estimate from the sizes of the parts; the allocator's fragments, the CUDA context and the layers that ZeRO-3
gathers come on top. It was within 4% of the measured peak of ViT-L-14 on H200s, ZeRO-1 and 3 (docs/results.md).

Sizes: P parameters, T trainable ones, N data-parallel ranks, m micro-batch size, M micro-batches, b = M m, D embedding
width, S pixels per side, L tokens.
"""

import warnings
from pathlib import Path

import torch
from torch import nn

from infcl.config import BatchPlan, TrainConfig, total_steps
from infcl.kernels import WORKSPACE_BYTES
from infcl.parallel import Parallel, describe_ranks
from infcl.towers.config import CLIPConfig
from infcl.train.diagnostics import model_flops
from infcl.train.engine import read_preset, zero_stage
from infcl.train.optim import Schedule

STAGES = (0, 1, 2, 3)


def parameter_counts(model: nn.Module) -> dict[str, tuple[int, int]]:
    """{"image": (parameters, of which trainable), "text": ..., "scalars": ...}."""
    counts = {"image": [0, 0], "text": [0, 0], "scalars": [0, 0]}
    for name, parameter in model.named_parameters():
        part = "image" if name.startswith("visual.") else "scalars" if name.startswith("logit_") else "text"
        counts[part][0] += parameter.numel()
        counts[part][1] += parameter.numel() * parameter.requires_grad
    return {part: (total, trainable) for part, (total, trainable) in counts.items()}


def state_bytes(parameters: int, trainable: int, *, stage: int, ranks: int, precision: str) -> dict[str, float]:
    """{"parameters", "gradients", "optimizer"}: bytes per rank of what training keeps between steps.

    fp32 and amp_bf16: parameters and gradients of 4 bytes; bf16 and fp16: of 2, with gradients accumulated in fp32.
    Optimizer: two Adam moments and, from stage 1 on, the fp32 master of the rank's share.
    """
    low = precision in ("bf16", "fp16")
    width, share = 2 if low else 4, 1 / ranks
    whole, own = trainable * (width + (4 if low else 0)), trainable * share * 4
    return {
        "parameters": parameters * width * (share if stage == 3 else 1),
        "gradients": {0: whole, 1: whole + own}.get(stage, own),
        "optimizer": trainable * (8 if stage == 0 else 12 * share),
    }


def bucket_bytes(zero_optimization: dict, *, stage: int, precision: str) -> float:
    """Bytes per rank of DeepSpeed's buffers for gradients on their way: allocated whole, whatever the model's size."""
    if stage == 0:
        return 0.0
    size = zero_optimization.get("reduce_bucket_size", 5e8) * (2 if precision in ("bf16", "fp16") else 4)
    return size * (2 if stage < 3 and zero_optimization.get("overlap_comm", False) else 1)


def loss_bytes(name: str, *, rows: int, ranks: int, width: int) -> dict[str, float]:
    """{"features", "loss workspace"}: bytes per rank, for b `rows` of D `width` a rank.

    Features and their fp32 gradients of both sides; around a ring, also two blocks that travel and the gradients that
    travel with them. The tiled losses need a bounded workspace, the dense baselines their logits and those' gradient.
    """
    features = rows * width * 4
    ring = 4 * features if ranks > 1 else 0
    matrix = {"clip": (rows * ranks) ** 2, "open_clip": 2 * rows * rows * ranks, "disco": 2 * rows * rows * ranks}
    workspace = 8 * matrix[name] if name in matrix else min(WORKSPACE_BYTES, 16 * rows * rows)
    return {"features": 4 * features + ring, "loss workspace": workspace}


def activation_bytes(cfg: CLIPConfig, *, micro_batch_size: int, precision: str, checkpointing: bool) -> float:
    """Bytes that the graph of one micro-batch keeps, both towers; an estimate.

    A block keeps about 34 values of 2 bytes per 2 bytes of its input (Korthikanti et al. 2022, without the attention
    matrix, which fused attention does not keep); with activation checkpointing its input alone, and one block whole.
    """
    vision, text = cfg.vision_cfg, cfg.text_cfg
    total = 0.0
    for tokens, width, layers in (
        (1 + int(vision.num_patches * (1 - vision.patch_dropout)), vision.width, vision.layers),
        (text.context_length, text.width, text.layers),
    ):
        block = 34 * tokens * width * (2 if precision == "fp32" else 1)
        total += layers * 4 * tokens * width + block if checkpointing else layers * block
    return total * micro_batch_size


def pixel_bytes(cfg: CLIPConfig, batch: BatchPlan) -> float:
    """Host bytes per rank of a step's images and tokens, which wait there between the two passes."""
    return batch.rank_batch_size * (3 * cfg.vision_cfg.image_size**2 + 8 * cfg.text_cfg.context_length)


def memory_plan(
    cfg: CLIPConfig,
    batch: BatchPlan,
    config: TrainConfig,
    counts: dict[str, tuple[int, int]],
    precision: str,
    zero_optimization: dict,
) -> dict[str, list[float]]:
    """{part: bytes per rank under ZeRO 0, 1, 2, 3} of device memory; the last part is the total."""
    parameters, trainable = (sum(column) for column in zip(*counts.values()))
    columns = []
    for stage in STAGES:
        parts = state_bytes(parameters, trainable, stage=stage, ranks=batch.dp_size, precision=precision)
        parts["gradient buckets"] = bucket_bytes(zero_optimization, stage=stage, precision=precision)
        parts |= loss_bytes(config.loss, rows=batch.rank_batch_size, ranks=batch.dp_size, width=cfg.embed_dim)
        parts["activations"] = activation_bytes(
            cfg,
            micro_batch_size=batch.micro_batch_size,
            precision=precision,
            checkpointing=config.grad_checkpointing,
        )
        columns.append(parts | {"total": sum(parts.values())})
    return {part: [column[part] for column in columns] for part in columns[0]}


def describe_plan(config: TrainConfig, parallel: Parallel) -> str:
    """The resolved plan as text. ValueError for whatever the run would refuse before it builds the engine."""
    from infcl.train.build import build_loader, build_model, build_tasks, build_tokenizer_and_model_config

    preset, precision = read_preset(config, parallel.device.type)
    batch = BatchPlan.of(config, parallel.dp_size)
    tokenizer, cfg = build_tokenizer_and_model_config(config)
    loader = build_loader(config, batch, cfg, tokenizer, parallel)
    tasks = build_tasks(config, batch, cfg, tokenizer)
    steps = total_steps(config, loader.steps_per_epoch)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*which is a no-op")  # --pretrained: names and shapes are checked
        model = build_model(config, cfg)
    counts = parameter_counts(model)
    every = {"retrieval": config.val_frequency, "zero_shot": config.zeroshot_frequency}
    evaluations = [f"{name} {_every(every[name])}" for name in tasks]
    rows = [
        ("batch", str(batch)),
        ("steps", _steps_line(steps, loader, batch)),
        ("learning rate", _learning_rate_line(config, steps, loader.steps_per_epoch, batch)),
        ("data", _data_line(config, loader)),
        ("model", _model_line(config, counts)),
        ("compute", f"{model_flops(cfg) * batch.global_batch_size / 1e12:,.2f} TFLOP a step, towers alone"),
        ("system", f"{describe_ranks(parallel)}, {precision}, ZeRO-{zero_stage(preset)}"),
        ("evaluation", ", ".join(evaluations) or "none"),
        ("run folder", _folder_line(config)),
        ("checkpoints", _checkpoint_line(config, counts)),
    ]
    width = max(len(name) for name, _ in rows)
    lines = ["The plan (--dry-run: nothing is trained)", ""]
    lines += [*(f"  {name:<{width}}  {value}" for name, value in rows), ""]
    zero_optimization = preset.get("zero_optimization", {})
    plan = memory_plan(cfg, batch, config, counts, precision, zero_optimization)
    lines += _memory_table(plan, zero_stage(preset))
    offloaded = [name for name in ("offload_optimizer", "offload_param") if name in zero_optimization]
    if offloaded:
        lines.append(f"  This preset has {' and '.join(offloaded)}: those parts are in host memory instead.")
    pixels = _size(pixel_bytes(cfg, batch))
    lines.append(f"  Host memory: {pixels} a rank for a step's pixels and tokens, and what the loader reads ahead.")
    return "\n".join([*lines, ""])


def _steps_line(steps: int, loader, batch: BatchPlan) -> str:
    epochs = steps / loader.steps_per_epoch
    left_over = loader.num_samples - loader.steps_per_epoch * batch.global_batch_size
    return (
        f"{steps:,} = {epochs:.4g} epochs of {loader.steps_per_epoch:,} ({left_over:,} samples left over in each); "
        f"{steps * batch.global_batch_size:,} samples seen"
    )


def _learning_rate_line(config: TrainConfig, steps: int, steps_per_epoch: int, batch: BatchPlan) -> str:
    schedule = Schedule(
        config, global_batch_size=batch.global_batch_size, total_steps=steps, steps_per_epoch=steps_per_epoch
    )
    first, last = schedule(0), schedule(steps - 1)
    warning = f"; the run ends inside the warm-up, at {last:.3g}" if steps <= schedule.warmup else ""
    rise = f"{first:.3g} -> {schedule.peak:.3g} in {schedule.warmup:,} steps"
    return f"{config.opt}, {schedule}: {rise}, then {config.lr_scheduler} to {last:.3g}{warning}"


def _data_line(config: TrainConfig, loader) -> str:
    if config.dataset_type == "synthetic":
        return f"{loader.num_samples:,} synthetic pairs"
    from infcl.data.shards import expand_shards

    shards = expand_shards(config.train_data)
    found = {name.removeprefix("index/"): n for name, n in loader.report().items() if name.startswith("index/") and n}
    left_out = ", ".join(f"{n:,} {name}" for name, n in sorted(found.items())) or "none"
    size = _size(sum(Path(path).stat().st_size for path in shards if Path(path).is_file()))
    return f"{len(shards):,} shards, {size}, {loader.num_samples:,} usable samples; left out by the index: {left_out}"


def _model_line(config: TrainConfig, counts: dict[str, tuple[int, int]]) -> str:
    parts = []
    for part in ("image", "text"):
        total, trainable = counts[part]
        locked = "" if total == trainable else f" ({trainable / 1e6:.2f}M trainable)"
        parts.append(f"{part} tower {total / 1e6:.2f}M{locked}")
    return f"{config.model}: {sum(total for total, _ in counts.values()) / 1e6:.2f}M parameters, {', '.join(parts)}"


def _folder_line(config: TrainConfig) -> str:
    root = Path(config.logs) / (config.name or "(time and flags)")
    state = "new"
    if (root / "summary.json").is_file():
        state = "holds a finished run" + (", to be overwritten" if config.overwrite else "")
    elif (root / "config.json").is_file():
        state = "holds an unfinished run" + (", to be overwritten" if config.overwrite else "")
    extra = {"none": "", "all": ", tensorboard/, wandb/"}.get(config.report_to, f", {config.report_to}/")
    return f"{root} ({state}): metrics.jsonl{extra}, checkpoints/, export/, summary.json"


def _checkpoint_line(config: TrainConfig, counts: dict[str, tuple[int, int]]) -> str:
    parameters, trainable = (sum(column) for column in zip(*counts.values()))
    when = [_epochs(config.save_frequency)] if config.save_frequency else []
    when += [f"every {config.save_every_n_steps} steps"] if config.save_every_n_steps else []
    size, export = _size(4 * parameters + 8 * trainable), _size(4 * parameters)
    return f"{', '.join([*when, 'at the end'])}; about {size} each; the export {export}"


def _every(frequency: int) -> str:
    return f"{_epochs(frequency)} and at the end" if frequency else "at the end"


def _epochs(frequency: int) -> str:
    return "every epoch" if frequency == 1 else f"every {frequency} epochs"


def _memory_table(plan: dict[str, list[float]], stage: int) -> list[str]:
    width = max(len(part) for part in plan)
    heads = "".join(f"{f'ZeRO-{s}' + ('*' if s == stage else ' '):>12}" for s in STAGES)
    lines = ["  device memory a rank, estimated (* this preset)", f"  {'':<{width}}{heads}"]
    return lines + [f"  {part:<{width}}" + "".join(f"{_size(n):>11} " for n in row) for part, row in plan.items()]


def _size(count: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.{1 if count < 100 * scale else 0}f} {unit}"
    return f"{count:.0f} B"
