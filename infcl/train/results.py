"""Tables and files about a run: banner and warnings at its start; loss curve, export and summary.json at its end."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from infcl.checkpoint.run_folder import NotWritten, RunFolder, why_not_written, write_atomic
from infcl.config import TrainConfig, aligned, counted
from infcl.convert.export import export_model
from infcl.models.attention import towers_with_kernel
from infcl.models.config import CLIPConfig, load_any_config
from infcl.parallel import Parallel, describe_ranks, max_over
from infcl.report import draw_loss_curve, summary_table
from infcl.step.pixels import describe_pixels
from infcl.train.profiler import peak_memory_mb

if TYPE_CHECKING:
    from infcl.train.trainer import Trainer


def opening(trainer: "Trainer") -> Iterator[str]:
    """Yield the table of the run's settings, then warnings about flags that may be unintended."""
    config, batch, schedule, steps = trainer.config, trainer.batch, trainer.schedule, trainer.total_steps
    by_triton = ", ".join(towers_with_kernel(trainer.engine.module))
    towers = [
        f"{'compiled' if trainer.compiled else 'eager'} blocks",
        *([f"Triton attention ({by_triton})"] if by_triton else []),
        f"cached activations of {counted(trainer.resident, 'micro-batch', 'micro-batches')}",
        f"{'packed' if trainer.spec.packs_captions else 'padded'} captions",
    ]
    yield aligned(
        [
            ("model", f"{config.model}, {trainer.num_parameters / 1e6:.2f}M parameters"),
            ("data", f"{trainer.loader.num_samples:,} samples"),
            ("batch", str(batch)),
            ("steps", f"{steps:,}"),
            ("loss", config.loss),
            ("engine", f"{trainer.spec.zero_in_words}, {trainer.spec.precision}, {describe_ranks(trainer.parallel)}"),
            ("towers", ", ".join(towers)),
            ("pixels", describe_pixels(trainer.pixels)),
            ("optimizer", f"{config.opt}, learning rate {schedule}, {schedule.warmup:,} warm-up steps"),
        ]
    )
    if trainer.parallel.tp_size > 1:
        from megatron_patches.patches import describe_patches

        yield describe_patches()
    if smaller := batch.smaller_than_asked(config):
        yield smaller
    if odd := schedule.oddity():
        yield odd
    if trainer.step == 0:  # a resumed run has its weights from a checkpoint, and has reported this before
        yield from trainer.sources_of_weights
        yield from oddities(config, trainer.model_config.text_cfg.vocab_size)


def oddities(config: TrainConfig, vocab_size: int) -> Iterator[str]:
    """Yield warnings about flags that may not do what the user means, for a new run.

    Args:
        config: the flags.
        vocab_size: token embeddings of the trained model.
    """
    if vocab_size != (own := load_any_config(config.model).text_cfg.vocab_size):
        yield (
            f"--model {config.model} has {own} token embeddings; this --tokenizer makes them {vocab_size}, "
            "so released weights of its text tower do not fit"
        )
    for part in ("image", "text"):
        if getattr(config, f"lock_{part}") and not (config.pretrained or getattr(config, f"pretrained_{part}")):
            yield (
                f"--lock-{part} without --pretrained or --pretrained-{part}: the frozen part of the {part} tower "
                "stays as random as it begins"
            )


def summary_of(trainer: "Trainer", results: dict[str, dict[str, float]]) -> dict:
    """Return the contents of summary.json for a completed run with these evaluation results. Collective."""
    parallel, model_config, newest = trainer.parallel, trainer.model_config, trainer.checkpoints.newest
    peak = max_over(dist.group.WORLD, [peak_memory_mb(parallel.device)], parallel.device)[0]
    return {
        "zero_shot_top1": results.get("zero_shot", {}).get("top1"),
        "image_to_text_r1": results.get("retrieval", {}).get("image_to_text_r1"),
        "text_to_image_r1": results.get("retrieval", {}).get("text_to_image_r1"),
        "samples_seen": trainer.samples_seen,
        "steps": trainer.step,
        "skipped_steps": trainer.skips.total,
        "failed_saves": trainer.checkpoints.failed,
        "lost_metrics": trainer.metrics.lost,
        "train_seconds": round(trainer.train_seconds, 1),
        "peak_memory_mb": round(peak, 1),
        "zero_stage": trainer.engine.zero_stage,
        "world_size": parallel.world_size,
        "data": sum_reports(trainer.loader.report(), parallel),
        "evaluation": results,
        "ema": trainer.config.ema_eval,
        "loads_in_open_clip": model_config.loads_in_open_clip,
        "paths": {
            "run": str(trainer.run.root),
            "loss_curve": str(trainer.run.loss_curve),
            "export": str(trainer.run.export),
            "checkpoint": str(newest) if newest else None,
        },
    }


def write_results(
    run: RunFolder, parallel: Parallel, weights: dict[str, torch.Tensor], model_config: CLIPConfig, summary: dict
) -> None:
    """Write loss curve, exported model and, last, summary.json on rank 0. Collective.

    Args:
        run: where to write.
        parallel: the ranks.
        weights: of the full model, on rank 0.
        model_config: config of the towers.
        summary: from `summary_of`.

    Raises:
        NotWritten: on every rank, if the storage of rank 0 failed; with the cause and the newest checkpoint.
        RuntimeError: likewise, if rank 0 failed in another way.
    """
    problem: list[Any] = [None, False]  # (cause, whether the storage failed)
    cause: Exception | None = None
    if parallel.rank == 0:
        try:
            _write(run, weights, model_config, summary)
        except Exception as error:  # any kind: the other ranks wait for the broadcast, then all ranks raise
            cause, problem = error, [why_not_written(error), isinstance(error, OSError | SafetensorError)]
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise (NotWritten if problem[1] else RuntimeError)(
            f"the trained model could not be written to {run.root} ({problem[0]}); newest checkpoint: "
            f"{summary['paths']['checkpoint'] or 'none'}. Fix that and start again with --resume latest"
        ) from cause


def _write(run: RunFolder, weights: dict[str, torch.Tensor], model_config: CLIPConfig, summary: dict) -> None:
    if diverged := [name for name, value in weights.items() if not value.isfinite().all()]:
        raise ValueError(f"training has diverged: {len(diverged)} weights are not finite, {diverged[0]} first")
    draw_loss_curve(run.metrics, run.loss_curve)
    tokenizer_path = run.tokenizer if run.tokenizer.is_file() else None
    name = run.root.resolve().name
    export_model(weights, model_config, tokenizer_path, run.export, name=name, card=summary)
    write_atomic(run.summary, json.dumps(summary, indent=2) + "\n")


def describe_finished(run: RunFolder) -> str:
    """Return a text with the summary of a finished run. Rank 0 only."""
    summary = json.loads(run.summary.read_text())
    return f"{run.root} is finished; --overwrite trains it again\n{summary_table(summary)}"


def sum_reports(report: dict[str, int], parallel: Parallel) -> dict[str, int]:
    """Sum the loaders' counters over ranks, except those of the index, which are equal on all ranks. Collective."""
    reports: list[dict[str, int]] = [{}] * parallel.world_size
    dist.all_gather_object(reports, report)
    total = Counter({name: n for name, n in reports[0].items() if name.startswith("index/")})
    for each in reports:
        total.update({name: n for name, n in each.items() if not name.startswith("index/")})
    return dict(total)
