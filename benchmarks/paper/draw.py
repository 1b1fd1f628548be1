"""Plots in one style: dark lines on a light ground, which is part of the picture and so readable on any page.

A PNG carries a digest of what it shows, by which a test sees that it is up to date without drawing it again.
"""

import hashlib
import json
from pathlib import Path

COLOURS = {
    "infcl": "#1f4e79",
    "official inf_cl 1.2.1": "#c0504d",
    "CLIP": "#7a7a7a",
    "CLIP (b x b)": "#7a7a7a",
    "OpenCLIP": "#d98b2b",
    "open_clip's ClipLoss": "#d98b2b",
    "DisCo-CLIP": "#5b8c3e",
    "SigLIP": "#8d5aa8",
    "infcl, SigLIP": "#8d5aa8",
    "open_clip's SigLipLoss": "#c7a3d6",
    "lr as it is": "#1f4e79",
    "lr x sqrt(batch)": "#d98b2b",
    "lr x batch": "#c0504d",
}
GROUND, INK = "#fcfcfa", "#2b2b2b"


def digest(panels: dict) -> str:
    """Of what is plotted, to six digits."""
    rounded = {
        panel: {
            label: [[float(f"{value:.6g}") for value in point] for point in points] for label, points in series.items()
        }
        for panel, series in panels.items()
    }
    return hashlib.sha256(json.dumps(rounded, sort_keys=True).encode()).hexdigest()[:16]


def digest_of(picture: Path) -> str | None:
    """Which digest a PNG carries."""
    from PIL import Image

    if not picture.is_file():
        return None
    with Image.open(picture) as image:
        return image.info.get("Description")


def draw(
    panels: dict,
    picture: Path,
    *,
    x: tuple[str, ...],
    y: str,
    log_x: bool = True,
    log_y: bool = True,
    ticks: str = "k",
    overlaid: bool = False,
) -> None:
    """{panel: {label: [(x, y) or (x, y, deviation)]}} -> PNG, up to three panels beside each other, four as two by two.

    x: the axis of each panel, the last one's for those behind it.
    log_y: of panels whose values span a decade; within one a logarithmic axis has no readable ticks.
    ticks: "k": x positions as the data has them, in units of 1024; "": matplotlib chooses.
    overlaid: curves that are expected to hide each other: the first widest, each later one thinner and on top.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FixedLocator, NullLocator

    columns = len(panels) if len(panels) <= 3 else 2
    lines = -(-len(panels) // columns)
    many = max(map(len, panels.values())) > 4  # curves: no corner is free of them
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.32), "ncols": 2}
    size = (4.4 * columns + 0.4, (4.4 if many else 3.5) * lines)
    figure, axes = pyplot.subplots(lines, columns, figsize=size, dpi=110, squeeze=False, facecolor=GROUND)
    for axis, name, (panel, series) in zip(axes.flat, [*x, *[x[-1]] * len(panels)], panels.items()):
        axis.set_facecolor(GROUND)
        for order, (label, points) in enumerate(series.items()):
            xs, ys = [point[0] for point in points], [point[1] for point in points]
            colour = COLOURS.get(label, INK)
            width = (7.0, 4.8, 3.0, 1.3)[min(order, 3)] if overlaid and len(series) > 1 else 1.8
            marker = None if overlaid else "o"
            alpha = 0.55 if overlaid and order < 3 and len(series) > 1 else 1.0
            style = {"linewidth": width, "alpha": alpha, "marker": marker, "markersize": 4}
            axis.plot(xs, ys, color=colour, label=label, zorder=2 if overlaid else 3 - order / 100, **style)
            if overlaid and len(points[0]) > 2:
                low, high = [p[1] - p[2] for p in points], [p[1] + p[2] for p in points]
                axis.fill_between(xs, low, high, color=colour, alpha=0.12, linewidth=0)
        axis.set_xscale("log" if log_x else "linear", **({"base": 2} if log_x else {}))
        axis.set_yscale("log" if log_y and _spans_a_decade(series) else "linear")
        if ticks == "k":
            places = sorted({point[0] for points in series.values() for point in points})
            axis.xaxis.set_major_locator(FixedLocator(places))
            axis.xaxis.set_minor_locator(NullLocator())
            axis.set_xticklabels([_short(place) for place in places], rotation=45 if len(places) > 6 else 0)
        axis.set_title(panel, fontsize=10, color=INK)
        axis.set_xlabel(name, color=INK)
        axis.tick_params(colors=INK, labelsize=8)
        axis.grid(alpha=0.25, which="major")
        axis.legend(frameon=False, fontsize=8, **(below if many else {}))
    for axis in axes[:, 0]:
        axis.set_ylabel(y, color=INK)
    figure.tight_layout()
    _save(figure, picture, panels)


def draw_bar(panels: dict, picture: Path) -> None:
    """{axis: {part: [(width,)]}} of one panel -> PNG: the parts as one stacked bar, each labelled with its width."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ((axis_label, parts),) = panels.items()
    figure, axis = pyplot.subplots(figsize=(7, 1.8), dpi=110, facecolor=GROUND)
    axis.set_facecolor(GROUND)
    left = 0.0
    for (name, [(width,)]), colour in zip(parts.items(), ("#3b6ea8", "#e0a33a", "#b5473c", "#b9b9b9")):
        axis.barh([0], [width], left=left, color=colour, label=f"{name}: {width:.1f}")
        left += width
    axis.set_yticks([])
    axis.set_xlabel(axis_label, color=INK)
    axis.tick_params(colors=INK, labelsize=8)
    axis.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=8)
    _save(figure, picture, panels)


def _spans_a_decade(series: dict) -> bool:
    values = [point[1] for points in series.values() for point in points]
    return max(values) > 10 * min(values)


def _save(figure, picture: Path, panels: dict) -> None:
    from matplotlib import pyplot

    metadata = {"Description": digest(panels), "Software": None}
    figure.savefig(picture, facecolor=GROUND, bbox_inches="tight", metadata=metadata)
    pyplot.close(figure)


def _short(pairs: float) -> str:
    return f"{pairs / 1024:g}k" if pairs >= 1024 else f"{pairs:g}"
