"""The plan of a run, derived from its flags: the text of `pretrain_clip.py --dry-run`.

A dry run builds no engine, reads no image and writes no file except shard indexes, which the run needs anyway.
"""

from pathlib import Path

import torch

from infcl.config import BatchPlan, TrainConfig, aligned, counted, shown_bytes, teacher_in_words
from infcl.config.preset import stage_over
from infcl.data.loader import StepLoader
from infcl.engine.parameter_groups import checkpoint_bytes
from infcl.engine.schedule import Schedule
from infcl.kernels import select_tile
from infcl.parallel import Parallel, describe_ranks, ranks_of_host
from infcl.parallel.host_limits import host_memory_bytes
from infcl.plan.memory import host_bytes, host_parts, memory_of
from infcl.plan.setting import STAGES, Setting, parameter_counts, setting_of_run
from infcl.train.build import Inputs, build_loader, build_meta_model, build_schedule, build_tasks


def describe_plan(inputs: Inputs, parallel: Parallel) -> str:
    """Return the resolved plan as text. Collective.

    Raises:
        ValueError: for a usage error that the run would report before it builds the engine.
    """
    spec, cfg = inputs.spec, inputs.model_config
    config, batch = spec.flags, spec.batch
    if config.resume not in (None, "latest") and not Path(config.resume).is_dir():
        raise ValueError(f"--resume {config.resume}: no such folder; give latest, or RUN/checkpoints/step_NUMBER")
    select_tile(torch.empty(0, device=parallel.device), tile=config.tile)
    loader = build_loader(inputs, parallel)
    tasks = build_tasks(inputs)
    for task in tasks.values():
        task.check()
    schedule = build_schedule(spec, loader)
    model = build_meta_model(config, cfg)
    counts = parameter_counts(model)
    every = {"retrieval": config.val_frequency, "zero_shot": config.zeroshot_frequency}
    often = {name: f"{_every(every[name], 'epoch')} and " if every[name] else "" for name in tasks}
    rows = [
        ("batch", str(batch)),
        *([("", smaller)] if (smaller := batch.smaller_than_asked(config)) else []),
        ("steps", _steps_line(schedule.total_steps, loader, batch)),
        ("learning rate", _learning_rate_line(config, schedule)),
        ("data", _data_line(loader)),
        ("model", _model_line(config, counts)),
        *([("teacher", teacher)] if (teacher := teacher_in_words(vars(config))) else []),
        ("system", f"{describe_ranks(parallel)}, {spec.precision}, {spec.zero_in_words}"),
        ("evaluation", ", ".join(f"{name} {when}at the end" for name, when in often.items()) or "none"),
        ("run folder", _folder_line(config)),
        ("checkpoints", _checkpoint_line(config, counts)),
    ]
    lines = ["The plan (--dry-run: nothing is trained)", "", aligned(rows), ""]
    if (planned := cfg.planned) is None:
        return "\n".join([*lines, "  memory: not planned for towers that open_clip builds", ""])
    on_host = ranks_of_host(parallel)
    run = setting_of_run(spec, planned, counts, ranks_of_host=on_host, teacher=inputs.teacher_size)
    columns = [memory_of(run.with_(zero=stage, offloads=())) for stage in STAGES]
    plan = {part: [column[part] for column in columns] for part in columns[0]}
    offloads = "optimizer" in spec.offloads
    stages = [s for s in STAGES if stage_over(spec.ranks, s, spec.precision, offloads=offloads) == s]  # those that run
    lines += _memory_table(plan, stages, spec.zero_stage)
    if spec.offloads:
        named = " and ".join(f"offload_{part}" for part in spec.offloads)
        lines.append(f"  This preset has {named}: that is in host memory instead, as follows.")
    lines += ["", *_host_table(run, config, on_host)]
    return "\n".join([*lines, ""])


def _host_table(run: Setting, config: TrainConfig, ranks: int) -> list[str]:
    """Return lines about the host memory of a rank and of the `ranks` on its node."""
    pixels = {"auto": " (auto: in what is free)", "gpu": " (gpu: in the device's)"}.get(config.pixel_cache_gb, "")
    planned = run.with_(pixel_bytes=0.0) if config.pixel_cache_gb == "auto" else run
    parts = host_parts(planned)
    width = max(map(len, parts))
    where = ", in the same memory as the above" if run.on_cpu else ""
    return [
        f"  host memory per rank{where}, estimated",
        *(f"  {part:<{width}}{shown_bytes(n):>11}{pixels if part == 'pixels' else ''}" for part, n in parts.items()),
        f"  {shown_bytes(host_bytes(planned, ranks))} for {counted(ranks, 'rank')} of "
        f"{shown_bytes(host_memory_bytes())} a host, "
        "in addition to programs and what the loader reads ahead",
    ]


def _steps_line(steps: int, loader: StepLoader, batch: BatchPlan) -> str:
    epochs = steps / loader.steps_per_epoch
    left_over = loader.num_samples - loader.steps_per_epoch * batch.global_batch_size
    return (
        f"{steps:,} = {epochs:.4g} epochs of {loader.steps_per_epoch:,} ({left_over:,} samples left over in each); "
        f"{steps * batch.global_batch_size:,} samples seen"
    )


def _learning_rate_line(config: TrainConfig, schedule: Schedule) -> str:
    last = schedule(schedule.total_steps - 1)
    oddity = f"; {schedule.oddity()}" if schedule.oddity() else ""
    return f"{config.opt}, {schedule}: {schedule.describe_warmup()}, then {config.lr_scheduler} to {last:.3g}{oddity}"


def _data_line(loader: StepLoader) -> str:
    found = {name.removeprefix("index/"): n for name, n in loader.report().items() if name.startswith("index/") and n}
    return f"{loader.about}; left out by the index: {', '.join(f'{n:,} {name}' for name, n in found.items()) or 'none'}"


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
    if (root / "config.json").is_file():
        which = "a finished" if (root / "summary.json").is_file() else "an unfinished"
        state = f"has {which} run"
    extra = {"none": "", "all": ", tensorboard/, wandb/"}.get(config.report_to, f", {config.report_to}/")
    return f"{root} ({state}): metrics.jsonl{extra}, checkpoints/, export/, summary.json"


def _checkpoint_line(config: TrainConfig, counts: dict[str, tuple[int, int]]) -> str:
    parameters, trainable = (sum(column) for column in zip(*counts.values()))
    when = [_every(config.save_frequency, "epoch")] if config.save_frequency else []
    when += [_every(config.save_every_n_steps, "step")] if config.save_every_n_steps else []
    size, export = shown_bytes(checkpoint_bytes(config, parameters, trainable)), shown_bytes(4 * parameters)
    return f"{', '.join([*when, 'at the end'])}; about {size} each; the export {export}"


def _every(number: int, unit: str) -> str:
    return f"every {unit}" if number == 1 else f"every {number} {unit}s"


def _memory_table(plan: dict[str, list[float]], stages: list[int], stage: int) -> list[str]:
    """Return the lines of the device memory table for `stages`; `stage` is the run's."""
    width = max(len(part) for part in plan)
    heads = "".join(f"{f'ZeRO-{s}' + ('*' if s == stage else ' '):>12}" for s in stages)
    lines = ["  device memory per rank, estimated (* this run)", f"  {'':<{width}}{heads}"]
    for part, column in plan.items():
        lines.append(f"  {part:<{width}}" + "".join(f"{shown_bytes(column[s]):>11} " for s in stages))
    return lines
