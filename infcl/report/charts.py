"""Which curves a report shows: records of one or more runs -> charts, as data that drawing.py turns into pictures.

The x-axis is samples_seen, of one chart the training time. With several runs the colour is the run and the dash the
quantity; with one run the colour is the quantity.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from infcl.report.records import Run


@dataclass(frozen=True)
class Series:
    label: str
    xs: list[float]
    ys: list[float]
    colour: int  # index of the palette
    dash: int = 0  # 0 solid, 1 dashed, 2 dotted
    noisy: bool = False  # drawn faint, with a running mean on top
    points: bool = False  # few values: markers on the line


@dataclass(frozen=True)
class Chart:
    name: str  # of its PNG
    title: str
    series: list[Series]
    y: str  # what the y-axis counts
    x: str = "samples seen"
    note: str = ""
    log: bool = False
    from_zero: bool = False
    percent: bool = False


Quantity = tuple[str, str]  # key in the records, label


def train_charts(runs: list[Run]) -> dict[str, list[Chart]]:
    """{"Learning": charts, "Speed and memory": charts}; a chart without a single value is left out."""
    sample = _sample_size(runs)
    learning = [
        _with_validation(
            runs, _chart(runs, "loss", "Loss of the global batch", [("loss", "train")], y="loss", noisy=True)
        ),
        _loss_over_time(runs),
        _chart(
            runs,
            "directions",
            "Loss by direction",
            [("micro_loss_image_to_text", "image→text"), ("micro_loss_text_to_image", "text→image")],
            y="loss",
            note=f"among {sample} samples of one micro-batch, mean over ranks",
            noisy=True,
        ),
        _chart(
            runs,
            "accuracy",
            "Accuracy in the micro-batch",
            [("micro_accuracy", "accuracy")],
            y="share of the samples",
            note=f"how often the partner scores highest among {sample}",
            noisy=True,
            percent=True,
            from_zero=True,
        ),
        _chart(runs, "logit_scale", "Logit scale", [("logit_scale", "scale")], y="factor"),
        _chart(
            runs,
            "grad_norm",
            "Gradient norm",
            [("grad_norm", "all"), ("grad_norm_image", "image tower"), ("grad_norm_text", "text tower")],
            y="norm",
            note="before clipping",
            noisy=True,
            log=True,
        ),
        _chart(runs, "lr", "Learning rate", [("lr", "lr")], y="learning rate", from_zero=True),
    ]
    speed = [
        _chart(
            runs,
            "throughput",
            "Samples per second",
            [("samples_per_second", "samples/s")],
            y="samples/s",
            noisy=True,
            from_zero=True,
        ),
        _chart(
            runs,
            "mfu",
            "Model FLOPs utilisation",
            [("mfu", "MFU")],
            y="share of the peak",
            noisy=True,
            percent=True,
            from_zero=True,
        ),
        _chart(
            runs,
            "data_wait",
            "Time spent waiting for data",
            [("data_wait", "share of the step")],
            y="share of the step",
            noisy=True,
            percent=True,
            from_zero=True,
        ),
        _chart(
            runs,
            "memory",
            "Peak memory of rank 0",
            [("peak_memory_mb", "MiB")],
            y="MiB",
            note="of the device on a GPU, resident on a CPU",
            from_zero=True,
        ),
        _chart(
            runs, "skipped", "Skipped steps", [("skipped_steps", "steps")], y="steps", from_zero=True, only_if_any=True
        ),
        _chart(
            runs,
            "skipped_samples",
            "Skipped samples",
            [("skipped_samples", "samples")],
            y="samples",
            note="bad ones, replaced by others; since the last start",
            from_zero=True,
            only_if_any=True,
        ),
    ]
    groups = {"Learning": learning, "Speed and memory": speed}
    return {title: [chart for chart in charts if chart is not None] for title, charts in groups.items()}


def evaluation_charts(runs: list[Run]) -> list[Chart]:
    """Recall and accuracy over samples seen, wherever a run was evaluated at least twice."""
    wanted = [
        ("retrieval", "recall_1", "Recall@1", [("image_to_text_r1", "image→text"), ("text_to_image_r1", "text→image")]),
        ("retrieval", "recall_5", "Recall@5", [("image_to_text_r5", "image→text"), ("text_to_image_r5", "text→image")]),
        ("zero_shot", "zero_shot", "Zero-shot accuracy", [("top1", "top-1"), ("top5", "top-5")]),
    ]
    charts = [
        _chart(
            runs,
            name,
            title,
            quantities,
            y="share of the queries" if kind == "retrieval" else "share of the images",
            kind=kind,
            percent=True,
            from_zero=True,
            points=True,
        )
        for kind, name, title, quantities in wanted
    ]
    return [chart for chart in charts if chart is not None and any(len(series.xs) > 1 for series in chart.series)]


def _chart(
    runs: list[Run],
    name: str,
    title: str,
    quantities: list[Quantity],
    *,
    kind: str = "train",
    noisy: bool = False,
    points: bool = False,
    only_if_any: bool = False,
    **options,
) -> Chart | None:
    series = []
    for r, run in enumerate(runs):
        records = run.train if kind == "train" else run.evaluations.get(kind, [])
        for q, (key, label) in enumerate(quantities):
            known = [(record["samples_seen"], record[key]) for record in records if key in record]
            if not known or (only_if_any and not any(y for _, y in known)):
                continue
            xs, ys = zip(*known)
            several = len(runs) > 1
            text = (f"{run.name} · {label}" if len(quantities) > 1 else run.name) if several else label
            look: dict[str, Any] = {"colour": r, "dash": q} if several else {"colour": q}
            series.append(Series(text, list(xs), list(ys), noisy=noisy, points=points, **look))
    return Chart(name, title, series, **options) if series else None


def _loss_over_time(runs: list[Run]) -> Chart | None:
    """The loss against the time spent in steps: evaluations, checkpoints and restarts are not in it."""
    hours = []
    for run in runs:
        seen, elapsed, times = 0, 0.0, []
        for record in run.train:
            rate = record.get("samples_per_second") or float("inf")
            elapsed, seen = elapsed + (record["samples_seen"] - seen) / rate / 3600, record["samples_seen"]
            times.append(elapsed)
        hours.append({record["samples_seen"]: time for record, time in zip(run.train, times)})
    chart = _chart(runs, "loss_time", "Loss against training time", [("loss", "train")], y="loss", noisy=True)
    if chart is None or not (longest := max(max(times.values()) for times in hours)):
        return None
    factor, unit = (1, "hours") if longest >= 2 else (60, "minutes") if longest >= 1 / 30 else (3600, "seconds")
    with_loss = [times for run, times in zip(runs, hours) if any("loss" in record for record in run.train)]
    series = [
        dataclasses.replace(one, xs=[factor * times[samples] for samples in one.xs])
        for one, times in zip(chart.series, with_loss)
    ]
    return dataclasses.replace(chart, series=series, x=f"{unit} of training")


def _with_validation(runs: list[Run], chart: Chart | None) -> Chart | None:
    """The loss of held-out global batches, where it was evaluated, on the same axes."""
    held_out = _chart(runs, "val", "", [("val_loss", "validation")], y="loss", kind="retrieval", points=True)
    if chart is None or held_out is None:
        return chart
    several = len(runs) > 1
    for series in held_out.series:
        label = f"{series.label} · validation" if several else series.label
        look: dict[str, Any] = {"colour": series.colour, "dash": 1} if several else {"colour": 1}
        chart.series.append(Series(label, series.xs, series.ys, points=True, **look))
    return chart


def _sample_size(runs: list[Run]) -> str:
    sizes = sorted({min(1024, run.config["batch_size"]) for run in runs if "batch_size" in run.config})
    return " or ".join(map(str, sizes)) or "the"
