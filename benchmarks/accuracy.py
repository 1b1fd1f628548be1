"""Does a loss, or a larger batch, change what is learned? `python -m benchmarks.accuracy --study losses ...`

Trainings of the demo model (infcl/data/demo.py) by the ordinary trainer; one CSV row each as it ends, and its thinned
loss curve:

    --study losses       each of --losses from each of --seeds seeds, all else equal (the paper's Table 3)
    --study batch-size   --batches at the same number of samples seen, with the learning rate left alone, scaled by the
                         square root and linearly (the form of the paper's Figure 5)

    --out DIR    DIR/accuracy_losses.csv and DIR/accuracy_losses_curves.csv (or _batches); rows are appended
    --work DIR   data set and run folders; the run folders are removed when their row is written
    --jobs N     trainings at once, of --ranks processes each, on --device cpu, or cuda with --gpus GPUs to share

benchmarks.results draws what it has written.
"""

import argparse
import json
import os
import shutil
from pathlib import Path

from benchmarks.clock import hardware
from benchmarks.rows import append
from benchmarks.trainings import Machine, Training, train_all
from infcl.data.demo import prepare_demo
from infcl.report import read_metrics

CURVE_POINTS = 70
LAST = 0.05  # of the steps: over which `final_loss` is the mean
# name: (--loss, --tile-dtype). The dense losses multiply features in float32, which they are; so do others but one.
LOSSES = {loss: (loss, "fp32") for loss in ("clip", "open_clip", "disco", "inf_cl", "siglip")}
LOSSES["inf_cl_bf16"] = ("inf_cl", "bf16")  # what a trainer takes on a GPU by itself
LEARNING_RATE, DEMO_BATCH, ACCUMULATE = 3e-3, 256, 2  # launch/demo.sh's
EXPONENTS = {"none": 0, "sqrt": 0.5, "linear": 1}  # --lr-scaling
BATCHES = [512 << i for i in range(7)]
RESULTS = {
    "zero_shot_top1": ("zero_shot", "top1"),
    "image_to_text_r1": ("retrieval", "image_to_text_r1"),
    "text_to_image_r1": ("retrieval", "text_to_image_r1"),
    "image_to_text_r5": ("retrieval", "image_to_text_r5"),
    "text_to_image_r5": ("retrieval", "text_to_image_r5"),
    "val_loss": ("retrieval", "val_loss"),
}


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    machine = Machine(jobs=options.jobs, device=options.device, ranks=options.ranks, gpus=options.gpus)
    data = prepare_demo(
        options.work / f"demo_{options.num_train}", num_train=options.num_train, jobs=len(os.sched_getaffinity(0))
    )
    trainings = {"losses": loss_trainings, "batch-size": batch_trainings}[options.study](options, data)
    where = hardware(options.commit) | {"jobs": options.jobs, "ranks": options.ranks, "num_train": options.num_train}
    name = {"losses": "accuracy_losses", "batch-size": "accuracy_batches"}[options.study]
    options.out.mkdir(parents=True, exist_ok=True)

    def finished(training: Training, run: Path, seconds: float) -> None:
        row, curve = read_result(run)
        row = {"run": training.name} | training.key | row | {"wall_seconds": round(seconds, 1)} | where
        append(options.out / f"{name}.csv", [row])
        append(options.out / f"{name}_curves.csv", [{"run": training.name} | point for point in curve])
        print(f"{training.name}: zero-shot {row['zero_shot_top1']:.4f}, {seconds:.0f} s", flush=True)
        shutil.rmtree(run)

    failed = train_all(trainings, machine, options.work / "runs", finished, time_out=options.time_out)
    print(f"{len(trainings) - len(failed)} of {len(trainings)} trainings finished")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", choices=("losses", "batch-size"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--losses", nargs="+", choices=tuple(LOSSES), default=list(LOSSES))
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each setting, with seeds of their own")
    parser.add_argument("--first-seed", type=int, default=0, help="the others follow it: more of them than there are")
    parser.add_argument("--steps", type=int, default=700, help="losses: steps of 256 pairs")
    parser.add_argument("--num-train", type=int, default=16384, help="pairs of the training set")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, help="batch-size: pairs")
    parser.add_argument("--samples", type=int, default=1 << 20, help="batch-size: samples seen")
    parser.add_argument(
        "--micro-batch", type=int, default=4096, help="batch-size: pairs of a rank's micro-batch at most"
    )
    parser.add_argument("--lr", type=float, default=LEARNING_RATE, help="batch-size: at the smallest batch")
    parser.add_argument("--lr-scalings", nargs="+", choices=tuple(EXPONENTS), default=list(EXPONENTS))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--time-out", type=float, default=1800.0, help="seconds of a training")
    parser.add_argument("--commit", default=None, help="for the CSV; default: git's HEAD")
    return parser


def loss_trainings(options: argparse.Namespace, data: Path) -> list[Training]:
    """Seed by seed, so that whatever is finished compares all losses."""
    batch = DEMO_BATCH // options.ranks // ACCUMULATE
    flags = ["--batch-size", str(batch), "--accum-freq", str(ACCUMULATE), "--steps", str(options.steps)]
    flags += ["--warmup", str(max(1, options.steps // 14))]
    return [
        Training(
            f"{loss}-{seed}",
            [*_demo_flags(data, *LOSSES[loss]), *flags, "--lr", str(LEARNING_RATE), "--seed", str(seed)],
            {"loss": loss, "seed": seed, "global_batch": DEMO_BATCH, "lr": LEARNING_RATE},
        )
        for seed in range(options.first_seed, options.first_seed + options.seeds)
        for loss in options.losses
    ]


def batch_trainings(options: argparse.Namespace, data: Path) -> list[Training]:
    """Smallest batches, which take longest, first. At the smallest batch the scalings agree: one training."""
    base, result = min(options.batches), []
    for batch in sorted(options.batches):
        micro = min(options.micro_batch, batch // options.ranks)
        for scaling in options.lr_scalings if batch > base else ["none"]:
            factor = (batch / base) ** EXPONENTS[scaling]
            for seed in range(options.first_seed, options.first_seed + options.seeds):
                flags = ["--batch-size", str(micro), "--accum-freq", str(batch // options.ranks // micro)]
                flags += ["--steps", str(options.samples // batch), "--warmup-samples", str(options.samples // 14)]
                flags += ["--lr", str(options.lr), "--lr-scaling", scaling, "--lr-base-batch", str(base)]
                key = {"loss": "inf_cl", "seed": seed, "global_batch": batch, "lr": options.lr * factor}
                key |= {"lr_scaling": scaling}
                name = f"{batch}-{scaling}-{options.lr:g}-{seed}"
                result.append(Training(name, [*_demo_flags(data), *flags, "--seed", str(seed)], key))
    return result


def _demo_flags(data: Path, loss: str = "inf_cl", tile_dtype: str = "fp32") -> list[str]:
    """What all have in common; blocks are not compiled, which for this model takes longer than the training."""
    flags = ["--train-data", f"{data}/train", "--val-data", f"{data}/val", "--zeroshot-data", f"{data}/zeroshot"]
    flags += ["--tokenizer", f"{data}/tokenizer.model", "--model", "demo", "--workers", "1"]
    flags += ["--wd", "0.05", "--beta2", "0.98", "--aug-cfg", "scale=(1.0,1.0)", "ratio=(1.0,1.0)"]
    flags += ["--val-frequency", "0", "--zeroshot-frequency", "0", "--save-frequency", "0", "--report-to", "none"]
    flags += ["--loss", loss, "--tile-dtype", tile_dtype]
    flags += ["--resident-micro-batches", "1"]  # several trainings may share a GPU
    return [*flags, "--compile-blocks", "off", "--deepspeed_config", "ds_configs/zero1.json"]


def read_result(run: Path) -> tuple[dict, list[dict]]:
    """A finished run folder -> (its row, its thinned loss curve)."""
    summary = json.loads((run / "summary.json").read_text())
    records = read_metrics(run / "metrics.jsonl", "train")
    last = [record["loss"] for record in records if "loss" in record][-max(1, round(LAST * len(records))) :]
    row = {name: summary["evaluation"][task][metric] for name, (task, metric) in RESULTS.items()}
    row |= {"final_loss": sum(last) / len(last), "train_seconds": summary["train_seconds"]}
    row |= {name: summary[name] for name in ("steps", "samples_seen", "skipped_steps")}
    return row, thin_curve(records)


def thin_curve(records: list[dict], points: int = CURVE_POINTS) -> list[dict]:
    """At most `points` means over equal stretches of steps."""
    records = [record for record in records if "loss" in record]
    size = -(-len(records) // points)
    stretches = [records[i : i + size] for i in range(0, len(records), size)]
    return [
        {"samples_seen": stretch[-1]["samples_seen"], "loss": round(sum(r["loss"] for r in stretch) / len(stretch), 5)}
        for stretch in stretches
    ]


if __name__ == "__main__":
    raise SystemExit(main())
