"""What a trainer tells of its run: the lines with which it opens, the summary with which it ends."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch.distributed as dist

from infcl.config import TrainConfig
from infcl.models.attention import towers_with_kernel
from infcl.parallel import describe_ranks, max_over
from infcl.report.summary import aligned
from infcl.step.pixels import describe_pixels
from infcl.train.metrics import peak_memory_mb
from infcl.train.results import sum_reports

if TYPE_CHECKING:
    from infcl.train.trainer import Trainer


def opening(trainer: "Trainer") -> Iterator[str]:
    """What the run is, and what in its flags may not be what was meant."""
    config, batch, schedule, steps = trainer.config, trainer.batch, trainer.schedule, trainer.total_steps
    by_triton = ", ".join(towers_with_kernel(trainer.engine.module))
    towers = [
        f"{'compiled' if trainer.compiled else 'eager'} blocks",
        *([f"Triton attention ({by_triton})"] if by_triton else []),
        f"{trainer.resident} resident micro-batches",
        f"{'packed' if trainer.spec.packs_captions else 'padded'} captions",
    ]
    yield aligned(
        [
            ("model", f"{config.model}, {trainer.num_parameters / 1e6:.2f}M parameters"),
            ("data", f"{trainer.loader.num_samples:,} samples"),
            ("batch", str(batch)),
            ("steps", f"{steps:,}"),
            ("loss", config.loss),
            ("engine", f"{trainer.engine.zero_in_words}, {trainer.spec.precision}, {describe_ranks(trainer.parallel)}"),
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
    if trainer.step == 0:  # else the weights are a checkpoint's, and all this was said
        yield from trainer.sources_of_weights
        yield from oddities(config)


def oddities(config: TrainConfig) -> Iterator[str]:
    """What in the flags of a run that begins may not be what was meant."""
    if config.opt == "lamb" and config.wd == 0:
        yield (
            "--opt lamb with --wd 0 is Adam: only what decays is scaled by |parameter| / |update|; --wd 1e-6 has all "
            "matrices scaled, and hardly decays"
        )
    for part in ("image", "text"):
        if getattr(config, f"lock_{part}") and not (config.pretrained or getattr(config, f"pretrained_{part}")):
            yield (
                f"--lock-{part} without --pretrained or --pretrained-{part}: what is frozen of the {part} tower stays "
                "as random as it begins"
            )


def summary_of(trainer: "Trainer", results: dict[str, dict[str, float]]) -> dict:
    """summary.json of a trained run with these evaluations. Collective."""
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
