"""A table of image files and captions, as open_clip reads it with --dataset-type csv, for the indexed reader.

In:  a text file with a header line; two of its columns (by name) hold an image's path and its caption. A `::` list of
     tables is one data set of several sources.
Out: `TableReader`, which gives the records of rows at random. Rows are held as one block of bytes and their offsets, so
     that workers share the memory (a list of strings would be copied to each, reference count by reference count).
"""

import csv
import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, TextIO

import numpy as np

from infcl.config import counted
from infcl.data.images import IMAGE_SUFFIXES
from infcl.data.index import DEFAULT_KEYS, MAX_IMAGE_BYTES
from infcl.data.records import Record
from infcl.data.remote import open_shard
from infcl.data.shards import split_sources
from infcl.data.storage import DEFAULT_STORAGE, ShardFault, StorageOptions, open_regular, retry

_URL = re.compile(r"[A-Za-z][\w+.-]*://\S+")
_TRIED = 1000  # images of a table that are looked for, at most, before training
_MAX_FIELD = 16 << 20  # characters; Python's limit would end at 128 K


class TableColumns(NamedTuple):
    """How a table is read: the character between columns, the names of the columns of image paths and of captions."""

    separator: str = "\t"
    image: str = "filepath"
    caption: str = "title"


DEFAULT_COLUMNS = TableColumns()


class TableReader:
    """Rows by number. An image path that is not absolute is taken from the working directory, or the table's."""

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
        if factors is not None and (len(factors) != len(self.paths) or min(factors) <= 0):
            raise ValueError(f"{len(self.paths)} sources need as many upsampling factors above 0, not {list(factors)}")
        block, ends, counts = bytearray(), [0], []
        self._folders: list[str] = []  # of each table: where its relative paths begin
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
        self.factors = np.array(factors or [1.0] * len(counts), dtype=np.float64)
        said = (self._block, self._ends, self.counts, self.factors)  # not the folders: a copy is the same
        self.sha256, self.found = hashlib.sha256(b"".join(part.tobytes() for part in said)).hexdigest(), dict(found)
        self.if_empty = "a table has a line of column names, then a line for each image (docs/howto/data.md)"

    def __str__(self) -> str:
        tables = len(self.paths)
        return f"{counted(tables, 'table')} hold{'s' * (tables == 1)} {int(self.counts.sum())} rows"

    def name_of(self, part: int) -> str:
        return self.paths[part]

    def read(
        self, samples: np.ndarray, *, images: bool = True, on_part: Callable[[int], None] = lambda part: None
    ) -> list[Record]:
        """Records of int64 row numbers [n], in their order."""
        records = []
        for row in samples.tolist():
            part = int(np.searchsorted(np.cumsum(self.counts), row, side="right"))
            on_part(part)
            begin, middle, end = self._ends[2 * row : 2 * row + 3].tolist()
            path = os.fsdecode(self._block[begin:middle].tobytes())
            path = path if "://" in path else os.path.join(self._folders[part], path)
            caption, fault, image = self._block[middle:end].tobytes(), None, None
            try:
                image = self.image(path) if images else None
            except ShardFault as error:
                fault = error
            records.append(Record(image, caption, None, path, self.paths[part], fault))
        return records

    def image(self, path: str) -> bytes:
        """The bytes of an image file. Raises ShardFault."""
        if path.startswith("pipe:"):  # a table is data: it never runs a command
            raise ShardFault("missing_image_file", f"{path!r} is no file")

        def attempt() -> bytes:
            try:
                file = open_shard(path, self.storage)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError) as error:
                raise ShardFault("missing_image_file", f"{path}: {error}") from error
            try:
                if file.file_bytes > MAX_IMAGE_BYTES:
                    raise ShardFault("image_file_too_large", f"{path}: {file.file_bytes} bytes")
                return file.pread(file.file_bytes, 0)
            finally:
                file.close()

        return retry(attempt, path, self.storage)


def _read_table(path: str, columns: TableColumns) -> tuple[list[tuple[str, str]], Counter, list[str]]:
    """((image path, caption) of each row, what was left out, and the message about it).

    A quote at the start of a field that nothing closes takes the rows up to the next quote into its field: lines of it
    that look like rows are left out with it, counted and told. ValueError where it takes all up to the end.
    """
    separator = columns.separator
    if len(separator) != 1:
        raise ValueError(f"--csv-separator {separator!r} must be one character")
    rows = []
    problems: Counter[str] = Counter()
    warnings: list[str] = []
    before = csv.field_size_limit(_MAX_FIELD)
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="", opener=open_regular) as file:
            text = _Lines(file)
            lines = csv.reader(text, delimiter=separator)
            header = [name.removeprefix("\ufeff") for name in next(lines, [])]
            try:
                image_at, caption_at = header.index(columns.image), header.index(columns.caption)
            except ValueError:
                raise ValueError(
                    f"{path} has no columns {columns.image!r} and {columns.caption!r} but {header[:10]}: "
                    f"say --csv-img-key, --csv-caption-key or --csv-separator (now {separator!r})"
                ) from None
            while True:
                first = lines.line_num + 1
                try:
                    row = next(lines)
                except StopIteration:
                    break
                except csv.Error:
                    problems["index/bad_row"] += lines.line_num + 1 - first
                    continue
                taken = lines.line_num + 1 - first
                if text.ended:
                    raise ValueError(
                        f"{path}, line {first}: a quote opens there, or in the {taken} lines from there "
                        "to the end, and is never closed: remove it, or double it within a quoted field"
                    )
                if taken > 1 and _holds_rows(row, len(header), image_at, separator, os.path.dirname(path)):
                    if not problems["index/unclosed_quote"]:
                        warnings.append(
                            f"{path}, lines {first} to {first + taken - 1}: one quoted field holds what look like "
                            "rows; they are left out: remove the quote that opens it (index/unclosed_quote counts such "
                            "lines)"
                        )
                    problems["index/unclosed_quote"] += taken
                    continue
                if len(row) <= max(image_at, caption_at):
                    problems["index/bad_row"] += bool(row)  # an empty line is no row
                elif not row[image_at]:
                    problems["index/no_image"] += 1
                else:
                    rows.append((row[image_at], row[caption_at]))
    except ShardFault as fault:
        raise ValueError(str(fault)) from fault
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    finally:
        csv.field_size_limit(before)
    return rows, +problems, warnings


class _Lines:
    """A file's lines without NULs. ended: more were asked for than there are. ValueError for one without an end."""

    def __init__(self, file: TextIO):
        self._file, self.ended = file, False

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = self._file.readline(_MAX_FIELD)
        if len(line) == _MAX_FIELD:
            raise ValueError(f"{self._file.name}: a line of more than {_MAX_FIELD >> 20} MB: is this a table?")
        if not line:
            self.ended = True
            raise StopIteration
        return line.replace("\0", "")


def _holds_rows(row: list[str], columns: int, image_at: int, separator: str, folder: str) -> bool:
    """Whether a field of several lines has one with all columns, that of the image being what names one: a file that is
    there, a url, or what ends as a picture's name does."""
    for field in row:
        for line in field.splitlines()[1:]:
            parts = line.split(separator)
            if len(parts) >= columns and _names_image(parts[image_at].strip(), folder):
                return True
    return False


def _names_image(name: str, folder: str) -> bool:
    if name.lower().partition("?")[0].endswith(IMAGE_SUFFIXES) or _URL.fullmatch(name):
        return True
    return bool(name) and (os.path.isfile(name) or os.path.isfile(os.path.join(folder, name)))


def _folder_of(rows: list[tuple[str, str]], path: str) -> str:
    """Where the relative paths of a table begin, "" or its folder: where the first image that is anywhere is found.

    ValueError when none of the first _TRIED local images is anywhere.
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
