"""The summary table that a run prints at its end."""

from infcl.config import aligned, counted


def summary_table(summary: dict) -> str:
    """Format summary.json as aligned lines for a terminal, without evaluations that did not run."""
    paths, steps = summary["paths"], summary["steps"]
    skipped, failed = summary.get("skipped_steps"), summary.get("failed_saves")
    unused = [f"{n} {name}" for name, n in summary["data"].items() if n and name.startswith(("skipped/", "index/"))]
    rows = [
        ("zero-shot top-1", _share(summary["zero_shot_top1"])),
        ("image->text recall@1", _share(summary["image_to_text_r1"])),
        ("text->image recall@1", _share(summary["text_to_image_r1"])),
        ("samples seen", f"{summary['samples_seen']:,}  ({counted(steps, 'step')}, {summary['train_seconds']:.0f} s)"),
        ("skipped steps", f"{skipped} of {steps}: their gradients were not finite" if skipped else None),
        ("skipped samples", ", ".join(unused) or "none"),
        ("failed saves", f"{failed}; the newest checkpoint is {paths.get('checkpoint') or 'none'}" if failed else None),
        ("peak memory", f"{summary['peak_memory_mb']:,.0f} MiB per rank"),
        ("engine", f"ZeRO-{summary['zero_stage']}, {counted(summary['world_size'], 'rank')}"),
        ("run folder", paths["run"]),
        ("loss curve", paths["loss_curve"]),
        ("exported model", paths["export"]),
    ]
    return "\n".join(["", aligned(rows), ""])


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"
