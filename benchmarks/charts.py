"""Line charts and bar charts of the docs.

A chart has panels of curves, {panel: {label: [(x, y) or (x, y, deviation)]}}. A curve of one number is drawn as a bar.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.rows import grouped, where

COLOURS = {
    "infcl": "#1f4e79", "official inf_cl 1.2.1": "#c0504d", "CLIP": "#7a7a7a", "CLIP (b x b)": "#7a7a7a",
    "OpenCLIP": "#d98b2b", "open_clip's ClipLoss": "#d98b2b", "DisCo-CLIP": "#5b8c3e", "SigLIP": "#8d5aa8",
    "infcl, SigLIP": "#8d5aa8", "open_clip's SigLipLoss": "#c7a3d6", "lr unchanged": "#1f4e79",
    "lr x sqrt(batch)": "#d98b2b", "lr x batch": "#c0504d",
}  # fmt: skip
GROUND, INK = "#fcfcfa", "#2b2b2b"
Panels = dict[str, dict[str, list[tuple]]]


def last(values: list[float]) -> tuple[float]:
    """Use the last of several rows for a point."""
    return (values[-1],)


def average(values: list[float]) -> tuple[float]:
    return (mean(values),)


def average_and_deviation(values: list[float]) -> tuple[float, float]:
    return mean(values), stdev(values)


def series(
    found: list[dict], x: str, y: str, by: str, labels: Mapping[Any, str], *, of=last, unit: float = 1.0
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


@dataclass(frozen=True)
class Chart:
    """An image of docs/results.

    Attributes:
        panels: returns the panels.
        x: names of the panels' x axes; the last one is repeated for further panels.
        y: name of the y axis.
        width: inches per panel; narrow charts are easier to read on a page.
        plain: linear axes without ticks at the points, for training curves.
        log_y: use a logarithmic y axis if values span a decade.
    """

    panels: Callable[[], Panels]
    x: tuple[str, ...]
    y: str
    width: float = 4.4
    plain: bool = False
    log_y: bool = True

    def draw(self, picture: Path) -> None:
        """Draw the panels into an image file: up to three in a row, four as two by two."""
        from matplotlib import use

        use("Agg")
        from matplotlib import pyplot

        panels = self.panels()
        columns = len(panels) if len(panels) <= 3 else 2
        count = -(-len(panels) // columns)
        lines = [curves for curves in panels.values() if not _is_bars(curves)]
        many = max(map(len, lines), default=0) > 4  # put the legend below: no corner is free of curves
        figure, grid = pyplot.subplots(
            count, columns, figsize=(self.width * columns + 0.4, (4.4 if many else 3.5) * count),
            dpi=484 / self.width, squeeze=False, facecolor=GROUND, layout="constrained",
        )  # fmt: skip
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
        metadata = {"Description": digest(panels), "Software": None}
        figure.savefig(picture, facecolor=GROUND, bbox_inches="tight", metadata=metadata)
        pyplot.close(figure)

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
        axis.set_yscale("log" if self.log_y and not self.plain and max(values) > 10 * min(values) else "linear")
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


def digest(panels: Panels) -> str:
    """Return a hash of a chart's values, rounded to six digits. A PNG has it as its description."""
    rounded = {
        panel: {label: [[float(f"{value:.6g}") for value in point] for point in points]
                for label, points in curves.items()}
        for panel, curves in panels.items()
    }  # fmt: skip
    return hashlib.sha256(json.dumps(rounded, sort_keys=True).encode()).hexdigest()[:16]


def digest_of(picture: Path) -> str | None:
    from PIL import Image

    if not picture.is_file():
        return None
    with Image.open(picture) as image:
        return image.info.get("Description")
