"""Summarise the rows of study.py: mean and deviation over seeds, as Markdown tables and a chart.

python examples/icons/table.py results/rows.csv --chart batch-size.png
"""

import argparse
import csv
import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCORES = ("image_to_text_r1", "text_to_image_r1", "top1_carbon", "top1_vaadin", "top1_fluent-emoji-flat")
GROUP = ("model", "batch", "steps", "treatment", "loss", "start", "teacher", "flags", "train", "lr", "warmup")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--chart", type=Path, help="picture of the score at equal samples and steps")
    args = parser.parse_args(arguments)
    with open(args.rows, newline="") as file:
        groups = grouped(list(csv.DictReader(file)))
    print("|", " | ".join([*GROUP, "seeds", "loss / ln B", *SCORES, "samples/s"]), "|")
    print("|---" * (len(GROUP) + len(SCORES) + 3) + "|")
    for key, rows in sorted(groups.items(), key=lambda item: (item[0][0], int(item[0][1]), item[0][2:])):
        loss = statistics.mean(float(row["final_loss"]) / float(row["ln_batch"]) for row in rows)
        rate = statistics.median(float(row["samples_per_second"]) for row in rows)
        cells = [*key, len(rows), f"{loss:.3f}", *(percent(rows, name) for name in SCORES), f"{rate:,.0f}"]
        print("|", " | ".join(map(str, cells)), "|")
    if args.chart:
        draw(groups, args.chart)


def grouped(rows: list[dict]) -> dict[tuple[str, ...], list[dict]]:
    """Return the rows by all settings except the seed. A run that starts from others is named by their batches."""
    groups = defaultdict(list)
    for row in rows:
        runs = {key: row[key].split("-")[0].removeprefix("b") for key in ("start", "teacher")}
        groups[tuple({**row, **runs}[name] for name in GROUP)].append(row)
    return dict(groups)


def percent(rows: list[dict], name: str) -> str:
    values = [100 * float(row[name]) for row in rows]
    return f"{statistics.mean(values):.1f}" + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")


def draw(groups: dict[tuple[str, ...], list[dict]], path: Path) -> None:
    """Draw the best setting of each batch. Left: equal samples; right: equal steps."""
    from matplotlib.figure import Figure

    rows = [rows for rows in groups.values() if not rows[0]["train"]]
    if not rows:
        raise SystemExit("--chart: no row is of a run on all training icons")
    samples = statistics.mode(int(row["samples"]) for group in rows for row in group)
    plain = [group for group in rows if _kind(group[0]) == "inf_cl, negative"]
    batches = defaultdict(set)  # of a number of steps
    for group in plain:
        batches[group[0]["steps"]].add(group[0]["batch"])
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _lines(left, [group for group in rows if int(group[0]["samples"]) == samples or group[0]["start"]], _kind)
    _lines(right, [group for group in plain if len(batches[group[0]["steps"]]) > 2], "{steps} steps".format_map)
    left.set_title(f"equal samples: {samples:,}")
    right.set_title("equal steps")
    left.set_ylabel("recall at 1, mean of both ways (%)")
    left.set_yscale("log")
    figure.savefig(path, dpi=150)


def _kind(row: dict) -> str:
    first = row["start"].split("-")[0].removeprefix("b")
    more = [row["flags"], "distilled" * bool(row["teacher"]), f"second half of a run at {first}" * bool(first)]
    return ", ".join(filter(None, [row["loss"], row["treatment"], *more]))


def _lines(axes: "Axes", groups: list[list[dict]], name_of: Callable[[dict], str]) -> None:
    """Draw a line for each name: the mean and deviation over the seeds of each batch's best setting."""
    lines: dict[str, dict[int, list[float]]] = defaultdict(dict)
    for rows in groups:
        values, best = [100 * float(row["score"]) for row in rows], lines[name_of(rows[0])]
        batch = int(rows[0]["batch"])
        best[batch] = max(best.get(batch, []), values, key=lambda v: (len(v), sum(v)))
    for (name, points), marker in zip(sorted(lines.items()), itertools.cycle("osD^v")):
        batches = sorted(points)
        means = [statistics.mean(points[batch]) for batch in batches]
        spreads = [statistics.stdev(points[batch]) if len(points[batch]) > 1 else 0.0 for batch in batches]
        axes.errorbar(batches, means, yerr=spreads, marker=marker, fillstyle="none", capsize=3, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("global batch (samples)")
    axes.grid(alpha=0.3)
    axes.legend()


if __name__ == "__main__":
    main()
