"""Storage: one shard, wherever it is stored, as a file that is read at (offset, size).

A shard is a path, `http(s)://`, any other `scheme://` that fsspec knows (s3, gs, hdfs, ...), or `pipe:COMMAND`; opened
(remote.py) it is a `ShardFile`: its size, a number that changes when its content may have changed, and `pread`. Here is
what all kinds share, and local files; the others are in remote.py.

A read that fails is tried again with back-off (`retry`); what then still fails is a `ShardFault` with a cause, which
is counted, and never a wrong byte.
"""

import contextlib
import http.client
import os
import random
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TextIO, TypeVar

MAX_LINE = 16 << 20  # characters of a text file's line
_SMALLEST_LIMIT = 1 << 30
T = TypeVar("T")


class ShardFault(Exception):
    """A shard that cannot be used now. `cause` is a counter's name."""

    def __init__(self, cause: str, message: str):
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True)
class StorageOptions:
    """timeout: seconds without a byte. attempts, backoff: tries, and the wait after the first, which then doubles.

    cache, cache_bytes: the spool's folder (default ~/.cache/infcl/shards) and its limit. allow_pipe: `pipe:` runs a
    shell command, so it must be asked for.
    """

    timeout: float = 30.0
    attempts: int = 4
    backoff: float = 1.0
    cache: str | None = None
    cache_bytes: int = 100 << 30
    allow_pipe: bool = False

    @property
    def copy_bytes(self) -> int:
        """The most that is copied of one shard, whatever its server sends: the spool's limit, where that is no toy."""
        return max(self.cache_bytes, _SMALLEST_LIMIT)


DEFAULT_STORAGE = StorageOptions()


class ShardFile(Protocol):
    file_bytes: int
    version: int  # differs when the content may differ

    def pread(self, size: int, offset: int) -> bytes:
        """Up to `size` bytes from `offset`; fewer only at the end of the file."""

    def changed(self) -> bool:
        """Whether the content may have changed since it was opened."""

    def close(self) -> None: ...


def is_remote(url: str) -> bool:
    return url.startswith("pipe:") or "://" in url


def retry(attempt: Callable[[], T], what: str, options: StorageOptions) -> T:
    """attempt(), until it succeeds or has failed `options.attempts` times, with about doubling waits in between.

    Raises ShardFault: "shard_missing" at once where there is no such file, "shard_unreadable" after the last attempt.
    """
    for number in range(1, options.attempts + 1):
        try:
            return attempt()
        except FileNotFoundError as error:
            raise ShardFault("shard_missing", f"{what}: not found ({error})") from error
        except (OSError, http.client.HTTPException) as error:
            if number == options.attempts:
                message = f"{what}: {number} attempts failed, the last with {type(error).__name__}: {error}"
                raise ShardFault("shard_unreadable", message) from error
        wait = options.backoff * 2 ** (number - 1)
        time.sleep(random.SystemRandom().uniform(0.5, 1.0) * wait)  # thousands of workers do not come back at once
    raise AssertionError("attempts is at least 1")


def open_regular(path: str | os.PathLike, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file, to read from. OSError where there is none; `ShardFault` "not_a_file", at once,
    for all that may never end or answer: a FIFO, a device, a socket, a folder. `flags` are what open(opener=...) gives.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # before it is opened: opening a device may act on it
        raise ShardFault("not_a_file", f"{os.fspath(path)} is not a regular file")
    return os.open(path, flags | os.O_NONBLOCK)  # a FIFO that took its place meanwhile does not wait for its writer


@contextlib.contextmanager
def open_lines(path: str | os.PathLike, *, encoding: str = "utf-8", errors: str = "strict") -> Iterator[Iterator[str]]:
    """Open a text file as an iterator over its lines. Raises ValueError when it cannot be read or a line has no end."""
    try:
        with open(path, encoding=encoding, errors=errors, newline="", opener=open_regular) as file:
            yield _bounded_lines(file)
    except ShardFault as fault:
        raise ValueError(str(fault)) from fault
    except OSError as error:
        raise ValueError(f"{os.fspath(path)}: {error.strerror}") from error


def _bounded_lines(file: TextIO) -> Iterator[str]:
    while line := file.readline(MAX_LINE):
        if len(line) == MAX_LINE:
            raise ValueError(f"{file.name}: a line of more than {MAX_LINE >> 20} MB: is this a text file?")
        yield line


class LocalFile:
    """A regular file on a file system. `fixed_version` is for the spool's files, whose times say nothing."""

    def __init__(self, path: str | os.PathLike, *, fixed_version: int | None = None):
        self._descriptor = open_regular(path)
        self._fixed_version = fixed_version
        self.file_bytes, self.version = self._state()

    def _state(self) -> tuple[int, int]:
        state = os.fstat(self._descriptor)
        return state.st_size, state.st_mtime_ns if self._fixed_version is None else self._fixed_version

    def pread(self, size: int, offset: int) -> bytes:
        data = os.pread(self._descriptor, size, offset)
        while len(data) < size:
            more = os.pread(self._descriptor, size - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def changed(self) -> bool:
        return self._state() != (self.file_bytes, self.version)

    def close(self) -> None:
        os.close(self._descriptor)
