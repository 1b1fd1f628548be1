"""Draw a chart with matplotlib, as SVG text for the page (coloured by its style sheet), and the loss curve as a PNG."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from infcl.report.charts import Chart, Series, loss_curve
from infcl.report.records import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#2a6fdb", "#d9680d", "#12876f", "#8a4fc4", "#c2355b", "#6b7280")  # --c0 to --c5 of style.css
_SOFT, _GRID = "#5f6670", "#ececea"  # --soft and --grid
_SIZE = 400, 220  # of an SVG, points
_AREA = {"left": 66 / 400, "right": 392 / 400, "bottom": 41 / 220, "top": 212 / 220}
_READ_OUT_POINTS = 240
_FEW = 30  # points of a curve, which get a marker each
_STYLE = {
    "font.size": 11,
    "xtick.labelsize": 10.5,
    "ytick.labelsize": 10.5,
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
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": chart.title}):
        figure = _figure([chart], (_SIZE[0] / 72, _SIZE[1] / 72))
        figure.subplots_adjust(**_AREA)
        figure.axes[0].yaxis.set_label_coords(-0.165, 0.5)  # at the left edge, however wide the tick labels are
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    for colour, name in {_SOFT: "soft", _GRID: "grid", **{c: f"c{i}" for i, c in enumerate(COLOURS)}}.items():
        svg = svg.replace(colour, f"var(--{name})")
    low, high = figure.axes[0].get_xlim()
    data: dict[str, Any] = {"left": _AREA["left"], "right": _AREA["right"], "low": low, "high": high}
    data |= {"percent": chart.percent, "series": [_read_out(series) for series in chart.series]}
    points = json.dumps(data).replace("<", "\\u003c")
    return f'{svg}<script type="application/json">{points}</script>'


def draw_loss_curve(metrics: Path, picture: Path) -> None:
    """Draw the loss (raw and smoothed) and the logit scale of metrics.jsonl over samples_seen, as a PNG."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        figure = _figure(loss_curve(read_metrics(metrics, "train")), (7, 6))
        figure.tight_layout()
        figure.savefig(picture, dpi=120)


def short(value: float) -> str:
    """Format a number briefly: 12,500,000 -> 12.5M."""
    for scale, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.12g}{unit}"
    return f"{value:.12g}"


def _figure(charts: Sequence[Chart], inches: tuple[float, float]) -> "Figure":
    """Return a figure with the charts below each other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches)
    for chart, axis in zip(charts, figure.subplots(len(charts), squeeze=False)[:, 0]):
        _draw(chart, axis)
    return figure


def _draw(chart: Chart, axis: "Axes") -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator

    for series in chart.series:
        colour = COLOURS[series.colour]
        if series.noisy:
            axis.plot(series.xs, series.ys, linewidth=0.7, alpha=0.3, color=colour)
        few: dict[str, Any] = {"marker": "o", "markersize": 4, "clip_on": False, "zorder": 3}  # 1.0 is on the frame
        axis.plot(series.xs, series.curve, color=colour, **(few if len(series.xs) <= _FEW else {}))
    low, high = _range(chart)
    axis.set(xlabel="samples seen", ylabel=chart.y, xlim=(0, None), ylim=(low, high))
    axis.set_yscale("log" if chart.log else "linear")
    wide = chart.log and high / low > 10
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 3)) if wide else MaxNLocator(6, steps=[1, 2, 5, 10]))
    axis.yaxis.set_major_formatter(lambda y, _: f"{100 * y:.12g}%" if chart.percent else short(y))
    axis.xaxis.set_major_formatter(lambda x, _: short(x))
    axis.minorticks_off()
    axis.set_ylim(low, high)
    axis.grid(axis="y", color=_GRID)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)


def _range(chart: Chart) -> tuple[float, float]:
    """Return the y-range of the smoothed curves and of the central 99% of the raw values."""
    raw = [np.quantile(series.ys, (0.005, 0.995)) for series in chart.series if series.noisy]
    values = np.concatenate([*raw, *(series.curve for series in chart.series)] or [np.array([0.0, 1.0])])
    if chart.log:
        values = values[values > 0] if (values > 0).any() else np.ones(1)
        return values.min() / 1.15, values.max() * 1.15
    low, high = values.min(), values.max()
    low = min(0.0, low) if chart.from_zero else low - 0.05 * (high - low)
    high_enough = high + (0.05 * (high - low) or abs(high) or 1.0)
    return low, min(high_enough, max(high, 1.0)) if chart.percent else high_enough


def _read_out(series: Series) -> dict:
    """Return evenly spaced points, with the last one."""
    at = np.unique(np.linspace(0, len(series.xs) - 1, _READ_OUT_POINTS).astype(int))
    ys = [float(f"{y:.4g}") for y in series.curve[at]]
    return {"label": series.label, "colour": series.colour, "xs": [series.xs[i] for i in at], "ys": ys}
