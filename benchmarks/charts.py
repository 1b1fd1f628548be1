"""Draw the charts of the docs from the raw files in docs/results: `python -m benchmarks.charts [NAME ...]`.

A chart has panels of curves, {panel: {label: [(x, y) or (x, y, deviation)]}}. A curve of one number is drawn as a bar.
CHARTS at the end lists the images. Nothing here measures.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.rows import RESULTS, ROOT, grouped, latest, rows, where

GIB = 2**30
LOSSES = {
    "inf_cl": "infcl",
    "official_open_clip": "open_clip's ClipLoss",
    "clip": "CLIP (b x b)",
    "disco": "DisCo-CLIP",
    "official": "official inf_cl 1.2.1",
    "siglip": "infcl, SigLIP",
    "official_siglip": "open_clip's SigLipLoss",
}
TRAINED = {"clip": "CLIP", "open_clip": "OpenCLIP", "disco": "DisCo-CLIP", "inf_cl": "infcl"}
TRAINED |= {"inf_cl_bf16": "infcl, BF16 GEMMs"}
COLOURS = {
    "infcl": "#1f4e79", "official inf_cl 1.2.1": "#c0504d", "CLIP": "#7a7a7a", "CLIP (b x b)": "#7a7a7a",
    "OpenCLIP": "#d98b2b", "open_clip's ClipLoss": "#d98b2b", "DisCo-CLIP": "#5b8c3e", "SigLIP": "#8d5aa8",
    "infcl, SigLIP": "#8d5aa8", "open_clip's SigLipLoss": "#c7a3d6",
}  # fmt: skip
GROUND, INK = "#fcfcfa", "#2b2b2b"
Panels = dict[str, dict[str, list[tuple]]]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *CHARTS], help="images to draw [all]")
    for name in parser.parse_args(arguments).names or CHARTS:
        CHARTS[name].draw(RESULTS / name)
        print((RESULTS / name).relative_to(ROOT))


# ---- panels ----


def overview() -> Panels:
    """Return README's chart: time and memory of the loss on one GPU, and the trainers' rates.

    It begins at 8,192 samples: below, kernel launches dominate the time of every loss.
    """
    names = {impl: LOSSES[impl] for impl in ("inf_cl", "official_open_clip", "official")}
    own = [row for row in _losses(gpus=1) if row["global_batch"] >= 8192]
    panels = {"loss, forward + backward, ms": _series(own, "global_batch", "median_ms", "impl", names)}
    panels["memory of the loss, GiB"] = _series(own, "global_batch", "extra_mib", "impl", names, unit=1024.0)
    found = where(
        rows("peers_train.csv"), gpus=1, model="ViT-L-14", precision="amp_bf16", status="ok", checkpointing=0,
        micro_batch=128, accum_freq=1,
    )  # fmt: skip
    panels["training ViT-L-14, samples/s"] = {
        f"{row['program']}, {row['blocks']}": [(row["samples_per_second"],)]
        for row in sorted(latest(found, "program", "blocks"), key=lambda row: -row["samples_per_second"])
    }
    return panels


def figure_1() -> Panels:
    """Return the memory of the loss by batch and by number of GPUs, measured and planned."""
    from infcl.plan.memory import loss_bytes

    panels = {f"loss alone, {name}": curves for name, curves in _loss_curves("extra_mib", 1024.0).items()}
    names = {impl: LOSSES[impl] for impl in ("inf_cl", "official_open_clip")}
    panels["loss alone, 128k samples, H200s"] = _series(
        _losses(global_batch=2**17), "gpus", "extra_mib", "impl", names, unit=1024.0
    )
    panels["loss alone, 256k samples, planned"] = {
        name: [(count, sum(loss_bytes(
            loss, rows=2**18 // count, ranks=count, width=768, two_level=loss == "inf_cl" and count > 8
        ).values()) / GIB) for count in (8, 16, 32, 64, 128, 256)]
        for loss, name in (("inf_cl", "infcl"), ("open_clip", "OpenCLIP"), ("clip", "CLIP"))
    }  # fmt: skip
    return panels


def figure_4() -> Panels:
    """Return the time of the loss by batch."""
    return _loss_curves("median_ms", 1.0)


def training_curves() -> Panels:
    """Return the loss by samples seen, with the deviation over seeds. SigLIP's loss has a separate panel."""
    found = [row | {"of": row["run"].rsplit("-", 1)[0]}
             for row in latest(rows("accuracy_losses_curves.csv"), "run", "samples_seen")]  # fmt: skip
    panels = {"softmax losses": TRAINED, "SigLIP's loss": {"siglip": "SigLIP"}}
    return {panel: _series(found, "samples_seen", "loss", "of", labels, of=_average_and_deviation)
            for panel, labels in panels.items()}  # fmt: skip


def _losses(**wanted) -> list[dict]:
    """Return the rows of the loss alone of width 768 that did not run out of memory."""
    return [row for row in where(rows("loss_h200.csv"), dim=768, **wanted) if row["median_ms"] != ""]


def _loss_curves(column: str, unit: float) -> Panels:
    return {
        f"{count} H200{'s' * (count > 1)}": _series(
            _losses(gpus=count), "global_batch", column, "impl", LOSSES, unit=unit
        )
        for count in (1, 4)
    }


def _last(values: list[float]) -> tuple[float]:
    return (values[-1],)


def _average_and_deviation(values: list[float]) -> tuple[float, float]:
    return mean(values), stdev(values)


def _series(
    found: list[dict], x: str, y: str, by: str, labels: Mapping[Any, str], *, of: Callable = _last, unit: float = 1.0
) -> dict[str, list[tuple]]:
    """Return a curve per label: points of y / unit against x.

    Args:
        found: rows.
        x, y: columns of the axes.
        by: column that selects the curve.
        labels: {value of `by`: label}.
        of: reduces the values of several rows with the same x to (y,) or (y, deviation).
        unit: divisor of y.
    """
    return {
        label: [(place, *of([row[y] / unit for row in own])) for place, own in sorted(grouped(rows_of, x).items())]
        for value, label in labels.items()
        if (rows_of := where(found, **{by: value}))
    }


# ---- drawing ----


@dataclass(frozen=True)
class Chart:
    """An image of docs/results.

    Attributes:
        panels: returns the panels.
        x: names of the panels' x axes; the last one is repeated for further panels.
        y: name of the y axis.
        width: inches per panel; narrow charts are easier to read on a page.
        plain: linear axes without ticks at the points, for training curves.
    """

    panels: Callable[[], Panels]
    x: tuple[str, ...]
    y: str
    width: float = 4.4
    plain: bool = False

    def draw(self, picture: Path) -> None:
        """Draw the panels into an image file: up to three in a row, four as two by two."""
        from matplotlib.figure import Figure

        panels = self.panels()
        columns = len(panels) if len(panels) <= 3 else 2
        count = -(-len(panels) // columns)
        lines = [curves for curves in panels.values() if not _is_bars(curves)]
        many = max(map(len, lines), default=0) > 4  # put the legend below: no corner is free of curves
        figure = Figure(
            figsize=(self.width * columns + 0.4, (4.4 if many else 3.5) * count), dpi=484 / self.width,
            facecolor=GROUND, layout="constrained",
        )  # fmt: skip
        grid = figure.subplots(count, columns, squeeze=False)
        for axis, name, (panel, curves) in zip(grid.flat, self.x + self.x[-1:] * len(panels), panels.items()):
            axis.set_facecolor(GROUND)
            axis.set_title(panel, fontsize=10, color=INK)
            axis.tick_params(colors=INK, labelsize=8)
            if _is_bars(curves):
                _bars(axis, curves)
            else:
                self._lines(axis, curves, many)
                axis.set_xlabel(name, color=INK)
        grid[0, 0].set_ylabel(self.y, color=INK)
        figure.savefig(picture, facecolor=GROUND, bbox_inches="tight", metadata={"Software": None})

    def _lines(self, axis, curves: dict, many: bool) -> None:
        from matplotlib.ticker import FixedLocator, NullLocator

        overlaid = self.plain and len(curves) > 1  # curves may hide each other: draw each later one thinner
        for order, (label, points) in enumerate(curves.items()):
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
        if not self.plain:
            axis.set_xscale("log", base=2)
            places = sorted({point[0] for points in curves.values() for point in points})
            axis.xaxis.set_major_locator(FixedLocator(places))
            axis.xaxis.set_minor_locator(NullLocator())
            names = [f"{place / 1024:g}k" if place >= 1024 else f"{place:g}" for place in places]
            axis.set_xticklabels(names, rotation=45 if len(places) > 6 else 0)
        values = [point[1] for points in curves.values() for point in points]
        axis.set_yscale("log" if not self.plain and max(values) > 10 * min(values) else "linear")
        axis.grid(alpha=0.25, which="major")
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.32), "ncols": 2}
        axis.legend(frameon=False, fontsize=8, **(below if many else {}))


def _is_bars(curves: dict) -> bool:
    return len(next(iter(curves.values()))[0]) == 1


def _bars(axis, curves: dict) -> None:
    """Draw horizontal bars, the first on top, each with its value."""
    for place, (label, [(value,)]) in enumerate(curves.items()):
        bar = axis.barh([-place], [value], color=COLOURS["infcl"] if label.startswith("infcl") else "#b9b9b9")
        axis.bar_label(bar, fmt="{:,.0f}", fontsize=8, color=INK, padding=2)
    axis.set_yticks([-place for place in range(len(curves))], list(curves), color=INK)
    axis.margins(x=0.25)


BATCH = "global batch"
CHARTS = {
    "figure_1.png": Chart(figure_1, (BATCH, BATCH, "GPUs"), "GiB per GPU"),
    "figure_4.png": Chart(figure_4, (BATCH,), "ms, forward + backward"),
    "loss_curves.png": Chart(training_curves, ("samples seen",), "loss", plain=True),
    "overview.png": Chart(overview, (BATCH,), "one H200", width=3.5),
}

if __name__ == "__main__":
    main()
