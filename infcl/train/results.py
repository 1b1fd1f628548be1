"""Warnings at a run's start; loss curve, exported model and summary.json at its end."""

import json
from collections import Counter
from collections.abc import Iterator

import torch

from infcl.checkpoint.records import Summary
from infcl.checkpoint.run_folder import NotWritten, RunFolder
from infcl.config import TrainConfig
from infcl.config.disk import write_atomic
from infcl.config.json_file import read_record
from infcl.config.words import reason
from infcl.convert.export import export_model
from infcl.data.tokenizer.source import stored_tokenizer
from infcl.models.config import CLIPConfig
from infcl.parallel import from_first_rank, gather_objects
from infcl.report import draw_loss_curve, summary_table


def oddities(config: TrainConfig, embed_dim: int) -> Iterator[str]:
    """Yield warnings about flags that may not do what the user means, for a new run. `embed_dim`: of the model."""
    for part in ("image", "text"):
        if getattr(config, f"lock_{part}") and not (config.pretrained or getattr(config, f"pretrained_{part}")):
            yield (
                f"--lock-{part} without --pretrained or --pretrained-{part}: the frozen part of the {part} tower "
                "stays as random as it begins"
            )
    if config.matryoshka_widths and (widest := config.matryoshka_widths[-1]) < embed_dim:
        yield (
            f"--matryoshka-widths end at {widest} of {embed_dim} dimensions: the others stay untrained, and full "
            f"embeddings are evaluated and exported with them. Add {embed_dim}"
        )


def write_results(run: RunFolder, weights: dict[str, torch.Tensor], model_config: CLIPConfig, summary: dict) -> None:
    """Write loss curve, exported model and, last, summary.json on rank 0. Collective.

    Args:
        weights: of the full model, on rank 0.

    Raises:
        NotWritten: on every rank, if the storage of rank 0 failed; with the cause and the newest checkpoint.
        RuntimeError: likewise, if rank 0 failed in another way.
    """

    def write() -> None:
        try:
            if diverged := [name for name, value in weights.items() if not value.isfinite().all()]:
                raise ValueError(f"training has diverged: {len(diverged)} weights are not finite, {diverged[0]} first")
            draw_loss_curve(run.metrics, run.loss_curve)
            tokenizer = stored_tokenizer(run.root, model_config)
            export_model(weights, model_config, tokenizer, run.export, name=run.root.resolve().name, card=summary)
            write_atomic(run.summary, json.dumps(summary, indent=2) + "\n")
        except Exception as error:  # whatever failed, the message names the newest checkpoint
            raise (NotWritten if isinstance(error, OSError) else RuntimeError)(
                f"the trained model could not be written to {run.root} ({reason(error)}); newest checkpoint: "
                f"{summary['paths']['checkpoint'] or 'none'}. Fix that and start again with --resume latest"
            ) from error

    from_first_rank(write)


def describe_finished(run: RunFolder) -> str:
    """Return a text with the summary of a finished run. Rank 0 only."""
    summary = dict(read_record(run.summary, Summary))
    return f"{run.root} is finished; another --name trains again\n{summary_table(summary)}"


def sum_reports(report: dict[str, int]) -> dict[str, int]:
    """Sum the loaders' counters over ranks, except those of the index, which are equal on all ranks. Collective."""
    reports = gather_objects(report)
    total = Counter({name: n for name, n in reports[0].items() if name.startswith("index/")})
    for each in reports:
        total.update({name: n for name, n in each.items() if not name.startswith("index/")})
    return dict(total)
