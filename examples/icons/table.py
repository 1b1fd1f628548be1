"""Summarise the rows of study.py: mean and deviation over seeds, as Markdown tables and a chart.

python examples/icons/table.py results/rows.csv --chart batch-size.png
"""

import argparse
import csv
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

SCORES = ("image_to_text_r1", "text_to_image_r1", "top1_carbon", "top1_vaadin", "top1_fluent-emoji-flat")
GROUP = ("batch", "steps", "treatment", "loss", "start", "lr", "warmup")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--chart", type=Path, help="score over the batch, one line per treatment, as a picture")
    args = parser.parse_args(arguments)
    with open(args.rows, newline="") as file:
        groups = grouped(list(csv.DictReader(file)))
    print("|", " | ".join([*GROUP, "seeds", "loss / ln B", *SCORES, "samples/s"]), "|")
    print("|---" * (len(GROUP) + len(SCORES) + 3) + "|")
    for key, rows in sorted(groups.items(), key=lambda item: (int(item[0][0]), item[0][1:])):
        loss = statistics.mean(float(row["final_loss"]) / float(row["ln_batch"]) for row in rows)
        rate = statistics.median(float(row["samples_per_second"]) for row in rows)
        cells = [*key, len(rows), f"{loss:.3f}", *(percent(rows, name) for name in SCORES), f"{rate:,.0f}"]
        print("|", " | ".join(map(str, cells)), "|")
    if args.chart:
        draw(groups, args.chart)


def grouped(rows: list[dict]) -> dict[tuple[str, ...], list[dict]]:
    """Return the rows by all settings except the seed. A run that continues another is named by that run's batch."""
    groups = defaultdict(list)
    for row in rows:
        start = row["start"].split("-")[0].removeprefix("b")
        groups[tuple({**row, "start": start}[name] for name in GROUP)].append(row)
    return dict(groups)


def percent(rows: list[dict], name: str) -> str:
    values = [100 * float(row[name]) for row in rows]
    return f"{statistics.mean(values):.1f}" + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")


def draw(groups: dict[tuple[str, ...], list[dict]], path: Path) -> None:
    """Draw the best setting of each batch: a line for each treatment, loss and start at equal samples."""
    from matplotlib.figure import Figure

    lines: dict[str, dict[int, list[float]]] = defaultdict(dict)
    equal = statistics.mode(int(row["samples"]) for rows in groups.values() for row in rows)
    for rows in groups.values():
        row, values = rows[0], [100 * float(row["score"]) for row in rows]
        if int(row["samples"]) != equal and not row["start"]:
            continue
        name = f"{row['loss']}, {row['treatment']}" + (", continued" if row["start"] else "")
        batch, best = int(row["batch"]), lines[name]
        if batch not in best or (len(values), statistics.mean(values)) > (
            len(best[batch]),
            statistics.mean(best[batch]),
        ):
            best[batch] = values
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, points in sorted(lines.items()):
        batches = sorted(points)
        means = [statistics.mean(points[batch]) for batch in batches]
        spreads = [statistics.stdev(points[batch]) if len(points[batch]) > 1 else 0.0 for batch in batches]
        axes.errorbar(batches, means, yerr=spreads, marker="o", capsize=3, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("global batch (samples)")
    axes.set_ylabel("recall at 1, mean of both ways (%)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
