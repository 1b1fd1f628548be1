"""Compare the plan with the measured rows in docs/results: `python -m tests.lib.measured` writes plan_errors.csv."""

import csv
import dataclasses
import functools
import json
import re
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from benchmarks.rows import append, grouped, where
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
from infcl.plan.timing import loss_seconds, step_seconds
from infcl.train.build import build_meta_model, build_tokenizer_and_model_config
from tests.lib.checkout import ROOT
from tests.lib.specs import whole

RESULTS = ROOT / "docs" / "results"
GIB = 2**30
BUCKETS = {"reduce_bucket_size": BUCKET, "overlap_comm": True}
SLOW_HOST = 2.9  # host_factor of the machines of step_slow_host.csv, fitted to these rows


class Case(NamedTuple):
    """A measured figure, its plan, and the largest relative error that is accepted."""

    kind: str
    name: str
    planned: float
    measured: float
    bound: float

    @property
    def error(self) -> float:
        return self.planned / self.measured - 1


@functools.cache
def cases() -> list[Case]:
    """Return all cases, in the order of the docs' table."""
    h200, of_machine = load_gpu("h200"), load_gpu(str(RESULTS / "h200_measured.json"))
    h100 = dataclasses.replace(load_gpu("h100"), host_factor=load_gpu(str(RESULTS / "h100_measured.json")).host_factor)
    slow = dataclasses.replace(h200, host_factor=SLOW_HOST)
    return [
        *_steps("steps on H200s", steps(), h200, 0.15, 0.05),
        *_steps("steps on H200s, profile of `--measure`", steps(), of_machine, 0.15, None),
        *_steps("steps with each attention", stored("step_attention.csv"), h200, 0.09, 0.05),
        *_steps("steps with cached activations", stored("step_resident.csv"), h200, 0.07, 0.02),
        *_steps("steps with packed and padded captions", stored("step_captions.csv"), h200, 0.1, 0.05),
        *_steps("steps on slow processors", stored("step_slow_host.csv"), slow, 0.15, 0.05),
        *_steps("steps on H100s", stored("step_h100.csv"), h100, 0.15, 0.05),
        *_tensor_parallel_steps(),
        *_peaks_at_start(),
        *_losses(),
    ]


def stored(name: str) -> list[dict]:
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def steps() -> list[dict]:
    """Return rows of benchmarks.step, except those of replaced code and those without warm-up."""
    return [
        row
        for row in stored("step.csv")
        if "not kept" not in row["label"]
        and "warm-up-steps 0" not in row["label"]  # their times include compiling
        and (row["gpus"], row["zero"], row["precision"]) != ("1", "1", "amp_bf16")  # is run as ZeRO-0
        and (row["gpus"], row["zero"]) != ("2", "3")  # each block was gathered three times
    ]


def setting_of_row(row: dict, gpu: Gpu) -> Setting:
    """Return the setting of a row of benchmarks.step."""
    gpus, micro_batch, micro_batches = (int(row[name]) for name in ("gpus", "micro_batch", "micro_batches"))
    label, share = row.get("label", ""), float(row.get("text_share") or 1)
    dropout = re.search(r"force-patch-dropout ([\d.]+)", label)
    model = load_model_config(row["model"]).with_overrides(patch_dropout=float(dropout[1]) if dropout else None)
    tokens = round(share * model.text_cfg.context_length)  # may exceed the context length: rows have free positions
    return whole(
        **captions_of(model, None if share == 1 else tokens),
        zero_optimization=BUCKETS | json.loads(row["zero_options"] or "{}"),
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


def _steps(kind: str, rows: list[dict], gpu: Gpu, speed: float, memory: float | None) -> Iterator[Case]:
    for row in rows:
        setting, name = setting_of_row(row, gpu), f"{row['gpus']} GPUs, {row['label']}"
        planned, measured = setting.global_batch / step_seconds(setting), float(row["samples_per_second"])
        yield Case(f"{kind}: samples/s", name, planned, measured, speed)
        if memory is not None:
            peak = memory_of(setting)["peak"] / GIB
            yield Case(f"{kind}: peak, GiB", name, peak, float(row["peak_gib"]), memory)


def _tensor_parallel_steps() -> Iterator[Case]:
    for row in where(rows_of("tensor_parallel.csv"), lever="none", status="ok", sequence_parallel="False"):
        if (row["model"], row["gpus"], row["tensor_parallel"], row["zero_stage"]) == ("ViT-L-14", 4, 2, 1):
            continue  # it communicated in another way
        setting = whole(
            model=_model_config(row["model"]), gpu=load_gpu("h200"), gpus=row["gpus"], gpus_per_node=row["gpus"],
            global_batch=row["gpus"] // row["tensor_parallel"] * row["accum_freq"] * row["batch_size"],
            micro_batch=row["batch_size"], zero=row["zero_stage"], checkpointing=row["checkpointing"] == "True",
            compiled=row["compiled"] == "True", tensor_parallel=row["tensor_parallel"], pixels="device",
            attention="auto" if row["attention"] == "triton" else "torch",
        )  # fmt: skip
        name = f"{row['model']}, {row['gpus']} GPUs, T = {row['tensor_parallel']}, ZeRO-{row['zero_stage']}"
        yield Case("steps under tensor parallelism: ms", name, 1000 * step_seconds(setting), row["step_ms"], 0.15)


def _model_config(name: str) -> CLIPConfig:
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


def _peaks_at_start() -> Iterator[Case]:
    """What the check at start plans for rows of benchmarks.step on one GPU."""
    for row in rows_of("step_peaks.csv"):
        config, preset = setting_of(row["label"].replace("pixel-cache gpu", "pixel-cache-gb gpu"))  # its present name
        preset["zero_optimization"] |= BUCKETS | json.loads(row["zero_options"] or "{}")
        _, cfg = build_tokenizer_and_model_config(config)
        spec = dataclasses.replace(resolve(config, device="cuda"), preset=preset)
        fit = Fit(spec, cfg, parameter_counts(build_meta_model(config, cfg)), float("inf"))
        yield Case("the check at start: peak, GiB", row["label"], fit.parts(spec)["peak"] / GIB, row["peak_gib"], 0.02)


def _losses() -> Iterator[Case]:
    """The loss alone with BF16 features on H200s: the fastest row of each size, as a slow host only adds."""
    rows = [row for row in where(rows_of("loss_h200.csv"), impl="inf_cl", dtype="bfloat16") if row["median_ms"] != ""]
    for (gpus, pairs, dim), same in grouped(rows, "gpus", "global_batch", "dim").items():
        large = pairs // gpus >= 16384
        if gpus == 1 and not large:
            continue  # the host sets the time
        model = dataclasses.replace(load_model_config("ViT-L-14"), embed_dim=dim)
        sizes = {"gpus": gpus, "gpus_per_node": gpus, "global_batch": pairs, "micro_batch": 128}
        planned = 1000 * loss_seconds(whole(model=model, gpu=load_gpu("h200"), **sizes))
        bound = 0.08 if large and dim >= 512 and (gpus, pairs) != (2, 32768) else 0.15
        kind = f"the loss alone, {'16,384 rows per GPU or more' if large else 'fewer rows'}: ms"
        yield Case(kind, f"{gpus} GPUs, {pairs:,} x {dim}", planned, min(row["median_ms"] for row in same), bound)


def main() -> None:
    """Write plan_errors.csv, and print its table for docs/benchmarks/planner.md."""
    found = [{"kind": c.kind, "planned": f"{c.planned:.4g}", "measured": f"{c.measured:.4g}"} for c in cases()]
    (RESULTS / "plan_errors.csv").unlink(missing_ok=True)
    append(RESULTS / "plan_errors.csv", found)
    for kind, group in grouped([c._asdict() | {"error": c.error} for c in cases()], "kind").items():
        errors = [one["error"] for one in group]
        print(f"| {kind} | {len(errors)} | {min(errors):+.1%} to {max(errors):+.1%} | {median(errors):+.1%} |")


if __name__ == "__main__":
    main()
