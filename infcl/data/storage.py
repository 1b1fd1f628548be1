"""Storage: a shard on any kind of storage, as a file for reads at (offset, size).

A shard is a path, `http(s)://`, any other `scheme://` that fsspec supports (s3, gs, hdfs, ...), or `pipe:COMMAND`.
remote.open_shard opens it as a file with the interface of `LocalFile`. This module has the common parts and local
files; remote.py has the other kinds.

A failed read is retried with back-off (`retry`). If it still fails, it raises a `ShardFault` with a cause, which is
counted. A read never returns wrong bytes.
"""

import contextlib
import itertools
import os
import random
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, TypeVar

MAX_LINE = 16 << 20  # characters per line of a text file
_SMALLEST_LIMIT = 1 << 30
T = TypeVar("T")


class ShardFault(Exception):
    """A shard that currently cannot be used. `cause` is the name of a counter."""

    def __init__(self, cause: str, message: str):
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True)
class StorageOptions:
    """Settings for reading shards.

    Args:
        timeout: seconds without a byte after which a read fails.
        attempts: number of attempts per read.
        backoff: seconds to wait after the first failed attempt; the wait doubles after each further one.
        cache: folder of the spool (default ~/.cache/infcl/shards).
        cache_bytes: size limit of the spool.
        allow_pipe: allow `pipe:COMMAND`, which runs a shell command.
    """

    timeout: float = 30.0
    attempts: int = 4
    backoff: float = 1.0
    cache: str | None = None
    cache_bytes: int = 100 << 30
    allow_pipe: bool = False

    @property
    def copy_bytes(self) -> int:
        """Size limit in bytes of one spooled shard: the limit of the spool, but at least 1 GiB."""
        return max(self.cache_bytes, _SMALLEST_LIMIT)


DEFAULT_STORAGE = StorageOptions()


def is_remote(url: str) -> bool:
    return url.startswith("pipe:") or "://" in url


def retry(attempt: Callable[[], T], what: str, options: StorageOptions) -> T:
    """Call `attempt` until it succeeds, at most `options.attempts` times, with exponential back-off.

    Args:
        attempt: the function to call.
        what: the path or url, for messages.
        options: number of attempts and the back-off.

    Returns:
        The result of `attempt`.

    Raises:
        ShardFault: "shard_missing" at once if the file does not exist, "shard_unreadable" after the last attempt.
    """
    for number in itertools.count(1):
        try:
            return attempt()
        except FileNotFoundError as error:
            raise ShardFault("shard_missing", f"{what}: not found ({error})") from error
        except OSError as error:
            if number >= options.attempts:
                message = f"{what}: {number} attempts failed, the last with {type(error).__name__}: {error}"
                raise ShardFault("shard_unreadable", message) from error
        wait = options.backoff * 2 ** (number - 1)
        # random, so that thousands of workers do not retry at the same time
        time.sleep(random.SystemRandom().uniform(0.5, 1.0) * wait)
    raise AssertionError("attempts is at least 1")


def open_regular(path: str | os.PathLike, flags: int = os.O_RDONLY) -> int:
    """Open a regular file and return its descriptor; usable as open(opener=...), which passes `flags`.

    Raises OSError if there is no such file, and `ShardFault` "not_a_file" for a FIFO, a device, a socket or a folder,
    from which a read might never return.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # checked first: opening a device may have side effects
        raise ShardFault("not_a_file", f"{os.fspath(path)} is not a regular file")
    return os.open(path, flags | os.O_NONBLOCK)  # never block on a FIFO that has replaced the file meanwhile


@contextlib.contextmanager
def open_lines(path: str | os.PathLike, *, encoding: str = "utf-8", errors: str = "strict") -> Iterator[Iterator[str]]:
    """Open a text file as an iterator of lines. Raises ValueError if it is unreadable or a line exceeds MAX_LINE."""

    def bounded(file: TextIO) -> Iterator[str]:
        while line := file.readline(MAX_LINE):
            if len(line) == MAX_LINE:
                raise ValueError(f"{file.name}: a line of more than {MAX_LINE >> 20} MB: is this a text file?")
            yield line

    try:
        with open(path, encoding=encoding, errors=errors, newline="", opener=open_regular) as file:
            yield bounded(file)
    except ShardFault as fault:
        raise ValueError(str(fault)) from fault
    except OSError as error:
        raise ValueError(f"{os.fspath(path)}: {error.strerror}") from error


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file so that no reader sees a part of it. Raises OSError and leaves no partial file if that fails."""
    temporary = path.with_name(f"{path.name}.{os.urandom(4).hex()}.tmp")  # random: nodes may share the folder
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


class LocalFile:
    """A regular local file. `fixed_version` replaces the time stamp as version, for files of the spool.

    Attributes: file_bytes, version (changes when the content may have changed).
    """

    def __init__(self, path: str | os.PathLike, *, fixed_version: int | None = None):
        self._file = open(path, "rb", buffering=0, opener=open_regular)
        self._fixed_version = fixed_version
        self.file_bytes, self.version = self._state()

    def _state(self) -> tuple[int, int]:
        state = os.fstat(self._file.fileno())
        return state.st_size, state.st_mtime_ns if self._fixed_version is None else self._fixed_version

    def pread(self, size: int, offset: int) -> bytes:
        """Read `size` bytes at `offset`; fewer only at the end of the file."""
        data = os.pread(self._file.fileno(), size, offset)
        while len(data) < size and (more := os.pread(self._file.fileno(), size - len(data), offset + len(data))):
            data += more
        return data

    def changed(self) -> bool:
        """Return whether the content may have changed since the file was opened."""
        return self._state() != (self.file_bytes, self.version)

    def close(self) -> None:
        self._file.close()
