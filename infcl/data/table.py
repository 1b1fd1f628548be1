"""A table of image files and captions, as open_clip reads it with --dataset-type csv, for the indexed reader.

In:  a text file with a header line; two of its columns (by name) hold an image's path and its caption. A `::` list of
     tables is one data set of several sources.
Out: `TableReader`, which gives the records of rows at random. Rows are held as one block of bytes and their offsets, so
     that workers share the memory (a list of strings would be copied to each, reference count by reference count).
"""

import csv
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from infcl.data.index import DEFAULT_KEYS, MAX_IMAGE_BYTES
from infcl.data.records import Record
from infcl.data.shards import split_sources
from infcl.data.storage import DEFAULT_STORAGE, ShardFault, StorageOptions, open_shard, retry

_TRIED = 1000  # images of a table that are looked for, at most, before training
_MAX_FIELD = 16 << 20  # characters; Python's limit would end at 128 K


class TableReader:
    """Rows by number. An image path that is not absolute is taken from the working directory, or the table's."""

    keys = DEFAULT_KEYS

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        separator: str = "\t",
        image_column: str = "filepath",
        caption_column: str = "title",
        factors: Sequence[float] | None = None,
        storage: StorageOptions = DEFAULT_STORAGE,
    ):
        self.paths, self.storage = split_sources(urls), storage
        if factors is not None and (len(factors) != len(self.paths) or min(factors) <= 0):
            raise ValueError(f"{len(self.paths)} sources need as many upsampling factors above 0, not {list(factors)}")
        digest, block, ends, counts = hashlib.sha256(), bytearray(), [0], []
        found: Counter[str] = Counter()
        for path in self.paths:
            rows, problems = _read_table(path, separator, image_column, caption_column)
            found.update(problems)
            for image, caption in rows:
                for field in (image, caption):
                    block += field.encode("utf-8", "surrogateescape")
                    ends.append(len(block))
            counts.append(len(rows))
        self._block, self._ends = np.frombuffer(bytes(block), dtype=np.uint8), np.array(ends, dtype=np.int64)
        self.counts = np.array(counts, dtype=np.int64)
        self.factors = np.array(factors or [1.0] * len(counts), dtype=np.float64)
        digest.update(self._block.tobytes() + self._ends.tobytes() + self.factors.tobytes())
        self.sha256, self.found = digest.hexdigest(), dict(found)
        self.warnings: list[str] = []
        self.if_empty = "a table has a line of column names, then a line for each image (docs/data.md)"

    def __str__(self) -> str:
        return f"{len(self.paths)} tables hold {int(self.counts.sum())} rows"

    def parts_of(self, samples: np.ndarray) -> list[int]:
        return np.unique(np.searchsorted(np.cumsum(self.counts), samples, side="right")).tolist()

    def name_of(self, part: int) -> str:
        return self.paths[part]

    def read(
        self, samples: np.ndarray, *, images: bool = True, on_part: Callable[[int], None] = lambda part: None
    ) -> list[Record]:
        """Records of int64 row numbers [n], in their order."""
        records = []
        for row in samples.tolist():
            part = self.parts_of(np.array([row]))[0]
            on_part(part)
            begin, middle, end = self._ends[2 * row : 2 * row + 3].tolist()
            path = os.fsdecode(self._block[begin:middle].tobytes())
            caption, fault, image = self._block[middle:end].tobytes(), None, None
            try:
                image = self._image(path) if images else None
            except ShardFault as error:
                fault = error
            records.append(Record(image, caption, None, path, self.paths[part], fault))
        return records

    def _image(self, path: str) -> bytes:
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


def _read_table(
    path: str, separator: str, image_column: str, caption_column: str
) -> tuple[list[tuple[str, str]], Counter]:
    """((image path, caption) of each row, what was left out)."""
    if len(separator) != 1:
        raise ValueError(f"--csv-separator {separator!r} must be one character")
    rows = []
    problems: Counter[str] = Counter()
    before = csv.field_size_limit(_MAX_FIELD)
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
            lines = csv.reader((line.replace("\0", "") for line in file), delimiter=separator)
            header = [name.removeprefix("\ufeff") for name in next(lines, [])]
            try:
                image_at, caption_at = header.index(image_column), header.index(caption_column)
            except ValueError:
                raise ValueError(
                    f"{path} has no columns {image_column!r} and {caption_column!r} but {header[:10]}: "
                    f"say --csv-img-key, --csv-caption-key or --csv-separator (now {separator!r})"
                ) from None
            while True:
                try:
                    row = next(lines)
                except StopIteration:
                    break
                except csv.Error:
                    problems["index/bad_row"] += 1
                    continue
                if len(row) <= max(image_at, caption_at):
                    problems["index/bad_row"] += bool(row)  # an empty line is no row
                elif not row[image_at]:
                    problems["index/no_image"] += 1
                else:
                    rows.append((row[image_at], row[caption_at]))
    except OSError as error:
        raise ValueError(f"--train-data {path}: {error.strerror}") from error
    finally:
        csv.field_size_limit(before)
    return _from_beside(rows, path), problems


def _from_beside(rows: list[tuple[str, str]], path: str) -> list[tuple[str, str]]:
    """Rows with paths that work: relative ones are looked for where the first that is anywhere is found.

    ValueError when none of the first _TRIED local images is anywhere.
    """
    local = [image for image, _ in rows if "://" not in image][:_TRIED]
    folder = os.path.dirname(path)
    for image in local:
        if os.path.exists(image):
            return rows
        if os.path.exists(os.path.join(folder, image)):
            return [(os.path.join(folder, other) if "://" not in other else other, caption) for other, caption in rows]
    if local:
        raise ValueError(
            f"{path}: none of its first {len(local):,} images is there (the first: {local[0]!r}); a path that is not "
            f"absolute is taken from the working directory or from {folder or '.'}"
        )
    return rows
