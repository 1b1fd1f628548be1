"""Memory of whole steps: the paper's Tables 1 and 2 beside ours, measured and planned; Figure 1."""

import itertools
import json

from benchmarks.paper.raw import batch, latest, markdown, newest, origin, rows, where
from infcl.config.preset import BUCKET
from infcl.models.config import load_model_config
from infcl.plan.compare import past
from infcl.plan.loads import memory_of
from infcl.plan.memory import parameter_counts
from infcl.plan.paper import paper_memory
from infcl.plan.parts import loss_bytes
from infcl.plan.setting import Setting, load_gpu
from infcl.train.build import build_meta_model, build_tokenizer_and_model_config
from infcl.train.fit import Fit

GIB = 2**30
FIGURE_1_GPUS = (8, 16, 32, 64, 128, 256)
BATCHES_K = (32, 64, 128, 256, 1024)
LOSSES = {("clip", 0): "CLIP", ("open_clip", 0): "OpenCLIP", ("inf_cl", 0): "Inf-CL", ("inf_cl", 1): "Inf-CL, offload"}


def _paper(table: int, **wanted) -> list[dict]:
    return where(rows("paper_memory.csv"), table=table, **wanted)


def table_1_planned() -> str:
    """Peak memory, GiB: the paper's and what is planned for its trainer, then infcl's plan, on its 8 and 32 A800s."""
    lines = []
    for gpus in (8, 32):
        for (loss, offload), name in LOSSES.items():
            cells = [f"{gpus} x A800, {name}: paper / its trainer, planned"]
            for batch_k in BATCHES_K:
                row = where(_paper(1, gpus=gpus, loss=loss, offload=offload), batch_k=batch_k)
                said = (f"{row[0]['peak_gib']:.1f}" if row[0]["fits"] else "x") if row else "-"
                cells.append(f"{said} / {_planned(gpus, loss, batch_k, offload, ours=False)}")
            lines.append(cells)
        for offload, what in ((0, "pixels on the GPU"), (1, "pixels in host memory")):
            plan = [_planned(gpus, "inf_cl", batch_k, offload, ours=True) for batch_k in BATCHES_K]
            lines.append([f"{gpus} x A800, infcl, {what}: planned", *plan])
    return markdown(["peak of a step, GiB", *(f"{k}k" for k in BATCHES_K)], lines)


def _planned(gpus: int, loss: str, batch_k: int, offload: int, *, ours: bool) -> str:
    card = load_gpu("a800-80g")
    setting = Setting(
        model=load_model_config("ViT-L-14"), gpu=card, gpus=gpus, global_batch=batch_k * 1024, micro_batch=128,
        zero=1 if ours else 0, loss=loss, pixels="host" if offload else "device", checkpointing=False,
    )  # fmt: skip
    if ours:
        peak = memory_of(setting)["peak"]
        return f"{peak / GIB:.1f}" if peak <= card.usable_bytes else "x"
    peak = paper_memory(setting)["peak"]
    return f"{peak / GIB:.1f}" if peak <= card.memory_gib * GIB else "x"


def table_1_loss() -> str:
    """Memory of the loss alone, GiB: the paper's 8 A800s, and ours on one and four H200s."""
    from benchmarks.paper.speed import tried

    measured = {"clip": "CLIP", "official_open_clip": "OpenCLIP", "official": "Inf-CL, official", "inf_cl": "infcl"}
    lines = []
    for gpus in (1, 4):
        for impl, name in measured.items():
            cells = [f"{gpus} H200{'s' if gpus > 1 else ''}, {name}"]
            for batch_k in BATCHES_K:
                found = where(tried(), impl=impl, gpus=gpus, dim=768, global_batch=batch_k * 1024)
                fits = found and found[-1]["median_ms"] != ""
                cells.append(f"{found[-1]['extra_mib'] / 1024:.2f}" if fits else "x" if found else "-")
            lines.append(cells)
    for loss in ("clip", "open_clip", "inf_cl"):
        cells = [f"paper, 8 A800s, {LOSSES[loss, 0]}"]
        for batch_k in BATCHES_K:
            row = where(_paper(1, gpus=8, loss=loss, batch_k=batch_k, offload=0), fits=1)
            cells.append(f"{row[0]['loss_gib']:.2f}" if row else "x")
        lines.append(cells)
    return markdown(["loss alone, GiB per GPU", *(f"{k}k" for k in BATCHES_K)], lines)


def table_1_measured() -> str:
    """Peak memory of whole steps on H200s held to 80 GB, and as planned for them and for eight, GiB."""
    found, lines = rows("table1_h200.csv"), []
    settings = list(itertools.product(("clip", "open_clip", "inf_cl"), ("gpu", "host")))
    names = {
        (loss, pixels): LOSSES[loss, 0].replace("Inf-CL", "infcl") + ", pixels not on the GPU" * (pixels == "host")
        for loss, pixels in settings
    }
    for loss, pixels in settings:
        own = where(found, loss=loss, pixels=pixels)
        failed = [row["global_batch"] for row in own if not row["fits"]]
        cells = []
        for batch_k in BATCHES_K:
            row = where(own, global_batch=batch_k * 1024, fits=1)
            said = f"{row[-1]['peak_gib']:.1f}" if row else "x" if batch_k * 1024 >= min(failed) else "-"
            cells.append(f"{said} / {_planned_within(own[0] | {'global_batch': batch_k * 1024})}")
        lines.append([f"{own[0]['gpus']} H200s, {names[loss, pixels]}: measured / planned", *cells])
    for loss, pixels in settings:
        row = where(found, loss=loss, pixels=pixels)[0] | {"gpus": 8}
        cells = [_planned_within(row | {"global_batch": batch_k * 1024}) for batch_k in BATCHES_K]
        lines.append([f"8 H200s, {names[loss, pixels]}: planned", *cells])
    return markdown(["peak of a step, GiB", *(f"{k}k" for k in BATCHES_K)], lines) + f"\n\n{origin(found)}."


def _planned_within(row: dict) -> str:
    from benchmarks.largest_batch import FILLED

    plan = planned_for_trial(row)
    return f"{plan:.1f}" if plan * GIB <= FILLED * row["memory_gb"] * 1e9 else "x"


def planned_for_trial(row: dict) -> float:
    """GiB that are planned for a trial of benchmarks.largest_batch."""
    from benchmarks.largest_batch import planned_peak

    names = ("model", "gpus", "pixels", "micro_batch", "loss", "precision")
    setting = {name: row[name] for name in names} | {"checkpointing": bool(row["checkpointing"])}
    setting["past"] = past(row)
    return planned_peak(pairs=row["global_batch"], **setting) / GIB


def step_memory() -> str:
    """Steps on one H200 that nothing holds to 80 GB, one a line, measured and planned."""
    found = rows("memory_rows.csv")
    names = ("gpus", "model", "memory_gb", "loss", "precision", "checkpointing", "pixels", "global_batch")
    lines = [
        [row["model"], row["precision"], "yes" if row["checkpointing"] else "no", f"{row['global_batch']:,}",
         f"{row['peak_gib']:.1f} / {planned_for_trial(row):.1f}"]
        for row in latest(found, *names)
    ]  # fmt: skip
    header = ["model", "precision", "checkpointing", "pairs", "peak, GiB: measured / planned"]
    return markdown(header, lines) + f"\n\n{origin(found)}."


def plan_peaks() -> str:
    """How far the plan is from all measured peaks of benchmarks.largest_batch, and on which side of the limit."""
    from benchmarks.largest_batch import FILLED

    found = rows("table1_h200.csv", "largest_batch.csv", "memory_rows.csv")
    errors = [planned_for_trial(row) / row["peak_gib"] - 1 for row in where(found, fits=1)]
    failed = where(found, fits=0)
    above = sum(_planned_within(row) == "x" for row in failed)
    return (
        f"Peaks of {len(errors)} more steps, of three losses and 1,024 to 4,194,304 pairs ([Tables 1 and\n"
        f"2](results.md#the-papers-tables-and-figures)), are planned within {min(errors):+.1%} and {max(errors):+.1%}; "
        f"of {len(failed)} that ran out of\nmemory {above} are planned above {FILLED:.1%} of the limit."
    )


def plan_states() -> str:
    """Peaks of steps on one H200 beside what the check at start reckons from the same flags."""
    found = list(rows("step_peaks.csv"))
    lines = []
    for row in found:
        flags = [word for word in row["label"].split(" measured-steps")[0].split() if word not in _SAID]
        plan = planned_at_start(row) / GIB
        peak = row["peak_gib"]
        lines.append(
            [row["model"], " ".join(flags), f"{peak:.1f} / {plan:.1f} ({round(plan / peak - 1, 3) + 0.0:+.1%})"]
        )
    return markdown(["model", "flags", "peak, GiB: measured / planned"], lines) + f"\n\n{origin(found)}."


_SAID = ("model", "ViT-B-16", "compile-blocks", "on")  # by the table, or of all rows


def planned_at_start(row: dict) -> float:
    """Bytes that infcl/train/fit.py reckons for the flags of a row of benchmarks.step on one GPU, with its buckets."""
    from benchmarks.step import setting_of

    config, preset = setting_of(row["label"])
    preset["zero_optimization"] |= {"reduce_bucket_size": BUCKET, "overlap_comm": True} | json.loads(
        row["zero_options"] or "{}"
    )
    _, cfg = build_tokenizer_and_model_config(config)
    counts = parameter_counts(build_meta_model(config, cfg))
    return Fit(config, cfg, counts, str(config.precision), preset, 1, float("inf")).parts(config)["peak"]


def table_2() -> str:
    """The largest batches: the paper's, ours as found on H200s held to 80 GB, ours as planned for its A800s."""
    found, lines = rows("largest_batch.csv"), []
    for row in _paper(2):
        name = LOSSES[row["loss"], 0]
        where_ = "offload" if row["offload"] else ""
        lines.append([row["model"], f"{row['gpus']} x A800", name, where_, "paper", f"{row['batch_k']}k", "", ""])
        if row["loss"] == "inf_cl":
            batch_, peak = _planned_largest(row["model"], row["gpus"], row["offload"])
            cells = [
                row["model"],
                f"{row['gpus']} x A800",
                "infcl",
                where_,
                "planned",
                batch(batch_),
                "",
                f"{peak:.1f}",
            ]
            lines.append(cells)
    names = ("model", "gpus", "pixels", "loss", "memory_gb", "precision", "checkpointing")
    for setting in dict.fromkeys(tuple(row[name] for name in names) for row in found):
        model, gpus, pixels, loss, memory_gb, precision, checkpointing = setting
        own = newest(where(found, **dict(zip(names, setting))))
        fitting = [row for row in own if row["fits"]]
        failed = [row["global_batch"] for row in own if not row["fits"]]
        if fitting:
            best = max(fitting, key=lambda row: row["global_batch"])
            limit = batch(min(failed)) if failed else "not tried"
            where_ = "offload" if pixels == "host" else ""
            shown = LOSSES[loss, 0].replace("Inf-CL", "infcl") + (f", {precision}" if precision != "bf16" else "")
            shown += "" if checkpointing else ", no checkpointing"
            lines.append([model, f"{gpus} x H200 at {memory_gb:g} GB", shown, where_,
                          "measured", batch(best["global_batch"]), limit, f"{best['peak_gib']:.1f}"])  # fmt: skip
    order = ("paper", "planned", "measured")
    lines.sort(key=lambda line: (line[0], line[3], "H200" in line[1], int(line[1].split()[0]), order.index(line[4])))
    header = ["model", "GPUs", "loss", "pixels", "", "largest batch", "does not fit", "peak, GiB"]
    return markdown(header, lines)


def _planned_largest(model: str, gpus: int, offload: int) -> tuple[int, float]:
    """(pairs, GiB at that batch) for infcl with checkpointing, bf16, micro-batch 256, ZeRO-1."""
    from benchmarks.largest_batch import planned_for

    card = load_gpu("a800-80g")
    pairs, peak = planned_for(model, gpus, card.usable_bytes, pixels="host" if offload else "gpu")
    return pairs, peak / GIB


def figure_1() -> dict:
    """{panel: {label: [(x, GiB)]}}: memory of the loss against the batch; against the GPUs, measured and planned."""
    from benchmarks.paper.speed import LABELS, loss_rows, memory_curves

    panels = {f"loss alone, {name}": series for name, series in memory_curves().items()}
    measured: dict[str, list[tuple[int, float]]] = {}
    for impl in ("inf_cl", "official_open_clip"):
        own = latest(where(loss_rows(), impl=impl, global_batch=2**17, dim=768), "gpus")
        measured[LABELS[impl]] = sorted((row["gpus"], row["extra_mib"] / 1024) for row in own)
    panels["loss alone, 128k pairs, H200s"] = measured
    series: dict[str, list[tuple[int, float]]] = {}
    for loss, name in (("inf_cl", "infcl"), ("open_clip", "OpenCLIP"), ("clip", "CLIP")):
        series[name] = []
        for gpus in FIGURE_1_GPUS:
            two_level = loss == "inf_cl" and gpus > 8  # of a host
            parts = loss_bytes(loss, rows=2**18 // gpus, ranks=gpus, width=768, two_level=two_level)
            series[name].append((gpus, sum(parts.values()) / GIB))
    return panels | {"loss alone, 256k pairs, planned": series}
