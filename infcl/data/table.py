"""Tables of image files and captions (--dataset-type csv, as in open_clip), for the indexed reader.

In:  a text file with a header line. Two columns, chosen by name, contain the path of an image and its caption. Or a
     .jsonl file, whose lines are {"image": path, "caption": text or list of texts, ...}; "captions" is accepted too,
     and a line is the json member of its sample. A `::` list of tables is one data set with several sources.
Out: `TableReader`, with random access to the records of rows. It keeps the rows as one block of bytes with offsets, so
     that workers share the memory. Updates of reference counts would copy a list of strings into every worker.
"""

import argparse
import contextlib
import csv
import hashlib
import json
import os
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from infcl.config import TrainConfig, counted
from infcl.config.redaction import check_text, redacted
from infcl.config.words import reason
from infcl.data.index import DEFAULT_KEYS, MAX_IMAGE_BYTES
from infcl.data.records import Record
from infcl.data.shards import check_factors, split_sources
from infcl.data.storage import SCHEMES, ShardFault, is_remote, open_lines, open_shard, retry

_TRIED = 1000  # images per table of which at least one must exist before training


class TableColumns(NamedTuple):
    """Format of a table: separator, names of the image and caption columns, root of relative paths [its folder]."""

    separator: str = "\t"
    image: str = "filepath"
    caption: str = "title"
    root: str | None = None


DEFAULT_COLUMNS = TableColumns()


def add_column_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `columns_of` to a command."""
    parser.add_argument("--csv-separator", default=DEFAULT_COLUMNS.separator, help="between columns [tab]")
    parser.add_argument("--csv-img-key", default=DEFAULT_COLUMNS.image, help="column of image paths [filepath]")
    parser.add_argument("--csv-caption-key", default=DEFAULT_COLUMNS.caption, help="column of captions [title]")
    parser.add_argument("--csv-img-root", help="where relative image paths start [the table's folder]")


def columns_of(flags: TrainConfig | argparse.Namespace) -> TableColumns:
    """Return the columns of tables that the flags select."""
    return TableColumns(flags.csv_separator, flags.csv_img_key, flags.csv_caption_key, flags.csv_img_root)


class TableReader:
    """Reader of a table's rows by number. Relative image paths start at the table's folder, or at `columns.root`.

    Args:
        urls: paths of the tables, or a `::` list.
        factors: upsampling factors, one per table.

    Raises:
        ValueError: a table cannot be read, lacks a column, or none of its first images exists.
    """

    keys = DEFAULT_KEYS
    warnings = ()
    if_empty = (
        "a table has a line of column names, then a line for each image; "
        'a .jsonl lines like {"image": "a.jpg", "caption": "..."}'
    )

    def __init__(
        self,
        urls: str,
        *,
        columns: TableColumns = DEFAULT_COLUMNS,
        factors: Sequence[float] | None = None,
    ):
        self.paths = split_sources(urls)
        block, ends, counts = bytearray(), array("q", [0]), []
        self._folders: list[str] = []  # base folder of the relative paths of each table
        problems: Counter[str] = Counter()
        for path in self.paths:
            first: list[str] = []
            before = len(ends)
            for row in _json_rows(path, problems) if is_json_lines(path) else _rows(path, columns, problems):
                if len(first) < _TRIED and "://" not in row[0] and not is_remote(columns.root or ""):
                    first.append(row[0])
                for field in row:
                    block += field.encode("utf-8", "surrogateescape")
                    ends.append(len(block))
            counts.append((len(ends) - before) // 2)
            self._folders.append(os.path.dirname(path) if columns.root is None else columns.root)
            images = [os.path.join(self._folders[-1], image) for image in first]
            if images and not any(map(os.path.exists, images)):
                raise ValueError(
                    f"{path}: none of its first {len(images):,} images exists (the first: {images[0]!r}); "
                    "--csv-img-root FOLDER sets where relative paths start"
                )
        self._block, self._ends = np.frombuffer(block, dtype=np.uint8), np.frombuffer(ends, dtype=np.int64)
        self.counts = np.array(counts, dtype=np.int64)
        self.factors = np.array(check_factors(factors, self.paths), dtype=np.float64)
        digest = hashlib.sha256()
        for part in (self._block, self._ends, self.counts, self.factors):  # no folders: a copy has the same hash
            digest.update(part.data)
        self.sha256, self.found = digest.hexdigest(), dict(+problems)

    def __str__(self) -> str:
        tables = len(self.paths)
        return f"{counted(tables, 'table')} hold{'s' * (tables == 1)} {int(self.counts.sum())} rows"

    def read(self, samples: np.ndarray, *, images: bool = True) -> list[Record]:
        """Return the records of int64 row numbers [n], in their order. With `images=False`, the images are not read."""
        records = []
        parts = np.searchsorted(np.cumsum(self.counts), samples, side="right")
        for row, part in zip(samples.tolist(), parts.tolist()):
            record = self._row(row, part)
            try:
                records.append(record._replace(image=read_file(record.where)) if images else record)
            except ShardFault as fault:
                records.append(record._replace(fault=fault))
        return records

    def captions(self) -> Iterator[Record]:
        """Return an iterator over the records of all rows, without images."""
        parts = np.repeat(np.arange(len(self.counts)), self.counts)
        return (self._row(row, part) for row, part in enumerate(parts.tolist()))

    def _row(self, row: int, part: int) -> Record:
        begin, middle, end = self._ends[2 * row : 2 * row + 3].tolist()
        path = os.fsdecode(self._block[begin:middle].tobytes())
        path = path if "://" in path else os.path.join(self._folders[part], path)
        rest, table = self._block[middle:end].tobytes(), self.paths[part]
        return Record(None, None, rest, path, table) if is_json_lines(table) else Record(None, rest, None, path, table)


def is_json_lines(path: str) -> bool:
    """Return whether a table is a .jsonl file."""
    return path.lower().endswith(".jsonl")


def read_file(path: str) -> bytes:
    """Return the bytes of a file or a url that a table or a folder names. Raises ShardFault."""
    if is_remote(path) and path.partition("://")[0] not in SCHEMES:  # a table is data: no command, no chained url
        raise ShardFault("unsupported_url", f"{path} is not a path or a url of {', '.join(SCHEMES)}")
    if is_remote(path):
        try:
            check_text(redacted(path), path)
        except ValueError as error:
            raise ShardFault("url_rejected", str(error)) from None

    def attempt() -> bytes:
        data = bytearray()

        def write(part: bytes) -> None:
            data.extend(part)
            if (size := max(len(data), opened.file_bytes)) > MAX_IMAGE_BYTES:
                raise ShardFault("image_file_too_large", f"{path}: {size} bytes")

        try:
            opened = open_shard(path, sequential=True)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError) as error:
            raise ShardFault("missing_image_file", f"{path}: {reason(error)}") from error
        with contextlib.closing(opened):
            opened.copy(write)
        return bytes(data)

    return retry(attempt, path)


def _json_rows(path: str, problems: Counter[str]) -> Iterator[tuple[str, str]]:
    """Yield (image path, the line's object as JSON) of each line; count other lines in `problems`."""
    with open_lines(path, errors="surrogateescape") as lines:
        for line in filter(str.strip, lines):
            try:
                values = json.loads(line)
            except (ValueError, RecursionError):
                values = None
            if not isinstance(values, dict):
                problems["index/bad_row"] += 1
            elif not isinstance(values.get("image"), str) or not values["image"]:
                problems["index/no_image"] += 1
            else:
                yield values["image"], json.dumps({"caption": values.get("captions"), **values})


def _rows(path: str, columns: TableColumns, problems: Counter[str]) -> Iterator[tuple[str, str]]:
    """Yield (image path, caption) of each row; count the lines of other rows in `problems`.

    The csv module rejects a row whose quotes do not match, or with a field of more than 128 KB.
    """
    separator = columns.separator.replace("\\t", "\t")  # '\\t' in a shell is two characters
    if len(separator) != 1:
        raise ValueError(f"--csv-separator {separator!r} must be one character")
    with open_lines(path, errors="surrogateescape") as lines:
        reader = csv.reader((line.replace("\0", "") for line in lines), delimiter=separator, strict=True)
        rows = _well_formed(reader, problems)
        header = next(rows, [])
        try:
            image_at, caption_at = header.index(columns.image), header.index(columns.caption)
        except ValueError:
            raise ValueError(
                f"{path} has no columns {columns.image!r} and {columns.caption!r} but {header[:10]}: "
                f"set --csv-img-key, --csv-caption-key or --csv-separator (now {separator!r})"
            ) from None
        for row in rows:
            if len(row) <= max(image_at, caption_at) or any(row[len(header) :]):
                problems["index/bad_row"] += bool(row)  # an empty line is not a row; more cells: a caption was split
            elif not row[image_at]:
                problems["index/no_image"] += 1
            else:
                yield row[image_at], row[caption_at]


def _well_formed(reader: Any, problems: Counter[str]) -> Iterator[list[str]]:
    while True:
        before = reader.line_num
        try:
            yield next(reader)
        except StopIteration:
            return
        except csv.Error:
            problems["index/bad_row"] += reader.line_num - before
