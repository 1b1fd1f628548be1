"""Compare the plan with the measured rows in docs/results: `python -m tests.lib.measured` writes plan_errors.csv."""

import csv
import dataclasses
import json
import re
from statistics import median

from benchmarks.largest_batch import planned_peak
from benchmarks.rows import append, grouped, latest, where
from benchmarks.rows import rows as rows_of
from benchmarks.step import setting_of
from infcl.config import resolve
from infcl.config.precision import PRECISIONS
from infcl.config.preset import BUCKET
from infcl.models.config import CLIPConfig, TextConfig, VisionConfig, load_model_config
from infcl.plan.fit import Fit
from infcl.plan.memory import memory_of
from infcl.plan.profile import Gpu, load_gpu
from infcl.plan.setting import Setting, captions_of, parameter_counts
from infcl.plan.timing import loss_seconds, samples_per_second, step_seconds
from infcl.train.build import build_meta_model, build_tokenizer_and_model_config
from tests.lib.checkout import ROOT

RESULTS = ROOT / "docs" / "results"
GIB = 2**30
SLOW_HOST = 2.9  # host_factor of the machines of step_slow_host.csv, fitted to these rows
EACH_PASS = ("a1532d8", "42cacc8")  # commits of step_hosts.csv before parameters that fit were gathered once per step
# (ZeRO, commit, precision) of replaced code: ZeRO-3 gathered every block three times; ZeRO-1 computed its norm tensor
# by tensor, which slows steps of one micro-batch.
OUTDATED = (("3", "188be76", "bf16"), ("1", "4fe3df6", "amp_bf16"))
# Commits at which autocast's steps had one more bucket, for the convolution's gradient. The oldest rows have no commit.
CONVOLUTION_APART = "0c83720 1de2850 38ac390 6591412 68ce065 6b83d03 7f09647 96af64e d7c9bff fe8de0c".split()
OVERLAPPED = ("0c83720", "88dc65e")  # commits at which stages 1 and 2 reduced DeepSpeed's buckets during the backward
# Commits at which the first addition to the gradients in the ring had separate memory.
FIRST_PART_APART = "0c83720 61184ba 7f09647 88dc65e c57863d".split()


PRESET = '{"overlap_comm": false, "reduce_bucket_size": 100000000}'


def reductions(row: dict) -> dict:
    """Return zero_optimization with the buckets that the row's commit used."""
    commit, options = str(row.get("commit") or "")[:7], json.loads(row.get("zero_options") or "{}")
    bucket = row.get("reduce_bucket_size") or options.get("reduce_bucket_size", BUCKET)
    stage = int(str(row.get("zero", row.get("zero_stage", 1)))[0])
    autocast = (row.get("precision") or "amp_bf16") == "amp_bf16"
    apart = autocast and (not commit or commit in CONVOLUTION_APART)
    overlap = options.get("overlap_comm", row.get("overlap_comm") not in (0, "0"))
    return {
        "overlap_comm": overlap,
        "reduce_bucket_size": float(bucket) * (1 if not apart else 1.5 if stage == 3 else 2),
    }


def setting_of_row(row: dict, gpu: Gpu) -> Setting:
    """Return the setting of a row of benchmarks.step."""
    gpus, micro_batch, micro_batches = (int(row[name]) for name in ("gpus", "micro_batch", "micro_batches"))
    label, share = row.get("label", ""), float(row.get("text_share") or 1)
    dropout = re.search(r"force-patch-dropout ([\d.]+)", label)
    model = load_model_config(row["model"]).with_overrides(patch_dropout=float(dropout[1]) if dropout else None)
    tokens = round(share * model.text_cfg.context_length)  # may exceed the context length: rows have free positions
    return Setting(
        **captions_of(model, None if share == 1 else tokens),
        zero_options=reductions(row),
        gpu=gpu,
        gpus=gpus,
        gpus_per_node=gpus,
        global_batch=gpus * micro_batch * micro_batches,
        micro_batch=micro_batch,
        zero=int(row["zero"][0]),
        offloads=("optimizer",) if row["zero"].endswith("offload") else (),
        checkpointing=row["checkpointing"] == "True",
        compiled=row["blocks"] == "compiled",
        resident=int(row["resident"]),
        precision=PRECISIONS[row.get("precision") or "amp_bf16"],
        pixels="device" if "pixel-cache gpu" in label else "host",
        attention="auto" if row.get("attention") == "triton" else "torch",  # older files lack the column
    )


def compare(rows: list[dict], gpu: Gpu) -> list[dict]:
    """Return [{"row", "samples_per_second", "speed_error", "peak_gib", "memory_error"}]: the plans and their errors."""
    compared = []
    for row in rows:
        setting = setting_of_row(row, gpu)
        speed, peak = samples_per_second(setting), memory_of(setting)["peak"] / GIB
        errors = {
            "speed_error": speed / float(row["samples_per_second"]) - 1,
            "memory_error": peak / float(row["peak_gib"]) - 1,
        }
        compared.append({"row": row, "samples_per_second": speed, "peak_gib": peak, **errors})
    return compared


def stored(name: str) -> list[dict]:
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def steps() -> list[dict]:
    """Return rows of benchmarks.step, except those of replaced code and those without warm-up."""
    return [
        row
        for row in stored("step.csv")
        if (row["zero"], row.get("commit"), row.get("precision")) not in OUTDATED
        and "not kept" not in row["label"]
        and "warm-up-steps 0" not in row["label"]  # their times include compiling
    ]


def h100() -> Gpu:
    """Return the shipped profile with the measured CPU speed of the H100 machine."""
    return dataclasses.replace(load_gpu("h100"), host_factor=load_gpu(str(RESULTS / "h100_measured.json")).host_factor)


def slow_host() -> Gpu:
    return dataclasses.replace(load_gpu("h200"), host_factor=SLOW_HOST)


def losses() -> list[dict]:
    """Return the newest rows of the loss alone with BF16 features, by number of GPUs and batch."""
    found = [row for row in where(rows_of("loss_h200.csv"), impl="inf_cl", dtype="bfloat16") if row["median_ms"] != ""]
    return latest(found, "gpus", "global_batch", "dim")


def planned_loss(gpus: int, samples: int, dim: int) -> float:
    """Return the planned ms of the loss and its ring on H200s of one node."""
    model = dataclasses.replace(load_model_config("ViT-L-14"), embed_dim=dim)
    setting = Setting(
        model=model, gpu=load_gpu("h200"), gpus=gpus, gpus_per_node=gpus, global_batch=samples, micro_batch=128
    )
    return 1000 * loss_seconds(setting)


def planned_for_trial(row: dict) -> float:
    """Return the planned GiB of a trial of benchmarks.largest_batch."""
    names = ("model", "gpus", "pixels", "micro_batch", "loss", "precision")
    setting = {name: row[name] for name in names} | {"checkpointing": bool(row["checkpointing"])}
    if row["commit"][:7] in OVERLAPPED or row["commit"][:7] in CONVOLUTION_APART:
        setting["zero_options"] = reductions(
            row | ({} if row["commit"][:7] in OVERLAPPED else {"zero_options": PRESET})
        )
    block = 4 * row["global_batch"] // row["gpus"] * load_model_config(row["model"]).embed_dim
    apart = row["commit"][:7] in FIRST_PART_APART and row["gpus"] > 1 and row["loss"] == "inf_cl"
    return (planned_peak(pairs=row["global_batch"], **setting) + block * apart) / GIB


def planned_at_start(row: dict) -> float:
    """Return the GiB that the check at start plans for a row of benchmarks.step on one GPU, with the row's buckets."""
    config, preset = setting_of(row["label"].replace("pixel-cache gpu", "pixel-cache-gb gpu"))  # its present name
    buckets = {"reduce_bucket_size": BUCKET, "overlap_comm": True} | json.loads(row["zero_options"] or "{}")
    preset["zero_optimization"] |= buckets
    _, cfg = build_tokenizer_and_model_config(config)
    counts = parameter_counts(build_meta_model(config, cfg))
    spec = dataclasses.replace(resolve(config, device="cuda"), preset=preset)
    return Fit(spec, cfg, counts, float("inf")).parts(spec)["peak"] / GIB


def model_config(name: str) -> CLIPConfig:
    """Return the towers of tensor_parallel.csv: bigG with 16 text heads, 5 B parameters, or a model of infcl."""
    if name == "bigG":
        cfg = load_model_config("ViT-bigG-14")
        return dataclasses.replace(cfg, text_cfg=dataclasses.replace(cfg.text_cfg, heads=16))
    if name == "5B":
        return dataclasses.replace(
            load_model_config("ViT-bigG-14"),
            embed_dim=1024,
            vision_cfg=VisionConfig(layers=44, width=3072, head_width=128, patch_size=14),
            text_cfg=TextConfig(width=1024, heads=16, layers=24),
        )
    return load_model_config(name)


def tensor_parallel_steps() -> list[tuple[dict, Setting]]:
    """Return rows of tensor_parallel.csv and their settings.

    Rows of 96af64e with T > 1 are skipped: that commit communicated in another way.
    """
    return [
        (row, Setting(
            model=model_config(row["model"]), gpu=load_gpu("h200"), gpus=row["gpus"], gpus_per_node=row["gpus"],
            global_batch=row["gpus"] // row["tensor_parallel"] * row["accum_freq"] * row["batch_size"],
            micro_batch=row["batch_size"], zero=row["zero_stage"], checkpointing=row["checkpointing"] == "True",
            compiled=row["compiled"] == "True", tensor_parallel=row["tensor_parallel"],
            pixels="device",
            attention="auto" if row["attention"] == "triton" else "torch",
            zero_options=reductions(row),
        ))
        for row in where(rows_of("tensor_parallel.csv"), lever="none", status="ok", sequence_parallel="False")
        if row["tensor_parallel"] == 1 or not row["commit"].startswith("96af64e")
    ]  # fmt: skip


def errors() -> list[dict]:
    """Return rows of "kind", "planned" and "measured" for the docs' table of errors."""
    found: list[tuple[str, float, float]] = []
    files = {
        "steps on H200s": (steps(), load_gpu("h200")),
        "steps on H200s, profile of `--measure`": (steps(), load_gpu(str(RESULTS / "h200_measured.json"))),
        "steps with each attention": (stored("step_attention.csv"), load_gpu("h200")),
        "steps with cached activations": (stored("step_resident.csv"), load_gpu("h200")),
        "steps with packed and padded captions": (stored("step_captions.csv"), load_gpu("h200")),
        "steps on slow processors": (stored("step_slow_host.csv"), slow_host()),
        "steps on H100s": (stored("step_h100.csv"), h100()),
    }
    for kind, (rows, gpu) in files.items():
        for one in compare(rows, gpu):
            found.append((f"{kind}: samples/s", one["samples_per_second"], float(one["row"]["samples_per_second"])))
        for one in compare(rows, gpu) if "profile" not in kind else ():
            found.append((f"{kind}: peak, GiB", one["peak_gib"], float(one["row"]["peak_gib"])))
    for row, setting in tensor_parallel_steps():
        found.append(("steps under tensor parallelism: ms", 1000 * step_seconds(setting), row["step_ms"]))
    for row in where(rows_of("table1_h200.csv", "largest_batch.csv"), fits=1):
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


def main() -> None:
    """Write plan_errors.csv, and print its table for docs/benchmarks/planner.md."""
    found = errors()
    (RESULTS / "plan_errors.csv").unlink(missing_ok=True)
    append(RESULTS / "plan_errors.csv", found)
    for kind, rows in grouped(found, "kind").items():
        apart = [float(row["planned"]) / float(row["measured"]) - 1 for row in rows]
        print(f"| {kind} | {len(rows)} | {min(apart):+.1%} to {max(apart):+.1%} | {median(apart):+.1%} |")


if __name__ == "__main__":
    main()
