"""Draw every table and chart of the docs from the raw files in docs/results: `python -m benchmarks.results --write`.

A page holds the region of a table between two markers, and may be any page of docs/ or README.md:

    <!-- results: table-3 -->
    ...
    <!-- end -->

TABLES and CHARTS name the functions that fill the regions and the pictures. --check reports what --write would change
and exits 1; names given as arguments are printed. Nothing here measures.
"""

import argparse
import csv
import hashlib
import json
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median, stdev

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
GIB = 2**30
Columns = dict[str, str | Callable[[dict], object]]
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
}
VARIANTS = {
    "two_passes": "infcl's loss as two passes of InfoNCE",
    "no_graph": "infcl, without a CUDA graph",
    "in_graph": "infcl in a compiled caller",
    "in_graph_replayed": "infcl in a compiled caller, `reduce-overhead`",
    "nt_xent": "NT-Xent (half of the matrix)",
    "views": "NT-Xent's views through infcl (the whole matrix)",
    "info_nce": "InfoNCE, b queries, 2 b documents",
}
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
    for name, (panels, how) in CHARTS.items() if options.write or options.check else ():
        if digest_of(RESULTS / name) != digest(panels()):
            changed.append(RESULTS / name)
            if options.write:
                how(panels(), RESULTS / name)
    for path in changed:
        print(f"{'wrote' if options.write else 'out of date:'} {path.relative_to(ROOT)}")
    return int(options.check and bool(changed))


# ---- regions of pages ----

_REGION = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    """README.md and the pages of docs/ that have regions."""
    return [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if regions(page.read_text())]


def regions(text: str) -> list[str]:
    """The names of the regions of a page.

    Raises:
        ValueError: a region is not closed.
    """
    found = _REGION.findall(text)
    if text.count("<!-- results:") != len(found):
        raise ValueError("a region has no <!-- end -->, or its name is not letters, digits and dashes")
    return [name for _, name, _ in found]


def fill(text: str, tables: Mapping[str, Callable[[], str]] | None = None) -> str:
    """Return a page with the content of each region replaced by what its function returns.

    Raises:
        ValueError: no function has the name of a region, or a region is not closed.
    """
    tables = TABLES if tables is None else tables
    if unknown := [name for name in regions(text) if name not in tables]:
        raise ValueError(f"no function fills the region {unknown[0]!r}; there are {', '.join(sorted(tables))}")
    return _REGION.sub(lambda match: f"{match[1]}{tables[match[2]]().strip()}\n{match[3]}", text)


# ---- raw files ----


def rows(*names: str) -> list[dict]:
    """Return the rows of CSV files of docs/results, one file after another, with their numbers as numbers."""
    found = []
    for name in names:
        with (RESULTS / name).open(newline="") as file:
            found += [{key: _value(key, text) for key, text in row.items()} for row in csv.DictReader(file)]
    return found


def _value(column: str, text: str):
    if column not in ("commit", "run", "version"):  # 6e15030 is no number, and 3.10 not 3.1
        for kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
    return text


def where(found: Iterable[dict], **wanted) -> list[dict]:
    """Return the rows whose columns have these values; a tuple stands for any of its values."""
    return [
        row
        for row in found
        if all(row.get(key) in value if isinstance(value, tuple) else row.get(key) == value
               for key, value in wanted.items())
    ]  # fmt: skip


def latest(found: Iterable[dict], *names: str) -> list[dict]:
    """Return the last row of each setting; settings differ in the columns `names`."""
    return list({tuple(row.get(name) for name in names): row for row in found}.values())


def newest(found: Sequence[dict]) -> list[dict]:
    """Return the rows of the last row's commit, which replace what was measured before."""
    return where(found, commit=found[-1]["commit"]) if found else []


def origin(found: Sequence[dict]) -> str:
    """'NVIDIA H200, torch 2.11.0+cu130.'"""
    names = [", ".join(sorted({str(row[name]) for row in found})) for name in ("device", "torch")]
    return f"{names[0]}, torch {names[1]}."


# ---- cells ----


class _Cells(string.Formatter):
    """str.format, with empty cells for values that a row does not have."""

    def format_field(self, value, spec):
        return "" if value == "" else super().format_field(value, spec)


def table(found: Iterable[dict], columns: Columns) -> str:
    """Return a Markdown table with a line per row; a column is a format or a function of the row."""
    cells = _Cells()
    return markdown(
        columns, ([cells.format(column, **row) if isinstance(column, str) else column(row)
                   for column in columns.values()] for row in found)
    )  # fmt: skip


def markdown(header: Iterable, lines: Iterable[Sequence]) -> str:
    text = [list(header), *lines]
    text.insert(1, ["---"] * len(text[0]))
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in text)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """'0.930 +- 0.012': mean and standard deviation; one value has no deviation."""
    text = f"{mean(values):.{digits}f}"
    return text + (f" +- {stdev(values):.{digits}f}" if len(values) > 1 else "")


def batch(samples: int) -> str:
    """65536 -> '64k', as the paper counts."""
    return f"{samples // 1024}k" if samples % 1024 == 0 else f"{samples:,}"


def ms(value: float) -> str:
    return f"{value:.2f}" if value < 2 else f"{value:.1f}" if value < 200 else f"{value:,.0f}"


def size(mib: float) -> str:
    return f"{mib:.0f} MiB" if mib < 1000 else f"{mib / 1024:.1f} GiB"


def gpus(count: int, kind: str = "H200") -> str:
    return f"{count} {kind}{'s' * (count > 1)}"


# ---- the loss alone ----


def loss_rows() -> list[dict]:
    """Rows of the loss alone on H200s; one that ran out of memory has no time."""
    return rows("loss_h200.csv")


def measured_losses() -> list[dict]:
    return [row for row in loss_rows() if row["median_ms"] != ""]


def loss_table(count: int, impls: tuple[str, ...]) -> str:
    """Time and memory by batch and implementation; 'x': out of memory, '-': not measured."""
    ours = where(loss_rows(), gpus=count, dim=768)
    batches = sorted({row["global_batch"] for row in where(measured_losses(), gpus=count, dim=768, impl=impls)})
    lines = []
    for samples in batches:
        found = [where(ours, impl=impl, global_batch=samples) for impl in impls]
        ratio = found[0][-1]["ratio_to_cublas"] if found[0] else ""
        lines.append([f"{samples:,}", *map(_loss_cell, found), ratio if ratio == "" else f"{ratio:.2f}"])
    text = markdown(["batch", *(LOSSES[impl] for impl in impls), "infcl's rate / cuBLAS"], lines)
    return f"{text}\n\n{origin(ours)}"


def _loss_cell(found: list[dict]) -> str:
    """The last row's time and memory; the range of times where those of its commit spread over 3%."""
    if not found or found[-1]["median_ms"] == "":
        return "x" if found else "-"
    times = sorted(row["median_ms"] for row in newest(found) if row["median_ms"] != "")
    last = found[-1]
    time = f"{ms(times[0])}-{ms(times[-1])}" if times[-1] > 1.03 * times[0] else _median(last)
    return f"{time} ms, {size(last['extra_mib'])}"


def _median(row: dict) -> str:
    deviation = f" +- {row['std_ms']:.2g}" if row["std_ms"] < 99.5 else f" +- {row['std_ms']:,.0f}"
    return ms(row["median_ms"]) + (deviation if row["repeats"] > 1 else "")


LOSS_COLUMNS: Columns = {
    "GPUs": "{gpus}",
    "batch": "{global_batch:,}",
    "width": "{dim}",
    "loss": lambda row: (LOSSES | VARIANTS)[row["impl"]],
    "ms": lambda row: _median(row),
    "memory": lambda row: size(row["extra_mib"]),
    "rate / cuBLAS": "{ratio_to_cublas:.2f}",
}


def loss_others() -> str:
    """Other losses and widths on one H200."""
    found = latest(where(measured_losses(), gpus=1), "impl", "dim", "global_batch")
    duplicates = ("inf_cl_mask", "inf_cl_positive", "siglip_mask", "siglip_positive")
    names = (*duplicates, "siglip", "official_siglip", "nt_xent", "views", "info_nce")
    found = [row for row in found if row["impl"] in names or (row["impl"] == "inf_cl" and row["dim"] in (512, 1024))]
    found.sort(key=lambda row: (["inf_cl", *names].index(row["impl"]), row["dim"], row["global_batch"]))
    return table(found, {name: LOSS_COLUMNS[name] for name in ("loss", "batch", "width", "ms", "memory")})


def loss_h100() -> str:
    found = [row for row in rows("loss_h100.csv") if row["median_ms"] != ""]
    found = latest(found, "gpus", "global_batch", "dim", "impl")
    found.sort(key=lambda row: (row["gpus"], row["global_batch"], row["dim"]))
    return f"{table(found, LOSS_COLUMNS)}\n\n{origin(found)}"


def siglip_and_disco() -> str:
    settings = ((1, 65536), (1, 131072), (4, 65536), (4, 131072), (4, 262144))
    lines = [
        [LOSSES[impl], *(_loss_cell(where(loss_rows(), impl=impl, gpus=count, global_batch=samples, dim=768))
                         for count, samples in settings)]
        for impl in ("inf_cl", "siglip", "official_siglip", "disco", "official_open_clip")
    ]  # fmt: skip
    return markdown(["loss", *(f"{gpus(count, 'GPU')}, {samples:,}" for count, samples in settings)], lines)


def symmetry() -> str:
    """What one pass over the logits for both directions saves; both rows of a line are of one commit."""
    one, lines = where([*measured_losses(), *rows("loss_h100.csv")], gpus=1, dim=768), []
    names = {
        "two_passes": ("inf_cl", "both directions in one pass, against two passes"),
        "official": ("inf_cl", "both directions in one pass, against the official code"),
        "views": ("nt_xent", "half of a symmetric matrix, against all of it"),
    }
    for against, (impl, name) in names.items():
        for power in (16,) if against == "official" else (15, 16, 17, 18):
            both = [
                (row, other)
                for other in where(one, impl=against, global_batch=2**power)
                for row in where(one, impl=impl, global_batch=2**power, commit=other["commit"])
            ]
            if both:
                ours, other = (row["median_ms"] for row in both[-1])
                card = str(both[-1][0]["device"]).split()[1]
                lines.append([name, card, f"{2**power:,}", ms(ours), ms(other), f"{other / ours:.2f}x"])
    return markdown(["what is used", "GPU", "batch", "with, ms", "without, ms", ""], lines)


def tiling() -> str:
    """What tiles and the ring add to bare GEMMs; the ring by copy engines is of code since removed."""

    def cell(name: str) -> Callable[[dict], str]:
        def text(row: dict) -> str:
            time = row[f"{name} ms"]
            return "" if time == "" else f"{time:.1f} ({time / row['products ms']:.2f})"

        return text

    names = {"tiles": "tiles", "ring, waiting": "ring, not overlapped", "ring, sends": "ring, overlapped"}
    columns: Columns = {"GPUs": "{gpus}", "batch": "{global_batch:,}", "bare GEMMs, ms": "{products ms:.1f}"}
    columns |= {f"{words}, ms": cell(name) for name, words in names.items()}
    return table(latest(rows("tiling_h200.csv"), "gpus", "global_batch"), columns)


def rings() -> str:
    """Flat and two-level rings over slow network cards, turn by turn."""
    turns: dict[tuple, dict[str, list[dict]]] = {}
    for row in rows("rings.csv"):
        setting = tuple(row[name] for name in ("hosts", "ranks", "nic_mbit", "ratio", "rows", "dim", "commit"))
        turns.setdefault(setting, {"flat": [], "two-level": []})[row["ring"]].append(row)
    lines, faster = [], []
    for (hosts, ranks, card, ratio, count, dim, _), found in turns.items():
        for flat, two_level in zip(found["flat"], found["two-level"], strict=True):
            faster.append(flat["median_ms"] / two_level["median_ms"])
            times = [f"{row['median_ms']:,.0f} ({row['fastest_ms']:,.0f})" for row in (flat, two_level)]
            shape = [f"{hosts} x {ranks}", f"{card:g} / {card * ratio:.0f}", f"{count}, {dim}"]
            lines.append([*shape, *times, f"{faster[-1]:.1f}x"])
    header = ["nodes x ranks", "Mbit/s between / within nodes", "rows per rank, width", "flat, ms", "two-level, ms"]
    text = markdown([*header, "faster"], lines)
    return f"{text}\n\nThe two-level ring is {min(faster):.1f} to {max(faster):.1f} times faster."


def precision() -> str:
    """Errors of loss, image gradients and scale gradient against float64, by loss, precision and kind of features."""
    found = where(rows("precision_h100.csv"), dim=768)
    errors = ("loss_error", "image_gradient_error", "scale_gradient_error")

    def cell(kind: str) -> Callable[[dict], str]:
        def text(row: dict) -> str:
            own = where(found, features=kind, **{name: row[name] for name in ("impl", "dtype", "tile_dtype")})
            return "; ".join(f"{own[0][error]:.1e}" for error in errors) if own else ""

        return text

    columns: Columns = {"loss": "{impl}", "features": "{dtype}", "GEMMs": lambda row: row["tile_dtype"] or row["dtype"]}
    columns |= {f"{kind} pairs": cell(kind) for kind in dict.fromkeys(row["features"] for row in found)}
    text = table(latest(found, "impl", "dtype", "tile_dtype"), columns)
    return f"{text}\n\nError of the loss; of the image gradients; of the scale's gradient. {origin(found)}"


def retrieval() -> str:
    found = latest(rows("retrieval.csv", "retrieval_h200.csv"), "impl", "pairs", "dim", "device")
    columns: Columns = {
        "": "{impl}", "pairs": "{pairs:,}", "width": "{dim}", "device": "{device}", "time": "{seconds:.2f} s",
        "memory above the features": lambda row: size(row["peak_mib"]),
    }  # fmt: skip
    return table(found, columns)


# ---- the paper's tables ----


def table_1_loss() -> str:
    """Memory of the loss alone, GiB: the paper's 8 A800s, and one and four H200s."""
    lines = []
    for count in (1, 4):
        for impl in ("clip", "official_open_clip", "official", "inf_cl"):
            cells = [f"{gpus(count)}, {LOSSES[impl]}"]
            for batch_k in BATCHES_K:
                found = where(loss_rows(), impl=impl, gpus=count, dim=768, global_batch=batch_k * 1024)
                fits = found and found[-1]["median_ms"] != ""
                cells.append(f"{found[-1]['extra_mib'] / 1024:.2f}" if fits else "x" if found else "-")
            lines.append(cells)
    for loss, name in (("clip", "CLIP"), ("open_clip", "OpenCLIP"), ("inf_cl", "Inf-CL")):
        cells = [f"paper, 8 A800s, {name}"]
        for batch_k in BATCHES_K:
            found = where(rows("paper_memory.csv"), table=1, gpus=8, loss=loss, batch_k=batch_k, offload=0, fits=1)
            cells.append(f"{found[0]['loss_gib']:.2f}" if found else "x")
        lines.append(cells)
    return markdown(["loss alone, GiB per GPU", *(f"{k}k" for k in BATCHES_K)], lines)


def table_1_measured() -> str:
    """Peak memory of whole steps on H200s limited to 80 GB, GiB."""
    found, lines = rows("table1_h200.csv"), []
    for loss, pixels in dict.fromkeys((row["loss"], row["pixels"]) for row in found):
        own = where(found, loss=loss, pixels=pixels)
        failed = min((row["global_batch"] for row in own if not row["fits"]), default=2**62)
        name = {"open_clip": "OpenCLIP", "clip": "CLIP", "inf_cl": "infcl"}[loss]
        cells = [f"{gpus(own[0]['gpus'])}, {name}" + ", pixels not on the GPU" * (pixels == "host")]
        for batch_k in BATCHES_K:
            row = where(own, global_batch=batch_k * 1024, fits=1)
            cells.append(f"{row[-1]['peak_gib']:.1f}" if row else "x" if batch_k * 1024 >= failed else "-")
        lines.append(cells)
    return markdown(["peak of a step, GiB", *(f"{k}k" for k in BATCHES_K)], lines) + f"\n\n{origin(found)}"


def table_1_planned() -> str:
    """Peak memory of a step, GiB: the paper's, what the planner says of its trainer, and of infcl on the same GPUs."""
    from benchmarks.paper import paper_memory
    from infcl.plan.loads import memory_of

    names = {"clip": "CLIP", "open_clip": "OpenCLIP", "inf_cl": "Inf-CL"}
    paper, lines = where(rows("paper_memory.csv"), table=1), []
    for count in (8, 32):
        for loss, offload in (("clip", 0), ("open_clip", 0), ("inf_cl", 0), ("inf_cl", 1)):
            cells = [f"{gpus(count, 'A800')}, {names[loss]}{', offload' * offload}: paper / planned"]
            for batch_k in BATCHES_K:
                row = where(paper, gpus=count, loss=loss, offload=offload, batch_k=batch_k)
                peak = paper_memory(_on_a800s(count, loss, batch_k, offload, zero=0))["peak"] / GIB
                said = (f"{row[0]['peak_gib']:.1f}" if row[0]["fits"] else "x") if row else "-"
                cells.append(f"{said} / {peak:.1f}" if peak <= _a800().memory_gib else f"{said} / x")
            lines.append(cells)
        for offload, what in ((0, "on the GPU"), (1, "in host memory")):
            peaks = [memory_of(_on_a800s(count, "inf_cl", k, offload, zero=1))["peak"] for k in BATCHES_K]
            cells = [f"{peak / GIB:.1f}" if peak <= _a800().usable_bytes else "x" for peak in peaks]
            lines.append([f"{gpus(count, 'A800')}, infcl, pixels {what}: planned", *cells])
    return markdown(["peak of a step, GiB", *(f"{k}k" for k in BATCHES_K)], lines)


def _a800():
    from infcl.plan.profile import load_gpu

    return load_gpu("a800-80g")


def _on_a800s(count: int, loss: str, batch_k: int, offload: int, zero: int):
    from infcl.models.config import load_model_config
    from infcl.plan.setting import Setting

    return Setting(
        model=load_model_config("ViT-L-14"), gpu=_a800(), gpus=count, global_batch=batch_k * 1024, micro_batch=128,
        zero=zero, loss=loss, pixels="host" if offload else "device", checkpointing=False,
    )  # fmt: skip


def figure_4_planned() -> str:
    """Steps of the paper's trainer on 8 A800s: its seconds, and those that the planner says."""
    from benchmarks.paper import paper_step

    columns: Columns = {
        "batch": "{batch_k}k", "paper, s": "{seconds}",
        "planned, s": lambda row: f"{paper_step(row['model'], row['gpus'], row['batch_k'] * 1024):.1f}",
    }  # fmt: skip
    return table(rows("paper_steps.csv"), columns)


def table_2() -> str:
    """The largest batches: the paper's, and ours on H200s limited to 80 GB and as planned for its A800s."""
    from benchmarks.largest_batch import planned_for

    names, lines = {"clip": "CLIP", "open_clip": "OpenCLIP", "inf_cl": "Inf-CL"}, []
    for row in where(rows("paper_memory.csv"), table=2):
        pixels, cards = "offload" if row["offload"] else "", f"{row['gpus']} x A800"
        lines.append([row["model"], cards, names[row["loss"]], pixels, "paper", f"{row['batch_k']}k", "", ""])
        if row["loss"] == "inf_cl":
            where_ = "host" if row["offload"] else "gpu"
            samples, peak = planned_for(row["model"], row["gpus"], _a800().usable_bytes, pixels=where_)
            lines.append(
                [row["model"], cards, "infcl", pixels, "planned", batch(samples), "", f"{peak / GIB:.1f}"]
            )  # fmt: skip
    keys, found = (
        ("model", "gpus", "pixels", "loss", "memory_gb", "precision", "checkpointing"),
        rows("largest_batch.csv"),
    )
    for setting in latest(found, *keys):
        own = newest(where(found, **{name: setting[name] for name in keys}))
        best = max(where(own, fits=1), key=lambda row: row["global_batch"])
        failed = [row["global_batch"] for row in own if not row["fits"]]
        words = names[setting["loss"]].replace("Inf-CL", "infcl")
        words += "" if setting["precision"] == "bf16" else f", {setting['precision']}"
        words += "" if setting["checkpointing"] else ", no checkpointing"
        lines.append([
            setting["model"], f"{setting['gpus']} x H200 at {setting['memory_gb']:g} GB", words,
            "offload" if setting["pixels"] == "host" else "", "measured", batch(best["global_batch"]),
            batch(min(failed)) if failed else "not tried", f"{best['peak_gib']:.1f}",
        ])  # fmt: skip
    order = ("paper", "planned", "measured")
    lines.sort(key=lambda line: (line[0], line[3], "H200" in line[1], int(line[1].split()[0]), order.index(line[4])))
    return markdown(["model", "GPUs", "loss", "pixels", "", "largest batch", "does not fit", "peak, GiB"], lines)


def table_3(name: str = "accuracy_losses.csv") -> str:
    """What each loss comes to: mean and deviation over its seeds."""
    found, lines = latest(rows(name), "run"), []
    for loss, words in TRAINED.items():
        if own := where(found, loss=loss):
            cells = [spread([row[metric] for row in own]) for metric in METRICS]
            lines.append([words, len(own), *cells, spread([row["final_loss"] for row in own], 4)])
    text = markdown(["loss", "seeds", *METRICS.values(), "loss of the last 5% of steps"], lines)
    one = found[0]
    return f"{text}\n\n{one['steps']} steps of {one['global_batch']} samples, ranks: {one['ranks']}; {origin(found)}"


def table_3_pairs(name: str = "accuracy_losses.csv") -> str:
    """Each loss against CLIP, seed by seed: both start from the same weights and see the same samples."""
    by_loss = {loss: {row["seed"]: row for row in where(rows(name), loss=loss)} for loss in TRAINED}
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


def table_3_ranks() -> str:
    """Trainings over two ranks: the loss before rounding errors grow, and what the losses come to."""
    name = "accuracy_losses_ranks"
    found = latest(rows(f"{name}.csv"), "run")
    curves, lines = latest(rows(f"{name}_curves.csv"), "run", "samples_seen"), []
    early = (0, 2, 5, 9)  # points of a curve, each the mean of ten steps
    for row in where(found, seed=found[0]["seed"], loss=tuple(set(TRAINED) - {"siglip"})):
        own = where(curves, run=row["run"])
        lines.append([TRAINED[row["loss"]], *(f"{own[point]['loss']:.5f}" for point in early)])
    heads = [f"loss at {own[point]['samples_seen']:,} samples" for point in early]
    seed = markdown([f"seed {found[0]['seed']}", *heads], lines)
    return "\n\n".join([seed, table_3_pairs(f"{name}.csv"), table_3(f"{name}.csv")])


def table_4() -> str:
    """The paper's ablation: no tiles, OpenCLIP, tiles of one kind, tiles of both."""
    names = {
        ("clip", 4): "no tiles: b x b on every GPU (CLIP)",
        ("official_open_clip", 4): "b/n x b on every GPU (OpenCLIP, local loss)",
        ("one_tile", 4): "cross-GPU tiles only: the ring, a block pair as one float32 matrix",
        ("inf_cl", 1): "in-GPU tiles only: b x b on every GPU, in tiles (as one GPU alone does it)",
        ("inf_cl", 4): "cross-GPU and in-GPU tiles (infcl)",
    }
    lines = []
    for (impl, count), name in names.items():
        last = where(measured_losses(), gpus=count, global_batch=65536, dim=768, impl=impl)[-1]
        lines.append([name, ms(last["median_ms"]), size(last["extra_mib"])])
    return markdown(["4 GPUs, batch 65,536, width 768", "ms", "memory"], lines)


def figure_5_table() -> str:
    """Zero-shot accuracy and image->text R@1 by batch, learning rate and its scaling."""
    studies, lines = _batch_studies(), []
    for rate, found in studies.items():
        for samples in sorted({row["global_batch"] for row in found}):
            own = where(found, global_batch=samples)
            cells = [
                " / ".join(spread([row[metric] for row in one]) for metric in list(METRICS)[:2]) if one else ""
                for one in (where(own, lr_scaling=scaling) for scaling in SCALINGS)
            ]
            lines.append([f"{rate:g}", f"{samples:,}", own[0]["steps"], *cells])
    text = markdown(["lr at 512", "batch", "steps", *(f"{name}: zero-shot / R@1" for name in SCALINGS.values())], lines)
    every = [row for found in studies.values() for row in found]
    return f"{text}\n\n{every[0]['samples_seen']:,} samples seen of {every[0]['num_train']:,}; {origin(every)}"


def _batch_studies() -> dict[float, list[dict]]:
    """{learning rate at the smallest batch: rows}; that batch's row stands for all scalings, which agree there."""
    from benchmarks.accuracy import EXPONENTS

    found = latest(rows("accuracy_batches.csv"), "run")
    base = min(row["global_batch"] for row in found)
    studies: dict[float, list[dict]] = {}
    for row in found:
        rate = float(f"{row['lr'] / (row['global_batch'] / base) ** EXPONENTS[row['lr_scaling']]:.6g}")
        same = SCALINGS if row["global_batch"] == base else [row["lr_scaling"]]
        studies.setdefault(rate, []).extend(row | {"lr_scaling": scaling} for scaling in same)
    return dict(sorted(studies.items()))


# ---- exactness and accuracy ----


def demo() -> str:
    found = latest(rows("demo.csv"), "preset", "ranks", "device")
    columns: Columns = {"preset": "{preset}", "ranks": "{ranks}", "precision": "{precision}"}
    columns |= {name: f"{{{metric}:.3f}}" for metric, name in METRICS.items()} | {"training": "{train_seconds:.0f} s"}
    return (
        f"{table(found, columns)}\n\n{found[0]['steps']} steps of {found[0]['global_batch']} samples; {origin(found)}"
    )


def many_ranks() -> str:
    """Losses of the whole trainer on many ranks of several nodes, compared with one rank's."""
    found = latest(newest(rows("ranks_32.csv")), "hosts", "ranks", "step")
    shapes = list(dict.fromkeys((row["hosts"], row["ranks"]) for row in found))
    lines, apart = [], 0.0
    for step in sorted({row["step"] for row in found}):
        losses = [where(found, hosts=nodes, ranks=ranks, step=step)[0]["loss"] for nodes, ranks in shapes]
        apart = max(apart, max(losses) / min(losses) - 1)
        lines.append([step, *(f"{loss:.7f}" for loss in losses)])
    header = [f"{ranks} ranks on {nodes} nodes" if ranks > 1 else "1 rank" for nodes, ranks in shapes]
    text = markdown(["step", *header], lines)
    return f"{text}\n\nThe greatest relative difference is {apart:.1e}. {origin(found)}"


def gradients() -> str:
    """Relative distances of a step's gradients from those of the whole matrix, and from float64."""
    found, lines = rows("accuracy_gradients.csv"), []
    settings = ("device", "precision", "ranks", "global_batch", "weights")
    for ours in latest(where(found, loss="inf_cl"), *settings, "tile_dtype"):
        run = where(found, **{name: ours[name] for name in (*settings, "commit")})
        own = {row["loss"]: row for row in run} | {"inf_cl": ours}
        exact = [" / ".join(f"{own[loss][part]:.1e}" for part in ("image", "text", "scale"))
                 for loss in ("inf_cl", "clip")]  # fmt: skip
        words = f"{ours['device']}, {ours['precision']}"
        words += f", GEMMs {ours['tile_dtype']}" if ours["tile_dtype"] != "fp32" else ""
        apart = [f"{own[loss]['from_clip']:.1e}" for loss in ("open_clip", "disco", "inf_cl")]
        lines.append([words, ours["ranks"], f"{ours['global_batch']:,}", ours["weights"], *apart, *exact])
    header = ["", "ranks", "batch", "weights", "OpenCLIP - CLIP", "DisCo-CLIP - CLIP", "infcl - CLIP"]
    header += ["infcl - float64: image / text / scale", "CLIP - float64"]
    return f"{markdown(header, lines)}\n\n{origin(found)}"


def hard_negatives() -> str:
    found = latest(rows("hard_negatives.csv"), "hard_negatives", "seed")
    lines = []
    for hard, name in enumerate(("negatives of the batch alone", "with hard negatives")):
        own = where(found, hard_negatives=hard)
        lines.append([name, len(own), *(spread([row[key] for row in own]) for key in ("relation", "recall_at_1"))])
    header = ["trained", "seeds", "relation correct (chance 0.5)", f"R@1 among {found[0]['documents']:,}"]
    return markdown(header, lines) + f"\n\n{found[0]['steps']} steps of {found[0]['batch']} queries; {origin(found)}"


# ---- whole steps (rows of benchmarks.step) ----


def _rate(row: dict) -> str:
    """Samples/s per GPU: the median of the steps, and their standard deviation where it was kept."""
    deviation = row.get("samples_per_second_std") or 0
    rate = row["samples_per_second_per_gpu"]
    return f"{rate:.0f}" + (f" +- {deviation / row['gpus']:.1f}" if deviation else "")


def _captions(row: dict) -> str:
    share = row["text_share"]
    return f"packed: {share:.0%}" if share != "" and share < 1 else "padded"


STEP: Columns = {
    "GPUs": "{gpus}",
    "model": "{model}",
    "micro-batch x accumulation": "{micro_batch} x {micro_batches}",
    "precision": "{precision}",
    "blocks": "{blocks}",
    "checkpointing": lambda row: "yes" if row["checkpointing"] == "True" else "",
    "ZeRO": "{zero}",
    "cached": "{resident}",
    "captions": _captions,
    "attention": "{attention}",
    "options": lambda row: ", ".join(_options(row)),
    "samples/s per GPU": _rate,
    "first pass": "{seconds_encode:.3f} s",
    "second pass": "{seconds_replay:.3f} s",
    "update": lambda row: f"{1000 * row['seconds_step']:.1f} ms",
    "MFU": "{mfu:.3f}",
    "HFU": "{hfu:.3f}",
    "peak": "{peak_gib:.1f} GiB",
}
SETTING = ("gpus", "model", "zero", "precision", "blocks", "checkpointing", "micro_batch", "micro_batches", "resident")
SETTING += ("attention", "zero_options", "packed")


def steps_of(*names: str) -> list[dict]:
    """Rows of benchmarks.step without those of removed options, in a compact order of `packed` captions or not."""
    return [
        row | {"packed": row.get("text_share") not in ("", 1.0, None), "attention": row.get("attention") or "torch"}
        for row in rows(*names)
        if row.get("encode_together", 1) in (1, "") and not re.search("not kept| profile ", row["label"])
    ]


def step_table(found: list[dict], columns: str, **more) -> str:
    """A table of the named columns of STEP, and of others given by their functions; below it the hardware."""
    return f"{table(found, {name: (STEP | more)[name] for name in columns.split(' | ')})}\n\n{origin(found)}"


def _options(row: dict) -> list[str]:
    """Options of ZeRO beyond the presets', in words."""
    options = json.loads(row["zero_options"] or "{}")
    words = ["all parameters persistent"] if any("persistence" in name for name in options) else []
    plain = {name: value for name, value in options.items() if "persistence" not in name}
    return words + [f"`{name}` {json.dumps(value)}" for name, value in plain.items() if row["gpus"] > 1]


def steps() -> str:
    """Every setting of whole steps on H200s, as measured last."""
    found = latest([row for row in steps_of("step.csv") if "warm-up-steps 0" not in row["label"]], *SETTING)
    found.sort(key=lambda row: (row["gpus"], row["model"], str(row["zero"]), -row["samples_per_second_per_gpu"]))
    return step_table(
        found, "GPUs | model | micro-batch x accumulation | precision | blocks | checkpointing | ZeRO | cached | "
        "captions | attention | options | samples/s per GPU | peak"
    )  # fmt: skip


def steps_h100() -> str:
    return step_table(
        steps_of("step_h100.csv"), "GPUs | model | micro-batch x accumulation | precision | blocks | checkpointing | "
        "ZeRO | cached | samples/s per GPU | peak"
    )  # fmt: skip


def step_settings() -> str:
    """ViT-L-14 on one H200 with packed captions: precision, compiled blocks, checkpointing, micro-batches."""
    found = where(steps_of("step.csv"), gpus=1, model="ViT-L-14", zero=(0, 1), packed=True)
    found = latest([row for row in found if row["micro_batches"] > 1 and "sdpa" not in row["label"]], *SETTING)
    found.sort(key=lambda row: -row["samples_per_second"])
    return step_table(
        found, "micro-batch x accumulation | precision | blocks | checkpointing | cached | attention | "
        "samples/s per GPU | MFU | HFU | peak"
    )  # fmt: skip


def captions() -> str:
    """One H200, autocast, compiled: packed and padded captions, as measured last of each model."""
    every = steps_of("step_captions.csv")
    found = [row for model in dict.fromkeys(row["model"] for row in every) for row in newest(where(every, model=model))]
    return step_table(
        found, "model | micro-batch x accumulation | captions | attention | samples/s per GPU | first pass | "
        "second pass | peak"
    )  # fmt: skip


def attention() -> str:
    """One H200, autocast, compiled: whole steps with torch's attention and with the Triton kernels."""

    def model(row: dict) -> str:
        dropped = re.search(r"force-patch-dropout ([\d.]+)", row["label"])
        return row["model"] + (f", {float(dropped[1]):.0%} of the patches dropped" if dropped else "")

    return step_table(
        steps_of("step_attention.csv"), "model | micro-batch x accumulation | captions | attention | "
        "samples/s per GPU | first pass | second pass | MFU", model=model
    )  # fmt: skip


def cached_activations() -> str:
    """One H200, autocast, compiled: how many micro-batches keep their activations between the passes."""

    def cached(row: dict) -> str:
        return f"{row['resident']} of {row['micro_batches']}" + " (auto)" * (
            "resident-micro-batches auto" in row["label"]
        )

    return step_table(
        steps_of("step_resident.csv"), "model | micro-batch x accumulation | cached | samples/s per GPU | first pass | "
        "second pass | MFU | HFU | peak", cached=cached
    )  # fmt: skip


def kernels() -> str:
    """Where the GPU time of a step goes, by kinds of kernels."""
    last = rows("kernels.csv")[-1]
    found = where(rows("kernels.csv"), label=last["label"], commit=last["commit"])
    kinds = {kind: where(found, kind=kind) for kind in dict.fromkeys(row["kind"] for row in found)}
    time = {kind: sum(row["ms"] for row in own) for kind, own in kinds.items()}
    lines = [
        [kind, f"{time[kind]:.1f} ms", f"{time[kind] / sum(time.values()):.1%}",
         f"{sum(row['calls'] or 0 for row in kinds[kind]):,.0f}"]
        for kind in sorted(kinds, key=lambda kind: -time[kind])
    ]  # fmt: skip
    return markdown([last["label"], "per step", "share", "calls"], lines) + f"\n\n{origin(found)}"


def _of_zero_1(found: list[dict], *same: str) -> dict[str, Callable[[dict], str]]:
    """A column with the rate compared with that of ZeRO-1 in rows that agree in the columns `same`."""

    def ratio(row: dict) -> str:
        plain = where(found, zero=1, **{name: row[name] for name in same})
        own = row["samples_per_second_per_gpu"]
        return f"{own / mean(one['samples_per_second_per_gpu'] for one in plain):.2f}" if plain else ""

    return {"of ZeRO-1": ratio}


def zero_3_hosts() -> str:
    """ViT-L-14 on two H200s, BF16, checkpointing: ZeRO-1 and ZeRO-3 by the speed of the machine's processor."""
    found = [row for row in rows("step_hosts.csv") if row["commit"] not in ("a1532d8", "42cacc8")]  # older ZeRO-3
    found.sort(key=lambda row: (row["python_loop_seconds"], row["micro_batch"], row["zero"]))
    return step_table(
        found, "Python loop | micro-batch x accumulation | ZeRO | options | samples/s per GPU | of ZeRO-1 | "
        "first pass | second pass | peak", **{"Python loop": "{python_loop_seconds:.2f} s"},
        **_of_zero_1(found, "python_loop_seconds", "micro_batch"),
    )  # fmt: skip


def optimizers() -> str:
    """ViT-B-16 on one H200 with each --opt."""
    found = latest(where(rows("optimizers.csv"), model="ViT-B-16"), "label")
    opt = {"`--opt`": lambda row: f"`{row['label'].split(' opt ')[1]}`"}
    return step_table(found, "`--opt` | samples/s per GPU | update | peak", **opt)


def locked_tower() -> str:
    """The paper's LiT setting on one H200: both towers trained, and the image tower locked."""
    found = latest(where(rows("optimizers.csv"), model="ViT-B-16-BERT-base"), "label")
    towers = {"towers": lambda row: "`--lock-image`" if "lock-image" in row["label"] else "both trained"}
    return step_table(found, "towers | samples/s per GPU | first pass | second pass | peak", **towers)


def steps_by_loss() -> str:
    """Whole steps on one GPU by batch and loss; 'x': out of memory, '-': not measured."""

    def cell(impl: str) -> Callable[[int], str]:
        def text(samples: int) -> str:
            own = where(found, impl=impl, global_batch=samples)
            if not own or own[0]["median_s"] == "":
                return "x" if own else "-"
            deviation = f" +- {own[0]['std_s']:.2f}" if own[0]["repeats"] > 1 else ""
            loss = ms(1000 * own[0]["seconds_loss"])
            return f"{own[0]['median_s']:.2f}{deviation} s, loss {loss} ms, {own[0]['peak_gib']:.1f} GiB"

        return text

    found = latest(rows("step_losses.csv"), "impl", "model", "device", "global_batch")
    impls = [impl for impl in LOSSES if where(found, impl=impl)]
    batches = sorted({row["global_batch"] for row in found})
    lines = [[f"{samples:,}", *(cell(impl)(samples) for impl in impls)] for samples in batches]
    one = found[0]
    how = f"{one['model']}, {one['precision']}, {one['blocks']}, micro-batches of {one['micro_batch']}"
    return f"{markdown(['batch', *(LOSSES[impl] for impl in impls)], lines)}\n\n{how}; {origin(found)}"


# ---- other trainers, data, tensor parallelism ----


def trainer_rows() -> list[dict]:
    """The last row of each setting of benchmarks.peers_train."""
    keys = ("program", "gpus", "model", "precision", "blocks", "checkpointing", "micro_batch", "accum_freq", "device")
    return latest(rows("peers_train.csv"), *keys)


def peer_trainers() -> str:
    """Trainers of others and infcl's, measured in the same runs."""
    found = trainer_rows()
    programs = list(dict.fromkeys(row["program"] for row in found))
    found.sort(key=lambda row: (
        row["gpus"], row["model"], row["accum_freq"], row["blocks"] == "compiled", programs.index(row["program"])
    ))  # fmt: skip
    columns: Columns = {
        "GPUs": "{gpus}",
        "model": "{model}",
        "micro-batch x accumulation": "{micro_batch} x {accum_freq}",
        "trainer": lambda row: f"{row['program']} {row['version']}".strip(),
        "blocks": lambda row: row["blocks"] + (", checkpointing" if row["checkpointing"] else "")
        + ("" if row["precision"] == "amp_bf16" else f", {row['precision']}"),
        "samples/s: median (mean)": lambda row: row["status"] if row["status"] != "ok"
        else f"{row['samples_per_second']:,.0f} ({row['mean']:,.0f} +- {row['std']:,.0f}, {row['steps']} steps)",
        "waiting for data": "{waiting:.0%}",
        "peak, GiB": "{peak_gib:.1f}",
    }  # fmt: skip
    return f"{table(found, columns)}\n\n{origin(found)}"


def data_speed() -> str:
    """Samples/s of one core, stage by stage, and those of open_clip's workers in the same rounds."""
    found = rows("data.csv")
    rates = {row["stage"]: row["samples_per_second_per_core"] for row in found}
    lines = []
    for stage in (name.removeprefix("ours/") for name in rates if name.startswith("ours/")):
        ours, theirs = rates[f"ours/{stage}"], rates.get(f"open_clip/{stage}")
        numbers = [f"{float(f'{rate:.4g}'):,.0f}" for rate in (ours, theirs) if rate]
        lines.append([stage, *numbers, *([f"{ours / theirs:.1f}x"] if theirs else ["", ""])])
    last = found[-1]
    text = markdown(["", "infcl", "open_clip 3.3", ""], lines)
    return f"{text}\n\n{last['cpu']}, torch {last['torch']}, load {last['load']}; {last['images']}."


def tensor_parallel_rows(name: str = "tensor_parallel.csv") -> list[dict]:
    """Rows of tensor_parallel.csv; at 96af64e values above T = 1 were sent in other ways."""
    return [
        row | {"tensor_parallel": f"{row['tensor_parallel']}" + sequence, "T": row["tensor_parallel"]}
        for row in where(rows(name), lever="none", status="ok")
        for sequence in [", sequence parallel" * (row["sequence_parallel"] == "True")]
        if row["tensor_parallel"] == 1 or not row["commit"].startswith("96af64e")
    ]


TENSOR_PARALLEL: Columns = {
    "towers": lambda row: {"bigG": "ViT-bigG-14", "5B": "5 B, checkpointing"}.get(row["model"], row["model"]),
    "GPUs": "{gpus}",
    "T": "{tensor_parallel}",
    "ZeRO": "{zero_stage}",
    "micro-batch": "{batch_size}",
    "global batch": lambda row: f"{row['accum_freq'] * row['batch_size'] * row['gpus'] // row['T']:,}",
    "samples/s per GPU": lambda row: f"{row['samples_per_second'] / row['gpus']:.0f}",
    "peak, GiB": "{peak_gib:.1f}",
    "fifth loss": "{loss:.4f}",
}


def tensor_parallel_table(found: list[dict], columns: str, *same: str) -> str:
    """A table of the named columns; "of T = 1" compares rates of rows that agree in the columns `same`."""

    def ratio(row: dict) -> str:
        plain = where(found, T=1, **{name: row[name] for name in same})
        rate = median(one["samples_per_second"] / one["gpus"] for one in plain) if plain else 0
        return f"{row['samples_per_second'] / row['gpus'] / rate:.2f}" if rate else ""

    every = TENSOR_PARALLEL | {"of T = 1": ratio}
    return f"{table(found, {name: every[name] for name in columns.split(' | ')})}\n\n{origin(found)}"


def tensor_parallel_rates() -> str:
    """ViT-L-14 under ZeRO-1: rates by T and micro-batch, as measured last."""
    found = where(tensor_parallel_rows(), model="ViT-L-14", zero_stage=1)
    found = latest(found, "gpus", "batch_size", "tensor_parallel")
    found.sort(key=lambda row: (row["batch_size"], row["gpus"], row["tensor_parallel"]))
    columns = "GPUs | micro-batch | T | samples/s per GPU | of T = 1 | peak, GiB"
    return tensor_parallel_table(found, columns, "batch_size")


def tensor_parallel_memory() -> str:
    """ViT-L-14 at T = 2 on two H100s, with and without sequence parallelism."""
    found = newest(tensor_parallel_rows("tensor_parallel_h100.csv"))
    return tensor_parallel_table(found, "micro-batch | T | samples/s per GPU | peak, GiB | fifth loss")


def tensor_parallel_sizes() -> str:
    """Towers that one GPU can hardly hold, by T and ZeRO stage."""
    found = where(tensor_parallel_rows(), model=("bigG", "5B"))
    found = latest(found, "model", "tensor_parallel", "zero_stage", "batch_size")
    found.sort(key=lambda row: (row["model"] == "5B", row["T"], row["zero_stage"], row["batch_size"]))
    columns = "towers | T | ZeRO | micro-batch | samples/s per GPU | of T = 1 | peak, GiB"
    return tensor_parallel_table(found, columns, "model", "zero_stage")


def tensor_parallel_losses() -> str:
    """Differences of twenty losses of each run from those in float32 at T = 1 on as many GPUs."""
    found: dict[tuple, list[float]] = {}
    for row in rows("tensor_parallel_losses.csv"):
        found.setdefault((row["gpus"], row["run"]), []).append(row["loss"])
    lines = []
    for (count, run), values in sorted(found.items()):
        if run != "T=1, float32":
            apart = [abs(a - b) for a, b in zip(values, found[count, "T=1, float32"], strict=True)]
            root = mean(one**2 for one in apart) ** 0.5
            lines.append([count, run.replace("=", " = "), f"{root:.5f}", f"{max(apart):.5f}"])
    return markdown(["GPUs", "", "root mean square", "greatest"], lines)


# ---- the planner ----


def plan_errors() -> str:
    """How far the plan is from what was measured, by kind."""
    found, lines = rows("plan_errors.csv"), []
    for kind in dict.fromkeys(row["kind"] for row in found):
        errors = [row["planned"] / row["measured"] - 1 for row in where(found, kind=kind)]
        lines.append([kind, len(errors), f"{min(errors):+.1%} to {max(errors):+.1%}", f"{median(errors):+.1%}"])
    return markdown(["planned", "rows", "errors", "median"], lines)


def planned_towers() -> str:
    """Eight H200s, 32k samples, BF16: the fastest setting of each model, as planned."""
    from infcl.models.config import load_model_config
    from infcl.plan.loads import memory_of
    from infcl.plan.profile import load_gpu
    from infcl.plan.search import fastest
    from infcl.plan.setting import Setting, parameters_of
    from infcl.plan.timing import phases_of, samples_per_second

    lines = []
    for name in ("ViT-B-32", "ViT-B-16", "ViT-L-14", "ViT-H-14", "ViT-bigG-14"):
        model = load_model_config(name)
        setting = Setting(
            model=model, gpu=load_gpu("h200"), gpus=8, global_batch=32768, micro_batch=128, precision="bf16"
        )
        seconds, best = fastest(setting, count=1)[0]
        loss = sum(phase.exposed for phase in phases_of(best) if phase.name in ("loss", "ring"))
        words = f"ZeRO-{best.zero}, micro-batch {best.micro_batch}" + (", checkpointing" if best.checkpointing else "")
        lines.append([
            name, f"{parameters_of(model) / 1e6:.0f}M", words, f"{samples_per_second(best):,.0f}", f"{seconds:.1f} s",
            f"{1000 * loss:.0f} ms ({loss / seconds:.2%})", f"{memory_of(best)['peak'] / GIB:.0f} GiB",
        ])  # fmt: skip
    return markdown(["model", "parameters", "fastest setting", "samples/s", "step", "loss", "peak"], lines)


def thousands() -> str:
    """Planned steps of up to 4,096 GPUs at a fixed batch per GPU, with both rings."""
    lines = []
    for name, network in (("scaling_nic400.csv", "400 Gbit/s per GPU"), ("scaling_eth100.csv", "100 Gbit/s per GPU")):
        found = rows(name)
        for count in (8, 64, 512, 4096):
            cells: list[str] = []
            for ring in ("flat", "two-level"):
                row, first = (where(found, ring=ring, gpus=number) for number in (count, 8))
                rate = "samples_per_second_per_gpu"
                cells += [f"{row[0]['seconds']:.2f} s", f"{row[0][rate] / first[0][rate]:.0%}"] if row else ["", ""]
            lines.append([network, f"{count:,}", f"{where(found, gpus=count)[0]['global_batch']:,}", *cells])
    header = ["network", "GPUs", "global batch", "flat: step", "rate per GPU", "two-level: step", "rate per GPU"]
    return markdown(header, lines)


# ---- charts: {panel: {label: [(x, y) or (x, y, deviation)]}} ----


def _loss_curves_of(column: str, unit: float) -> dict:
    panels = {}
    for count in (1, 4):
        panels[gpus(count)] = {
            LOSSES[impl]: sorted((row["global_batch"], row[column] / unit) for row in own)
            for impl in ("inf_cl", "official_open_clip", "clip", "disco", "official", "siglip", "official_siglip")
            if (own := latest(where(measured_losses(), gpus=count, dim=768, impl=impl), "global_batch"))
        }
    return panels


def figure_1() -> dict:
    """Memory of the loss against the batch, and against the GPUs: measured, and of infcl's losses as planned."""
    from infcl.plan.parts import loss_bytes

    panels = {f"loss alone, {name}": series for name, series in _loss_curves_of("extra_mib", 1024.0).items()}
    panels["loss alone, 128k samples, H200s"] = {
        LOSSES[impl]: sorted((row["gpus"], row["extra_mib"] / 1024) for row in latest(
            where(measured_losses(), impl=impl, global_batch=2**17, dim=768), "gpus"))
        for impl in ("inf_cl", "official_open_clip")
    }  # fmt: skip
    panels["loss alone, 256k samples, planned"] = {
        name: [(count, sum(loss_bytes(
            loss, rows=2**18 // count, ranks=count, width=768, two_level=loss == "inf_cl" and count > 8
        ).values()) / GIB) for count in (8, 16, 32, 64, 128, 256)]
        for loss, name in (("inf_cl", "infcl"), ("open_clip", "OpenCLIP"), ("clip", "CLIP"))
    }  # fmt: skip
    return panels


def figure_4() -> dict:
    """Time of the loss against the batch."""
    return _loss_curves_of("median_ms", 1.0)


def figure_5() -> dict:
    """Accuracy against the batch."""
    return {
        f"{name}, lr {rate:g} at 512": {
            label: [
                (samples, mean(row[metric] for row in where(found, lr_scaling=scaling, global_batch=samples)))
                for samples in sorted({row["global_batch"] for row in where(found, lr_scaling=scaling)})
            ]
            for scaling, label in SCALINGS.items()
        }
        for rate, found in _batch_studies().items()
        for metric, name in list(METRICS.items())[:2]
    }


def loss_curves() -> dict:
    """Loss against samples seen, with the deviation over seeds; SigLIP's is another loss, on a panel of its own."""
    curves = latest(rows("accuracy_losses_curves.csv"), "run", "samples_seen")
    panels: dict = {"softmax losses": {}, "SigLIP's loss": {}}
    for loss, name in TRAINED.items():
        at: dict[int, list[float]] = {}
        for row in curves:
            if row["run"].rsplit("-", 1)[0] == loss:
                at.setdefault(row["samples_seen"], []).append(row["loss"])
        points = [(samples, mean(values), stdev(values)) for samples, values in sorted(at.items())]
        panels["SigLIP's loss" if loss == "siglip" else "softmax losses"][name] = points
    return panels


def tiling_bar() -> dict:
    """Parts of a rank's time on four GPUs, of the largest batch's last row."""
    row = max(where(rows("tiling_h200.csv"), gpus=4)[::-1], key=lambda row: row["global_batch"])
    gemms, tiles, waiting, ring = (row[f"{name} ms"] for name in ("products", "tiles", "ring, waiting", "ring, sends"))
    parts = {"GEMMs": gemms, "exponentials, sums, launches": tiles - gemms, "communication": min(waiting, ring) - tiles}
    what = f"ms, forward + backward, batch {row['global_batch']:,}, width {row['dim']}, {gpus(row['gpus'])}"
    return {what: {name: [(width,)] for name, width in parts.items() if width > 0}}


def overview() -> dict:
    """README's chart: time and memory of the loss on one GPU, and training rates of the trainers."""
    names = ("inf_cl", "official_open_clip", "official")
    own = where(measured_losses(), gpus=1, dim=768)
    panels: dict = {
        panel: {LOSSES[impl]: sorted((row["global_batch"], row[column] / unit)
                                     for row in latest(where(own, impl=impl), "global_batch")) for impl in names}
        for panel, column, unit in (("loss, ms", "median_ms", 1.0), ("memory of the loss, GiB", "extra_mib", 1024.0))
    }  # fmt: skip
    found = where(trainer_rows(), gpus=1, model="ViT-L-14", precision="amp_bf16", status="ok", checkpointing=0)
    panels["ViT-L-14 on one H200, samples/s"] = {
        f"{row['program']}, {row['blocks']}": [(row["samples_per_second"],)]
        for row in sorted(found, key=lambda row: -row["samples_per_second"])
        if (row["micro_batch"], row["accum_freq"]) == (128, 1)
    }
    return panels


COLOURS = {
    "infcl": "#1f4e79", "official inf_cl 1.2.1": "#c0504d", "CLIP": "#7a7a7a", "CLIP (b x b)": "#7a7a7a",
    "OpenCLIP": "#d98b2b", "open_clip's ClipLoss": "#d98b2b", "DisCo-CLIP": "#5b8c3e", "SigLIP": "#8d5aa8",
    "infcl, SigLIP": "#8d5aa8", "open_clip's SigLipLoss": "#c7a3d6", "lr unchanged": "#1f4e79",
    "lr x sqrt(batch)": "#d98b2b", "lr x batch": "#c0504d",
}  # fmt: skip
GROUND, INK = "#fcfcfa", "#2b2b2b"


def digest(panels: dict) -> str:
    """Return a hash of what a chart shows, to six digits; a PNG carries it as its description."""
    rounded = {
        panel: {label: [[float(f"{value:.6g}") for value in point] for point in points]
                for label, points in series.items()}
        for panel, series in panels.items()
    }  # fmt: skip
    return hashlib.sha256(json.dumps(rounded, sort_keys=True).encode()).hexdigest()[:16]


def digest_of(picture: Path) -> str | None:
    from PIL import Image

    if not picture.is_file():
        return None
    with Image.open(picture) as image:
        return image.info.get("Description")


def curves(x: str | tuple[str, ...], y: str, *, width: float = 4.4, **axes) -> Callable[[dict, Path], None]:
    """Return a function that draws panels side by side (four: two by two) as lines; values of one point as bars.

    Args:
        x: name of the x axis, or of each panel's, the last one for those after it.
        y: name of the y axis.
        width: inches per panel; narrow charts are easier to read on a page.
        axes: log_x, log_y (where values span a decade), ticks at the points, and overlaid: curves that may hide each
            other, the first widest and each later one thinner.
    """

    def draw(panels: dict, picture: Path) -> None:
        from matplotlib import use

        use("Agg")
        from matplotlib import pyplot

        columns = len(panels) if len(panels) <= 3 else 2
        count = -(-len(panels) // columns)
        many = max(map(len, panels.values())) > 4  # the legend goes below: no corner is free of curves
        figure, grid = pyplot.subplots(
            count, columns, figsize=(width * columns + 0.4, (4.4 if many else 3.5) * count), dpi=484 / width,
            squeeze=False, facecolor=GROUND,
        )  # fmt: skip
        names = [x] if isinstance(x, str) else list(x)
        for axis, name, (panel, series) in zip(grid.flat, names + names[-1:] * len(panels), panels.items()):
            axis.set_facecolor(GROUND)
            axis.set_title(panel, fontsize=10, color=INK)
            axis.tick_params(colors=INK, labelsize=8)
            if len(next(iter(series.values()))[0]) == 1:
                _bars(axis, series)
            else:
                _lines(axis, series, many, **axes)
                axis.set_xlabel(name, color=INK)
        grid[0, 0].set_ylabel(y, color=INK)
        figure.tight_layout()
        _save(figure, picture, panels)

    return draw


def _lines(axis, series: dict, many: bool, log_x=True, log_y=True, ticks=True, overlaid=False) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    overlaid = overlaid and len(series) > 1
    for order, (label, points) in enumerate(series.items()):
        xs, ys, *deviations = zip(*points)
        colour = COLOURS.get(label, INK)
        axis.plot(
            xs, ys, color=colour, label=label, zorder=2 if overlaid else 3 - order / 100, markersize=4,
            linewidth=(7.0, 4.8, 3.0, 1.3)[min(order, 3)] if overlaid else 1.8, marker=None if deviations else "o",
            alpha=0.55 if overlaid and order < 3 else 1.0,
        )  # fmt: skip
        for deviation in deviations:
            low, high = ([value + sign * width for value, width in zip(ys, deviation)] for sign in (-1, 1))
            axis.fill_between(xs, low, high, color=colour, alpha=0.12, linewidth=0)
    values = [point[1] for points in series.values() for point in points]
    axis.set_xscale("log", base=2) if log_x else axis.set_xscale("linear")
    axis.set_yscale("log" if log_y and max(values) > 10 * min(values) else "linear")
    if ticks:
        places = sorted({point[0] for points in series.values() for point in points})
        axis.xaxis.set_major_locator(FixedLocator(places))
        axis.xaxis.set_minor_locator(NullLocator())
        names = [f"{place / 1024:g}k" if place >= 1024 else f"{place:g}" for place in places]
        axis.set_xticklabels(names, rotation=45 if len(places) > 6 else 0)
    axis.grid(alpha=0.25, which="major")
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.32), "ncols": 2}
    axis.legend(frameon=False, fontsize=8, **(below if many else {}))


def _bars(axis, series: dict) -> None:
    """Horizontal bars, the first on top, each with its value."""
    for place, (label, [(value,)]) in enumerate(series.items()):
        bar = axis.barh([-place], [value], color=COLOURS["infcl"] if label.startswith("infcl") else "#b9b9b9")
        axis.bar_label(bar, fmt="{:,.0f}", fontsize=8, color=INK, padding=2)
    axis.set_yticks([-place for place in range(len(series))], list(series), color=INK)
    axis.margins(x=0.15)


def stacked_bar(panels: dict, picture: Path) -> None:
    """Draw the parts of one panel as a stacked bar, each labelled with its width."""
    from matplotlib import use

    use("Agg")
    from matplotlib import pyplot

    ((name, parts),) = panels.items()
    figure, axis = pyplot.subplots(figsize=(7, 1.8), dpi=110, facecolor=GROUND)
    axis.set_facecolor(GROUND)
    left = 0.0
    for (label, [(width,)]), colour in zip(parts.items(), ("#3b6ea8", "#e0a33a", "#b5473c")):
        axis.barh([0], [width], left=left, color=colour, label=f"{label}: {width:.1f}")
        left += width
    axis.set_yticks([])
    axis.set_xlabel(name, color=INK)
    axis.tick_params(colors=INK, labelsize=8)
    axis.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=8)
    _save(figure, picture, panels)


def _save(figure, picture: Path, panels: dict) -> None:
    from matplotlib import pyplot

    metadata = {"Description": digest(panels), "Software": None}
    figure.savefig(picture, facecolor=GROUND, bbox_inches="tight", metadata=metadata)
    pyplot.close(figure)


TABLES: dict[str, Callable[[], str]] = {
    "data-speed": data_speed,
    "demo": demo,
    "figure-4-planned": figure_4_planned,
    "figure-4-steps": steps_by_loss,
    "figure-5": figure_5_table,
    "gradients": gradients,
    "hard-negatives": hard_negatives,
    "locked-tower": locked_tower,
    "loss-1-gpu": lambda: loss_table(1, ("inf_cl", "clip_compiled", "clip", "official_open_clip", "official")),
    "loss-4-gpus": lambda: loss_table(4, ("inf_cl", "clip", "official_open_clip", "official")),
    "loss-h100": loss_h100,
    "loss-others": loss_others,
    "optimizers": optimizers,
    "peer-trainers": peer_trainers,
    "plan-errors": plan_errors,
    "precision": precision,
    "ranks-32": many_ranks,
    "retrieval": retrieval,
    "rings": rings,
    "siglip-disco": siglip_and_disco,
    "step-attention": attention,
    "step-captions": captions,
    "step-kernels": kernels,
    "step-levers": step_settings,
    "step-residents": cached_activations,
    "step-zero-3-hosts": zero_3_hosts,
    "steps": steps,
    "steps-h100": steps_h100,
    "symmetry": symmetry,
    "table-1-loss": table_1_loss,
    "table-1-measured": table_1_measured,
    "table-1-planned": table_1_planned,
    "table-2": table_2,
    "table-3": table_3,
    "table-3-pairs": table_3_pairs,
    "table-3-ranks": table_3_ranks,
    "table-4": table_4,
    "tensor-parallel-losses": tensor_parallel_losses,
    "tensor-parallel-memory": tensor_parallel_memory,
    "tensor-parallel-rates": tensor_parallel_rates,
    "tensor-parallel-sizes": tensor_parallel_sizes,
    "thousands": thousands,
    "tiling": tiling,
    "towers": planned_towers,
}
BATCH = "global batch"
CHARTS: dict[str, tuple[Callable[[], dict], Callable[[dict, Path], None]]] = {
    "figure_1.png": (figure_1, curves((BATCH, BATCH, "GPUs"), "GiB per GPU")),
    "figure_4.png": (figure_4, curves(BATCH, "ms, forward + backward")),
    "figure_5.png": (figure_5, curves(BATCH, "accuracy", log_y=False)),
    "loss_curves.png": (
        loss_curves,
        curves("samples seen", "loss", log_x=False, log_y=False, ticks=False, overlaid=True),
    ),
    "overview.png": (overview, curves(BATCH, "one H200", width=3.3)),
    "tiling_4.png": (tiling_bar, stacked_bar),
}

if __name__ == "__main__":
    raise SystemExit(main())
