"""Draw a chart with matplotlib, as SVG text for the page (coloured by its style sheet), and the loss curve as a PNG."""

import io
import json
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

from infcl.report.charts import Chart, Series, loss_curve
from infcl.report.records import read_metrics

COLOURS = ("#2a6fdb", "#d9680d", "#12876f", "#8a4fc4", "#c2355b", "#6b7280")  # --c0 to --c5 of style.css
_SOFT, _GRID = "#5f6670", "#ececea"  # --soft and --grid
_DASHES: tuple[Any, ...] = ("-", (0, (3, 2.5)), (0, (1, 2)))
_SIZE = 400, 220  # of an SVG, points
_AREA = {"left": 66 / 400, "right": 392 / 400, "bottom": 41 / 220, "top": 212 / 220}
_READ_OUT_POINTS = 240
_RULES = {
    "path.simplify_threshold": 1.0,  # pixels; keeps the SVG of a noisy curve small without a visible change
    "axes.edgecolor": _SOFT,
    "axes.labelcolor": _SOFT,
    "xtick.color": _SOFT,
    "ytick.color": _SOFT,
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
}


def draw_svg(chart: Chart) -> str:
    """Return <svg>...</svg> and the chart's points as JSON, from which the page shows the value under the pointer."""
    text = io.StringIO()
    with _matplotlib().rc_context(
        _RULES | {"font.size": 11, "xtick.labelsize": 10.5, "ytick.labelsize": 10.5, "svg.hashsalt": chart.name}
    ):
        figure = _figure(chart, (_SIZE[0] / 72, _SIZE[1] / 72))
        figure.subplots_adjust(**_AREA)
        figure.axes[0].yaxis.set_label_coords(-0.165, 0.5)  # at the left edge, however wide the tick labels are
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{escape(chart.title)}" ', 1)
    names = {colour: f"c{i}" for i, colour in enumerate(COLOURS)} | {_SOFT: "soft", _GRID: "grid"}
    for colour, name in names.items():
        svg = svg.replace(colour, f"var(--{name})")
    low, high = figure.axes[0].get_xlim()
    data = {"left": _AREA["left"], "right": _AREA["right"], "low": low, "high": high, "x": chart.x}
    data |= {"percent": chart.percent, "series": [_read_out(series) for series in chart.series]}
    points = json.dumps(data).replace("<", "\\u003c")
    return f'{svg}<script type="application/json">{points}</script>'


def draw_loss_curve(metrics: Path, picture: Path) -> None:
    """Draw the loss (raw and smoothed) and the logit scale of metrics.jsonl over samples_seen, as a PNG."""
    with _matplotlib().rc_context(_RULES):
        figure = _figure(loss_curve(read_metrics(metrics, "train")), (7, 4))
        lines = [line for axis in figure.axes for line in axis.lines if not line.get_label().startswith("_")]
        figure.axes[0].legend(handles=lines, frameon=False, loc="upper center")
        figure.tight_layout()
        figure.savefig(picture, dpi=120)


def legend(series: Series) -> str:
    """Return the legend entry of a series, a line and a label, as HTML."""
    look = f"c{series.colour % len(COLOURS)} dash{series.dash % len(_DASHES)}"
    line = f'<svg viewBox="0 0 22 8"><path class="line {look}" d="M0,4L22,4"/></svg>'
    return f'<span class="key">{line}{escape(series.label)}</span>'


def smooth(values: list[float]) -> list[float]:
    """Return the running mean over a thirtieth of the curve. The window is centred, and shorter at the ends."""
    half, sums = len(values) // 60, [0.0, *accumulate(values)]
    result = []
    for i in range(len(values)):
        reach = min(half, i, len(values) - 1 - i)
        result.append((sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1))
    return result


def tick_labels(marks: list[float], *, percent: bool = False) -> list[str]:
    """Return the tick labels of an axis, with enough digits to distinguish them."""
    labels: list[str] = []
    for digits in range(4, 17):
        labels = [f"{100 * mark:.{digits}g}%" if percent else short(mark, digits) for mark in marks]
        if len(set(labels)) == len(marks):
            break
    return labels


def short(value: float, digits: int = 4) -> str:
    """Format a number briefly: 12,500,000 -> 12.5M."""
    for scale, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.{digits}g}{unit}"
    return f"{value:.{digits}g}"


def _figure(chart: Chart, inches: tuple[float, float]):
    figure = _matplotlib().figure.Figure(figsize=inches)
    axis = figure.subplots()
    for series in chart.series:
        _plot(axis.twinx() if series.right else axis, series)
    low, high = _range(chart)
    axis.set(xlabel=chart.x, ylabel=chart.y, xlim=(0, None), ylim=(low, high))
    axis.set_yscale("log" if chart.log else "linear")
    marks = _marks(low, high, log=chart.log)
    axis.set_yticks(marks, labels=tick_labels(marks, percent=chart.percent))
    axis.set_yticks([], minor=True)
    axis.set_ylim(low, high)
    axis.xaxis.set_major_formatter(lambda value, _: short(value))
    axis.grid(axis="y", color=_GRID)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    return figure


def _plot(axis, series: Series) -> None:
    colour, dash = COLOURS[series.colour % len(COLOURS)], _DASHES[series.dash % len(_DASHES)]
    look: dict[str, Any] = {"color": colour, "linestyle": dash}
    if series.points or len(series.xs) == 1:
        look |= {"marker": "o", "markersize": 4, "clip_on": False, "zorder": 3}  # an accuracy of 1 is on the frame
    if series.noisy:
        axis.plot(series.xs, series.ys, linewidth=0.7, alpha=0.3, color=colour)
    if series.right:
        axis.set_ylabel(series.label)
        axis.spines[:].set_visible(False)
    ys = smooth(series.ys) if series.noisy else series.ys
    axis.plot(series.xs, ys, label=series.label.replace("$", r"\$"), **look)


def _marks(low: float, high: float, *, log: bool) -> list[float]:
    """Return round tick values in [low, high]."""
    ticker = _matplotlib().ticker
    locator = ticker.MaxNLocator(6, steps=[1, 2, 5, 10])
    if log and high / low > 10:
        locator = ticker.LogLocator(subs=(1, 3))
    return [float(mark) for mark in locator.tick_values(low, high) if low <= mark <= high]


def _range(chart: Chart) -> tuple[float, float]:
    """Return the y-range of the smoothed curves and of the central 99% of the raw values."""
    values: list[float] = []
    for series in (one for one in chart.series if not one.right):
        values += smooth(series.ys) if series.noisy else series.ys
        if series.noisy and series.ys:  # a run may have no step
            ordered, cut = sorted(series.ys), len(series.ys) // 200
            values += [ordered[cut], ordered[-1 - cut]]
    if chart.log:
        positive = [value for value in values if value > 0] or [1.0]
        return min(positive) / 1.15, max(positive) * 1.15
    low, high = min(values, default=0.0), max(values, default=1.0)
    low = min(0.0, low) if chart.from_zero else low - 0.05 * (high - low)
    margin = 0.05 * (high - low) or abs(high) or 1.0
    return low, high + margin if not chart.percent else min(high + margin, max(high, 1.0))


def _read_out(series: Series) -> dict:
    """Return evenly spaced points and the last one; for a noisy series, points of its running mean."""
    step = -(-len(series.xs) // _READ_OUT_POINTS)
    ys = smooth(series.ys) if series.noisy else series.ys
    kept = [*range(0, len(ys) - 1, step), len(ys) - 1]
    ys = [float(f"{ys[i]:.4g}") for i in kept]
    return {"label": series.label, "colour": series.colour % len(COLOURS), "xs": [series.xs[i] for i in kept], "ys": ys}


def _matplotlib():
    import matplotlib
    import matplotlib.figure
    import matplotlib.ticker

    return matplotlib
