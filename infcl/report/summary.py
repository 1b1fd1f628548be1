"""The summary table that a run prints at its end."""

from infcl.config import aligned, counted

_NO_OPEN_CLIP = "  (for infcl.convert.export.load_exported: open_clip has no convolutional stem)"


def summary_table(summary: dict) -> str:
    """Format summary.json as aligned lines for a terminal, without evaluations that did not run."""
    paths = summary["paths"]
    rows = [
        ("zero-shot top-1", _share(summary["zero_shot_top1"])),
        ("image->text recall@1", _share(summary["image_to_text_r1"])),
        ("text->image recall@1", _share(summary["text_to_image_r1"])),
        ("samples seen", f"{summary['samples_seen']:,}  ({summary['steps']} steps, {summary['train_seconds']:.0f} s)"),
        ("skipped steps", _skipped_steps(summary)),
        ("skipped samples", _skipped(summary["data"])),
        ("failed saves", _failed_saves(summary)),
        ("peak memory", f"{summary['peak_memory_mb']:,.0f} MiB per rank"),
        ("engine", f"ZeRO-{summary['zero_stage']}, {counted(summary['world_size'], 'rank')}"),
        ("run folder", paths["run"]),
        ("loss curve", paths["loss_curve"]),
        ("exported model", paths["export"] + ("" if summary.get("loads_in_open_clip", True) else _NO_OPEN_CLIP)),
    ]
    return "\n".join(["", aligned(rows), ""])


def skipped_by_cause(data: dict) -> dict[str, int]:
    """Return the counters of unused samples: bad ones (skipped/) and those that the index excludes (index/)."""
    return {name: n for name, n in data.items() if n and name.startswith(("skipped/", "index/"))}


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"


def _skipped_steps(summary: dict) -> str | None:
    """Return None if no step was skipped."""
    count = summary.get("skipped_steps")
    return f"{count} of {summary['steps']}: their gradients were not finite" if count else None


def _failed_saves(summary: dict) -> str | None:
    """Return None if every checkpoint was written."""
    count, newest = summary.get("failed_saves"), summary["paths"].get("checkpoint")
    return f"{count}; the newest checkpoint is {newest or 'none'}" if count else None


def _skipped(data: dict) -> str:
    return ", ".join(f"{n} {name}" for name, n in skipped_by_cause(data).items()) or "none"
