"""Trials of benchmarks.largest_batch on one rank: one engine runs one abridged step per batch.

All trials share one start, which takes most of the time (imports, connections, towers). Two steps of six micro-batches
come first; they allocate all lasting state (moments, gradients, workspaces). Each trial is then one step with its own
pixels, loss and features. Before it, the state of the previous trial is freed and the peak memory is reset.

If a trial runs out of memory before the first backward of its step, no lasting state has changed and the next trial
follows. Later, DeepSpeed holds an incomplete step, so the processes exit and new ones run the remaining trials. Ranks
exchange their results over gloo, with a timeout: a rank that hangs in a collective ends all processes.

An abridged step has everything that grows with the batch in full size: cached pixels, tokens, features, the loss of all
samples over all ranks, feature gradients. Micro-batches between the first and the last `real` ones of a pass get random
unit vectors as features and no backward. Encoding them would take hours, and no more memory than the others.
"""

import argparse
import dataclasses
import datetime
import gc
import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.clock import hardware
from benchmarks.rows import append, read
from benchmarks.step import SYNTHETIC, config_of, shared_folder
from infcl.checkpoint.run_folder import claim_run_folder
from infcl.config import parse_args
from infcl.engine.parameter_groups import later_host_bytes
from infcl.models.packing import num_texts
from infcl.parallel import Parallel, destroy_parallel, init_parallel, max_over
from infcl.report import read_metrics
from infcl.step.pixels import build_pixel_cache
from infcl.train.build import build_loader, build_loss, resolve_inputs
from infcl.train.diagnostics import SampledLoss
from infcl.train.observers import Step
from infcl.train.profiler import PhaseTimer
from infcl.train.trainer import Trainer

WARM_UP_MICRO_BATCHES = 6  # the encoded ones at both ends of a pass, and one between that is not
KEY = ("model", "gpus", "memory_gb", "pixels", "loss", "precision", "checkpointing", "micro_batch", "global_batch")
COLUMNS = (
    *KEY,
    *("fits", "peak_gib", "seconds_loss", "step_seconds", "device", "torch", "triton", "deepspeed", "commit", "said"),
)


class AbridgedTrainer(Trainer):
    """A trainer whose engine runs different batches one after another, because its start takes longer than a step."""

    real = 2  # number of micro-batches at each end of a pass that are encoded
    replaying = False  # whether a backward of the step has begun; before it, no lasting state has changed

    def fit(self) -> dict:
        raise RuntimeError("a trainer of changing batches learns nothing: it measures")

    def release(self) -> None:
        """Free all state of a batch and reset the peak memory. Parameters, gradients and moments stay."""
        for name in ("pixels", "loss", "sampled_loss"):
            self.__dict__.pop(name, None)
        gc.collect()
        if self.parallel.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def take(self, *, steps: int = 1, **changes) -> None:
        """Change the batch, the loss or the pixel cache (fields of the config) for the next `steps` steps."""
        self.inputs = dataclasses.replace(self.inputs, spec=self.spec.change(**changes))
        self.spec, self.config, self.batch = self.inputs.spec, self.inputs.spec.flags, self.inputs.spec.batch
        before: Any = self.loader
        loader: Any = build_loader(self.inputs, self.parallel)
        loader._source.pool = before._source.pool  # reuse the random images: drawing and pinning takes a second
        self.loader = loader
        self.pixels = build_pixel_cache(
            self.spec,
            self.engine.module,
            self.parallel,
            resident=self.resident,
            repeats=self.loader.repeats,
            reserved=later_host_bytes(self.spec, self.engine.module),
        )
        self.loss = build_loss(self.spec, self.parallel)
        self.sampled_loss = SampledLoss(self.loss, rows=self.batch.micro_batch_size)
        self.timer = PhaseTimer(self.parallel.device)
        self.step, self.total_steps = 0, steps

    def train_step(self, micro_batches) -> Step:
        self.encoded, self.replaying = 0, False
        return super().train_step(micro_batches)

    def _backward(self, surrogate: torch.Tensor, is_last: bool) -> None:
        self.replaying = True
        if surrogate.requires_grad:
            super()._backward(surrogate, is_last)

    def _encode(self, micro_batch: dict) -> dict:
        index, self.encoded = self.encoded, self.encoded + 1
        return super()._encode(micro_batch) if self._is_real(index) else self._stand_in(micro_batch)

    def _encode_again(self, micro_batch: dict, kept: dict, first: int) -> dict:
        if self._is_real(first // self.batch.micro_batch_size):
            return super()._encode_again(micro_batch, kept, first)
        return self._stand_in(micro_batch)

    def _is_real(self, index: int) -> bool:
        """Return whether a micro-batch is encoded.

        The last ones keep their graphs (cached activations). The last one before them is replayed and ends the step.
        """
        cached = self.batch.num_micro_batches - max(1, self.resident)
        return index < self.real or index >= cached - self.real

    def _stand_in(self, micro_batch: dict) -> dict[str, torch.Tensor]:
        device, shape = self.parallel.device, (num_texts(micro_batch), self.model_config.embed_dim)
        features = {
            name: F.normalize(torch.randn(shape, device=device), dim=1) for name in ("image_features", "text_features")
        }
        scalars = {"logit_scale": 2.659, "logit_bias": self.model_config.init_logit_bias}
        return features | {
            n: torch.full([1], value, device=device) for n, value in scalars.items() if value is not None
        }


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
