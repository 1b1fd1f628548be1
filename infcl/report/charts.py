"""Charts of a report: records of a run -> charts, as data that drawing.py draws.

The x-axis is samples_seen.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from infcl.report.records import Run


@dataclass(frozen=True)
class Series:
    label: str
    xs: list[float]
    ys: list[float]
    colour: int = 0  # index of the palette
    noisy: bool = False  # draw it faint, with a running mean on top

    @property
    def curve(self) -> np.ndarray:
        """The values to draw and to read: the running mean if they are noisy."""
        return smooth(self.ys) if self.noisy else np.array(self.ys)


@dataclass(frozen=True)
class Chart:
    """Definition of a chart; `_filled` adds its series."""

    title: str
    y: str  # label of the y-axis
    quantities: dict[str, str] = field(default_factory=dict)  # {key of train records, or KIND/key of others: label}
    note: str = ""
    log: bool = False
    from_zero: bool = False
    percent: bool = False
    noisy: bool = False  # its train records are
    only_if_any: bool = False  # leave out a series of zeros
    series: list[Series] = field(default_factory=list)


_SHARE: dict[str, Any] = {"percent": True, "from_zero": True}
_LOSS = Chart("Loss of the global batch", "loss", {"loss": "train", "retrieval/val_loss": "validation"}, noisy=True)
_LOGIT_SCALE = Chart("Logit scale", "logit scale", {"logit_scale": "scale"})
_LEARNING = (
    _LOSS,
    Chart("Loss by direction", "loss",
          {"micro_loss_image_to_text": "image→text", "micro_loss_text_to_image": "text→image"},
          note="among {} samples of one micro-batch, mean over ranks", noisy=True),
    Chart("Accuracy in the micro-batch", "share of the samples", {"micro_accuracy": "accuracy"},
          note="how often the partner scores highest among {}", noisy=True, **_SHARE),
    _LOGIT_SCALE,
    Chart("Gradient norm", "norm",
          {"grad_norm": "all", "grad_norm_image": "image tower", "grad_norm_text": "text tower"},
          note="before clipping", noisy=True, log=True),
    Chart("Learning rate", "learning rate", {"lr": "lr"}, from_zero=True),
)  # fmt: skip
_SPEED = (
    Chart("Samples per second", "samples/s", {"samples_per_second": "samples/s"}, noisy=True, from_zero=True),
    Chart("Model FLOPs utilisation", "share of the peak", {"mfu": "MFU"}, noisy=True, **_SHARE),
    Chart("Time spent waiting for data", "share of the step", {"data_wait": "data"}, noisy=True, **_SHARE),
    Chart("Peak memory of rank 0", "MiB", {"peak_memory_mb": "MiB"},
          note="of the device on a GPU, resident on a CPU", from_zero=True),
    Chart("Skipped steps", "steps", {"skipped_steps": "steps"}, from_zero=True, only_if_any=True),
    Chart("Skipped samples", "samples", {"skipped_samples": "samples"},
          note="bad ones, replaced by others; since the last start", from_zero=True, only_if_any=True),
)  # fmt: skip
_EVALUATIONS = (
    *(Chart(f"Recall@{k}", "share of the queries",
            {f"retrieval/image_to_text_r{k}": "image→text", f"retrieval/text_to_image_r{k}": "text→image"}, **_SHARE)
      for k in (1, 5)),
    Chart("Zero-shot accuracy", "share of the images", {"zero_shot/top1": "top-1", "zero_shot/top5": "top-5"},
          **_SHARE),
)  # fmt: skip


def train_charts(run: Run) -> dict[str, list[Chart]]:
    """Return {"Learning": charts, "Speed and memory": charts} without the charts that have no values."""
    samples = min(1024, run.config["batch_size"]) if "batch_size" in run.config else "the"
    groups = {}
    for title, charts in (("Learning", _LEARNING), ("Speed and memory", _SPEED)):
        filled = [_filled(replace(chart, note=chart.note.format(samples)), run) for chart in charts]
        groups[title] = [chart for chart in filled if chart.series]
    return groups


def evaluation_charts(run: Run) -> list[Chart]:
    """Return charts of recall and accuracy over samples seen, for evaluations that the run repeated at least once."""
    charts = [_filled(chart, run) for chart in _EVALUATIONS]
    return [chart for chart in charts if any(len(series.xs) > 1 for series in chart.series)]


def loss_curve(records: list[dict]) -> list[Chart]:
    """Return charts of the loss and of the logit scale over the "train" records of a run."""
    run = Run(Path(), "", records, {}, [], {}, {}, None)
    return [_filled(chart, run) for chart in (_LOSS, _LOGIT_SCALE)]


def smooth(values: list[float]) -> np.ndarray:
    """Return the running mean over a thirtieth of the curve. The window is centred, and shorter at the ends."""
    sums, at = np.cumsum([0.0, *values]), np.arange(len(values))
    reach = np.minimum(len(values) // 60, np.minimum(at, at[::-1]))
    return (sums[at + reach + 1] - sums[at - reach]) / (2 * reach + 1)


def _filled(chart: Chart, run: Run) -> Chart:
    """Return the chart with the series of the run."""
    series = []
    for colour, (key, label) in enumerate(chart.quantities.items()):
        kind, _, name = key.rpartition("/")
        records = [record for record in (run.evaluations.get(kind, []) if kind else run.train) if name in record]
        xs, ys = ([float(record[of]) for record in records] for of in ("samples_seen", name))
        if ys and (any(ys) or not chart.only_if_any):
            series.append(Series(label, xs, ys, colour, noisy=chart.noisy and not kind))
    return replace(chart, series=series)
