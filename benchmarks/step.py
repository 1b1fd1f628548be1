"""Measure samples/s, phase times and memory of full optimizer steps: `python -m benchmarks.step --gpus 8 --zero 1 ...`.

The steps are the trainer's own (its build, engine, loop and metrics), on synthetic uint8 images. Flags that are not
listed below are pretrain_clip.py's. The defaults here are --model ViT-L-14 and --resident-micro-batches 1. Each setting
prints one line; --csv appends it with commit, hardware and versions:

    samples/s   of all GPUs: the median of the steps after the first --warm-up-steps. The CSV also has their mean and
                standard deviation
    MFU         FLOPs per second that training on these samples needs (each tower forward and backward once), divided
                by the rate of cuBLAS's 8192^3 BF16 GEMM in the same run
    HFU         the same for the executed FLOPs, with the second encoding and the recomputation of checkpointed blocks
    text_share  share of the text tower's token positions that are computed. Both rates count only these. Captions are
                packed unless --pack-captions is off

`bash benchmarks/sweep.sh FILE CSV` measures each line of a file (flags; # comments) in processes of its own.
"""

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.clock import hardware, library_tflops
from benchmarks.processes import torchrun
from benchmarks.rows import append, parser_of_rows
from infcl.config import TrainConfig, parse_args
from infcl.models.attention import towers_with_kernel
from infcl.models.clip import CLIP
from infcl.models.config import CLIPConfig
from infcl.models.flops import forward_flops
from infcl.parallel import Parallel, destroy_parallel, init_parallel, max_over, report_mistake
from infcl.report import read_metrics
from infcl.train.diagnostics import model_flops, trained_shares

if TYPE_CHECKING:
    from infcl.train.trainer import Trainer

PHASES = ("data", "encode", "loss", "replay", "step")
COLUMNS = (  # encode_together belongs to a removed flag; it stays, empty, because the existing files have it
    "label", "gpus", "model", "zero", "precision", "blocks", "checkpointing", "micro_batch", "micro_batches",
    "global_batch", "resident", "encode_together", "text_share", "attention", "samples_per_second",
    "samples_per_second_per_gpu", "samples_per_second_mean", "samples_per_second_std",
    *(f"seconds_{phase}" for phase in PHASES), "step_seconds", "peak_gib", "mfu", "hfu",
    "library_tflops", "steps", "loss", "zero_options", "device", "torch", "triton", "deepspeed", "commit",
)  # fmt: skip
ONE_RESIDENT = ["--resident-micro-batches", "1"]  # with auto, rows would depend on the GPU's memory
SYNTHETIC = ["--dataset-type", "synthetic", "--train-num-samples", str(10**9)]


def main() -> None:
    options, trainer_flags = _parse(sys.argv[1:])
    if options.gpus > 1 and "RANK" not in os.environ:
        sys.exit(subprocess.run(command(options.gpus, sys.argv[1:])).returncode)
    else:
        measure(options, trainer_flags)
        destroy_parallel()


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = parser_of_rows(__doc__)
    parser.add_argument("--gpus", type=int, default=1, help="one process each")
    parser.add_argument("--zero", default="1", help="preset: ds_configs/zero<this>.json")
    parser.add_argument("--zero-options", type=json.loads, default={}, help="JSON: more keys of zero_optimization")
    parser.add_argument("--measured-steps", type=int, default=4)
    parser.add_argument("--warm-up-steps", type=int, default=2)
    parser.add_argument("--label", default=None, help="of the row; default: the flags")
    return parser.parse_known_args(arguments)


# ---- one setting ----


def measure(options: argparse.Namespace, trainer_flags: list[str]) -> None:
    """Train a few steps and report them."""
    with shared_folder() as folder:
        steps = options.warm_up_steps + options.measured_steps
        config = config_of(options.zero, options.zero_options, steps, trainer_flags, folder)
        try:
            parallel = init_parallel(config.device)
        except ValueError as error:  # too few GPUs
            sys.exit(report_mistake("benchmarks.step", error))
        rate = library_tflops() if parallel.device.type == "cuda" else float("nan")
        from infcl.train.trainer import Trainer

        trainer, peak = trained(Trainer, config, parallel)
        if parallel.rank == 0:
            report(_row(trainer, options, peak, rate), options.csv)
            table = trainer.run.root / "profile" / "table.txt"
            if table.is_file():
                print(table.read_text())


def trained(kind: type["Trainer"], config: TrainConfig, parallel: Parallel) -> tuple["Trainer", float]:
    """Make a trainer and run its steps; return it, and the largest peak memory of a rank in GiB (NaN on a CPU)."""
    from infcl.checkpoint.run_folder import claim_run_folder
    from infcl.train.build import resolve_inputs

    trainer = kind(resolve_inputs(config, parallel), parallel, claim_run_folder(config, parallel))
    with trainer.signals:
        trainer._train()
    trainer.metrics.say(trainer.profiler.close() or "")
    trainer.metrics.close()
    peak = torch.cuda.max_memory_allocated() / 2**30 if parallel.device.type == "cuda" else float("nan")
    return trainer, max_over(parallel.dp_group, [peak], parallel.device)[0]


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Yield a temporary folder that all processes of a launch share. Its name has the id of their common parent."""
    folder = Path(tempfile.gettempdir(), f"infcl-step-{os.getppid() if 'RANK' in os.environ else os.getpid()}")
    folder.mkdir(exist_ok=True)
    try:
        yield folder
    finally:
        if os.environ.get("RANK", "0") == "0":
            shutil.rmtree(folder, ignore_errors=True)


def config_of(zero: str, zero_options: dict, steps: int, trainer_flags: list[str], folder: Path) -> TrainConfig:
    """Return the config of a run on synthetic data with a preset of ds_configs/. The run writes to `folder`."""
    preset = json.loads(Path(f"ds_configs/zero{zero}.json").read_text())
    preset["zero_optimization"] |= zero_options
    path = folder / "preset.json"
    own = folder / f"preset_{os.getpid()}.json"  # each rank writes it, none may read it incomplete
    own.write_text(json.dumps(preset))
    own.replace(path)
    given = [*SYNTHETIC, "--model", "ViT-L-14", *ONE_RESIDENT]
    given += ["--report-to", "none", "--save-frequency", "0", "--log-every-n-steps", str(10**9), "--warmup", "0"]
    given += ["--logs", str(folder), "--name", "run", "--deepspeed_config", str(path), "--steps", str(steps)]
    return parse_args([*given, *trainer_flags])


def _bucket_options(zero: str) -> dict:
    """Return the preset's options for a row. A row without them used DeepSpeed's own bucket size, and overlap_comm."""
    known = json.loads(Path(f"ds_configs/zero{zero}.json").read_text())["zero_optimization"]
    found = {name: known[name] for name in ("reduce_bucket_size",) if name in known}
    return found | ({"overlap_comm": False} if known.get("overlap_comm") == "auto" else {})  # all GPUs are on one node


def setting_of(label: str) -> tuple[TrainConfig, dict]:
    """Return (config, preset) of a row from its label, which has the flags without dashes."""
    own = ("zero", "zero-options", "measured-steps", "warm-up-steps", "gpus")
    names = {field.name.replace("_", "-") for field in dataclasses.fields(TrainConfig)}.union(own)
    words = [f"--{word}" if word in names else word for word in label.split()]
    options, flags = _parse(words)
    path = f"ds_configs/zero{options.zero}.json"
    config = parse_args([*SYNTHETIC, "--model", "ViT-L-14", *ONE_RESIDENT, "--deepspeed_config", path, *flags])
    return config, json.loads(Path(path).read_text())


def _row(trainer, options: argparse.Namespace, peak: float, rate: float) -> dict:
    config, batch = trainer.config, trainer.batch
    records = [r for r in read_metrics(trainer.run.metrics, "train") if r["step"] > options.warm_up_steps]
    median = {
        name: statistics.median(record.get(name, 0.0) for record in records)
        for name in ("samples_per_second", "loss", "text_share", *(f"seconds_{phase}" for phase in PHASES))
    }
    rates = [record["samples_per_second"] for record in records]
    per_gpu = median["samples_per_second"] / batch.dp_size
    model, cfg = trainer.engine.module, trainer.model_config
    again = 1 - trainer.resident / batch.num_micro_batches
    share = median["text_share"]
    executed = executed_flops(model, cfg, again=again, checkpointing=config.grad_checkpointing, text_share=share)
    default_label = " ".join(_shown_flags(sys.argv[1:]))
    return (
        median
        | {
            "label": options.label or default_label,
            "gpus": batch.dp_size,
            "model": config.model,
            "attention": "triton" if towers_with_kernel(model) else "torch",
            "zero": options.zero if trainer.engine.zero_stage == int(options.zero[0]) else trainer.engine.zero_stage,
            "precision": str(trainer.engine.precision),
            "blocks": "compiled" if trainer.compiled else "eager",
            "checkpointing": config.grad_checkpointing,
            "micro_batch": batch.micro_batch_size,
            "micro_batches": batch.num_micro_batches,
            "global_batch": batch.global_batch_size,
            "resident": trainer.resident,
            "samples_per_second_per_gpu": per_gpu,
            "samples_per_second_mean": statistics.fmean(rates),
            "samples_per_second_std": statistics.stdev(rates) if len(rates) > 1 else "",
            "step_seconds": batch.global_batch_size / median["samples_per_second"],
            "peak_gib": peak,
            "mfu": model_flops(cfg, trained_shares(model), share) * per_gpu / rate / 1e12,
            "hfu": executed * per_gpu / rate / 1e12,
            "library_tflops": rate,
            "steps": len(records),
            "zero_options": json.dumps(_bucket_options(options.zero) | options.zero_options),
            "deepspeed": metadata.version("deepspeed"),
        }
        | hardware(options.commit)
    )


def executed_flops(
    model: CLIP, cfg: CLIPConfig, *, again: float, checkpointing: bool, text_share: float = 1.0
) -> float:
    """Return the FLOPs that the towers execute per sample.

    Args:
        again: share of the micro-batches that are encoded a second time.
        checkpointing: whether blocks are recomputed in the backward.
        text_share: share of the text tower's token positions that are computed.
    """
    total, shares = 0.0, {"image": 1.0, "text": text_share}
    for tower, trained in trained_shares(model).items():
        encoded = 1 + again * (not model.frozen[tower])
        total += shares[tower] * forward_flops(cfg)[tower] * (encoded + trained * (2 + checkpointing))
    return total


def report(row: dict, path: Path | None) -> None:
    """Print a row; append it to the CSV."""
    seconds = ", ".join(f"{phase} {row.get(f'seconds_{phase}') or 0:.3f}" for phase in PHASES)
    print(
        f"{row['label']}: {row['samples_per_second']:.1f} samples/s, {row['samples_per_second_per_gpu']:.1f} per GPU, "
        f"MFU {row['mfu']:.3f}, HFU {row['hfu']:.3f}, {row['peak_gib']:.1f} GiB, seconds: {seconds}",
        flush=True,
    )
    append(path, [row], COLUMNS)


def command(gpus: int, flags: list[str], module: str = "benchmarks.step") -> list[str]:
    """Return the command that measures one setting, with one process per GPU."""
    return [*torchrun(gpus), "-m", module, *flags]


def _shown_flags(flags: list[str]) -> list[str]:
    """Return the flags of a setting without dashes."""
    hidden = {at + more for at, flag in enumerate(flags) if flag in ("--csv", "--commit") for more in (0, 1)}
    return [flag.removeprefix("--") for at, flag in enumerate(flags) if at not in hidden]


if __name__ == "__main__":
    main()
