"""Records: read the undecoded bytes of samples, by their global sample numbers or front to back.

In:  a `Manifest`, and sample numbers in any order; or the urls of shards.
Out: `Record`s in that order. Samples of one shard are read together, and adjacent samples with one call.
"""

import contextlib
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from infcl.config import counted
from infcl.config.words import printable
from infcl.data.index import (
    ABSENT,
    DEFAULT_KEYS,
    MAX_IMAGE_BYTES,
    MAX_TEXT_BYTES,
    SampleKeys,
    Shard,
    find_samples,
    read_sidecar,
    scan_shard,
)  # fmt: skip
from infcl.data.shards import Manifest
from infcl.data.storage import ShardFault, ShardFile, is_remote, open_copy, open_shard, retry

MAX_CAPTION_BYTES = 4096
_MERGE_GAP = 4096  # members closer than this are read with one call
_MERGE_BYTES = 16 << 20
_OPEN_FILES, _OPEN_CONNECTIONS = 128, 8
_LEAVE_ALONE_SECONDS = 60.0  # wait after a failed shard before the next attempt


class BadSample(Exception):
    """A sample that cannot be used. `cause` is the name of a counter; the message has the details."""

    def __init__(self, cause: str, message: str = ""):
        super().__init__(printable(message or cause))
        self.cause = cause


class Record(NamedTuple):
    """The undecoded members of one sample, its origin (`where`, for messages), and the fault of an unreadable shard."""

    image: bytes | None
    text: bytes | None
    json: bytes | None
    where: str
    shard: str = ""
    fault: ShardFault | None = None
    teacher: bytes | None = None


class ShardReader:
    """Reader of records by global sample number. It keeps a bounded number of open files and indexes.

    A failed read is retried (storage.retry). If a shard still cannot be read, or has changed since it was indexed, its
    records have a `fault`, and the reader waits before it tries that shard again. Workers are forked before the first
    read, so that processes share no connection.

    Args:
        needs_json: read the json member in addition to the text member.
    """

    if_empty = (
        "are these tars of jpg, png or webp with a txt or a json of the same name? --image-key and --text-key name "
        "other extensions; python -m infcl.data.shards index looks at each"
    )

    def __init__(self, manifest: Manifest, keys: SampleKeys = DEFAULT_KEYS, *, needs_json: bool = False):
        # few connections: every worker of every rank opens its own
        remote = any(is_remote(shard.path) for shard in manifest.shards)
        self.manifest, self.keys, self.needs_json = manifest, keys, needs_json
        self._max_open = _OPEN_CONNECTIONS if remote else _OPEN_FILES
        # the attributes of indexed.Collection, for the plan and the report
        self.counts = np.array([shard.samples for shard in manifest.shards])
        self.factors = np.array([shard.factor for shard in manifest.shards])
        self.sha256, self.found, self.warnings = manifest.sha256, manifest.found, manifest.warnings
        self._open: OrderedDict[int, tuple[ShardFile, np.ndarray]] = OrderedDict()  # shard -> (file, members)
        self._faults: dict[int, tuple[float, ShardFault]] = {}  # shard -> (time of the next attempt, fault)

    def __str__(self) -> str:
        shards = len(self.manifest.shards)
        return f"{counted(shards, 'shard')} hold{'s' * (shards == 1)} {self.manifest.num_samples} usable samples"

    def read(self, samples: np.ndarray, *, images: bool = True) -> list[Record]:
        """Return the records of the global sample numbers int64 [n], in their order."""
        shard_of = np.searchsorted(self.manifest.ends, samples, side="right")
        records: dict[int, Record] = {}
        for i in np.unique(shard_of).tolist():
            shard = self.manifest.shards[i]
            slots = np.flatnonzero(shard_of == i)
            rows = samples[slots] - (self.manifest.ends[i] - shard.samples)
            try:
                data, fault = self._read_shard(i, rows, images), None
            except ShardFault as error:
                data, fault = [None] * (4 * len(rows)), error
            for k, (slot, row) in enumerate(zip(slots.tolist(), rows.tolist())):
                where = f"{shard.path} sample {row}"
                image, text, json, teacher = data[4 * k : 4 * k + 4]
                records[slot] = Record(image, text, json, where, shard.path, fault, teacher)
        return [records[slot] for slot in range(len(samples))]

    def _read_shard(self, i: int, rows: np.ndarray, images: bool) -> list[bytes | None]:
        """Return image, text, json, teacher, image, ... of the given rows of shard i. Raises ShardFault."""
        if i in self._faults and time.monotonic() < self._faults[i][0]:
            raise self._faults[i][1].with_traceback(None)  # or each time would add to it
        path = self.manifest.shards[i].path

        def attempt() -> list[bytes | None]:
            try:
                file, members = self._file(i)
                wanted = [member for row in members[rows].tolist() for member in self._wanted(row, images)]
                data = read_members(file, wanted, path)
                if file.changed():
                    raise ShardFault("shard_changed", f"{path} changed during the run")
                return data
            except BaseException:  # KeyboardInterrupt too: a handle with a half-read response is unusable
                if i in self._open:
                    self._open.pop(i)[0].close()
                raise

        try:
            return retry(attempt, path)
        except ShardFault as error:
            self._faults[i] = time.monotonic() + _LEAVE_ALONE_SECONDS, error
            raise

    def _wanted(self, row: list[int], images: bool) -> list[tuple[int, int]]:
        """Return (offset, size) of image, text, json and teacher; what is not needed is marked as absent."""
        absent = (ABSENT, ABSENT)
        use_json = self.keys.json_text is not None or row[2] == ABSENT
        text = absent if use_json else (row[2], min(row[3], MAX_CAPTION_BYTES + 1))
        json = (row[4], row[5]) if use_json or self.needs_json else absent
        return [(row[0], row[1]) if images else absent, text, json, (row[6], row[7]) if self.keys.teacher else absent]

    def _file(self, i: int) -> tuple[ShardFile, np.ndarray]:
        if i in self._open:
            self._open.move_to_end(i)
            return self._open[i]
        shard = self.manifest.shards[i]
        file = open_shard(shard.path)
        if (file.file_bytes, file.version) != (shard.file_bytes, shard.version):
            file.close()
            raise ShardFault(
                "shard_changed",
                f"{shard.path} changed during the run: {shard.file_bytes} bytes when indexed, {file.file_bytes} now "
                f"(or its time or tag differs); restart the run to index it again",
            )
        self._open[i] = file, self._members(shard)
        if len(self._open) > self._max_open:
            self._open.popitem(last=False)[1][0].close()
        return self._open[i]

    def _members(self, shard: Shard) -> np.ndarray:
        """Return a shard's index. A damaged index is removed and rebuilt."""
        members = read_sidecar(shard, self.keys)
        if members is None:
            _, members = scan_shard(shard.path, self.keys)
            if len(members) != shard.samples:
                raise ShardFault("shard_changed", f"{shard.path} has other samples than its index: restart the run")
            with contextlib.suppress(OSError):
                os.unlink(shard.index_path)
        return members


def read_members(file: ShardFile, wanted: list[tuple[int, int]], path: str) -> list[bytes | None]:
    """Return the bytes of each (offset, size), or None if absent. Adjacent ranges are read with one call."""
    result: list[bytes | None] = [None] * len(wanted)
    order = sorted((i for i, (offset, _) in enumerate(wanted) if offset != ABSENT), key=lambda i: wanted[i])
    at = 0
    while at < len(order):
        begin, end = wanted[order[at]][0], sum(wanted[order[at]])
        stop = at + 1
        while stop < len(order):
            offset, size = wanted[order[stop]]
            if offset - end > _MERGE_GAP or offset + size - begin > _MERGE_BYTES:
                break
            end, stop = max(end, offset + size), stop + 1
        data = file.pread(end - begin, begin)
        if len(data) < end - begin:
            raise ShardFault(
                "shard_changed", f"{path} ends at byte {begin + len(data)}: it was truncated after indexing"
            )
        for i in order[at:stop]:
            offset, size = wanted[i]
            result[i] = data[offset - begin : offset - begin + size]
        at = stop
    return result


def stream_records(
    urls: Sequence[str],
    keys: SampleKeys,
    failed: Callable[[str, str, Exception], None],
    *,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[tuple[str, Record]]:
    """Yield (key, record) of every sample, in order; with `world_size` > 1, of samples rank, rank + world_size, ...

    Args:
        failed: called with (cause, url, error) for each shard that cannot be opened or is damaged, and for each sample
            without an image.
        rank, world_size: of the members of other samples only the headers are read.
    """
    first = rank  # row of the next sample in its shard
    for url in urls:
        try:
            with contextlib.closing(open_copy(url)) as file:
                rows, bad_keys, damage = find_samples(file.pread, file.file_bytes, url, keys)
                for key in bad_keys.get("no_image", ()):
                    failed("no_image", url, ValueError(f"{url} {printable(key)}: no image"))
                if damage:
                    failed("damaged_shard", url, ValueError(f"{url}: {damage}"))
                own = islice(rows.items(), first, None, world_size)
                first = (first - len(rows)) % world_size
                for key, row in own:
                    name = key.encode("utf-8", "backslashreplace").decode()  # a name may be any bytes
                    yield name, _read_record(file, row, f"{url} {name}", url)
        except ShardFault as fault:
            failed(fault.cause, url, fault)
        except (OSError, ValueError) as error:  # ValueError: it is compressed
            failed("damaged_shard" if isinstance(error, ValueError) else "shard_unreadable", url, error)


def _read_record(file: ShardFile, row: list[int], where: str, url: str) -> Record:
    if row[1] > MAX_IMAGE_BYTES:
        fault = ShardFault("image_file_too_large", f"{where}: {row[1]} bytes, {MAX_IMAGE_BYTES} allowed")
        return Record(None, None, None, where, url, fault)
    text_bytes = min(row[3], MAX_TEXT_BYTES + 1)
    teacher = (row[6], row[7]) if len(row) > 6 else (ABSENT, ABSENT)
    wanted = [(row[0], row[1]), (row[2], text_bytes), (row[4], row[5]), teacher]
    image, text, json, embeddings = read_members(file, wanted, url)
    return Record(image, text, json, where, url, teacher=embeddings)
