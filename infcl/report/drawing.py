"""A chart -> SVG text whose colours come from the page's style sheet (light and dark), or a PNG by matplotlib."""

import json
import math
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

from infcl.report.charts import Chart, Series
from infcl.report.records import read_metrics

WIDTH, HEIGHT = 400, 220
LEFT, RIGHT, TOP, BOTTOM = 66, 8, 8, 41
MAX_POINTS = 240
PNG_COLOURS = ("#2a6fdb", "#d9680d", "#12876f", "#8a4fc4", "#c2355b", "#6b7280")
_PNG_DASHES = ("-", "--", ":")


def draw_svg(chart: Chart) -> str:
    """<svg>...</svg> followed by the chart's points as JSON, for the page's read-out under the pointer."""
    low, high = _range(chart)
    x_end = max(max(series.xs) for series in chart.series) or 1
    to_x = _scale(0, x_end, LEFT, WIDTH - RIGHT)
    to_y = _scale(low, high, HEIGHT - BOTTOM, TOP, log=chart.log)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}">']
    parts.append(f'<clipPath id="clip-{chart.name}"><rect x="{LEFT}" y="{TOP - 4}" width="{WIDTH - LEFT - RIGHT + 4}" ')
    parts.append(f'height="{HEIGHT - TOP - BOTTOM + 8}"/></clipPath>')
    marks = ticks(low, high, log=chart.log)
    for tick, label in zip(marks, tick_labels(marks, percent=chart.percent)):
        y = to_y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    marks = ticks(0, x_end, count=5)
    for tick, label in zip(marks, tick_labels(marks)):
        x, anchor = to_x(tick), "end" if to_x(tick) > WIDTH - 30 else "middle"
        parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 23}" text-anchor="{anchor}">{label}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text class="tick" x="{middle[0]}" y="{HEIGHT - 6}" text-anchor="middle">{escape(chart.x)}</text>')
    turned = f'transform="translate(11 {middle[1]}) rotate(-90)" text-anchor="middle"'
    parts.append(f'<text class="tick" {turned}>{escape(chart.y)}</text>')
    parts.append(f'<g clip-path="url(#clip-{chart.name})">')
    read_out = []
    for series in chart.series:
        xs, ys = series.xs, smooth(series.ys) if series.noisy else series.ys
        look = _look(series)
        if series.noisy and len(xs) > 1:
            raw = zip(*thin(xs, series.ys))
            parts.append(f'<path class="line faint {look}" d="{_path(raw, to_x, to_y)}"/>')
        if len(xs) > 1:
            parts.append(f'<path class="line {look}" d="{_path(zip(*thin(xs, ys)), to_x, to_y)}"/>')
        if series.points or len(xs) == 1:
            dots = (f'<circle class="{look}" cx="{to_x(x):.1f}" cy="{to_y(y):.1f}" r="3"/>' for x, y in zip(xs, ys))
            parts.extend(dots)
        xs, ys = thin(xs, ys)
        read_out.append({"label": series.label, "xs": xs, "ys": [float(f"{y:.4g}") for y in ys], "look": look})
    parts.append(f'</g><line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>')
    area = {"left": LEFT, "right": WIDTH - RIGHT, "width": WIDTH, "end": x_end, "percent": chart.percent, "x": chart.x}
    data = json.dumps({"series": read_out, **area}).replace("<", "\\u003c")
    return "".join(parts) + f'<script type="application/json">{data}</script>'


def legend(series: Series) -> str:
    line = f'<svg viewBox="0 0 22 8"><path class="line {_look(series)}" d="M0,4L22,4"/></svg>'
    return f'<span class="key">{line}{escape(series.label)}</span>'


def draw_png(chart: Chart, picture: Path) -> None:
    """The same chart as a picture file, for slides and issues."""
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(7, 4), dpi=110)
    for series in chart.series:
        look: dict[str, Any] = {
            "color": PNG_COLOURS[series.colour % len(PNG_COLOURS)],
            "linestyle": _PNG_DASHES[series.dash % len(_PNG_DASHES)],
        }
        if series.noisy:
            axis.plot(series.xs, series.ys, linewidth=0.7, alpha=0.3, **look)
        ys = smooth(series.ys) if series.noisy else series.ys
        if series.points:
            look |= {"marker": "o", "clip_on": False, "zorder": 3}  # an accuracy of 1 is on the frame
        axis.plot(series.xs, ys, linewidth=1.7, label=series.label.replace("$", r"\$"), **look)
    low, high = _range(chart)
    axis.set(xlabel=chart.x, ylabel=chart.y, xlim=(0, None), ylim=(low, high), yscale="log" if chart.log else "linear")
    axis.set_title(chart.title, pad=22 if chart.note else 8)
    axis.text(0.5, 1.02, chart.note, transform=axis.transAxes, ha="center", fontsize="small", color="0.4")
    marks = ticks(low, high, log=chart.log)
    axis.set_yticks(marks, labels=tick_labels(marks, percent=chart.percent))
    axis.set_yticks([], minor=True)
    axis.xaxis.set_major_formatter(lambda value, _: short(value))
    axis.grid(alpha=0.25)
    if len(chart.series) > 1:
        axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(picture)
    plt.close(figure)


def draw_loss_curve(metrics: Path, picture: Path) -> None:
    """Loss (raw and smoothed) and logit scale over samples_seen, from metrics.jsonl into a PNG."""
    plt = _pyplot()
    records = [r for r in read_metrics(metrics, "train") if "loss" in r]  # a skipped step may have none
    samples, loss = [r["samples_seen"] for r in records], [r["loss"] for r in records]
    figure, axis = plt.subplots(figsize=(7, 4), dpi=120)
    axis.plot(samples, loss, color="#9db8d2", linewidth=0.8, label="loss of the global batch")
    axis.plot(samples, smooth(loss), color="#1f4e79", linewidth=1.8, label="smoothed")
    axis.set_xlabel("samples seen")
    axis.xaxis.set_major_formatter(lambda value, _: short(value))
    axis.set_ylabel("contrastive loss")
    axis.grid(alpha=0.25)
    scale = axis.twinx()
    scale.plot(samples, [r["logit_scale"] for r in records], color="#b5651d", linewidth=1.0, label="logit scale")
    scale.set_ylabel("logit scale")
    handles, labels = axis.get_legend_handles_labels()
    more_handles, more_labels = scale.get_legend_handles_labels()
    axis.legend(handles + more_handles, labels + more_labels, frameon=False, loc="upper center")
    figure.tight_layout()
    figure.savefig(picture)
    plt.close(figure)


def smooth(values: list[float]) -> list[float]:
    """Mean over a window of a thirtieth of the curve around each value; shorter, but still centred, at the ends."""
    half, sums = len(values) // 60, [0.0, *accumulate(values)]
    result = []
    for i in range(len(values)):
        reach = min(half, i, len(values) - 1 - i)
        result.append((sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1))
    return result


def thin(xs: list[float], ys: list[float]) -> tuple[list[float], list[float]]:
    """At most MAX_POINTS points: of each stretch its lowest and highest, so that spikes stay; the last point too."""
    if len(xs) <= MAX_POINTS:
        return list(xs), list(ys)
    size = math.ceil(2 * len(xs) / (MAX_POINTS - 2))
    kept: set[int] = {0, len(xs) - 1}
    for start in range(0, len(xs), size):
        stretch = range(start, min(start + size, len(xs)))
        kept |= {min(stretch, key=ys.__getitem__), max(stretch, key=ys.__getitem__)}
    order = sorted(kept)
    return [xs[i] for i in order], [ys[i] for i in order]


def ticks(low: float, high: float, *, count: int = 6, log: bool = False) -> list[float]:
    """Round values in [low, high]: 1, 2 or 5 times a power of ten, about `count` of them."""
    if log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for factors in ((1,), (1, 3), (1, 2, 5)):
            found = [f * 10.0**p for p in powers for f in factors if low <= f * 10.0**p <= high]
            if len(found) >= 3:
                break
        return found
    step = 10.0 ** math.floor(math.log10((high - low) / count))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= count)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_labels(marks: list[float], *, percent: bool = False) -> list[str]:
    """The texts of an axis, with as many digits as tell its marks apart."""
    labels: list[str] = []
    for digits in range(4, 17):
        labels = [f"{100 * mark:.{digits}g}%" if percent else short(mark, digits) for mark in marks]
        if len(set(labels)) == len(marks):
            break
    return labels


def short(value: float, digits: int = 4) -> str:
    """12,500,000 -> 12.5M."""
    for scale, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.{digits}g}{unit}"
    return f"{value:.{digits}g}"


def _look(series: Series) -> str:
    return f"c{series.colour % len(PNG_COLOURS)} dash{series.dash % len(_PNG_DASHES)}"


def _range(chart: Chart) -> tuple[float, float]:
    """Of the smoothed curves and of all but the wildest hundredth of the raw values."""
    values: list[float] = []
    for series in chart.series:
        values += smooth(series.ys) if series.noisy else series.ys
        if series.noisy:
            ordered, cut = sorted(series.ys), len(series.ys) // 200
            values += [ordered[cut], ordered[-1 - cut]]
    if chart.log:
        positive = [value for value in values if value > 0] or [1.0]
        return min(positive) / 1.15, max(positive) * 1.15
    low, high = min(values), max(values)
    low = min(0.0, low) if chart.from_zero else low - 0.05 * (high - low)
    margin = 0.05 * (high - low) or abs(high) or 1.0
    return low, high + margin if not chart.percent else min(high + margin, max(high, 1.0))


def _scale(low: float, high: float, start: float, end: float, *, log: bool = False):
    if log:
        return lambda v: start + (end - start) * math.log(max(v, low / 10) / low) / math.log(high / low)
    return lambda v: start + (end - start) * (v - low) / (high - low)


def _path(points, to_x, to_y) -> str:
    return "M" + "L".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in points)


def _pyplot():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
