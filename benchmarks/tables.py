"""Markdown tables of rows.

A Table groups rows and writes one line per group. A cell is a format string for the group's last row (the files keep
older rows), or a function of the group's rows.
"""

import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any

from benchmarks.rows import grouped, origin, rows, where

Cell = str | Callable[[list[dict]], object]
Columns = dict[str, Any]  # {heading: Cell}


@dataclass(frozen=True)
class Table:
    """A table for one region of a page. Call it to get its Markdown.

    Attributes:
        source: a CSV file of docs/results, or a function that returns rows.
        columns: {heading: cell}.
        by: columns that group the rows; a line is a group. Without them each row is a line.
        keep: column values that a row must have; see `where`.
        order: sort key of a group's last row. Without it, lines are in the order of their first rows.
        foot: text below the table: a format string for the first row and {origin}, or a function of all rows.
    """

    source: str | Callable[[], list[dict]]
    columns: Columns
    by: tuple[str, ...] = ()
    keep: Mapping = field(default_factory=dict)
    order: Callable[[dict], Any] | None = None
    foot: str | Callable[[list[dict]], str] = "{origin}"

    def __call__(self) -> str:
        found = where(rows(self.source) if isinstance(self.source, str) else self.source(), **self.keep)
        lines = list(grouped(found, *self.by).values()) if self.by else [[row] for row in found]
        if self.order is not None:
            order = self.order
            lines.sort(key=lambda own: order(own[-1]))
        text = table(lines, self.columns)
        foot = self.foot if isinstance(self.foot, str) else self.foot(found)
        return f"{text}\n\n{foot.format(**found[0] | {'origin': origin(found) if 'origin' in foot else ''})}".strip()


# ---- lines and cells ----


class _Empty(Exception):
    """A row does not have the value."""


class _Format(string.Formatter):
    """str.format with the formats of UNITS. A missing value makes an empty cell."""

    def format_field(self, value, spec):
        if value == "":
            raise _Empty
        return UNITS[spec](value) if spec in UNITS else super().format_field(value, spec)


def table(lines: Iterable[list[dict]], columns: Columns) -> str:
    """Return a Markdown table with one line per group of rows."""
    return markdown(columns, ([text_of(cell, own) for cell in columns.values()] for own in lines))


def text_of(cell: Cell, own: list[dict]) -> str:
    """Return the text of a cell; empty if a format string has no row."""
    if not isinstance(cell, str):
        return str(cell(own))
    try:
        return _Format().format(cell, **own[-1]) if own else ""
    except _Empty:
        return ""


def across(cell: Cell, headings: Mapping[str, Mapping]) -> Columns:
    """Return one column per heading, with the cell for the group's rows that have the heading's values."""
    return {
        heading: lambda own, wanted=wanted: text_of(cell, where(own, **wanted)) for heading, wanted in headings.items()
    }


def markdown(header: Iterable, lines: Iterable[Sequence]) -> str:
    text = [list(header), *lines]
    text.insert(1, ["---"] * len(text[0]))
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in text)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Format the mean and standard deviation: '0.930 +- 0.012'. One value has no deviation."""
    text = f"{mean(values):.{digits}f}"
    return text + (f" +- {stdev(values):.{digits}f}" if len(values) > 1 else "")


def spread_of(column: str, digits: int = 3) -> Cell:
    return lambda own: spread([row[column] for row in own], digits) if own else ""


def batch(samples: int) -> str:
    """Format a batch size as the paper does: 65536 -> '64k'."""
    return f"{samples // 1024}k" if samples % 1024 == 0 else f"{samples:,}"


def ms(value: float) -> str:
    return f"{value:.2f}" if value < 2 else f"{value:.1f}" if value < 200 else f"{value:,.0f}"


def gpus(count: int, kind: str = "H200") -> str:
    return f"{count} {kind}{'s' * (count > 1)}"


UNITS: dict[str, Callable] = {
    "batch": batch,
    "ms": ms,
    "rate": lambda value: f"{float(f'{value:.4g}'):,.0f}",
    "size": lambda mib: f"{mib:.0f} MiB" if mib < 1000 else f"{mib / 1024:.1f} GiB",
    "yes": lambda value: "yes" if value not in (0, "False") else "",
}
