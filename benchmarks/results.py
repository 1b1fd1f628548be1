"""Draw every table and chart of the docs from the raw files in docs/results: `python -m benchmarks.results --write`.

README.md and the pages of docs/ can have regions for tables, between two markers:

    <!-- results: table-3 -->
    ...
    <!-- end -->

TABLES and CHARTS at the end define the content of the regions and images. --check reports what --write would change
and exits with 1. Tables given by name are printed. Nothing here measures.
"""

import argparse
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean, median, stdev

from benchmarks.charts import Chart, Panels, average, average_and_deviation, digest, digest_of, series
from benchmarks.rows import RESULTS, ROOT, grouped, latest, newest, rows, where
from benchmarks.tables import Columns, Table, across, batch, gpus, markdown, ms, spread, spread_of, text_of

GIB = 2**30
LOSSES = {
    "inf_cl": "infcl",
    "official": "official inf_cl 1.2.1",
    "clip": "CLIP (b x b)",
    "clip_compiled": "CLIP (b x b), compiled",
    "official_open_clip": "open_clip's ClipLoss",
    "inf_cl_mask": "infcl, duplicates masked",
    "inf_cl_positive": "infcl, duplicates as positives",
    "siglip": "infcl, SigLIP",
    "siglip_mask": "infcl, SigLIP, duplicates masked",
    "siglip_positive": "infcl, SigLIP, duplicates as positives",
    "official_siglip": "open_clip's SigLipLoss",
    "disco": "DisCo-CLIP",
    "views": "NT-Xent's views through infcl",
    "info_nce": "InfoNCE, b queries, 2 b documents",
}
PAPER = {"clip": "CLIP", "open_clip": "OpenCLIP", "inf_cl": "Inf-CL"}
TRAINED = {"clip": "CLIP", "open_clip": "OpenCLIP", "disco": "DisCo-CLIP", "inf_cl": "infcl"}
TRAINED |= {"inf_cl_bf16": "infcl, BF16 GEMMs", "siglip": "SigLIP"}
METRICS = {"zero_shot_top1": "zero-shot", "image_to_text_r1": "image->text R@1", "text_to_image_r1": "text->image R@1"}
SCALINGS = {"none": "lr unchanged", "sqrt": "lr x sqrt(batch)", "linear": "lr x batch"}
BATCHES_K = (32, 64, 128, 256, 1024)  # the paper's Table 1, in units of 1,024 samples


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *TABLES], help="tables to print")
    parser.add_argument("--write", action="store_true", help="fill the regions of all pages, draw changed charts")
    parser.add_argument("--check", action="store_true", help="exit 1 where --write would change something")
    options = parser.parse_args(arguments)
    for name in options.names:
        print(TABLES[name](), "\n")
    changed = []
    for page in pages() if options.write or options.check else ():
        text = page.read_text()
        if (filled := fill(text)) != text:
            changed.append(page)
            if options.write:
                page.write_text(filled)
    for name, chart in CHARTS.items() if options.write or options.check else ():
        if digest_of(RESULTS / name) != digest(chart.panels()):
            changed.append(RESULTS / name)
            if options.write:
                chart.draw(RESULTS / name)
    for path in changed:
        print(f"{'wrote' if options.write else 'out of date:'} {path.relative_to(ROOT)}")
    return int(options.check and bool(changed))


# ---- regions of pages ----

_REGION = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    """Return README.md and the pages of docs/ that have regions."""
    return [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if regions(page.read_text())]


def regions(text: str) -> list[str]:
    """Return the names of the regions of a page.

    Raises:
        ValueError: a region is not closed.
    """
    found = _REGION.findall(text)
    if text.count("<!-- results:") != len(found):
        raise ValueError("a region has no <!-- end -->, or its name is not letters, digits and dashes")
    return [name for _, name, _ in found]


def fill(text: str, tables: Mapping[str, Callable[[], str]] | None = None) -> str:
    """Return a page with the content of each region replaced by its table.

    Raises:
        ValueError: a region has no table of its name, or is not closed.
    """
    tables = TABLES if tables is None else tables
    if unknown := [name for name in regions(text) if name not in tables]:
        raise ValueError(f"no table fills the region {unknown[0]!r}; there are {', '.join(sorted(tables))}")
    return _REGION.sub(lambda match: f"{match[1]}{tables[match[2]]().strip()}\n{match[3]}", text)


# ---- which of open_clip's configs build ----


def open_clip_models() -> str:
    """Return a table with a line per first word of the configs' names."""
    families: dict[str, list[dict]] = {}
    for row in rows("open_clip_models.csv"):
        families.setdefault(re.split(r"[^A-Za-z]", row["model"])[0], []).append(row)
    lines = ["| names | configs | built | rejected |", "| --- | --- | --- | --- |"]
    for name, found in families.items():
        rejected = [row["why"] for row in found if row["result"] == "rejected"]
        why = f"{len(rejected)}: {rejected[0]}" if rejected else ""
        lines.append(f"| `{name}*` | {len(found)} | {len(found) - len(rejected)} | {why} |")
    return "\n".join(lines)


# ---- the loss alone; a row that ran out of memory has no time ----


def measured_losses() -> list[dict]:
    return [row for row in rows("loss_h200.csv") if row["median_ms"] != ""]


def _loss_cell(own: list[dict]) -> str:
    """Format the last row's time and memory; 'x': out of memory, '-': not measured.

    If the times of its commit spread by more than 3%, the cell has their range.
    """
    if not own or own[-1]["median_ms"] == "":
        return "x" if own else "-"
    times = sorted(row["median_ms"] for row in newest(own) if row["median_ms"] != "")
    time = f"{ms(times[0])}-{ms(times[-1])}" if times[-1] > 1.03 * times[0] else _median(own)
    return text_of(time + " ms, {extra_mib:size}", own)


def _median(own: list[dict]) -> str:
    row = own[-1]
    deviation = f" +- {row['std_ms']:.2g}" if row["std_ms"] < 99.5 else f" +- {row['std_ms']:,.0f}"
    return ms(row["median_ms"]) + (deviation if row["repeats"] > 1 else "")


def _gib(own: list[dict]) -> str:
    fits = own and own[-1]["median_ms"] != ""
    return f"{own[-1]['extra_mib'] / 1024:.2f}" if fits else "x" if own else "-"


LOSS: Columns = {
    "GPUs": "{gpus}",
    "batch": "{global_batch:,}",
    "width": "{dim}",
    "loss": lambda own: LOSSES[own[-1]["impl"]],
    "ms": _median,
    "memory": "{extra_mib:size}",
    "rate / cuBLAS": "{ratio_to_cublas:.2f}",
}
LOSS_SETTING = ("gpus", "global_batch", "dim", "impl")
SIGLIP_AND_DISCO = ("inf_cl", "siglip", "official_siglip", "disco", "official_open_clip")
ON_H100 = ("inf_cl", "clip_compiled", "official_open_clip", "official", "siglip", "official_siglip", "disco")
OTHER_LOSSES = ("inf_cl", "inf_cl_mask", "inf_cl_positive", "siglip_mask", "siglip_positive", "siglip")
OTHER_LOSSES += ("official_siglip", "views", "info_nce")


def loss_table(count: int, *impls: str) -> Table:
    """Return a table of time and memory by batch and implementation."""
    columns = {"batch": "{global_batch:,}"} | across(_loss_cell, {LOSSES[impl]: {"impl": impl} for impl in impls})
    columns |= across("{ratio_to_cublas:.2f}", {"infcl's rate / cuBLAS": {"impl": "inf_cl"}})
    return Table(
        "loss_h200.csv", columns, by=("global_batch",), keep={"gpus": count, "dim": 768, "impl": impls},
        order=lambda row: row["global_batch"],
    )  # fmt: skip


def other_losses() -> list[dict]:
    """Return rows of other losses and widths on one H200 at 65,536 samples."""
    found = where(measured_losses(), gpus=1, impl=OTHER_LOSSES, global_batch=65536)
    return [row for row in found if row["impl"] != "inf_cl" or row["dim"] in (512, 1024)]


def _precision_errors(own: list[dict]) -> str:
    errors = ("loss_error", "image_gradient_error", "scale_gradient_error")
    return "; ".join(f"{own[0][error]:.1e}" for error in errors) if own else ""


# ---- the paper's tables ----


def losses_by_memory() -> list[dict]:
    """Return rows of the loss alone on one and four H200s, and of the paper's on 8 A800s."""
    impls = ("clip", "official_open_clip", "official", "inf_cl")
    ours = [
        row | {"who": f"{gpus(count)}, {LOSSES[impl]}", "batch_k": row["global_batch"] / 1024}
        for count in (1, 4)
        for impl in impls
        for row in where(rows("loss_h200.csv"), gpus=count, impl=impl, dim=768)
    ]
    paper = [
        row | {"who": f"paper, 8 A800s, {name}"}
        | ({"median_ms": 0, "extra_mib": 1024 * row["loss_gib"]} if row["fits"] else {"median_ms": ""})
        for loss, name in PAPER.items()
        for row in where(rows("paper_memory.csv"), table=1, gpus=8, loss=loss, offload=0)
    ]  # fmt: skip
    return ours + paper


def steps_at_80_gb() -> list[dict]:
    """Return rows of the peak memory of full steps on H200s limited to 80 GB.

    Batches larger than one that failed count as failed.
    """
    found = []
    for own in grouped(rows("table1_h200.csv"), "loss", "pixels").values():
        failed = min((row["global_batch"] for row in own if not row["fits"]), default=2**62)
        name = PAPER[own[0]["loss"]].replace("Inf-CL", "infcl") + ", pixels not on the GPU" * (
            own[0]["pixels"] == "host"
        )
        found += [row | {"who": f"{gpus(row['gpus'])}, {name}", "batch_k": row["global_batch"] / 1024} for row in own]
        found += [found[-1] | {"batch_k": k, "fits": 0} for k in BATCHES_K if k * 1024 >= failed]
    return found


def _planned_step(own: list[dict]) -> str:
    from benchmarks.paper import paper_step

    return f"{paper_step(own[0]['model'], own[0]['gpus'], own[0]['batch_k'] * 1024):.1f}"


def largest_batches() -> list[dict]:
    """Return the largest batches: the paper's, and infcl's on H200s limited to 80 GB."""
    found = []
    for row in where(rows("paper_memory.csv"), table=2):
        row |= {"cards": "A800", "pixels": "offload" if row["offload"] else "", "above": ""}
        found.append(row | {"words": PAPER[row["loss"]], "kind": "paper", "batch": f"{row['batch_k']}k"})
    keys = ("model", "gpus", "pixels", "loss", "memory_gb", "precision", "checkpointing")
    for trials in grouped(rows("largest_batch.csv"), *keys).values():
        own = newest(trials)
        best = max(where(own, fits=1), key=lambda row: row["global_batch"])
        failed = [row["global_batch"] for row in own if not row["fits"]]
        words = PAPER[best["loss"]].replace("Inf-CL", "infcl")
        words += "" if best["precision"] == "bf16" else f", {best['precision']}"
        words += "" if best["checkpointing"] else ", no checkpointing"
        found.append(best | {
            "cards": f"H200 at {best['memory_gb']:g} GB", "pixels": "offload" if best["pixels"] == "host" else "",
            "words": words, "kind": "measured", "batch": batch(best["global_batch"]),
            "above": batch(min(failed)) if failed else "not tried",
        })  # fmt: skip
    return found


def trainings(name: str) -> list[dict]:
    """Return the last row of each training, in the order of TRAINED."""
    order = list(TRAINED)
    found = sorted(latest(rows(name), "run"), key=lambda row: order.index(row["loss"]))
    return [row | {"words": TRAINED[row["loss"]]} for row in found]


def trained() -> Table:
    """Return a table of the results of each loss: mean and deviation over its seeds."""
    columns: Columns = {"loss": "{words}", "seeds": len} | {name: spread_of(key) for key, name in METRICS.items()}
    columns["loss of the last 5% of steps"] = spread_of("final_loss", 4)
    foot = "{steps} steps of {global_batch} samples, ranks: {ranks}; {origin}"
    return Table(lambda: trainings("accuracy_losses.csv"), columns, by=("loss",), foot=foot)


def trained_pairs() -> str:
    """Return a table of each loss compared with CLIP per seed, with the same initial weights and samples."""
    by_loss = {loss: {row["seed"]: row for row in where(rows("accuracy_losses.csv"), loss=loss)} for loss in TRAINED}
    lines = []
    for loss in ("open_clip", "disco", "inf_cl", "inf_cl_bf16"):
        if seeds := sorted(set(by_loss[loss]) & set(by_loss["clip"])):
            cells = []
            for metric in METRICS:
                apart = [by_loss[loss][seed][metric] - by_loss["clip"][seed][metric] for seed in seeds]
                cells.append(f"{mean(apart):+.3f} +- {stdev(apart) / len(apart) ** 0.5:.3f}")
            lines.append([f"{TRAINED[loss]} - CLIP", *cells])
    deviations = [stdev([row[metric] for row in by_loss["clip"].values()]) for metric in METRICS]
    lines.append(["standard deviation of CLIP over seeds", *(f"{one:.3f}" for one in deviations)])
    return markdown(["mean over seeds +- its standard error", *METRICS.values()], lines)


ABLATION = {  # implementation and GPUs: words, the paper's name
    ("clip", 4): ("no tiles: b x b on every GPU (CLIP)", "clip"),
    ("official_open_clip", 4): ("b/n x b on every GPU (OpenCLIP, local loss)", "open_clip"),
    ("one_tile", 4): ("cross-GPU tiles only: the ring, a block pair as one float32 matrix", "cross_gpu_tiles"),
    ("inf_cl", 1): ("in-GPU tiles only: b x b on every GPU, in tiles (as one GPU alone does it)", ""),
    ("inf_cl", 4): ("cross-GPU and in-GPU tiles (infcl)", "inf_cl"),
}


def ablation() -> list[dict]:
    found = where(measured_losses(), global_batch=65536, dim=768)
    paper = {row["loss"]: f"{row['loss_gib']} GB" for row in where(rows("paper_memory.csv"), table=4)}
    return [row | {"words": words, "paper": paper.get(name, "-")} for (impl, count), (words, name) in ABLATION.items()
            for row in where(found, impl=impl, gpus=count)]  # fmt: skip


def batch_studies() -> list[dict]:
    """Return trainings with "rate", the learning rate at the smallest batch, where one row serves all scalings."""
    from benchmarks.accuracy import EXPONENTS

    found = latest(rows("accuracy_batches.csv"), "run")
    base = min(row["global_batch"] for row in found)
    studies = []
    for row in found:
        rate = float(f"{row['lr'] / (row['global_batch'] / base) ** EXPONENTS[row['lr_scaling']]:.6g}")
        same = SCALINGS if row["global_batch"] == base else [row["lr_scaling"]]
        studies += [row | {"lr_scaling": scaling, "rate": rate} for scaling in same]
    return studies


def _zero_shot_and_recall(own: list[dict]) -> str:
    return " / ".join(spread([row[metric] for row in own]) for metric in list(METRICS)[:2]) if own else ""


# ---- exactness and accuracy ----


def false_negatives() -> list[dict]:
    """Return trainings with "share", the duplicates in the batch, and "gain", R@1 above that of "negative"."""
    found = latest(rows("false_negatives.csv"), "run")
    found = [row | {"r1": (row["image_to_text_r1"] + row["text_to_image_r1"]) / 2} for row in found]
    alike = {(row["global_batch"], row["seed"]): row["r1"] for row in where(found, duplicates="negative")}
    shares = {row["global_batch"]: row["duplicate_share"] for row in where(found, duplicates="mask")}
    complete = [row for row in found if (row["global_batch"], row["seed"]) in alike]
    order = ("negative", "mask", "positive")
    return [
        row | {"share": shares[row["global_batch"]], "gain": row["r1"] - alike[row["global_batch"], row["seed"]]}
        for row in sorted(complete, key=lambda row: (row["global_batch"], order.index(row["duplicates"])))
    ]


def _gain(own: list[dict]) -> str:
    """Format the mean gain over the seeds and its standard error; empty for the reference treatment."""
    gains = [row["gain"] for row in own]
    error = f" +- {stdev(gains) / len(gains) ** 0.5:.3f}" if len(gains) > 1 else ""
    return "" if own[0]["duplicates"] == "negative" else f"{mean(gains):+.3f}{error}"


def word_order() -> list[dict]:
    words = {"none": "captions of the batch alone", "exchanged": "and with the objects exchanged"}
    return [row | {"words": words[row["negatives"]]} for row in latest(rows("word_order.csv"), "run")]


# ---- whole steps (rows of benchmarks.step) ----

STEP: Columns = {
    "GPUs": "{gpus}",
    "model": "{model}",
    "micro-batch x accumulation": "{micro_batch} x {micro_batches}",
    "precision": "{precision}",
    "blocks": "{blocks}",
    "checkpointing": "{checkpointing:yes}",
    "ZeRO": "{zero}",
    "cached": "{resident}",
    "captions": "{captions}",
    "attention": "{attention}",
    "options": "{options}",
    "samples/s per GPU": "{rate}",
    "first pass": "{seconds_encode:.3f} s",
    "second pass": "{seconds_replay:.3f} s",
    "update": lambda own: f"{1000 * own[-1]['seconds_step']:.1f} ms",
    "MFU": "{mfu:.3f}",
    "HFU": "{hfu:.3f}",
    "peak": "{peak_gib:.1f} GiB",
}
SETTING = ("gpus", "model", "zero", "precision", "blocks", "checkpointing", "micro_batch", "micro_batches", "resident")
SETTING += ("attention", "zero_options", "packed")


def steps_of(*names: str) -> list[dict]:
    """Return rows of benchmarks.step, except those of removed options, with texts for their cells.

    "rate" is the median of the steps in samples/s per GPU, with their standard deviation if the row has it.
    """
    found = []
    for row in rows(*names):
        if row.get("encode_together", 1) not in (1, "") or re.search("not kept| profile ", row["label"]):
            continue
        share, deviation = row.get("text_share"), row.get("samples_per_second_std")
        packed = share not in ("", None) and share < 1
        rate = f"{row['samples_per_second_per_gpu']:.0f}"
        found.append(row | {
            "packed": packed, "captions": f"packed: {share:.0%}" if packed else "padded",
            "attention": row.get("attention") or "torch", "options": _options(row),
            "rate": rate + (f" +- {deviation / row['gpus']:.1f}" if deviation else ""),
        })  # fmt: skip
    return found


def _options(row: dict) -> str:
    """Describe ZeRO options that differ from the presets."""
    options = json.loads(row["zero_options"] or "{}")
    words = ["all parameters persistent"] if any("persistence" in name for name in options) else []
    plain = {name: value for name, value in options.items() if "persistence" not in name}
    return ", ".join(words + [f"`{name}` {json.dumps(value)}" for name, value in plain.items() if row["gpus"] > 1])


def step_table(source: str | Callable[[], list[dict]], columns: str, *, by=(), keep=None, order=None, **more) -> Table:
    """Return a table of the named columns of STEP, and of further columns given as cells, with the hardware below."""
    cells = {name: (STEP | more)[name] for name in columns.split(" | ")}
    read = (lambda: steps_of(source)) if isinstance(source, str) else source
    return Table(read, cells, by=by, keep=keep or {}, order=order)


def accumulated_steps() -> list[dict]:
    """Return steps of ViT-L-14 on one H200 with packed captions, which differ in training options."""
    found = where(steps_of("step.csv"), gpus=1, model="ViT-L-14", zero=(0, 1), packed=True)
    return [row for row in found if row["micro_batches"] > 1 and "sdpa" not in row["label"]]


def steps_by_captions() -> list[dict]:
    """Return the newest steps of each model with packed and padded captions: one H200, autocast, compiled."""
    return [row for own in grouped(steps_of("step_captions.csv"), "model").values() for row in newest(own)]


def _with_dropout(own: list[dict]) -> str:
    dropped = re.search(r"force-patch-dropout ([\d.]+)", own[-1]["label"])
    return own[-1]["model"] + (f", {float(dropped[1]):.0%} of the patches dropped" if dropped else "")


def _cached(own: list[dict]) -> str:
    automatic = " (auto)" * ("resident-micro-batches auto" in own[-1]["label"])
    return f"{own[-1]['resident']} of {own[-1]['micro_batches']}{automatic}"


# ---- other trainers, data, tensor parallelism ----


def trainer_rows() -> list[dict]:
    """Return the last row of each setting of benchmarks.peers_train."""
    keys = ("program", "gpus", "model", "precision", "blocks", "checkpointing", "micro_batch", "accum_freq", "device")
    found = latest(rows("peers_train.csv"), *keys)
    programs = list(dict.fromkeys(row["program"] for row in found))
    return [
        row | {
            "order": programs.index(row["program"]), "trainer": f"{row['program']} {row['version']}".strip(),
            "how": row["blocks"] + ", checkpointing" * bool(row["checkpointing"])
            + ("" if row["precision"] == "amp_bf16" else f", {row['precision']}"),
        }
        for row in found
    ]  # fmt: skip


def _rate_of_trainer(own: list[dict]) -> str:
    row = own[-1]
    if row["status"] != "ok":
        return row["status"]
    return f"{row['samples_per_second']:,.0f} ({row['mean']:,.0f} +- {row['std']:,.0f}, {row['steps']} steps)"


def data_rates() -> list[dict]:
    """Return samples/s per core and stage, of infcl and of open_clip's workers in the same rounds."""
    found = [row | dict(zip(("program", "name"), row["stage"].split("/", 1))) for row in rows("data.csv")]
    ours = {row["name"]: row["samples_per_second_per_core"] for row in where(found, program="ours")}
    theirs = {row["name"]: row["samples_per_second_per_core"] for row in where(found, program="open_clip")}
    return [found[-1] | {"name": name, "ours": rate, "theirs": theirs.get(name, ""),
            "ratio": rate / theirs[name] if name in theirs else ""} for name, rate in ours.items()]  # fmt: skip


# ---- the planner ----


def plan_errors() -> list[dict]:
    return [row | {"error": row["planned"] / row["measured"] - 1} for row in rows("plan_errors.csv")]


def _range(own: list[dict]) -> str:
    errors = [row["error"] for row in own]
    return f"{min(errors):+.1%} to {max(errors):+.1%}"


# ---- charts ----


def loss_curves_of(column: str, unit: float) -> Panels:
    names = ("inf_cl", "official_open_clip", "clip", "disco", "official", "siglip", "official_siglip")
    labels = {impl: LOSSES[impl] for impl in names}
    return {
        gpus(count): series(
            where(measured_losses(), gpus=count, dim=768), "global_batch", column, "impl", labels, unit=unit
        )
        for count in (1, 4)
    }


def figure_1() -> Panels:
    """Return the memory of the loss by batch and by number of GPUs, measured and planned."""
    from infcl.plan.memory import loss_bytes

    panels = {f"loss alone, {name}": curves for name, curves in loss_curves_of("extra_mib", 1024.0).items()}
    names = {impl: LOSSES[impl] for impl in ("inf_cl", "official_open_clip")}
    found = where(measured_losses(), global_batch=2**17, dim=768)
    panels["loss alone, 128k samples, H200s"] = series(found, "gpus", "extra_mib", "impl", names, unit=1024.0)
    panels["loss alone, 256k samples, planned"] = {
        name: [(count, sum(loss_bytes(
            loss, rows=2**18 // count, ranks=count, width=768, two_level=loss == "inf_cl" and count > 8
        ).values()) / GIB) for count in (8, 16, 32, 64, 128, 256)]
        for loss, name in (("inf_cl", "infcl"), ("open_clip", "OpenCLIP"), ("clip", "CLIP"))
    }  # fmt: skip
    return panels


def figure_5() -> Panels:
    """Return the accuracy by batch."""
    return {
        f"{name}, lr {rate:g} at 512": series(own, "global_batch", metric, "lr_scaling", SCALINGS, of=average)
        for rate, own in sorted(grouped(batch_studies(), "rate").items())
        for metric, name in list(METRICS.items())[:2]
    }


def training_curves() -> Panels:
    """Return the loss by samples seen, with the deviation over seeds. SigLIP's loss has a separate panel."""
    found = [row | {"of": row["run"].rsplit("-", 1)[0]}
             for row in latest(rows("accuracy_losses_curves.csv"), "run", "samples_seen")]  # fmt: skip
    panels = {"softmax losses": {loss: TRAINED[loss] for loss in TRAINED if loss != "siglip"}}
    panels["SigLIP's loss"] = {"siglip": TRAINED["siglip"]}
    return {panel: series(found, "samples_seen", "loss", "of", labels, of=average_and_deviation)
            for panel, labels in panels.items()}  # fmt: skip


def overview() -> Panels:
    """Return README's chart: time and memory of the loss on one GPU, and the trainers' rates.

    It begins at 8,192 samples: below, kernel launches dominate the time of every loss.
    """
    names = {impl: LOSSES[impl] for impl in ("inf_cl", "official_open_clip", "official")}
    own = [row for row in where(measured_losses(), gpus=1, dim=768) if row["global_batch"] >= 8192]
    panels = {"loss, forward + backward, ms": series(own, "global_batch", "median_ms", "impl", names)}
    panels["memory of the loss, GiB"] = series(own, "global_batch", "extra_mib", "impl", names, unit=1024.0)
    found = where(
        trainer_rows(), gpus=1, model="ViT-L-14", precision="amp_bf16", status="ok", checkpointing=0,
        micro_batch=128, accum_freq=1,
    )  # fmt: skip
    panels["training ViT-L-14, samples/s"] = {
        f"{row['program']}, {row['blocks']}": [(row["samples_per_second"],)]
        for row in sorted(found, key=lambda row: -row["samples_per_second"])
    }
    return panels


# ---- tables and charts of the docs ----


def _by(*names: str) -> Callable[[dict], tuple]:
    """Return a sort key by columns; "-name" sorts the largest first."""
    return lambda row: tuple(-row[name[1:]] if name.startswith("-") else row[name] for name in names)


BATCH = "global batch"
OF_BATCH_K = {f"{k}k": {"batch_k": k} for k in BATCHES_K}
TABLES: dict[str, Callable[[], str]] = {
    "data-speed": Table(
        data_rates,
        {"": "{name}", "infcl": "{ours:rate}", "open_clip 3.3": "{theirs:rate}", "infcl / open_clip": "{ratio:.1f}x"},
        foot="{cpu}, torch {torch}, load {load}; {images}.",
    ),
    "false-negatives": Table(
        false_negatives,
        {"batch": "{global_batch:,}", "duplicate share": "{share:.0%}", "`--duplicates`": "{duplicates}", "seeds": len}
        | {name: spread_of(key) for key, name in METRICS.items()}
        | {"R@1 compared with `negative`": _gain},
        by=("global_batch", "duplicates"),
        foot="{samples_seen:,} samples seen at each batch, {num_train:,} images; {origin}",
    ),
    "figure-4-planned": Table(
        "paper_steps.csv", {"batch": "{batch_k}k", "paper, s": "{seconds}", "planned, s": _planned_step}, foot=""
    ),
    "figure-5": Table(
        batch_studies,
        {"lr at 512": "{rate:g}", "batch": "{global_batch:,}", "steps": "{steps}"} | across(
            _zero_shot_and_recall, {f"{name}: zero-shot / R@1": {"lr_scaling": key} for key, name in SCALINGS.items()}),
        by=("rate", "global_batch"), order=_by("rate", "global_batch"),
        foot="{samples_seen:,} samples seen of {num_train:,}; {origin}",
    ),
    "locked-tower": step_table(
        "optimizers.csv", "towers | samples/s per GPU | first pass | second pass | peak", by=("label",),
        keep={"model": "ViT-B-16-BERT-base"},
        towers=lambda own: "`--lock-image`" if "lock-image" in own[-1]["label"] else "both trained",
    ),
    "loss-1-gpu": loss_table(1, "inf_cl", "clip_compiled", "clip", "official_open_clip", "official"),
    "loss-4-gpus": loss_table(4, "inf_cl", "clip", "official_open_clip", "official"),
    "loss-h100": Table(
        "loss_h100.csv", {name: cell for name, cell in LOSS.items() if name != "width"}, by=LOSS_SETTING,
        keep={"dim": 768, "global_batch": (65536, 131072), "impl": ON_H100}, order=_by("gpus", "global_batch"),
    ),
    "loss-others": Table(
        other_losses, {name: LOSS[name] for name in ("loss", "width", "ms", "memory")}, by=LOSS_SETTING,
        order=lambda row: (OTHER_LOSSES.index(row["impl"]), row["dim"], row["global_batch"]), foot="",
    ),
    "optimizers": step_table(
        "optimizers.csv", "`--opt` | samples/s per GPU | update | peak", by=("label",), keep={"model": "ViT-B-16"},
        **{"`--opt`": lambda own: f"`{own[-1]['label'].split(' opt ')[1]}`"},
    ),
    "open-clip-models": open_clip_models,
    "peer-trainers": Table(
        trainer_rows,
        {
            "GPUs": "{gpus}", "model": "{model}", "micro-batch x accumulation": "{micro_batch} x {accum_freq}",
            "trainer": "{trainer}", "blocks": "{how}", "samples/s: median (mean)": _rate_of_trainer,
            "waiting for data": "{waiting:.0%}", "peak, GiB": "{peak_gib:.1f}",
        },
        order=lambda row: (row["gpus"], row["model"], row["accum_freq"], row["blocks"] == "compiled", row["order"]),
    ),
    "plan-errors": Table(
        plan_errors,
        {"planned": "{kind}", "rows": len, "errors": _range,
         "median": lambda own: f"{median(row['error'] for row in own):+.1%}"},
        by=("kind",), foot="",
    ),
    "precision": Table(
        "precision_h100.csv",
        {"loss": "{impl}", "features": "{dtype}", "GEMMs": lambda own: own[-1]["tile_dtype"] or own[-1]["dtype"]}
        | across(_precision_errors, {
            f"{kind} pairs": {"features": kind} for kind in ("random", "training", "told apart", "matched")}),
        by=("impl", "dtype", "tile_dtype"), keep={"dim": 768},
        foot="Error of the loss; of the image gradients; of the scale's gradient. {origin}",
    ),
    "retrieval": Table(
        lambda: rows("retrieval.csv", "retrieval_h200.csv"),
        {"": "{impl}", "pairs": "{pairs:,}", "width": "{dim}", "device": "{device}", "time": "{seconds:.2f} s",
         "memory above the features": "{peak_mib:size}"},
        by=("impl", "pairs", "dim", "device"), foot="",
    ),
    "siglip-disco": Table(
        "loss_h200.csv",
        {"loss": LOSS["loss"]} | across(_loss_cell, {
            f"{gpus(count, 'GPU')}, {samples:,}": {"gpus": count, "global_batch": samples}
            for count, samples in ((1, 65536), (1, 131072), (4, 65536), (4, 131072), (4, 262144))}),
        by=("impl",), keep={"dim": 768, "impl": SIGLIP_AND_DISCO}, foot="",
        order=lambda row: SIGLIP_AND_DISCO.index(row["impl"]),
    ),
    "step-attention": step_table(
        "step_attention.csv", "model | micro-batch x accumulation | captions | attention | samples/s per GPU | "
        "first pass | second pass | MFU", model=_with_dropout,
    ),
    "step-captions": step_table(
        steps_by_captions, "model | micro-batch x accumulation | captions | attention | samples/s per GPU | "
        "first pass | second pass | peak",
    ),
    "step-levers": step_table(
        accumulated_steps, "micro-batch x accumulation | precision | blocks | checkpointing | cached | attention | "
        "samples/s per GPU | MFU | HFU | peak", by=SETTING, order=_by("-samples_per_second"),
    ),
    "step-residents": step_table(
        "step_resident.csv", "model | micro-batch x accumulation | cached | samples/s per GPU | first pass | "
        "second pass | MFU | HFU | peak", cached=_cached,
    ),
    "table-1-loss": Table(
        losses_by_memory, {"loss alone, GiB per GPU": "{who}"} | across(_gib, OF_BATCH_K), by=("who",), foot=""
    ),
    "table-1-measured": Table(
        steps_at_80_gb,
        {"peak of a step, GiB": "{who}"} | across(
            lambda own: f"{own[-1]['peak_gib']:.1f}" if own and own[-1]["fits"] else "x" if own else "-", OF_BATCH_K),
        by=("who",),
    ),
    "table-2": Table(
        largest_batches,
        {"model": "{model}", "GPUs": "{gpus} x {cards}", "loss": "{words}", "pixels": "{pixels}", "": "{kind}",
         "largest batch": "{batch}", "does not fit": "{above}", "peak, GiB": "{peak_gib:.1f}"},
        order=lambda row: (row["model"], row["pixels"], row["cards"] != "A800", row["gpus"],
                           row["kind"] == "measured"),
        foot="",
    ),
    "table-3": trained(),
    "table-3-pairs": trained_pairs,
    "table-4": Table(
        ablation, {"4 GPUs, batch 65,536, width 768": "{words}",
                   "ms": "{median_ms:ms}", "memory": "{extra_mib:size}", "paper's memory, width 512": "{paper}"},
        by=("words",), foot="",
    ),
    "word-order": Table(
        word_order,
        {"negatives": "{words}", "seeds": len, "caption chosen (chance 0.5)": spread_of("word_order")}
        | {METRICS[key]: spread_of(key) for key in ("image_to_text_r1", "text_to_image_r1")},
        by=("negatives",), order=lambda row: row["negatives"] == "exchanged",
        foot="{steps} steps of {global_batch} samples, {scenes:,} held-out scenes; {origin}",
    ),
}  # fmt: skip
CHARTS = {
    "figure_1.png": Chart(figure_1, (BATCH, BATCH, "GPUs"), "GiB per GPU"),
    "figure_4.png": Chart(lambda: loss_curves_of("median_ms", 1.0), (BATCH,), "ms, forward + backward"),
    "figure_5.png": Chart(figure_5, (BATCH,), "accuracy", log_y=False),
    "loss_curves.png": Chart(training_curves, ("samples seen",), "loss", plain=True),
    "overview.png": Chart(overview, (BATCH,), "one H200", width=3.5),
}

if __name__ == "__main__":
    raise SystemExit(main())
