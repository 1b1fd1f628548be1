"""Whole training steps on one GPU, with our loss and with each peer's or our dense one instead (the paper's Figure 4).

    pip install inf_cl==1.2.1 open_clip_torch
    python -m benchmarks.step_losses --csv docs/results/step_losses.csv

One engine takes all of it: the trainer's own towers, gradient cache, optimizer and loop on synthetic images, where
only the loss changes. So the figure shows what a loss costs a training, not how fast another program's towers are
(benchmarks.step --peer). Batches in rising order, of each the losses one after another; --csv gets every row at once.

    inf_cl               ours, as the trainer takes it
    clip                 ours too, the whole b x b matrix, features in the towers' 16-bit type as under autocast
    official_open_clip   open_clip's ClipLoss, from the installed package or --open-clip-loss, the same features
    official             the inf_cl package 1.2.1, which computes from float32 features

Seconds are the host's of a whole step, with data and update; of --repeats steps, or as many as --seconds allow for a
setting, going by the same loss at the batch before. Peak memory: torch's, of a setting's steps. One that runs out of
memory has a row without times. Flags that are not listed are pretrain_clip.py's.
"""

import argparse
import importlib.util
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.clock import affordable, hardware
from benchmarks.loss_impls import make
from benchmarks.reused import ReusedTrainer
from benchmarks.rows import append
from benchmarks.step import config_of, shared_folder
from infcl.checkpoint.run_folder import claim_run_folder
from infcl.parallel import destroy_parallel, init_parallel
from infcl.report import read_metrics
from infcl.train.build import resolve_inputs

LOSSES = ("inf_cl", "clip", "official_open_clip", "official")
PHASES = ("encode", "loss", "replay", "step")
COLUMNS = (
    "impl", "model", "precision", "blocks", "pixels", "micro_batch", "global_batch", "median_s", "mean_s", "std_s",
    "repeats", "warm_up", *(f"seconds_{phase}" for phase in PHASES), "peak_gib", "device", "torch", "triton", "commit",
)  # fmt: skip


def main() -> None:
    options, trainer_flags = _parser().parse_known_args()
    micro_batches = {batch: batch // options.batch_size for batch in sorted(map(int, options.batches.split(",")))}
    if odd := [batch for batch, count in micro_batches.items() if not count or batch % options.batch_size]:
        raise SystemExit(f"--batches {odd[0]} is no multiple of --batch-size {options.batch_size}")
    impls = options.impl.split(",")
    refuse_missing(impls, options.open_clip_loss)
    with shared_folder() as folder:
        trainer = first_steps(options, trainer_flags, folder)
        calls = {impl: loss_of(impl, trainer, options.open_clip_loss) for impl in impls}
        print(f"{'loss':>20} {'batch':>9} {'seconds':>9} {'std':>7} {'of it loss':>10} {'peak GiB':>9}", flush=True)
        last: dict[str, tuple[int, float]] = {}  # of each loss: the batch before, ms
        for batch, count in micro_batches.items():
            for impl, call in calls.items():
                pairs, ms = last.get(impl, (batch, 0.0))
                steps = affordable(options.seconds, ms * batch / pairs, options.warm_up, options.repeats)
                if steps is None:
                    continue
                compiling, warm_up, repeats = steps
                row = measure(trainer, call, count, compiling + warm_up, repeats)
                last[impl] = batch, 1000 * (row["median_s"] or 0.0)
                report({"impl": impl, "model": options.model} | row | hardware(options.commit), options.csv)
        trainer.metrics.close()
    destroy_parallel()


def refuse_missing(impls: list[str], open_clip_loss: Path | None = None) -> None:
    """SystemExit for what is no loss of ours, or one whose package or file is not there; before anything is trained."""
    if unknown := [impl for impl in impls if impl not in LOSSES]:
        raise SystemExit(f"--impl: unknown loss '{unknown[0]}'; one of {', '.join(LOSSES)}")
    if "official" in impls and importlib.util.find_spec("inf_cl") is None:
        raise SystemExit("official is the inf_cl package: pip install inf_cl==1.2.1, or leave it out of --impl")
    path = open_clip_loss or installed_open_clip_loss()
    if "official_open_clip" in impls and (path is None or not path.is_file()):
        raise SystemExit(
            f"official_open_clip is open_clip's loss.py, which is not there ({path or 'no package'}): "
            "pip install open_clip_torch, or say --open-clip-loss, or leave it out of --impl"
        )


def first_steps(options: argparse.Namespace, trainer_flags: list[str], folder: Path) -> ReusedTrainer:
    """A trainer behind two steps of two micro-batches, which compile and connect what there is to."""
    flags = ["--model", options.model, "--batch-size", str(options.batch_size), "--accum-freq", "2"]
    config = config_of("1", {}, 2, [*flags, "--pixel-cache", "gpu", *trainer_flags], folder)
    parallel = init_parallel(config.device)
    trainer = ReusedTrainer(resolve_inputs(config, parallel), parallel, claim_run_folder(config, parallel))
    trainer._train()
    return trainer


def loss_of(impl: str, trainer: ReusedTrainer, open_clip_loss: Path | None = None) -> Callable | None:
    """Of a peer, what the step calls: (images [b, D] f32, texts, scale [1] f32, bias or None) -> []; None: ours."""
    if impl == "inf_cl":
        return None
    loss = make(impl, None, {}, open_clip_loss or installed_open_clip_loss())
    low = {"amp_bf16": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = torch.float32 if impl == "official" else low.get(trainer.engine.precision, torch.float32)

    def call(images, texts, scale, bias=None):
        zero = scale.new_zeros(())
        with torch.autocast(images.device.type, enabled=False):
            return loss(images.to(dtype), texts.to(dtype), scale.squeeze(), zero if bias is None else bias).float()

    return call


def installed_open_clip_loss() -> Path | None:
    """loss.py of the installed package, which is not imported."""
    found = importlib.util.find_spec("open_clip")
    return None if found is None or found.origin is None else Path(found.origin).parent / "loss.py"


def measure(trainer: ReusedTrainer, call: Callable | None, micro_batches: int, warm_up: int, repeats: int) -> dict:
    """A row: `repeats` steps behind `warm_up` ones; without times where memory runs out in the loss."""
    trainer.release()
    trainer.take(steps=warm_up + repeats, loss="inf_cl", accum_freq=micro_batches)
    if call is not None:
        trainer.take_loss(call)
    row = {
        "precision": trainer.engine.precision,
        "blocks": "compiled" if trainer.compiled else "eager",
        "pixels": trainer.config.pixel_cache,
        "micro_batch": trainer.batch.micro_batch_size,
        "global_batch": trainer.batch.global_batch_size,
        "warm_up": warm_up,
        "median_s": None,
    }
    try:
        with trainer.signals:
            trainer._train()
    except torch.OutOfMemoryError:
        if trainer.replaying:  # DeepSpeed holds half of a step
            raise
        return row
    records = [r for r in read_metrics(trainer.run.metrics, "train") if r["step"] > warm_up]
    seconds = [trainer.batch.global_batch_size / record["samples_per_second"] for record in records]
    on_gpu = trainer.parallel.device.type == "cuda"
    return row | {
        "median_s": statistics.median(seconds),
        "mean_s": statistics.mean(seconds),
        "std_s": statistics.stdev(seconds) if len(seconds) > 1 else 0.0,
        "repeats": len(seconds),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else float("nan"),
        **{f"seconds_{p}": statistics.median(record[f"seconds_{p}"] for record in records) for p in PHASES},
    }


def report(row: dict, path: Path | None) -> None:
    """Print a row; append it to the CSV."""
    text = "out of memory"
    if row["median_s"] is not None:
        text = f"{row['median_s']:9.3f} {row['std_s']:7.3f} {row['seconds_loss']:10.4f} {row['peak_gib']:9.1f}"
    print(f"{row['impl']:>20} {row['global_batch']:>9} {text}", flush=True)
    append(path, [row], COLUMNS)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--impl", default=",".join(LOSSES), help="comma-separated")
    parser.add_argument("--batches", default="4096,16384,65536,131072", help="pairs, comma-separated")
    parser.add_argument("--model", default="ViT-B-32")
    parser.add_argument("--batch-size", type=int, default=512, help="micro-batch")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--warm-up", type=int, default=1, help="steps that are not timed, after three; 0: none at all")
    parser.add_argument("--seconds", type=float, default=40.0, help="that a setting's steps may take: fewer, or none")
    parser.add_argument("--open-clip-loss", type=Path, default=None, help="open_clip's loss.py [the installed one]")
    parser.add_argument("--csv", type=Path, default=None, help="append the rows to this file")
    parser.add_argument("--commit", default=None, help="for the CSV; default: git's HEAD")
    return parser


if __name__ == "__main__":
    main()
