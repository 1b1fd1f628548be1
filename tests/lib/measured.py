"""What the planner says of the measured rows in docs/results; `python -m tests.lib.measured` writes plan_errors.csv."""

import dataclasses
import json

from benchmarks.largest_batch import planned_peak
from benchmarks.results import latest, measured_losses, where
from benchmarks.results import rows as rows_of
from benchmarks.rows import append
from benchmarks.step import setting_of
from benchmarks.tensor_parallel import model_config
from infcl.config import resolve
from infcl.config.preset import BUCKET
from infcl.models.config import load_model_config
from infcl.plan.compare import compare, past, read_steps, warmed_up
from infcl.plan.loss_time import loss_seconds
from infcl.plan.memory import parameter_counts
from infcl.plan.setting import Gpu, Setting, load_gpu
from infcl.plan.timing import step_seconds
from infcl.train.build import build_meta_model, build_tokenizer_and_model_config
from infcl.train.fit import Fit
from tests.lib.checkout import ROOT

RESULTS = ROOT / "docs" / "results"
GIB = 2**30
SLOW_HOST = 2.9  # host_factor of the machines of step_slow_host.csv, set by these rows
EACH_PASS = ("a1532d8", "42cacc8")  # commits of step_hosts.csv before what fits was gathered once a step
# (ZeRO, commit, precision) of code that was replaced: ZeRO-3 gathered every block three times; ZeRO-1 took its norm
# tensor by tensor, which shows in steps of one micro-batch.
OUTDATED = (("3", "188be76", "bf16"), ("1", "4fe3df6", "amp_bf16"))


def steps() -> list[dict]:
    """Rows of benchmarks.step without those of replaced code and those that were not warmed up."""
    files = [RESULTS / "step.csv", *sorted(RESULTS.glob("plan_steps*.csv"))]
    return [
        row
        for path in files
        for row in read_steps(path)
        if (row["zero"], row.get("commit"), row.get("precision")) not in OUTDATED
        and "not kept" not in row["label"]
        and warmed_up(row)
    ]


def h100() -> Gpu:
    """The shipped profile, with the measured speed of the H100 machine's host."""
    return dataclasses.replace(load_gpu("h100"), host_factor=load_gpu(str(RESULTS / "h100_measured.json")).host_factor)


def slow_host() -> Gpu:
    return dataclasses.replace(load_gpu("h200"), host_factor=SLOW_HOST)


def losses() -> list[dict]:
    """The loss alone with 16-bit features, as measured last, by GPUs and batch."""
    return latest(where(measured_losses(), impl="inf_cl", dtype="bfloat16"), "gpus", "global_batch", "dim")


def planned_loss(gpus: int, samples: int, dim: int) -> float:
    """ms of the loss and its ring on H200s of one node."""
    model = dataclasses.replace(load_model_config("ViT-L-14"), embed_dim=dim)
    setting = Setting(
        model=model, gpu=load_gpu("h200"), gpus=gpus, gpus_per_node=gpus, global_batch=samples, micro_batch=128
    )
    return 1000 * loss_seconds(setting)


def planned_for_trial(row: dict) -> float:
    """GiB of a trial of benchmarks.largest_batch."""
    names = ("model", "gpus", "pixels", "micro_batch", "loss", "precision")
    setting = {name: row[name] for name in names} | {"checkpointing": bool(row["checkpointing"])}
    setting["past"] = past(row)
    return planned_peak(pairs=row["global_batch"], **setting) / GIB


def planned_at_start(row: dict) -> float:
    """GiB that the check at start plans for the flags of a row of benchmarks.step on one GPU, with its buckets."""
    config, preset = setting_of(row["label"])
    buckets = {"reduce_bucket_size": BUCKET, "overlap_comm": True} | json.loads(row["zero_options"] or "{}")
    preset["zero_optimization"] |= buckets
    _, cfg = build_tokenizer_and_model_config(config)
    counts = parameter_counts(build_meta_model(config, cfg))
    spec = dataclasses.replace(resolve(config, device="cuda"), preset=preset)
    return Fit(spec, cfg, counts, float("inf")).parts(spec)["peak"] / GIB


def tensor_parallel_steps() -> list[tuple[dict, Setting]]:
    """Rows of benchmarks.tensor_parallel and their settings, without those of 96af64e with T above 1: their sums and
    rows were sent in other ways.
    """
    return [
        (row, Setting(
            model=model_config(row["model"]), gpu=load_gpu("h200"), gpus=row["gpus"], gpus_per_node=row["gpus"],
            global_batch=row["gpus"] // row["tensor_parallel"] * row["accum_freq"] * row["batch_size"],
            micro_batch=row["batch_size"], zero=row["zero_stage"], checkpointing=row["checkpointing"] == "True",
            compiled=row["compiled"] == "True", tensor_parallel=row["tensor_parallel"],
            sequence_parallel=row["sequence_parallel"] == "True", pixels="device",
            attention="auto" if row["attention"] == "triton" else "torch",
            reduce_bucket_size=row.get("reduce_bucket_size") or BUCKET, overlap_comm=row.get("overlap_comm") != 0,
        ))
        for row in where(rows_of("tensor_parallel.csv"), lever="none", status="ok")
        if row["tensor_parallel"] == 1 or not row["commit"].startswith("96af64e")
    ]  # fmt: skip


def errors() -> list[dict]:
    """[{"kind", "planned", "measured"}] of all that the docs' table of errors counts."""
    found: list[tuple[str, float, float]] = []
    files = {
        "steps on H200s": (steps(), load_gpu("h200")),
        "steps on H200s, profile of `--measure`": (steps(), load_gpu(str(RESULTS / "h200_measured.json"))),
        "steps with each attention": (read_steps(RESULTS / "step_attention.csv"), load_gpu("h200")),
        "steps with cached activations": (read_steps(RESULTS / "step_resident.csv"), load_gpu("h200")),
        "steps with packed and padded captions": (read_steps(RESULTS / "step_captions.csv"), load_gpu("h200")),
        "steps on slow processors": (read_steps(RESULTS / "step_slow_host.csv"), slow_host()),
        "steps on H100s": (read_steps(RESULTS / "step_h100.csv"), h100()),
    }
    for kind, (rows, gpu) in files.items():
        for one in compare(rows, gpu):
            found.append((f"{kind}: samples/s", one["samples_per_second"], float(one["row"]["samples_per_second"])))
        for one in compare(rows, gpu) if "profile" not in kind else ():
            found.append((f"{kind}: peak, GiB", one["peak_gib"], float(one["row"]["peak_gib"])))
    for row, setting in tensor_parallel_steps():
        found.append(("steps under tensor parallelism: ms", 1000 * step_seconds(setting), row["step_ms"]))
    for row in where(rows_of("table1_h200.csv", "largest_batch.csv", "memory_rows.csv"), fits=1):
        found.append(("steps of 1,024 to 4,194,304 samples: peak, GiB", planned_for_trial(row), row["peak_gib"]))
    for row in rows_of("step_peaks.csv"):
        found.append(("the check at start: peak, GiB", planned_at_start(row), row["peak_gib"]))
    for row in losses():
        planned = planned_loss(row["gpus"], row["global_batch"], row["dim"])
        large = row["global_batch"] // row["gpus"] >= 16384
        kind = f"the loss alone, {'16,384 rows per GPU or more' if large else 'fewer rows'}: ms"
        found.append((kind, planned, row["median_ms"]))
    found.sort(key=lambda one: not one[0].startswith("steps"))
    return [{"kind": kind, "planned": f"{plan:.4g}", "measured": f"{seen:.4g}"} for kind, plan, seen in found]


if __name__ == "__main__":
    (RESULTS / "plan_errors.csv").unlink(missing_ok=True)
    append(RESULTS / "plan_errors.csv", errors())
