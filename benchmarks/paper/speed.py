"""The losses alone and in whole steps: tables by batch, the paper's Table 4 and Figure 4, what tiling costs."""

from benchmarks.paper.raw import NOT_MEASURED, batch, latest, markdown, ms, newest, origin, rows, size, where

LABELS = {
    "inf_cl": "infcl",
    "official": "official inf_cl 1.2.1",
    "clip": "CLIP (b x b)",
    "clip_compiled": "CLIP (b x b), compiled",
    "official_open_clip": "open_clip's ClipLoss",
    "siglip": "infcl, SigLIP",
    "official_siglip": "open_clip's SigLipLoss",
    "disco": "DisCo-CLIP",
}


def tried() -> list[dict]:
    """Of repeated settings all rows, in their order; one that ran out of memory has no time."""
    return rows("loss_h200.csv")


def loss_rows() -> list[dict]:
    return [row for row in tried() if row["median_ms"] != ""]


def loss_table(gpus: int, impls: tuple[str, ...]) -> str:
    """ms and extra memory by global batch, of each setting's newest commit; 'x': out of memory. Last: those commits."""
    ours = where(tried(), gpus=gpus, dim=768)
    batches = sorted({row["global_batch"] for row in ours if row["impl"] in impls and row["median_ms"] != ""})
    lines = []
    for pairs in batches:
        cells = [_cell(where(ours, impl=impl, global_batch=pairs)) for impl in impls]
        inf = where(ours, impl="inf_cl", global_batch=pairs)
        ratio = f"{inf[-1]['ratio_to_cublas']:.2f}" if inf and inf[-1]["median_ms"] != "" else ""
        shown = [found[-1] for impl in impls if (found := where(ours, impl=impl, global_batch=pairs))]
        commits = dict.fromkeys(str(row["commit"])[:7] for row in shown)
        lines.append([f"{pairs:,}", *cells, ratio, ", ".join(commits)])
    return markdown(["b", *(LABELS[impl] for impl in impls), "infcl / library", "runs"], lines)


def _cell(found: list[dict]) -> str:
    """The last row's time and memory; the range of times where those of its commit spread over 3%. '-': no row."""
    if not found:
        return "-"
    if found[-1]["median_ms"] == "":
        return "x"
    times = sorted(row["median_ms"] for row in newest(found) if row["median_ms"] != "")
    spread = times[-1] > 1.03 * times[0]
    shown = f"{ms(times[0])}-{ms(times[-1])}" if spread else ms(found[-1]["median_ms"])
    std = found[-1]["std_ms"]
    deviation = "" if spread or found[-1]["repeats"] == 1 else f" +- {std:.2g}" if std < 99.5 else f" +- {std:,.0f}"
    return f"{shown}{deviation} ms, {size(found[-1]['extra_mib'])}"


ONE_GPU = ("inf_cl", "clip_compiled", "clip", "official_open_clip", "official")
FOUR_GPUS = ("inf_cl", "clip", "official_open_clip", "official")


def loss_one_gpu() -> str:
    return loss_table(1, ONE_GPU)


def loss_four_gpus() -> str:
    return loss_table(4, FOUR_GPUS)


def loss_two_gpus() -> str:
    """Two H200s: the ring by copy engines and by the process group's sends, with the spread of the repeats."""
    names, lines = {"inf_cl": "copy engines", "inf_cl sends": "sends"}, []
    for impl, name in names.items():
        for row in _by_batch(where(loss_rows(), gpus=2, dim=768, impl=impl)):
            time = f"{row['median_ms']:.1f} ({row['mean_ms']:.1f} +- {row['std_ms']:.1f}, {row['repeats']} repeats)"
            rate = f"{row['tflops_per_gpu']:.0f} TFLOP/s, {row['ratio_to_cublas']:.2f}"
            lines.append([f"{row['global_batch']:,}", name, time, size(row["extra_mib"]), rate])
    return markdown(["b", "messages", "ms: median (mean)", "memory", "rate, of the library's"], lines)


def loss_h100() -> str:
    """All that one or two H100s were asked: the last row of each setting."""
    every = [row for row in rows("loss_h100.csv") if row["median_ms"] != ""]
    found = latest(every, "gpus", "global_batch", "dim", "impl")
    names = LABELS | {
        "two_passes": "infcl's loss as two passes of InfoNCE",
        "no_graph": "infcl, without a CUDA graph",
        "in_graph": "infcl in a compiled caller",
        "in_graph_replayed": "infcl in a compiled caller, `reduce-overhead`",
    }
    lines = [
        [
            row["gpus"],
            f"{row['global_batch']:,}",
            row["dim"],
            names[row["impl"]],
            f"{ms(row['median_ms'])} +- {row['std_ms']:.2g}",
            size(row["extra_mib"]),
            f"{row['ratio_to_cublas']:.2f}",
        ]
        for row in sorted(found, key=lambda row: (row["gpus"], row["global_batch"], row["dim"]))
    ]
    return f"{markdown(['GPUs', 'b', 'D', 'loss', 'ms', 'memory', 'of the library'], lines)}\n\n{origin(found)}."


_OTHERS = {  # on one GPU: (--impl, D)
    ("siglip", 768): "SigLIP",
    ("official_siglip", 768): "SigLIP, open_clip's",
    ("inf_cl", 512): "infcl, D = 512",
    ("inf_cl", 1024): "infcl, D = 1024",
    ("nt_xent", 768): "NT-Xent (half of the matrix)",
    ("views", 768): "the same views through infcl (all of it)",
    ("info_nce", 768): "InfoNCE, b queries, 2 b documents",
}


def loss_others() -> str:
    """What else one H200 was asked: SigLIP, other widths, NT-Xent."""
    one = where(loss_rows(), gpus=1)
    lines = [
        [_OTHERS[row["impl"], row["dim"]], f"{row['global_batch']:,}", ms(row["median_ms"]), size(row["extra_mib"])]
        for key in _OTHERS
        for row in _by_batch(where(one, impl=key[0], dim=key[1]))
    ]
    return markdown(["loss", "b", "ms", "memory"], lines)


def _by_batch(found: list[dict]) -> list[dict]:
    return sorted(latest(found, "global_batch"), key=lambda row: row["global_batch"])


def table_4() -> str:
    """The paper's ablation as rows: no tiles, OpenCLIP, tiles of one kind, of both."""
    found = where(loss_rows(), gpus=4, global_batch=65536, dim=768)
    alone = where(loss_rows(), gpus=1, global_batch=65536, dim=768, impl="inf_cl")
    found += [row | {"impl": "in_gpu"} for row in alone]
    names = {
        "clip": "no tiles: b x b on every GPU (CLIP)",
        "official_open_clip": "b/n x b on every GPU (OpenCLIP, local loss)",
        "one_tile": "cross-GPU tiles only: the ring, a block pair as one float32 matrix",
        "in_gpu": "in-GPU tiles only: b x b on every GPU, in tiles (as one GPU alone does it)",
        "inf_cl": "cross-GPU and in-GPU tiles (infcl)",
    }
    lines = []
    for impl, name in names.items():
        own = where(found, impl=impl)
        lines.append([name, ms(own[-1]["median_ms"]), size(own[-1]["extra_mib"])] if own else [name, NOT_MEASURED, ""])
    return markdown(["4 GPUs, b = 65,536, D = 768", "ms", "memory"], lines)


_SIDE_BY_SIDE = ("inf_cl", "siglip", "official_siglip", "disco", "official_open_clip")
_SETTINGS = ((1, 65536), (1, 131072), (4, 65536), (4, 131072), (4, 262144))


def side_by_side() -> str:
    """SigLIP and DisCo-CLIP beside the others, one and four GPUs."""
    lines = []
    for impl in _SIDE_BY_SIDE:
        cells = [LABELS[impl]]
        for gpus, pairs in _SETTINGS:
            own = where(tried(), impl=impl, gpus=gpus, global_batch=pairs, dim=768)
            cells.append(_cell(own))
        lines.append(cells)
    return markdown(["loss", *(f"{gpus} GPU{'s' * (gpus > 1)}, {pairs:,}" for gpus, pairs in _SETTINGS)], lines)


def symmetry() -> str:
    """Products and time with and without the symmetry of the problem."""
    one = where([*loss_rows(), *rows("loss_h100.csv")], gpus=1, dim=768)
    lines = []
    for name, impl, against, pairs in (
        *(
            ("both directions in one pass (one / two passes over the same tiles)", "inf_cl", "two_passes", 2**power)
            for power in (15, 16, 17, 18)
        ),
        ("both directions in one pass (ours / official)", "inf_cl", "official", 65536),
        *(
            ("half of a symmetric matrix (NT-Xent / all of it)", "nt_xent", "views", 2**power)
            for power in (15, 16, 17, 18)
        ),
    ):
        pair = _of_one_run(where(one, impl=impl, global_batch=pairs), where(one, impl=against, global_batch=pairs))
        if pair:
            times = [row["median_ms"] for row in pair]
            gpu = str(pair[0]["device"]).split()[1]
            lines.append([name, gpu, f"{pairs:,}", ms(times[0]), ms(times[1]), f"{times[1] / times[0]:.2f}x"])
    return markdown(["what is used", "GPU", "b", "with, ms", "without, ms", ""], lines)


def _of_one_run(ours: list[dict], theirs: list[dict]) -> tuple[dict, dict] | None:
    """The newest rows of two implementations that were measured at one commit."""
    pairs = [(own, their) for their in theirs for own in where(ours, commit=their["commit"])]
    return pairs[-1] if pairs else None


def tiling() -> str:
    lines = []
    for row in latest(rows("tiling_h200.csv"), "gpus", "global_batch"):
        bare, tiles = row["products ms"], row["tiles ms"]
        line = [row["gpus"], f"{row['global_batch']:,}", f"{bare:.1f}", f"{tiles:.1f} ({tiles / bare:.2f})"]
        for name in ("ring, waiting", "ring, sends", "ring"):
            value = row.get(f"{name} ms")
            line.append(f"{value:.1f} +- {row[f'{name} std']:.1f} ({value / bare:.2f})" if value else "")
        lines.append(line)
    rings = ["ring, waiting for each message", "overlapped, sends", "overlapped, copy engines"]
    header = ["GPUs", "b", "bare products", "tiles", *rings]
    return markdown(header, lines)


def ring_turns() -> str:
    """Steps of two GPUs in turns: mean of each kind of messages +- its standard error."""
    found, kinds = rows("ring_turns.csv"), ("waited for", "sends", "copy engines")
    lines = []
    for count in dict.fromkeys(row["rows"] for row in found):
        own = {row["messages"]: row for row in where(found, rows=count)}
        cells = [
            f"{own[kind]['mean_ms']:.2f} +- {own[kind]['std_ms'] / own[kind]['steps'] ** 0.5:.2f}" for kind in kinds
        ]
        lines.append([f"{count:,}", *cells, own[kinds[0]]["steps"]])
    return markdown(["rows a GPU", *(f"{kind}, ms" for kind in kinds), "steps"], lines)


def rings() -> str:
    """Flat and two-level rings over slow network cards: each turn of both, and the range of how much faster one is."""
    turns: dict[tuple, dict[str, list[dict]]] = {}
    for row in rows("rings.csv"):
        setting = tuple(row[name] for name in ("hosts", "ranks", "nic_mbit", "ratio", "rows", "dim", "commit"))
        turns.setdefault(setting, {"flat": [], "two-level": []})[row["ring"]].append(row)
    lines, faster = [], []
    for (hosts, ranks, card, ratio, pairs, dim, commit), found in turns.items():
        for flat, two_level in zip(found["flat"], found["two-level"], strict=True):
            faster.append(flat["median_ms"] / two_level["median_ms"])
            times = [f"{row['median_ms']:,.0f} ({row['fastest_ms']:,.0f})" for row in (flat, two_level)]
            shape = [f"{hosts} x {ranks}", f"{card:g} / {card * ratio:.0f}", f"{pairs}, {dim}"]
            lines.append([*shape, *times, f"{faster[-1]:.1f}", commit or "not kept"])
    header = ["hosts x ranks", "Mbit/s between / within hosts", "pairs a rank, D", "flat, ms", "two-level, ms"]
    table = markdown([*header, "times faster", "commit"], lines)
    return f"{table}\n\nThe two-level ring is {min(faster):.1f} to {max(faster):.1f} times faster."


def tiling_bar() -> dict:
    """{what was measured: {part of a rank's time on four GPUs: [(ms,)]}}, of the largest batch's last row.

    Tiles alone may take longer than with a ring (each block is a call of its own there): then no message shows.
    """
    row = max(where(rows("tiling_h200.csv"), gpus=4)[::-1], key=lambda row: row["global_batch"])
    names = "products", "tiles", "ring, waiting", "ring" if row["ring ms"] else "ring, sends"
    products, tiles, waiting, overlapped = (row[f"{name} ms"] for name in names)
    shorter = min(waiting, overlapped)
    own = min(tiles, shorter)
    parts = {"matrix products": products, "epilogue, launches": own - products}
    parts["communication, not hidden" if overlapped < waiting else "communication, waited for"] = shorter - own
    names = "communication that overlapping hides", "more where it is overlapped"
    parts[names[overlapped > waiting]] = abs(waiting - overlapped)
    what = f"ms, forward + backward, b = {row['global_batch']:,}, D = {row['dim']}, {row['gpus']} GPUs"
    return {what: {name: [(width,)] for name, width in parts.items() if width > 0}}


def retrieval() -> str:
    lines = [
        [row["impl"], f"{row['pairs']:,}", row["dim"], row["device"], f"{row['seconds']:.2f} s", size(row["peak_mib"])]
        for row in latest(rows("retrieval.csv", "retrieval_h200.csv"), "impl", "pairs", "dim", "device")
    ]
    return markdown(["", "pairs", "D", "device", "time", "memory above the features"], lines)


def precision() -> str:
    """A line per loss and precision; of each kind of features the errors of loss, images' gradients and scale's."""
    found = where(rows("precision_h100.csv"), dim=768)
    kinds = list(dict.fromkeys(row["features"] for row in found))
    errors = ("loss_error", "image_gradient_error", "scale_gradient_error")
    lines = []
    for impl, dtype, tile in dict.fromkeys((row["impl"], row["dtype"], row["tile_dtype"]) for row in found):
        own = {row["features"]: row for row in where(found, impl=impl, dtype=dtype, tile_dtype=tile)}
        cells = ["; ".join(f"{own[kind][error]:.1e}" for error in errors) if kind in own else "" for kind in kinds]
        lines.append([impl, dtype, tile or dtype, *cells])
    heads = [f"{kind} pairs: loss; features; scale" for kind in kinds]
    return markdown(["loss", "features", "products", *heads], lines) + f"\n\n{origin(found)}."


def loss_origin() -> str:
    """Of the rows that are shown, each setting's newest commit: hardware, and which of them each commit measured."""
    found = [row for row in loss_rows() if _is_shown(row)]
    last = {_setting(row): row["commit"] for row in found}
    shown = [row for row in found if row["commit"] == last[_setting(row)]]
    rates = sorted(row["cublas_tflops"] for row in shown)
    text = f"{origin(shown)}; the library's product: {rates[0]:.0f} to {rates[-1]:.0f} TFLOP/s."
    lines = []
    for commit in dict.fromkeys(row["commit"] for row in shown):
        for gpus in (1, 2, 4):
            batches: dict[str, set[int]] = {}
            for row in where(shown, commit=commit, gpus=gpus):
                name = row["impl"] + (f", D = {row['dim']}" if row["dim"] != 768 else "")
                batches.setdefault(name, set()).add(row["global_batch"])
            words = [f"{name}: {', '.join(map(batch, sorted(pairs)))}" for name, pairs in batches.items()]
            if words:
                lines.append([commit[:7], gpus, "; ".join(words)])
    return f"{text}\n\n{markdown(['commit', 'GPUs', 'what it measured (names of --impl, pairs)'], lines)}"


def _is_shown(row: dict) -> bool:
    """Whether one of the tables above has a place for this row."""
    impl, gpus, dim, pairs = (row[name] for name in ("impl", "gpus", "dim", "global_batch"))
    if gpus == 1:
        return (impl, dim) in _OTHERS or (dim == 768 and impl in ONE_GPU)
    tables = {2: ("inf_cl", "inf_cl sends"), 4: (*FOUR_GPUS, *(["one_tile"] if pairs == 65536 else []))}
    return dim == 768 and (impl in tables[gpus] or (impl in _SIDE_BY_SIDE and (gpus, pairs) in _SETTINGS))


def _setting(row: dict) -> tuple:
    return tuple(row[name] for name in ("impl", "gpus", "global_batch", "dim"))


def figure_4() -> dict:
    """Time of the loss against the batch: {panel: {label: [(pairs, ms)]}}."""
    return _curves("median_ms", 1.0)


def whole_steps() -> list[dict]:
    """The newest rows of benchmarks.step_losses; one that ran out of memory has no time."""
    return latest(rows("step_losses.csv"), "impl", "model", "device", "global_batch")


def steps_by_loss() -> str:
    """Whole steps on one GPU: seconds, of them the loss, and peak memory, by batch and loss; the plot of them."""
    found = whole_steps()
    if not found:
        return "Whole steps are not measured yet."
    impls = [impl for impl in LABELS if where(found, impl=impl)]
    lines = []
    for pairs in sorted({row["global_batch"] for row in found}):
        lines.append([f"{pairs:,}", *(_step_cell(where(found, impl=i, global_batch=pairs)) for i in impls)])
    words = sorted({f"{row['model']}, {row['precision']}, blocks {row['blocks']}" for row in found})
    micro_batches = sorted({row["micro_batch"] for row in found})
    settings = f"{'; '.join(words)}, micro-batches of {', '.join(map(str, micro_batches))}; {origin(found)}."
    picture = "![a step beside infcl's, and its loss, against batch](results/figure_4_steps.png)"
    return f"{markdown(['b', *(LABELS[impl] for impl in impls)], lines)}\n\n{settings}\n\n{picture}"


def _step_cell(found: list[dict]) -> str:
    """'1.42 +- 0.01 s, loss 12.3 ms, 45.1 GiB' of a row; 'x': out of memory; '-': no row."""
    if not found:
        return "-"
    row = found[-1]
    if row["median_s"] == "":
        return "x"
    spread = f" +- {row['std_s']:.2f}" if row["repeats"] > 1 else ""
    return f"{row['median_s']:.2f}{spread} s, loss {ms(1000 * row['seconds_loss'])} ms, {row['peak_gib']:.1f} GiB"


def figure_4_steps() -> dict:
    """A whole step, and of it the loss, against the batch: {panel: {label: [(pairs, value)]}}.

    The step beside that with infcl's loss, since towers take nearly all of a step and seconds would lie on one line.
    """
    found = [row for row in whole_steps() if row["median_s"] != ""]
    ours = {row["global_batch"]: row["median_s"] for row in where(found, impl="inf_cl")}
    values = {
        "a whole step, times as long as infcl's": lambda row: row["median_s"] / ours[row["global_batch"]],
        "of it the loss, seconds": lambda row: row["seconds_loss"],
    }
    return {
        panel: {
            LABELS[impl]: sorted((row["global_batch"], value(row)) for row in where(found, impl=impl))
            for impl in LABELS
            if where(found, impl=impl)
        }
        for panel, value in values.items()
    }


def memory_curves() -> dict:
    """Memory of the loss against the batch: {panel: {label: [(pairs, GiB)]}}."""
    return _curves("extra_mib", 1024.0)


def _curves(column: str, unit: float) -> dict:
    panels = {}
    for gpus in (1, 4):
        own = where(loss_rows(), gpus=gpus, dim=768)
        series = {}
        for impl in ("inf_cl", "official_open_clip", "clip", "disco", "official", "siglip", "official_siglip"):
            points = _by_batch(where(own, impl=impl))
            if points:
                series[LABELS[impl]] = [(row["global_batch"], row[column] / unit) for row in points]
        panels[f"{gpus} H200{'s' if gpus > 1 else ''}"] = series
    return panels
