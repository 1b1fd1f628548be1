"""What is learned: Table 3 (losses side by side), gradients of one step, Figure 5 (batch sizes)."""

import statistics

from benchmarks.accuracy import EXPONENTS
from benchmarks.paper.raw import NOT_MEASURED, batch, latest, markdown, mean_and_deviation, newest, origin, rows, where
from infcl.config import counted

LOSSES = {"clip": "CLIP", "open_clip": "OpenCLIP", "disco": "DisCo-CLIP", "inf_cl": "infcl"}
LOSSES |= {"inf_cl_bf16": "infcl, products bf16", "siglip": "SigLIP"}
METRICS = {"zero_shot_top1": "zero-shot", "image_to_text_r1": "image->text R@1", "text_to_image_r1": "text->image R@1"}
EARLY = (0, 2, 5, 9)  # points of a curve, each the mean of some steps
SCALINGS = {"none": "lr as it is", "sqrt": "lr x sqrt(batch)", "linear": "lr x batch"}


def demo() -> str:
    """The demo with each preset."""
    found = latest(rows("demo.csv"), "preset", "ranks", "device")
    lines = [
        [row["preset"], f"{counted(row['ranks'], 'rank')}, {row['precision']}"]
        + [f"{row[metric]:.3f}" for metric in METRICS]
        + [f"{row['train_seconds']:.0f} s"]
        for row in found
    ]
    text = markdown(["preset", "how", *METRICS.values(), "training"], lines)
    return f"{text}\n\n{found[0]['steps']} steps of {found[0]['global_batch']} pairs; {origin(found)}."


def many_ranks() -> str:
    """Losses of the whole trainer on many ranks of several hosts beside one rank's, of the last run."""
    found = latest(newest(rows("ranks_32.csv")), "hosts", "ranks", "step")
    shapes = list(dict.fromkeys((row["hosts"], row["ranks"]) for row in found))
    lines, apart = [], 0.0
    for step in sorted({row["step"] for row in found}):
        losses = [where(found, hosts=hosts, ranks=ranks, step=step)[0]["loss"] for hosts, ranks in shapes]
        apart = max(apart, max(losses) / min(losses) - 1)
        lines.append([step, *(f"{loss:.7f}" for loss in losses)])
    header = [f"{ranks} ranks on {hosts} hosts" if ranks > 1 else "1 rank" for hosts, ranks in shapes]
    text = markdown(["step", *header], lines)
    return f"{text}\n\nApart by {apart:.1e} at most (relative), {found[0]['pairs']} pairs a step; {origin(found)}."


def table_3() -> str:
    return _of_seeds(latest(rows("accuracy_losses.csv"), "run"))


def _of_seeds(found: list[dict]) -> str:
    """What each loss comes to: mean and deviation over its seeds."""
    if not found:
        return f"{NOT_MEASURED.capitalize()} yet."
    lines = []
    for loss, name in LOSSES.items():
        own = where(found, loss=loss)
        if own:
            cells = [mean_and_deviation([row[metric] for row in own]) for metric in METRICS]
            lines.append([name, len(own), *cells, mean_and_deviation([row["final_loss"] for row in own], 4)])
    text = markdown(["loss", "seeds", *METRICS.values(), "loss of the last 5% of steps"], lines)
    one = found[0]
    return (
        f"{text}\n\n{one['steps']} steps of {one['global_batch']} pairs, {counted(one['ranks'], 'rank')} each, "
        f"{one['jobs']} trainings at once; {origin(found)}."
    )


def table_3_ranks() -> str:
    """Trainings over several ranks: the loss while rounding has not yet parted them, and what they come to."""
    found = latest(rows("accuracy_losses_ranks.csv"), "run")
    curves = latest(rows("accuracy_losses_ranks_curves.csv"), "run", "samples_seen")
    if not found:
        return f"{NOT_MEASURED.capitalize()} yet."
    first = [row for row in where(found, seed=found[0]["seed"]) if row["loss"] != "siglip"]
    lines = []
    for row in first:
        own = where(curves, run=row["run"])
        lines.append([LOSSES[row["loss"]], *(f"{own[i]['loss']:.5f}" for i in EARLY if i < len(own))])
    curve = where(curves, run=first[0]["run"])
    pairs = [f"loss at {curve[i]['samples_seen']:,} pairs" for i in EARLY if i < len(curve)]
    early = markdown([f"seed {first[0]['seed']}", *pairs], lines)
    return "\n\n".join([early, _beside_clip(found), _of_seeds(found)])


def table_3_pairs() -> str:
    return _beside_clip(rows("accuracy_losses.csv"))


def _beside_clip(found: list[dict]) -> str:
    """Each loss against clip, seed by seed: both start from the same weights and see the same pairs."""
    by_loss = {loss: {row["seed"]: row for row in where(found, loss=loss)} for loss in LOSSES}
    spread = {
        metric: statistics.stdev([row[metric] for row in by_loss["clip"].values()]) if len(by_loss["clip"]) > 1 else 0.0
        for metric in METRICS
    }
    lines = []
    for loss in ("open_clip", "disco", "inf_cl", "inf_cl_bf16"):
        seeds = sorted(set(by_loss[loss]) & set(by_loss["clip"]))
        if not seeds:
            continue
        cells = []
        for metric in METRICS:
            differences = [by_loss[loss][seed][metric] - by_loss["clip"][seed][metric] for seed in seeds]
            cells.append(f"{statistics.mean(differences):+.3f} +- {_standard_error(differences):.3f}")
        lines.append([f"{LOSSES[loss]} - CLIP", *cells])
    if not lines:
        return f"{NOT_MEASURED.capitalize()} yet."
    lines.append(["spread of CLIP over seeds", *(f"{spread[metric]:.3f}" for metric in METRICS)])
    return markdown(["mean over seeds +- its standard error", *METRICS.values()], lines)


def _standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def gradients() -> str:
    """A line per row of infcl, beside the other losses of its run: distances from the whole matrix's, from float64."""
    found, lines = rows("accuracy_gradients.csv"), []
    settings = ("device", "precision", "ranks", "global_batch", "weights")
    for ours in latest(where(found, loss="inf_cl"), *settings, "tile_dtype"):
        run = {name: ours[name] for name in (*settings, "commit")}
        own = {row["loss"]: row for row in where(found, **run)} | {"inf_cl": ours}
        device, precision, ranks, pairs, weights = (ours[name] for name in settings)
        tile_dtype = ours["tile_dtype"]
        losses = [f"{own[loss]['from_clip']:.1e}" for loss in ("open_clip", "disco", "inf_cl")]
        true = {loss: " / ".join(f"{own[loss][part]:.1e}" for part in ("image", "text", "scale")) for loss in own}
        where_ = f"{device}, {precision}" + (f", products {tile_dtype}" if tile_dtype != "fp32" else "")
        lines.append([where_, ranks, f"{pairs:,}", weights, *losses, true["inf_cl"], true["clip"]])
    header = ["", "ranks", "batch", "weights", *(f"{LOSSES[loss]} - CLIP" for loss in ("open_clip", "disco", "inf_cl"))]
    header += ["infcl - float64: image / text / scale", "CLIP - float64"]
    return f"{markdown(header, lines)}\n\n{origin(found)}."


def hard_negatives() -> str:
    found = latest(rows("hard_negatives.csv"), "hard_negatives", "seed")
    if not found:
        return f"{NOT_MEASURED.capitalize()} yet."
    lines = []
    for hard in (0, 1):
        own = where(found, hard_negatives=hard)
        values = [mean_and_deviation([row[name] for row in own]) for name in ("relation", "recall_at_1")]
        lines.append(["with hard negatives" if hard else "negatives of the batch alone", len(own), *values])
    header = ["trained", "seeds", "relation right (chance 0.5)", f"R@1 among {found[0]['documents']:,}"]
    return markdown(header, lines) + f"\n\n{found[0]['steps']} steps of {found[0]['batch']} queries; {origin(found)}."


def table_5() -> str:
    """The batch-size study as a table: zero-shot / image->text R@1 by batch, learning rate and its scaling."""
    studies = _batch_studies()
    if not studies:
        return f"{NOT_MEASURED.capitalize()} yet."
    lines = []
    for rate, found in studies.items():
        for pairs in sorted({row["global_batch"] for row in found}):
            steps = where(found, global_batch=pairs)[0]["steps"]
            cells = [f"{rate:g}", batch(pairs) if pairs >= 1024 else pairs, steps]
            for scaling in SCALINGS:
                own = where(found, global_batch=pairs, lr_scaling=scaling)
                values = [mean_and_deviation([row[metric] for row in own]) for metric in METRICS if own]
                cells.append(" / ".join(values[:2]) if own else "")
            lines.append(cells)
    text = markdown(["lr at 512", "batch", "steps", *(f"{name}: zero-shot / R@1" for name in SCALINGS.values())], lines)
    every = [row for found in studies.values() for row in found]
    one = every[0]
    return f"{text}\n\n{one['samples_seen']:,} samples seen of {one['num_train']:,} pairs; {origin(every)}."


def _batch_studies() -> dict[float, list[dict]]:
    """{learning rate at the smallest batch: rows}; that batch's row stands for all scalings, which agree there."""
    found = latest(rows("accuracy_batches.csv"), "run")
    base = min((row["global_batch"] for row in found), default=0)
    studies: dict[float, list[dict]] = {}
    for row in found:
        rate = float(f"{row['lr'] / (row['global_batch'] / base) ** EXPONENTS[row['lr_scaling']]:.6g}")
        same = SCALINGS if row["global_batch"] == base else [row["lr_scaling"]]
        studies.setdefault(rate, []).extend(row | {"lr_scaling": scaling} for scaling in same)
    return dict(sorted(studies.items()))


def figure_5() -> dict:
    """{panel: {label: [(batch, accuracy)]}}."""
    panels = {}
    for rate, found in _batch_studies().items():
        for metric, name in list(METRICS.items())[:2]:
            series = {}
            for scaling, label in SCALINGS.items():
                own = where(found, lr_scaling=scaling)
                series[label] = [
                    (pairs, statistics.mean(row[metric] for row in where(own, global_batch=pairs)))
                    for pairs in sorted({row["global_batch"] for row in own})
                ]
            panels[f"{name}, lr {rate:g} at 512"] = series
    return panels


def loss_curves() -> dict:
    """{panel: {label: [(samples seen, loss, standard deviation)]}}; SigLIP's is another loss, on a panel of its own."""
    curves = latest(rows("accuracy_losses_curves.csv"), "run", "samples_seen")
    panels: dict = {"softmax losses": {}, "SigLIP's loss": {}}
    for loss, name in LOSSES.items():
        at: dict[int, list[float]] = {}
        for row in curves:
            if str(row["run"]).rsplit("-", 1)[0] == loss:
                at.setdefault(row["samples_seen"], []).append(row["loss"])
        points = [
            (samples, statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0)
            for samples, values in sorted(at.items())
        ]
        if points:
            panels["SigLIP's loss" if loss == "siglip" else "softmax losses"][name] = points
    return {panel: series for panel, series in panels.items() if series}
