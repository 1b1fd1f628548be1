"""Raw results: rows of a CSV."""

import csv
from pathlib import Path


def append(path: Path, rows: list[dict]) -> None:
    """Rows of the same columns, to a CSV that gets its header with the first."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        if new:
            writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> list[dict[str, str]]:
    """All rows; none where there is no file yet."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
