"""Raw results: rows of a CSV."""

import csv
from collections.abc import Sequence
from pathlib import Path


def append(path: Path | None, rows: list[dict], columns: Sequence[str] | None = None) -> None:
    """Rows to a CSV that gets its header with the first; without a path nowhere.

    columns: what of a row is written, None: the keys of the first; one that a row lacks stays empty.
    Raises ValueError where the file's header has others.
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


def read(path: Path) -> list[dict[str, str]]:
    """All rows; none where there is no file yet."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
