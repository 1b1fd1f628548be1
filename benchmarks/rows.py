"""Raw results: rows of CSV files."""

import argparse
import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"


def parser_of_rows(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that has --csv and --commit, and takes no abbreviated flags."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--csv", type=Path, help="append the rows to this file")
    parser.add_argument("--commit", help="for the CSV; default: git's HEAD")
    return parser


def append(path: Path | None, rows: list[dict], columns: Sequence[str] | None = None) -> None:
    """Append rows to a CSV file, which gets its header with the first ones; without a path do nothing.

    Args:
        path: the file; its folder is made.
        rows: a row lacks what stays empty.
        columns: what is written of a row; by default the keys of the first, and other rows may not have others.

    Raises:
        ValueError: the header of the file has other columns.
    """
    if path is None:
        return
    names = list(columns or rows[0])
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", newline="") as file:
        file.seek(0)
        if not new and (header := next(csv.reader(file), [])) != names:
            raise ValueError(f"{path} has the columns {', '.join(header)}; these rows have {', '.join(names)}")
        writer = csv.DictWriter(file, names, lineterminator="\n", extrasaction="ignore" if columns else "raise")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> list[dict]:
    """Return the rows of a CSV file with their numbers as numbers; none where there is no file yet."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return [{key: _value(key, text) for key, text in row.items()} for row in csv.DictReader(file)]


def _value(column: str, text: str):
    if column not in ("commit", "run", "version"):  # 6e15030 is no number, and 3.10 not 3.1
        for kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
    return text


def rows(*names: str) -> list[dict]:
    """Return the rows of files of docs/results, one file after another.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if missing := [name for name in names if not (RESULTS / name).is_file()]:
        raise FileNotFoundError(RESULTS / missing[0])
    return [row for name in names for row in read(RESULTS / name)]


def where(found: Iterable[dict], **wanted) -> list[dict]:
    """Return the rows whose columns have these values; a tuple stands for any of its values."""
    return [
        row
        for row in found
        if all(row.get(key) in value if isinstance(value, tuple) else row.get(key) == value
               for key, value in wanted.items())
    ]  # fmt: skip


def grouped(found: Iterable[dict], *names: str) -> dict:
    """Return {values of the columns: rows}; a single column's values are keys as they are."""
    groups: dict = {}
    for row in found:
        values = tuple(row.get(name) for name in names)
        groups.setdefault(values if len(names) > 1 else values[0], []).append(row)
    return groups


def latest(found: Iterable[dict], *names: str) -> list[dict]:
    """Return the last row of each setting; settings differ in the columns `names`."""
    return [own[-1] for own in grouped(found, *names).values()]


def newest(found: Sequence[dict]) -> list[dict]:
    """Return the rows of the last row's commit, which replace what was measured before."""
    return where(found, commit=found[-1]["commit"]) if found else []


def origin(found: Sequence[dict]) -> str:
    """'NVIDIA H200, torch 2.11.0+cu130.'"""
    names = [", ".join(sorted({str(row[name]) for row in found})) for name in ("device", "torch")]
    return f"{names[0]}, torch {names[1]}."
