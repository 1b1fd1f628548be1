"""Trials of benchmarks.largest_batch on one rank: one engine runs one abridged step per batch.

All trials share one start, which takes most of the time (imports, connections, towers). Two steps of six micro-batches
come first; they allocate all lasting state (moments, gradients, workspaces). Each trial is then one step with its own
pixels, loss and features. Before it, the state of the previous trial is freed and the peak memory is reset.

If a trial runs out of memory before the first backward of its step, no lasting state has changed and the next trial
follows. Later, DeepSpeed holds an incomplete step, so the processes exit and new ones run the remaining trials. Ranks
exchange their results over gloo, with a timeout: a rank that hangs in a collective ends all processes.
"""

import argparse
import datetime
import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.abridged import AbridgedTrainer
from benchmarks.clock import hardware
from benchmarks.rows import append, read
from benchmarks.step import SYNTHETIC, config_of, shared_folder
from infcl.checkpoint.run_folder import claim_run_folder
from infcl.config import parse_args
from infcl.parallel import Parallel, destroy_parallel, init_parallel, max_over
from infcl.report import read_metrics
from infcl.train.build import resolve_inputs

WARM_UP_MICRO_BATCHES = 6  # the encoded ones at both ends of a pass, and one between that is not
KEY = ("model", "gpus", "memory_gb", "pixels", "loss", "precision", "checkpointing", "micro_batch", "global_batch")
COLUMNS = (
    *KEY,
    *("fits", "peak_gib", "seconds_loss", "step_seconds", "device", "torch", "triton", "deepspeed", "commit", "said"),
)


class Trials:
    """Runs trials: `trials(loss, pixels, batch)` returns a row. Trials that `path` has are not repeated. Collective.

    Args:
        path: CSV file to which rank 0 appends rows. During a trial, `begun.json` next to it has the trial's key.
    """

    def __init__(self, trainer: AbridgedTrainer, options: argparse.Namespace, path: Path):
        self.trainer, self.options, self.path = trainer, options, path
        self.parallel, self.pixel_cache_gb = trainer.parallel, trainer.config.pixel_cache_gb
        self.known = {tuple(row[name] for name in KEY): row for row in read(path)}
        self.fates = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=60))
        dist.barrier(self.fates)  # all ranks have read `path`

    def __call__(self, loss: str, pixels: str, batch: int) -> dict:
        options = self.options
        key = {"model": options.model, "gpus": options.gpus, "memory_gb": options.memory_gb, "pixels": pixels}
        key |= {"loss": loss, "precision": options.precision, "checkpointing": int(not options.no_checkpointing)}
        key |= {"micro_batch": options.batch_size, "global_batch": batch}
        if known := self.known.get(tuple(key.values())):
            return known
        begun = self.path.with_name("begun.json")
        if self.parallel.rank == 0:
            begun.write_text(json.dumps(key))
        row = key | self._attempt(loss, pixels, batch // options.gpus // options.batch_size) | versions(options.commit)
        if self.parallel.rank == 0:
            append(self.path, [row], COLUMNS)
            begun.unlink()
            shown = f"{row['peak_gib']:.1f} GiB" if row["fits"] else f"does not fit ({row['said'][:100]})"
            print(f"{loss:>10} {pixels:>5} {batch:>12,} pairs: {shown}", flush=True)
        return row

    def _attempt(self, loss: str, pixels: str, micro_batches: int) -> dict:
        said, trainer = "", self.trainer
        try:
            self._step(loss, pixels, micro_batches)
        except torch.OutOfMemoryError as error:
            if trainer.replaying:
                raise
            said = str(error)[:200]
        failed = torch.tensor(float(bool(said)))
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=self.fates)
        if failed:
            return {"fits": 0, "said": said or "on another rank"}
        on_gpu = self.parallel.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else float("nan")
        row = {"fits": 1, "peak_gib": max_over(self.parallel.dp_group, [peak], self.parallel.device)[0]}
        if self.parallel.rank == 0:
            record = read_metrics(trainer.run.metrics, "train")[0]  # every trial is step 1; the last one is kept
            seconds = trainer.batch.global_batch_size / record["samples_per_second"]
            row |= {"seconds_loss": record["seconds_loss"], "step_seconds": seconds}
        return row

    def _step(self, loss: str, pixels: str, micro_batches: int) -> None:
        self.trainer.release()
        where = "gpu" if pixels == "gpu" else self.pixel_cache_gb
        self.trainer.take(loss=loss, accum_freq=micro_batches, pixel_cache_gb=where)
        with self.trainer.signals:
            self.trainer._train()


def versions(commit: str | None) -> dict[str, str]:
    return hardware(commit) | {"deepspeed": metadata.version("deepspeed")}


def run(options: argparse.Namespace, trainer_flags: list[str], plan: Callable[[Trials], None]) -> None:
    """Build the engine on each rank, then call `plan(trials)`."""
    with shared_folder() as folder:
        parallel = init_parallel(parse_args(SYNTHETIC + trainer_flags).device)
        if parallel.device.type == "cuda":
            total = torch.cuda.get_device_properties(parallel.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, options.memory_gb * 1e9 / total), parallel.device)
        trainer = warmed_up(options, trainer_flags, parallel, folder)
        plan(Trials(trainer, options, options.rows))
        trainer.metrics.close()
    destroy_parallel()


def warmed_up(
    options: argparse.Namespace, trainer_flags: list[str], parallel: Parallel, folder: Path
) -> AbridgedTrainer:
    """Return a trainer after its first two steps. Collective; all ranks write to the same `folder`."""
    config = config_of("1", {}, 2, flags_of(options, trainer_flags), folder)
    trainer = AbridgedTrainer(resolve_inputs(config, parallel), parallel, claim_run_folder(config, parallel))
    with trainer.signals:
        trainer._train()
    return trainer


def flags_of(options: argparse.Namespace, trainer_flags: list[str]) -> list[str]:
    flags = ["--model", options.model, "--precision", options.precision, "--loss", options.loss[0]]
    flags += ["--batch-size", str(options.batch_size), "--accum-freq", str(WARM_UP_MICRO_BATCHES)]
    flags += ["--compile-blocks", "off", "--skip-memory-check"]
    flags += ["--pack-captions", "off"]  # a batch must fit with the longest captions too
    return [*flags, *([] if options.no_checkpointing else ["--grad-checkpointing"]), *trainer_flags]
