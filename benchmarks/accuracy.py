"""Compare the accuracy of losses, all else equal (the paper's Table 3): `python -m benchmarks.accuracy ...`

The ordinary trainer trains the demo model (infcl/data/demo.py), one training after another: each of --losses with each
of --seeds seeds. Each appends a CSV row and its thinned loss curve. Commands with other seeds may run at the same time,
each with its own --out and --work. The study of batch sizes is examples/icons/study.py.

    --out DIR    DIR/accuracy_losses.csv and accuracy_losses_curves.csv. Rows are appended; trainings that have a row
                 are skipped
    --work DIR   data set and run folders; a run folder is removed when its row is written

benchmarks.charts draws the chart.
"""

import argparse
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.clock import hardware
from benchmarks.processes import exit_on_sigterm, reason, run, torchrun
from benchmarks.rows import append, read
from infcl.data.demo import prepare_demo
from infcl.report import read_metrics

CURVE_POINTS = 70
LAST = 0.05  # `final_loss` is the mean over this share of the steps, at the end
# name: (--loss, --tile-dtype). Features are float32; every loss except inf_cl_bf16 multiplies them in float32.
LOSSES = {loss: (loss, "fp32") for loss in ("clip", "open_clip", "disco", "inf_cl", "siglip")}
LOSSES["inf_cl_bf16"] = ("inf_cl", "bf16")  # the trainer's default on a GPU
LEARNING_RATE, DEMO_BATCH, ACCUMULATE = 3e-3, 256, 2  # launch/demo.sh's
ENVIRONMENT = {"cpu": {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}, "cuda": {}}  # {--device: variables}
RESULTS = {
    "zero_shot_top1": ("zero_shot", "top1"),
    "image_to_text_r1": ("retrieval", "image_to_text_r1"),
    "text_to_image_r1": ("retrieval", "text_to_image_r1"),
    "image_to_text_r5": ("retrieval", "image_to_text_r5"),
    "text_to_image_r5": ("retrieval", "text_to_image_r5"),
    "val_loss": ("retrieval", "val_loss"),
}


@dataclass(frozen=True)
class Training:
    name: str  # name of its run folder
    flags: list[str]
    key: dict  # columns that identify its row


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    exit_on_sigterm("benchmarks.accuracy")
    data = prepare_demo(options.work / f"demo_{options.num_train}", num_train=options.num_train)
    rows, curves = options.out / "accuracy_losses.csv", options.out / "accuracy_losses_curves.csv"
    known = {row["run"] for row in read(rows)}
    trainings = [training for training in loss_trainings(options, data) if training.name not in known]
    where = hardware(options.commit) | {"ranks": options.ranks, "num_train": options.num_train}
    failed = 0
    for training in trainings:
        folder, began = options.work / "runs" / training.name, time.monotonic()
        command = command_of(training, options)
        shutil.rmtree(folder, ignore_errors=True)  # of a training that failed
        failure, output = run(command, options.time_out, env=os.environ | ENVIRONMENT[options.device])
        if failure:
            failed += 1
            print(f"{training.name}: {failure}\n  " + "\n  ".join(reason(output)), flush=True)
            continue
        row, curve = read_result(folder)
        row = {"run": training.name} | training.key | row | {"wall_seconds": round(time.monotonic() - began, 1)} | where
        append(rows, [row])
        append(curves, [{"run": training.name} | point for point in curve])
        print(f"{training.name}: {_shown(row)}, {row['wall_seconds']:.0f} s", flush=True)
        shutil.rmtree(folder)
    print(f"{len(trainings) - failed} of {len(trainings)} trainings finished")
    return 1 if failed else 0


def command_of(training: Training, options: argparse.Namespace) -> list[str]:
    """Return the trainer's command. Without "--", torchrun reads --logs as an abbreviation of its own flags."""
    start = [*torchrun(options.ranks), *(["--"] if options.ranks > 1 else []), "pretrain_clip.py", *training.flags]
    place = ["--logs", str(options.work / "runs"), "--name", training.name]
    return [*start, "--device", options.device, *place]


def _shown(row: dict) -> str:
    names = ("zero_shot_top1", "image_to_text_r1", "text_to_image_r1")
    return ", ".join(f"{name} {row[name]:.4f}" for name in names if name in row)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--losses", nargs="+", choices=tuple(LOSSES), default=list(LOSSES))
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each setting, with seeds of their own")
    parser.add_argument("--first-seed", type=int, default=0, help="the others follow it: more of them than there are")
    parser.add_argument("--steps", type=int, default=700, help="of 256 samples")
    parser.add_argument("--num-train", type=int, default=16384, help="samples of the demo")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--time-out", type=float, default=1800.0, help="seconds of a training")
    parser.add_argument("--commit", default=None, help="for the CSV; default: git's HEAD")
    return parser


def loss_trainings(options: argparse.Namespace, data: Path) -> list[Training]:
    """Return the trainings ordered by seed, so that an unfinished study compares all losses."""
    result = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for name in options.losses:
            loss, tile_dtype = LOSSES[name]
            flags = [*_flags(options, data), "--loss", loss, "--tile-dtype", tile_dtype, "--seed", str(seed)]
            key = {"loss": name, "seed": seed, "global_batch": DEMO_BATCH, "lr": LEARNING_RATE}
            result.append(Training(f"{name}-{seed}", flags, key))
    return result


def _flags(options: argparse.Namespace, data: Path) -> list[str]:
    """Return the common flags. Blocks stay eager, because compiling takes longer than training this model."""
    flags = ["--train-data", f"{data}/train", "--val-data", f"{data}/val", "--zeroshot-data", f"{data}/zeroshot"]
    flags += ["--tokenizer", f"{data}/tokenizer.model", "--model", "demo", "--workers", "1"]
    flags += ["--wd", "0.05", "--beta2", "0.98", "--aug-cfg", "scale=(1.0,1.0)", "ratio=(1.0,1.0)"]
    flags += ["--val-frequency", "0", "--zeroshot-frequency", "0", "--save-frequency", "0", "--report-to", "none"]
    flags += ["--resident-micro-batches", "1"]  # several trainings may share a GPU
    flags += ["--compile-blocks", "off", "--deepspeed_config", "ds_configs/zero1.json"]
    batch = DEMO_BATCH // options.ranks // ACCUMULATE
    flags += ["--batch-size", str(batch), "--accum-freq", str(ACCUMULATE), "--steps", str(options.steps)]
    return [*flags, "--warmup", str(max(1, options.steps // 14)), "--lr", str(LEARNING_RATE)]


def read_result(run: Path) -> tuple[dict, list[dict]]:
    """Return the row and the thinned loss curve of a finished run folder."""
    summary = json.loads((run / "summary.json").read_text())
    records = read_metrics(run / "metrics.jsonl", "train")
    last = [record["loss"] for record in records if "loss" in record][-max(1, round(LAST * len(records))) :]
    found = summary["evaluation"]
    row = {name: found[task][metric] for name, (task, metric) in RESULTS.items() if task in found}
    row |= {"final_loss": sum(last) / len(last), "train_seconds": summary["train_seconds"]}
    row |= {name: summary[name] for name in ("steps", "samples_seen", "skipped_steps")}
    return row, thin_curve(records)


def thin_curve(records: list[dict], points: int = CURVE_POINTS) -> list[dict]:
    """Return at most `points` means over equal numbers of steps."""
    records = [record for record in records if "loss" in record]
    size = -(-len(records) // points)
    stretches = [records[i : i + size] for i in range(0, len(records), size)]
    return [
        {"samples_seen": stretch[-1]["samples_seen"], "loss": round(sum(r["loss"] for r in stretch) / len(stretch), 5)}
        for stretch in stretches
    ]


if __name__ == "__main__":
    raise SystemExit(main())
