"""Raw results: rows of CSV files."""

import argparse
import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"


def parser_of_rows(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that has --csv and --commit and rejects abbreviated flags."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--csv", type=Path, help="append the rows to this file")
    parser.add_argument("--commit", help="for the CSV; default: git's HEAD")
    return parser


def append(path: Path | None, rows: list[dict], columns: Sequence[str] | None = None) -> None:
    """Append rows to a CSV file, with a header if it is new. Without a path, do nothing.

    Args:
        path: the file; its folder is created.
        rows: missing keys leave cells empty.
        columns: the keys to write; default: the keys of the first row, and other rows may have no other keys.

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
    """Return the rows of a CSV file, with numbers converted. A missing file has no rows."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return [{key: _value(key, text) for key, text in row.items()} for row in csv.DictReader(file)]


def _value(column: str, text: str):
    if column not in ("commit", "run", "version"):  # 6e15030 is not a number, and 3.10 is not 3.1
        for kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
    return text


def rows(*names: str) -> list[dict]:
    """Return the rows of several files of docs/results, in order.

    Raises:
        FileNotFoundError: a file does not exist.
    """
    if missing := [name for name in names if not (RESULTS / name).is_file()]:
        raise FileNotFoundError(RESULTS / missing[0])
    return [row for name in names for row in read(RESULTS / name)]


def where(found: Iterable[dict], **wanted) -> list[dict]:
    """Return the rows whose columns have these values; a tuple matches any of its values."""
    return [
        row
        for row in found
        if all(row.get(key) in value if isinstance(value, tuple) else row.get(key) == value
               for key, value in wanted.items())
    ]  # fmt: skip


def grouped(found: Iterable[dict], *names: str) -> dict:
    """Return {tuple of the columns' values: rows}; with a single column the keys are plain values."""
    groups: dict = {}
    for row in found:
        values = tuple(row.get(name) for name in names)
        groups.setdefault(values if len(names) > 1 else values[0], []).append(row)
    return groups


def latest(found: Iterable[dict], *names: str) -> list[dict]:
    """Return the last row of each setting, which the columns `names` identify."""
    return [own[-1] for own in grouped(found, *names).values()]
