"""Summarise the rows of study.py: mean and deviation over seeds, as Markdown tables and charts.

python examples/icons/table.py results/rows.csv --chart batch-size.png --causes causes.png
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
SCORE = "recall at 1, mean of both ways (%)"
GROUP = ("model", "batch", "steps", "treatment", "loss", "start", "teacher", "flags", "train", "lr", "warmup")

Groups = list[list[dict]]  # the rows of one setting each


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--chart", type=Path, help="picture of the score at equal samples and steps")
    parser.add_argument("--causes", type=Path, help="picture of what the fall at equal samples may come from")
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
    drawn = [rows for rows in groups.values() if not rows[0]["train"]]
    if (args.chart or args.causes) and not drawn:
        raise SystemExit("--chart, --causes: no row is of a run on all training icons")
    if args.chart:
        draw(drawn, args.chart)
    if args.causes:
        draw_causes(drawn, args.causes)


def grouped(rows: list[dict]) -> dict[tuple[str, ...], list[dict]]:
    """Return the rows by all settings except the seed. A run that starts from others is named by their batches."""
    groups = defaultdict(list)
    for row in rows:
        runs = {key: _first(row[key]) for key in ("start", "teacher")}
        groups[tuple({**row, **runs}[name] for name in GROUP)].append(row)
    return dict(groups)


def percent(rows: list[dict], name: str) -> str:
    values = [100 * float(row[name]) for row in rows]
    return f"{statistics.mean(values):.1f}" + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")


def draw(groups: Groups, path: Path) -> None:
    """Draw the plain loss' best setting of each batch. Left: equal samples; right: equal steps."""
    from matplotlib.figure import Figure

    plain = [rows for rows in groups if _kind(rows[0]) == "inf_cl, negative"]
    batches = defaultdict(set)  # of a number of steps
    for rows in plain:
        batches[rows[0]["steps"]].add(rows[0]["batch"])
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _lines(left, [*_equal_samples(plain), *(rows for rows in groups if rows[0]["start"])], _beginning)
    _lines(right, [rows for rows in plain if len(batches[rows[0]["steps"]]) > 2], "{steps} steps".format_map)
    left.set_title(f"equal samples: {_samples(groups):,}")
    right.set_title("equal steps")
    left.set_ylabel(SCORE)
    left.set_yscale("log")
    figure.savefig(path, dpi=150)


def draw_causes(groups: Groups, path: Path) -> None:
    """Draw what the fall at equal samples may come from: false negatives, learning rate, steps, the loss' time."""
    from matplotlib.figure import Figure

    equal = [rows for rows in _equal_samples(groups) if not rows[0]["flags"] and not rows[0]["teacher"]]
    plain = [rows for rows in equal if _kind(rows[0]) == "inf_cl, negative"]
    treated = {rows[0]["batch"] for rows in equal if rows not in plain}
    alone = [[row for row in rows if row["per_gpu"] == "1"] for rows in plain]
    figure = Figure(figsize=(10, 7.5), layout="constrained")
    (negatives, rates), (steps, speed) = figure.subplots(2, 2)
    _lines(negatives, [rows for rows in equal if rows[0]["batch"] in treated], _kind, apart=0.1)
    _lines(rates, plain, lambda row: f"{int(row['batch']):>7,}", x="lr")
    _lines(steps, plain, y=lambda row: float(row["final_loss"]) / float(row["ln_batch"]))
    _lines(speed, list(filter(None, alone)), y=lambda row: float(row["samples_per_second"]))
    for axes, title, label in (
        (negatives, "false negatives", SCORE),
        (rates, "learning rate of each batch", SCORE),
        (steps, "too few steps", "last loss / ln(batch)"),
        (speed, "time of the loss: one run per GPU", "samples/s"),
    ):
        axes.set_title(title)
        axes.set_ylabel(label)
    negatives.set_yscale("log")
    rates.set_yscale("log")
    rates.set_ylim(top=200)  # room for the legend
    values = sorted({float(rows[0]["lr"]) for rows in plain})
    rates.set_xticks(values, [f"{value:g}" for value in values])
    rates.set_xlabel("learning rate")
    speed.set_ylim(bottom=0)
    figure.savefig(path, dpi=150)


def _samples(groups: Groups) -> int:
    return statistics.mode(int(row["samples"]) for rows in groups for row in rows)


def _equal_samples(groups: Groups) -> Groups:
    return [rows for rows in groups if int(rows[0]["samples"]) == _samples(groups) and not rows[0]["start"]]


def _kind(row: dict) -> str:
    more = [row["flags"], "distilled" * bool(row["teacher"]), _beginning(row) * bool(row["start"])]
    return ", ".join(filter(None, [row["loss"], row["treatment"], *more]))


def _beginning(row: dict) -> str:
    return f"second half of a run at {int(_first(row['start'])):,}" if row["start"] else "one batch"


def _first(run: str) -> str:
    """Return the batch of the run that another one starts from, or learns from."""
    return run.split("-")[0].removeprefix("b")


def _mean_recall(row: dict) -> float:
    return 100 * float(row["score"])


def _lines(
    axes: "Axes",
    groups: Groups,
    name_of: Callable[[dict], str] = lambda row: "",
    x: str = "batch",
    y: Callable[[dict], float] = _mean_recall,
    apart: float = 0.0,
) -> None:
    """Draw a line for each name: the mean and deviation over the seeds of the best setting at each x.

    Args:
        apart: factors of two between the lines' points of one x, so that equal ones stay visible.
    """
    lines: dict[str, dict[float, list[dict]]] = defaultdict(dict)
    for rows in groups:
        best, place = lines[name_of(rows[0])], float(rows[0][x])
        best[place] = max(best.get(place, []), rows, key=lambda rows: (len(rows), sum(map(_mean_recall, rows))))
    for index, (name, marker) in enumerate(zip(sorted(lines), itertools.cycle("osD^v"))):
        values = [(place, list(map(y, rows))) for place, rows in sorted(lines[name].items())]
        places = [place * 2 ** (apart * (index - (len(lines) - 1) / 2)) for place, _ in values]
        means = [statistics.mean(some) for _, some in values]
        spreads = [statistics.stdev(some) if len(some) > 1 else 0.0 for _, some in values]
        axes.errorbar(places, means, yerr=spreads, marker=marker, fillstyle="none", capsize=3, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("global batch (samples)")
    axes.grid(alpha=0.3)
    if len(lines) > 1:
        axes.legend(ncols=2 if len(lines) > 4 else 1)


if __name__ == "__main__":
    main()
