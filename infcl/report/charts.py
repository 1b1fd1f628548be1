"""Charts of a report: records of one or more runs -> charts, as data that drawing.py draws.

The x-axis is samples_seen, except for one chart over the training time. With several runs the colour shows the run and
the dash the quantity; with one run the colour shows the quantity.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from infcl.report.records import Run


@dataclass(frozen=True)
class Series:
    label: str
    xs: list[float]
    ys: list[float]
    colour: int  # index of the palette
    dash: int = 0  # 0 solid, 1 dashed, 2 dotted
    noisy: bool = False  # draw it faint, with a running mean on top
    points: bool = False  # few values: draw markers on the line
    right: bool = False  # use a separate axis on the right


@dataclass(frozen=True)
class Chart:
    """Definition of a chart; `_filled` adds its series."""

    name: str
    title: str
    y: str  # label of the y-axis
    quantities: dict[str, str] = field(default_factory=dict)  # {key in the records: label}
    kind: str = "train"  # which records
    x: str = "samples seen"
    note: str = ""
    log: bool = False
    from_zero: bool = False
    percent: bool = False
    noisy: bool = False
    points: bool = False
    only_if_any: bool = False  # leave out a series of zeros
    series: list[Series] = field(default_factory=list)


_SHARE: dict[str, Any] = {"percent": True, "from_zero": True}
_LEARNING = (
    Chart("loss", "Loss of the global batch", "loss", {"loss": "train"}, noisy=True),
    Chart("loss_time", "Loss against training time", "loss", {"loss": "train"}, noisy=True),
    Chart("directions", "Loss by direction", "loss",
          {"micro_loss_image_to_text": "image→text", "micro_loss_text_to_image": "text→image"},
          note="among {} samples of one micro-batch, mean over ranks", noisy=True),
    Chart("accuracy", "Accuracy in the micro-batch", "share of the samples", {"micro_accuracy": "accuracy"},
          note="how often the partner scores highest among {}", noisy=True, **_SHARE),
    Chart("logit_scale", "Logit scale", "factor", {"logit_scale": "scale"}),
    Chart("grad_norm", "Gradient norm", "norm",
          {"grad_norm": "all", "grad_norm_image": "image tower", "grad_norm_text": "text tower"},
          note="before clipping", noisy=True, log=True),
    Chart("lr", "Learning rate", "learning rate", {"lr": "lr"}, from_zero=True),
)  # fmt: skip
_SPEED = (
    Chart("throughput", "Samples per second", "samples/s", {"samples_per_second": "samples/s"},
          noisy=True, from_zero=True),
    Chart("mfu", "Model FLOPs utilisation", "share of the peak", {"mfu": "MFU"}, noisy=True, **_SHARE),
    Chart("data_wait", "Time spent waiting for data", "share of the step", {"data_wait": "share of the step"},
          noisy=True, **_SHARE),
    Chart("memory", "Peak memory of rank 0", "MiB", {"peak_memory_mb": "MiB"},
          note="of the device on a GPU, resident on a CPU", from_zero=True),
    Chart("skipped", "Skipped steps", "steps", {"skipped_steps": "steps"}, from_zero=True, only_if_any=True),
    Chart("skipped_samples", "Skipped samples", "samples", {"skipped_samples": "samples"},
          note="bad ones, replaced by others; since the last start", from_zero=True, only_if_any=True),
)  # fmt: skip
_EVALUATIONS = (
    *(Chart(f"recall_{k}", f"Recall@{k}", "share of the queries",
            {f"image_to_text_r{k}": "image→text", f"text_to_image_r{k}": "text→image"},
            kind="retrieval", points=True, **_SHARE) for k in (1, 5)),
    Chart("zero_shot", "Zero-shot accuracy", "share of the images", {"top1": "top-1", "top5": "top-5"},
          kind="zero_shot", points=True, **_SHARE),
)  # fmt: skip
_VALIDATION = Chart("val", "", "loss", {"val_loss": "validation"}, kind="retrieval", points=True)


def train_charts(runs: list[Run]) -> dict[str, list[Chart]]:
    """Return {"Learning": charts, "Speed and memory": charts} without the charts that have no values."""
    sizes = sorted({min(1024, run.config["batch_size"]) for run in runs if "batch_size" in run.config})
    samples = " or ".join(map(str, sizes)) or "the"
    groups = {}
    for title, charts in (("Learning", _LEARNING), ("Speed and memory", _SPEED)):
        filled = [_filled(replace(chart, note=chart.note.format(samples)), runs) for chart in charts]
        groups[title] = [chart for chart in filled if chart.series]
    return groups


def evaluation_charts(runs: list[Run]) -> list[Chart]:
    """Return charts of recall and accuracy over samples seen, for evaluations that a run repeated at least once."""
    charts = [_filled(chart, runs) for chart in _EVALUATIONS]
    return [chart for chart in charts if any(len(series.xs) > 1 for series in chart.series)]


def loss_curve(records: list[dict]) -> Chart:
    """Return a chart of the loss and, on a separate axis, the logit scale of a run's "train" records."""
    known = [record for record in records if "loss" in record]  # a skipped step may have none
    xs = [record["samples_seen"] for record in known]
    loss = Series("loss of the global batch", xs, [record["loss"] for record in known], 0, noisy=True)
    scale = Series("logit scale", xs, [record["logit_scale"] for record in known], 1, right=True)
    return Chart("loss_curve", "", "contrastive loss", series=[loss, scale])


def _filled(chart: Chart, runs: list[Run]) -> Chart:
    """Return the chart with the series of the runs."""
    series, several = [], len(runs) > 1
    for r, run in enumerate(runs):
        records = run.train if chart.kind == "train" else run.evaluations.get(chart.kind, [])
        for q, (key, label) in enumerate(chart.quantities.items()):
            known = [(record["samples_seen"], record[key]) for record in records if key in record]
            if not known or (chart.only_if_any and not any(y for _, y in known)):
                continue
            xs, ys = [float(x) for x, _ in known], [y for _, y in known]
            if chart.name == "loss_time":
                hours = _hours(run)
                xs = [hours[x] for x in xs]
            text = (f"{run.name} · {label}" if len(chart.quantities) > 1 else run.name) if several else label
            look: dict[str, Any] = {"colour": r, "dash": q} if several else {"colour": q}
            series.append(Series(text, xs, ys, noisy=chart.noisy, points=chart.points, **look))
    if chart.name == "loss":
        for held_out in _filled(_VALIDATION, runs).series:
            look = {"label": f"{held_out.label} · validation", "dash": 1} if several else {"colour": 1}
            series.append(replace(held_out, **look))
    if chart.name == "loss_time":
        return _in_a_unit(chart, series)
    return replace(chart, series=series)


def _hours(run: Run) -> dict[float, float]:
    """Return {samples seen: hours spent in steps}, without evaluations, checkpoints and restarts."""
    seen, elapsed, hours = 0, 0.0, {}
    for record in run.train:
        rate = record.get("samples_per_second") or float("inf")
        elapsed, seen = elapsed + (record["samples_seen"] - seen) / rate / 3600, record["samples_seen"]
        hours[seen] = elapsed
    return hours


def _in_a_unit(chart: Chart, series: list[Series]) -> Chart:
    """Return the chart over hours, minutes or seconds, without series if the records have no times."""
    longest = max((max(one.xs) for one in series), default=0.0)
    factor, unit = (1, "hours") if longest >= 2 else (60, "minutes") if longest >= 1 / 30 else (3600, "seconds")
    scaled = [replace(one, xs=[factor * x for x in one.xs]) for one in series if longest]
    return replace(chart, series=scaled, x=f"{unit} of training")
