"""The spool: whole shards on local disk, for storage that cannot be read at random.

In:  a url and a function that writes its bytes.
Out: a local path. A shard is fetched once for all processes of a host (a lock per shard), under a temporary name that
     is renamed when it is complete, so a file in the spool is whole. Beyond the limit, the shards used longest ago
     are removed; a process that still has one open keeps reading it. What a killed process left of a shard is removed
     too, when another one is spooled.
"""

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

from infcl.data.storage import ShardFault, StorageOptions

MIN_BYTES_PER_SECOND = 16 << 10  # slower transfers end
TOO_SLOW = f"slower than {MIN_BYTES_PER_SECOND >> 10} KB/s"
_FREE_BYTES = 256 << 20  # of the disk, which a copy leaves
_BYTES_BETWEEN_LOOKS = 64 << 20  # at what is free
_GROWS_WITHIN_SECONDS = 60  # a file that is being written: on shared storage, locks may not reach other hosts


def spooled(url: str, write: Callable[[BinaryIO], None], options: StorageOptions) -> Path:
    """The local copy of `url`; `write` makes it where there is none. Raises what `write` raises."""
    folder = spool_folder(options)
    folder.mkdir(parents=True, exist_ok=True)
    path = spool_path(url, options)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            stat = path.stat()
            os.utime(path, ns=(time.time_ns(), stat.st_mtime_ns))  # used now
            return path
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            with open(temporary, "wb") as file:
                write(cast(BinaryIO, _Bounded(file, options)))
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    _make_room(folder, path, options.cache_bytes)
    return path


class _Bounded:
    """A file of the spool, to write to. Raises ShardFault beyond --data-cache-gb and before the disk is full, and
    TimeoutError where the bytes only trickle in."""

    def __init__(self, file: BinaryIO, options: StorageOptions):
        self._file, self._limit, self._written, self._look_at = file, options.copy_bytes, 0, 0
        self._deadline = time.monotonic() + options.timeout  # of the first byte

    def write(self, data: bytes) -> None:
        self._written += len(data)
        if self._written > self._limit:
            raise ShardFault("shard_unreadable", f"more than {self._limit / 1e9:.3g} GB came (--data-cache-gb)")
        if time.monotonic() > self._deadline + self._written / MIN_BYTES_PER_SECOND:
            raise TimeoutError(TOO_SLOW)
        if self._written > self._look_at:
            self._look_at = self._written + _BYTES_BETWEEN_LOOKS
            free = shutil.disk_usage(os.path.dirname(self._file.name)).free
            if free < _FREE_BYTES:
                raise ShardFault("shard_unreadable", f"{free / 1e6:.0f} MB are free on the disk of the spool")
        self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def spool_path(url: str, options: StorageOptions) -> Path:
    return spool_folder(options) / f"{hashlib.sha256(url.encode()).hexdigest()[:32]}.tar"


def spool_folder(options: StorageOptions) -> Path:
    return Path(options.cache) if options.cache else Path.home() / ".cache" / "infcl" / "shards"


def _removed_if_left_over(temporary: Path) -> bool:
    """Remove a temporary file that nobody writes: a writer holds its shard's lock, and a lock ends with its process."""
    try:
        with open(temporary.with_name(f"{temporary.name.split('.')[0]}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            temporary.unlink(missing_ok=True)
    except OSError:  # it is being written, or is another user's
        return False
    return True


def _make_room(folder: Path, newest: Path, limit: int) -> None:
    shards, total = [], 0
    for path in folder.iterdir():
        try:
            stat = path.stat()
        except FileNotFoundError:
            continue  # another process made room
        if path.suffix == ".tmp":
            if time.time() - stat.st_mtime > _GROWS_WITHIN_SECONDS and _removed_if_left_over(path):
                continue
            total += stat.st_size
        elif path.suffix == ".tar":
            shards.append((stat.st_atime_ns, stat.st_size, path))
            total += stat.st_size
    for _, size, path in sorted(shards):
        if total <= limit:
            break
        if path != newest:
            path.unlink(missing_ok=True)
            total -= size
