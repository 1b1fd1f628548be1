"""Tables of image files and captions (--dataset-type csv, as in open_clip), for the indexed reader.

In:  a text file with a header line. Two columns, chosen by name, contain the path of an image and its caption. A `::`
     list of tables is one data set with several sources.
Out: `TableReader`, with random access to the records of rows. It keeps the rows as one block of bytes with offsets, so
     that workers share the memory. Updates of reference counts would copy a list of strings into every worker.
"""

import csv
import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from infcl.config import counted
from infcl.data.images import IMAGE_SUFFIXES
from infcl.data.index import DEFAULT_KEYS, MAX_IMAGE_BYTES
from infcl.data.records import Record
from infcl.data.remote import open_shard
from infcl.data.shards import check_factors, split_sources
from infcl.data.storage import DEFAULT_STORAGE, MAX_LINE, ShardFault, StorageOptions, open_lines, retry

_IMAGE_NAME = re.compile(
    rf"[A-Za-z][\w+.-]*://\S+|.*({'|'.join(map(re.escape, IMAGE_SUFFIXES))})(\?.*)?", re.IGNORECASE
)
_TRIED = 1000  # images per table of which at least one must exist before training


class TableColumns(NamedTuple):
    """Format of a table: the column separator, and the names of the image and caption columns."""

    separator: str = "\t"
    image: str = "filepath"
    caption: str = "title"


DEFAULT_COLUMNS = TableColumns()


class TableReader:
    """Reader of a table's rows by number. Relative image paths start at the working directory or at the table's folder.

    Args:
        urls: paths of the tables, or a `::` list.
        columns: the format of the tables.
        factors: upsampling factors, one per table.
        storage: time-outs and attempts.

    Raises:
        ValueError: a table cannot be read, lacks a column, or none of its first images exists.
    """

    keys = DEFAULT_KEYS

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        columns: TableColumns = DEFAULT_COLUMNS,
        factors: Sequence[float] | None = None,
        storage: StorageOptions = DEFAULT_STORAGE,
    ):
        self.paths, self.storage = split_sources(urls), storage
        block, ends, counts = bytearray(), [0], []
        self._folders: list[str] = []  # base folder of the relative paths of each table
        found: Counter[str] = Counter()
        self.warnings: list[str] = []
        for path in self.paths:
            rows, problems, warnings = _read_table(path, columns)
            self._folders.append(_folder_of(rows, path))
            found.update(problems)
            self.warnings += warnings
            for image, caption in rows:
                for field in (image, caption):
                    block += field.encode("utf-8", "surrogateescape")
                    ends.append(len(block))
            counts.append(len(rows))
        self._block, self._ends = np.frombuffer(bytes(block), dtype=np.uint8), np.array(ends, dtype=np.int64)
        self.counts = np.array(counts, dtype=np.int64)
        self.factors = np.array(check_factors(factors, self.paths), dtype=np.float64)
        # not the folders: a copy of the data has the same hash
        content = (self._block, self._ends, self.counts, self.factors)
        self.sha256, self.found = hashlib.sha256(b"".join(part.tobytes() for part in content)).hexdigest(), dict(found)
        self.if_empty = "a table has a line of column names, then a line for each image (docs/howto/data.md)"

    def __str__(self) -> str:
        tables = len(self.paths)
        return f"{counted(tables, 'table')} hold{'s' * (tables == 1)} {int(self.counts.sum())} rows"

    def name_of(self, part: int) -> str:
        return self.paths[part]

    def read(
        self, samples: np.ndarray, *, images: bool = True, on_part: Callable[[int], None] = lambda part: None
    ) -> list[Record]:
        """Return the records of int64 row numbers [n], in their order. With `images=False`, the images are not read."""
        records = []
        for row in samples.tolist():
            part = int(np.searchsorted(np.cumsum(self.counts), row, side="right"))
            on_part(part)
            record = self._row(row, part)
            try:
                image = read_image(record.where, self.storage) if images else None
                records.append(record._replace(image=image))
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
        return Record(None, self._block[middle:end].tobytes(), None, path, self.paths[part])


def read_image(path: str, storage: StorageOptions = DEFAULT_STORAGE) -> bytes:
    """Return the bytes of an image file. Raises ShardFault."""
    if path.startswith("pipe:"):  # a table is data and must not run a command
        raise ShardFault("missing_image_file", f"{path!r} is no file")

    def attempt() -> bytes:
        try:
            file = open_shard(path, storage)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError) as error:
            raise ShardFault("missing_image_file", f"{path}: {error}") from error
        try:
            if file.file_bytes > MAX_IMAGE_BYTES:
                raise ShardFault("image_file_too_large", f"{path}: {file.file_bytes} bytes")
            return file.pread(file.file_bytes, 0)
        finally:
            file.close()

    return retry(attempt, path, storage)


def _read_table(path: str, columns: TableColumns) -> tuple[list[tuple[str, str]], Counter, list[str]]:
    """Return ((image path, caption) of each row, counts of skipped rows by cause, warnings).

    An unclosed quote at the start of a field merges all rows up to the next quote into that field. If the lines of a
    field look like rows, they are skipped and counted.
    """
    separator = columns.separator
    if len(separator) != 1:
        raise ValueError(f"--csv-separator {separator!r} must be one character")
    rows: list[tuple[str, str]] = []
    problems: Counter[str] = Counter()
    warnings: list[str] = []
    lines = _numbered_rows(path, separator)
    header = [name.removeprefix("\ufeff") for name in next(lines, (1, 1, []))[2] or []]
    try:
        image_at, caption_at = header.index(columns.image), header.index(columns.caption)
    except ValueError:
        raise ValueError(
            f"{path} has no columns {columns.image!r} and {columns.caption!r} but {header[:10]}: "
            f"set --csv-img-key, --csv-caption-key or --csv-separator (now {separator!r})"
        ) from None
    for first, taken, row in lines:
        if row is None:
            problems["index/bad_row"] += taken
        elif taken > 1 and _holds_rows(row, len(header), image_at, separator):
            if not problems["index/unclosed_quote"]:
                warnings.append(
                    f"{path}, lines {first} to {first + taken - 1}: one quoted field contains what look like rows; "
                    "they are left out: remove the quote that opens it (index/unclosed_quote counts such lines)"
                )
            problems["index/unclosed_quote"] += taken
        elif len(row) <= max(image_at, caption_at):
            problems["index/bad_row"] += bool(row)  # an empty line is not a row
        elif not row[image_at]:
            problems["index/no_image"] += 1
        else:
            rows.append((row[image_at], row[caption_at]))
    return rows, +problems, warnings


def _numbered_rows(path: str, separator: str) -> Iterator[tuple[int, int, list[str] | None]]:
    """Yield (number of the first line, number of lines, fields) of each row; fields is None if csv cannot parse it.

    Raises ValueError if a quoted field extends to the end of the file.
    """
    at_end = False

    def without_nuls(lines: Iterator[str]) -> Iterator[str]:
        nonlocal at_end
        yield from (line.replace("\0", "") for line in lines)
        at_end = True

    before = csv.field_size_limit(MAX_LINE)  # the default is 128 K
    try:
        with open_lines(path, errors="surrogateescape") as lines:
            rows, first = csv.reader(without_nuls(lines), delimiter=separator), 1
            while not at_end:
                row: list[str] | None
                try:
                    row = next(rows)
                except StopIteration:
                    return
                except csv.Error:
                    row = None
                taken = rows.line_num + 1 - first
                if at_end and row is not None:  # the reader needs more lines than the file has
                    raise ValueError(
                        f"{path}, line {first}: a quote opens there, or in the {taken} lines from there to the end, "
                        "and is never closed: remove it, or double it within a quoted field"
                    )
                yield first, taken, row
                first = rows.line_num + 1
    finally:
        csv.field_size_limit(before)


def _holds_rows(row: list[str], columns: int, image_at: int, separator: str) -> bool:
    """Return whether a line inside a field looks like a row: all columns, and an image name in the image column."""
    lines = (line.split(separator) for field in row for line in field.splitlines()[1:])
    return any(len(parts) >= columns and _IMAGE_NAME.fullmatch(parts[image_at].strip()) for parts in lines)


def _folder_of(rows: list[tuple[str, str]], path: str) -> str:
    """Return the base folder of a table's relative paths: "" or the table's folder, where the first image is found.

    Raises ValueError if none of the first _TRIED local images exists.
    """
    local = [image for image, _ in rows if "://" not in image][:_TRIED]
    folder = os.path.dirname(path)
    for image in local:
        if os.path.exists(image):
            return ""
        if os.path.exists(os.path.join(folder, image)):
            return folder
    if local:
        raise ValueError(
            f"{path}: none of its first {len(local):,} images is there (the first: {local[0]!r}); a path that is not "
            f"absolute is taken from the working directory or from {folder or '.'}"
        )
    return ""
