"""What a person sees of a finished run: the table at its end and the picture of its loss curve."""

import json
from pathlib import Path


def summary_table(summary: dict) -> str:
    """summary.json -> aligned lines for a terminal; evaluations that did not run are left out."""
    paths = summary["paths"]
    rows = [
        ("zero-shot top-1", _share(summary["zero_shot_top1"])),
        ("image->text recall@1", _share(summary["image_to_text_r1"])),
        ("text->image recall@1", _share(summary["text_to_image_r1"])),
        ("samples seen", f"{summary['samples_seen']:,}  ({summary['steps']} steps, {summary['train_seconds']:.0f} s)"),
        ("skipped samples", _skipped(summary["data"])),
        ("peak memory", f"{summary['peak_memory_mb']:,.0f} MiB a rank"),
        ("engine", f"ZeRO-{summary['zero_stage']}, {summary['world_size']} rank(s)"),
        ("run folder", paths["run"]),
        ("loss curve", paths["loss_curve"]),
        ("exported model", paths["export"]),
    ]
    rows = [(name, value) for name, value in rows if value is not None]
    width = max(len(name) for name, _ in rows)
    return "\n".join(["", *(f"  {name:<{width}}  {value}" for name, value in rows), ""])


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"


def _skipped(data: dict) -> str:
    found = [f"{n} {name}" for name, n in data.items() if n and name.startswith(("skipped/", "index/"))]
    return ", ".join(found) or "none"


def read_metrics(path: Path, kind: str) -> list[dict]:
    """The records of one kind, ordered by step; of steps that a resumed run did again, the last stands."""
    by_step = {}
    for line in Path(path).read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == kind:
            by_step[record["step"]] = record
    return [by_step[step] for step in sorted(by_step)]


def draw_loss_curve(metrics: Path, picture: Path) -> None:
    """Loss (raw and smoothed) and logit scale over samples_seen, from metrics.jsonl into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = read_metrics(metrics, "train")
    samples, loss = [r["samples_seen"] for r in records], [r["loss"] for r in records]
    smooth, average = [], None
    for value in loss:
        average = value if average is None else 0.95 * average + 0.05 * value
        smooth.append(average)
    figure, axis = plt.subplots(figsize=(7, 4), dpi=120)
    axis.plot(samples, loss, color="#9db8d2", linewidth=0.8, label="loss of the global batch")
    axis.plot(samples, smooth, color="#1f4e79", linewidth=1.8, label="smoothed")
    axis.set_xlabel("samples seen")
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
