"""The spool: a local cache of full shards, for storage without random access.

In:  a url, and a function that writes its bytes.
Out: a local path. A lock per shard ensures that the processes of a node fetch each shard once. A shard is written under
     a temporary name and renamed when complete, so every file in the spool is complete. Above the size limit, the least
     recently used shards are removed; a process that has one open can still read it. Spooling a shard also removes the
     temporary files of killed processes.
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

MIN_BYTES_PER_SECOND = 16 << 10  # slower transfers are stopped
TOO_SLOW = f"slower than {MIN_BYTES_PER_SECOND >> 10} KB/s"
_FREE_BYTES = 256 << 20  # disk space that a copy must leave free
_BYTES_BETWEEN_LOOKS = 64 << 20  # written between checks of the free space
# a temporary file with a writer changes within this time; on shared storage, other nodes may not see its lock
_GROWS_WITHIN_SECONDS = 60


def spooled(url: str, write: Callable[[BinaryIO], None], options: StorageOptions) -> Path:
    """Return the path of the local copy of `url`, which `write` creates if needed. Raises what `write` raises."""
    folder = spool_folder(options)
    folder.mkdir(parents=True, exist_ok=True)
    path = spool_path(url, options)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            stat = path.stat()
            os.utime(path, ns=(time.time_ns(), stat.st_mtime_ns))  # mark as recently used
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
    """Writer of a spool file with limits.

    It raises ShardFault above --data-cache-gb or if the disk is almost full, and TimeoutError if the data is too slow.
    """

    def __init__(self, file: BinaryIO, options: StorageOptions):
        self._file, self._limit, self._written, self._look_at = file, options.copy_bytes, 0, 0
        self._deadline = time.monotonic() + options.timeout  # for the first byte

    def write(self, data: bytes) -> None:
        self._written += len(data)
        if self._written > self._limit:
            raise ShardFault("shard_unreadable", f"the shard exceeds {self._limit / 1e9:.3g} GB (--data-cache-gb)")
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
    """Remove a temporary file without a writer: a writer holds its shard's lock until its process exits."""
    try:
        with open(temporary.with_name(f"{temporary.name.split('.')[0]}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            temporary.unlink(missing_ok=True)
    except OSError:  # it has a writer, or belongs to another user
        return False
    return True


def _make_room(folder: Path, newest: Path, limit: int) -> None:
    shards, total = [], 0
    for path in folder.iterdir():
        try:
            stat = path.stat()
        except FileNotFoundError:
            continue  # another process has removed it
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
