"""Tensor-parallel towers: which T, what is planned, and the losses beside those without tensor parallelism."""

import math
import statistics

from benchmarks.paper.raw import markdown, origin, rows, where
from infcl.config.preset import BUCKET
from infcl.plan.compare import past
from infcl.plan.loads import memory_of
from infcl.plan.setting import Setting, load_gpu
from infcl.plan.timing import step_seconds

GIB = 2**30


def measured_steps(name: str = "tensor_parallel.csv", gpu: str = "h200") -> list[tuple[dict, Setting]]:
    """Rows of benchmarks.tensor_parallel that the trainer's way at their commit made, and what is planned for them.

    Without those of 96af64e with T above 1, which sent sums and rows in other ways.
    """
    from benchmarks.tensor_parallel import model_config

    found = where(rows(name), lever="none", status="ok")
    return [
        (row, Setting(
            model=model_config(row["model"]), gpu=load_gpu(gpu), gpus=row["gpus"], gpus_per_node=row["gpus"],
            global_batch=row["gpus"] // row["tensor_parallel"] * row["accum_freq"] * row["batch_size"],
            micro_batch=row["batch_size"], zero=row["zero_stage"], checkpointing=row["checkpointing"] == "True",
            compiled=row["compiled"] == "True", tensor_parallel=row["tensor_parallel"],
            sequence_parallel=row["sequence_parallel"] == "True", pixels="device",
            attention="auto" if row["attention"] == "triton" else "torch",
            reduce_bucket_size=row.get("reduce_bucket_size") or BUCKET, overlap_comm=row.get("overlap_comm") != 0,
        ))
        for row in found
        if row["tensor_parallel"] == 1 or not row["commit"].startswith("96af64e")
    ]  # fmt: skip


def planned_steps() -> str:
    """Steps of benchmarks.tensor_parallel, ms: measured, of several rows the range, and planned."""
    cells: dict[tuple, list[float]] = {}
    plans = {}
    for row, setting in measured_steps():
        words = f"{row['model']}, ZeRO-{row['zero_stage']}" + (", checkpointing" if setting.checkpointing else "")
        size = f"{setting.tensor_parallel}" + (", sequence parallel" if setting.sequence_parallel else "")
        key = (words, row["gpus"], size, row["batch_size"])
        cells.setdefault(key, []).append(row["step_ms"])
        plans[key] = 1000 * step_seconds(setting)
    lines = []
    for key in sorted(cells):
        times, plan = sorted(cells[key]), plans[key]
        said = "-".join(f"{time:.0f}" for time in dict.fromkeys((times[0], times[-1])))
        errors = " to ".join(dict.fromkeys(f"{plan / time - 1:+.0%}" for time in (times[-1], times[0])))
        lines.append([*key, f"{said} / {plan:.0f} ({errors})"])
    return markdown(["", "GPUs", "T", "m", "ms measured / plan"], lines)


def large_towers() -> str:
    """Towers that one GPU holds badly, by T and ZeRO stage: the last row of each setting; peaks as planned for the code
    of then, and for that of today."""
    names, last = {"bigG": "ViT-bigG-14", "5B": "5 B, checkpointing"}, {}
    for row, setting in measured_steps():
        if row["model"] in names:
            place = list(names).index(row["model"])
            last[place, setting.tensor_parallel, setting.sequence_parallel, setting.zero, row["batch_size"]] = (
                row,
                setting,
            )
    lines = []
    for (place, *_), (row, setting) in sorted(last.items()):
        whole = next((one for key, one in last.items() if key[:2] == (place, 1) and key[3] == setting.zero), None)
        of_whole = f"{row['samples_per_second'] / whole[0]['samples_per_second']:.2f}" if whole else ""
        size = f"{setting.tensor_parallel}" + (", `--sequence-parallel`" if setting.sequence_parallel else "")
        then = setting.with_(past=past(row))
        today = setting.with_(reduce_bucket_size=None, overlap_comm=None)
        plans = [memory_of(one)["peak"] / GIB for one in (then, today)]
        peak = f"{row['peak_gib']:.1f}" if row["peak_gib"] else "?"
        lines.append([
            names[row["model"]], size, setting.zero, row["batch_size"], f"{row['samples_per_second']:.0f}", of_whole,
            f"{peak} / {plans[0]:.1f}", f"{plans[1]:.1f}", row["commit"],
        ])  # fmt: skip
    header = ["towers", "T", "ZeRO", "m", "samples/s", "of T = 1", "peak, GiB: measured / planned", "planned today"]
    return markdown([*header, "commit"], lines)


def sequence_parallel_memory() -> str:
    """ViT-L-14 at T = 2 on two H100s of one run, with and without `--sequence-parallel`: peaks and samples/s."""
    found = measured_steps("tensor_parallel_h100.csv", "h100")
    both = [(row, one) for row, one in found if row["commit"] == found[-1][0]["commit"]]
    lines = [
        [
            row["batch_size"], "yes" if one.sequence_parallel else "", f"{row['samples_per_second'] / row['gpus']:.0f}",
            f"{row['peak_gib']:.1f} / {memory_of(one)['peak'] / GIB:.1f}", f"{row['loss']:.4f}",
        ]
        for row, one in both
    ]  # fmt: skip
    header = ["m", "`--sequence-parallel`", "samples/s a GPU", "peak, GiB: measured / planned", "fifth loss"]
    return markdown(header, lines) + f"\n\n{origin([row for row, _ in both])}."


def updates() -> str:
    """The fifth step's loss of large micro-batches, by program and T; of settings that ran twice both."""
    found = where(rows("tensor_parallel_updates.csv"), step=5)
    losses: dict[str, list[str]] = {}
    for row in found:
        words = [f"T = {row['tensor_parallel']}" if row["program"] == "infcl" else row["program"]]
        words += ["sequence parallel"] if row["sequence_parallel"] == "True" else []
        words += ["compiled"] if row["compiled"] == "True" else []
        words += [f"at {row['commit']}"] if row["commit"] != found[0]["commit"] else []
        losses.setdefault(", ".join(words), []).append(f"{row['loss']:.4f}")
    lines = [[name, ", ".join(values)] for name, values in losses.items()]
    return markdown(["", "loss"], lines) + f"\n\n{origin(found[:1])}, where no other is named."


def losses() -> str:
    """Twenty losses of each run from those in float32 at T = 1 on as many GPUs: root mean square and greatest."""
    found: dict[tuple, list[float]] = {}
    for row in rows("tensor_parallel_losses.csv"):
        found.setdefault((row["gpus"], row["run"]), []).append(row["loss"])
    lines = []
    for (gpus, run), values in sorted(found.items()):
        if run == "T=1, float32":
            continue
        apart = [abs(a - b) for a, b in zip(values, found[gpus, "T=1, float32"], strict=True)]
        root = math.sqrt(statistics.fmean(difference**2 for difference in apart))
        lines.append([gpus, run.replace("=", " = "), f"{root:.5f}", f"{max(apart):.5f}"])
    return markdown(["GPUs", "", "from T = 1 in float32", "greatest"], lines)


def rates() -> str:
    """ViT-L-14 under ZeRO-1: samples/s a GPU by T and micro-batch, the range; greatest peak."""
    cells: dict[tuple, list[dict]] = {}
    for row, setting in measured_steps():
        if row["model"] == "ViT-L-14" and setting.zero == 1:
            kind = (setting.tensor_parallel, setting.sequence_parallel)
            cells.setdefault((row["batch_size"], *kind), []).append(row)
    lines = []
    for size in sorted({key[0] for key in cells}):
        line, whole = [size], _a_gpu(cells[size, 1, False])
        for kind in ((1, False), (2, False), (2, True)):
            found = cells.get((size, *kind))
            line += [_range(found)] if found else [""]
            if kind[0] > 1:
                line += [f"{statistics.median(_a_gpu(found)) / statistics.median(whole):.2f}"] if found else [""]
        lines.append(line)
    header = ["m", "T = 1", "T = 2", "of T = 1", "T = 2, `--sequence-parallel`", "of T = 1"]
    return markdown(header, lines)


def _a_gpu(found: list[dict]) -> list[float]:
    return [row["samples_per_second"] / row["gpus"] for row in found]


def _range(found: list[dict]) -> str:
    rates = sorted(round(rate) for rate in _a_gpu(found))
    said = " to ".join(dict.fromkeys(str(rate) for rate in (rates[0], rates[-1])))
    peaks = [row["peak_gib"] for row in found if row["peak_gib"]]
    return said + (f", {max(peaks):.0f} GiB" if peaks else "")


def at_one_global_batch() -> str:
    """ViT-L-14 on four GPUs of one machine: T = 1 and T = 2 at the same global batch, in as many micro-batches."""
    found = where(rows("tensor_parallel.csv"), lever="none", model="ViT-L-14", gpus=4, zero_stage=1, status="ok")
    found = where(found, commit=found[-1]["commit"])
    pairs = [row["accum_freq"] * row["batch_size"] * row["gpus"] // row["tensor_parallel"] for row in found]
    largest = [row for row, global_batch in zip(found, pairs) if global_batch == max(pairs)]
    (whole,) = where(largest, tensor_parallel=1)
    lines = [
        [
            row["tensor_parallel"], "yes" if row["sequence_parallel"] == "True" else "", row["batch_size"], max(pairs),
            f"{row['samples_per_second'] / row['gpus']:.0f}",
            f"{row['samples_per_second'] / whole['samples_per_second']:.2f}", f"{row['peak_gib']:.1f}",
        ]
        for row in largest
    ]  # fmt: skip
    header = ["T", "`--sequence-parallel`", "m", "global batch", "samples/s a GPU", "of T = 1", "peak, GiB"]
    return markdown(header, lines) + f"\n\n{origin(largest)}."
