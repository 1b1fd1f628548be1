"""Raw results under docs/results -> rows with numbers; tables as Markdown."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.rows import read

RESULTS = Path(__file__).parents[2] / "docs" / "results"
NOT_MEASURED = "not measured"


def rows(*names: str) -> list[dict]:
    """Of CSV files under docs/results, one after another; a file that is not there has no rows."""
    return [{key: _value(key, text) for key, text in row.items()} for name in names for row in read(RESULTS / name)]


def _value(column: str, text: str):
    if column in ("commit", "run", "version"):  # 6e15030 is no number, and 3.10 not 3.1
        return text
    for kind in (int, float):
        try:
            return kind(text)
        except (TypeError, ValueError):
            continue
    return text


def where(found: Iterable[dict], **wanted) -> list[dict]:
    return [row for row in found if all(row.get(name) == value for name, value in wanted.items())]


def newest(found: Sequence[dict]) -> list[dict]:
    """Of one setting's rows, oldest first, those of the last one's commit: what ran before is replaced."""
    return where(found, commit=found[-1]["commit"]) if found else []


def latest(found: Iterable[dict], *names: str) -> list[dict]:
    """The last row of each setting; settings differ in the columns `names`."""
    return list({tuple(row[name] for name in names): row for row in found}.values())


def markdown(header: Sequence[str], lines: Iterable[Sequence]) -> str:
    text = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in text)


def mean_and_deviation(values: Sequence[float], digits: int = 3) -> str:
    """'0.930 +- 0.012'; of one value without a deviation."""
    text = f"{statistics.mean(values):.{digits}f}"
    return text + (f" +- {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def batch(pairs: int) -> str:
    """65536 -> '64k', as the paper counts; 4194304 -> '4096k'."""
    return f"{pairs // 1024:,}k".replace(",", "") if pairs % 1024 == 0 else f"{pairs:,}"


def ms(value: float) -> str:
    return f"{value:.2f}" if value < 2 else f"{value:.1f}" if value < 200 else f"{value:,.0f}"


def size(mib: float) -> str:
    return f"{mib:.0f} MiB" if mib < 1000 else f"{mib / 1024:.1f} GiB"


def origin(found: Sequence[dict]) -> str:
    """'NVIDIA H200, torch 2.11.0+cu130, commits 6255a34, d7c9bff'."""
    devices = ", ".join(sorted({str(row["device"]) for row in found}))
    versions = ", ".join(sorted({str(row["torch"]) for row in found}))
    commits = list(dict.fromkeys(str(row["commit"])[:7] for row in found))
    return f"{devices}, torch {versions}, commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}"
