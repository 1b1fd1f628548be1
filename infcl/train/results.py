"""What a finished run leaves beside its checkpoints: loss curve, exported model, and last summary.json."""

import json
from collections import Counter

import torch
import torch.distributed as dist

from infcl.checkpoint.run_folder import RunFolder, why_not_written, write_atomic
from infcl.models.config import CLIPConfig
from infcl.parallel import Parallel
from infcl.report import draw_loss_curve, summary_table


def write_results(
    run: RunFolder, parallel: Parallel, weights: dict[str, torch.Tensor], model_config: CLIPConfig, summary: dict
) -> None:
    """Rank 0 writes; weights: the whole model's, on rank 0. Collective.

    Raises RuntimeError on every rank, with the cause and the newest checkpoint, where rank 0 could not write.
    """
    problem: list[str | None] = [None]
    cause: Exception | None = None
    if parallel.rank == 0:
        try:
            _write(run, weights, model_config, summary)
        except Exception as error:  # whatever it is: the other ranks wait to be told, then all raise it
            cause, problem = error, [why_not_written(error)]
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise RuntimeError(
            f"the trained model could not be written to {run.root} ({problem[0]}); newest checkpoint: "
            f"{summary['paths']['checkpoint'] or 'none'}. When that is mended, start again with --resume latest"
        ) from cause


def _write(run: RunFolder, weights: dict[str, torch.Tensor], model_config: CLIPConfig, summary: dict) -> None:
    from infcl.convert.export import export_model

    if diverged := [name for name, value in weights.items() if not value.isfinite().all()]:
        raise ValueError(f"training has diverged: {len(diverged)} weights are not finite, {diverged[0]} first")
    draw_loss_curve(run.metrics, run.loss_curve)
    tokenizer_path = run.tokenizer if run.tokenizer.is_file() else None
    name = run.root.resolve().name
    export_model(weights, model_config, tokenizer_path, run.export, name=name, card=summary)
    write_atomic(run.summary, json.dumps(summary, indent=2) + "\n")


def describe_finished(run: RunFolder) -> str:
    """What a start says of a run that is finished. Rank 0 only."""
    summary = json.loads(run.summary.read_text())
    return f"{run.root} is finished; --overwrite trains it again\n{summary_table(summary)}"


def sum_reports(report: dict[str, int], parallel: Parallel) -> dict[str, int]:
    """The loaders' counters summed over ranks; what the index left out is the same on every rank. Collective."""
    reports: list[dict[str, int]] = [{}] * parallel.world_size
    dist.all_gather_object(reports, report)
    total = Counter({name: n for name, n in reports[0].items() if name.startswith("index/")})
    for each in reports:
        total.update({name: n for name, n in each.items() if not name.startswith("index/")})
    return dict(total)
