"""Storage: a shard on any kind of storage, as a file for reads at (offset, size).

A shard is a path, a url of one of SCHEMES, `filecache::` and such a url, or `pipe:COMMAND`. `open_shard` opens it for
random access, `open_copy` for one sequential pass. The copy of a remote shard is a temporary file, so a transfer that
breaks off is repeated before a sample of it is used.

Every failure of a transport, and a read slower than 16 KB/s, is retried with back-off (`retry`). If it still fails, it
raises a `ShardFault` with a cause, which is counted. A read never returns wrong bytes.

http(s) uses urllib3 instead of fsspec. If a server ignores the range, fsspec reads a full shard into memory. It also
reports every failure as a missing file, and hides the file size and tag in each response.
"""

import concurrent.futures
import contextlib
import errno
import ipaddress
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import IO, Any, TextIO, TypeVar
from urllib.parse import urljoin, urlsplit

import urllib3

from infcl.config.words import printable, reason

SCHEMES = ("file", "http", "https", "s3", "gs", "hdfs")  # fsspec has others, some of which open further urls
TIMEOUT = 30.0  # seconds without a byte after which a read fails
ATTEMPTS = 4  # per read
BACKOFF = 1.0  # seconds to wait after the first failed attempt; the wait doubles after each further one
MAX_LINE = 16 << 20  # characters per line of a text file
_MIN_BYTES_PER_SECOND = 16 << 10  # slower reads are stopped
_FREE_BYTES = 256 << 20  # disk space that a copy must leave free
_COPY_BYTES, _READ_BYTES = 8 << 20, 1 << 18  # of a copy: per read of a file, and of a stream
_SECONDS_BETWEEN_CHECKS = 60.0  # of size and tag, if responses do not carry them
_REDIRECTS = 5
_AS_SENT: dict[str, Any] = {"redirect": False, "preload_content": False, "decode_content": False}  # of urllib3
_TEMPORARY = (408, 425, 429, 500, 502, 503, 504)  # HTTP statuses that are retried
T = TypeVar("T")


class ShardFault(Exception):
    """A shard that currently cannot be used. `cause` is the name of a counter."""

    def __init__(self, cause: str, message: str):
        super().__init__(printable(message))
        self.cause = cause


def is_remote(url: str) -> bool:
    return url.startswith("pipe:") or "://" in url


def open_shard(url: str, *, sequential: bool = False) -> "ShardFile":
    """Open a file of any kind, in one attempt; with `sequential`, it may have no random access, only `copy`.

    Raises:
        ShardFault: the shard cannot be used.
        Exception: the attempt failed and may be retried.
    """
    if not is_remote(url) or url.startswith("file://"):
        return LocalFile(open(url.removeprefix("file://"), "rb", buffering=0, opener=open_regular))
    scheme, _, rest = url.removeprefix("filecache::").partition("://")
    if scheme not in SCHEMES or "::" in rest:
        raise ShardFault("unsupported_url", f"{url} is not a url of {', '.join(SCHEMES)}")
    if not url.startswith(("http://", "https://")):
        return FsspecFile(url)
    file = HttpFile(url)
    if not (file.ranges or sequential):
        file.close()
        raise ShardFault(
            "shard_unreadable",
            f"{url}: the server has no random access: use --dataset-type streaming, or filecache::{url} "
            "(docs/howto/data.md)",
        )
    return file


def open_copy(url: str) -> "ShardFile":
    """Open a shard for a sequential pass; a remote one as a temporary copy that is deleted when it is closed.

    Raises:
        ShardFault: all attempts failed.
    """

    def attempt() -> ShardFile:
        if not is_remote(url):
            return open_shard(url)
        with contextlib.ExitStack() as on_failure:
            copy = on_failure.enter_context(tempfile.TemporaryFile())
            if url.startswith("pipe:"):
                _copy_pipe(url[5:], _bounded(copy))
            else:
                with contextlib.closing(open_shard(url, sequential=True)) as file:
                    file.copy(_bounded(copy))
            copy.flush()
            on_failure.pop_all()
        return LocalFile(copy)

    return retry(attempt, url)


def retry(attempt: Callable[[], T], what: str) -> T:
    """Return attempt(), called at most `ATTEMPTS` times with exponential back-off. `what` is the url, for messages.

    Raises:
        ShardFault: "shard_missing" at once if the file does not exist, "shard_unreadable" after the last attempt.
    """
    for number in range(ATTEMPTS):
        if number:  # random, so that thousands of workers do not retry at the same time
            time.sleep(random.SystemRandom().uniform(0.5, 1.0) * BACKOFF * 2 ** (number - 1))
        try:
            return attempt()
        except ShardFault:
            raise
        except FileNotFoundError as error:
            raise ShardFault("shard_missing", f"{what}: not found ({error.strerror or error})") from error
        except (OSError, ValueError, urllib3.exceptions.HTTPError) as error:  # ValueError: of what a server sent
            failure = reason(error)
    raise ShardFault("shard_unreadable", f"{what}: {ATTEMPTS} attempts failed, the last with {failure}")


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return call(), or raise TimeoutError after `seconds`; a hanging call stays in its daemon thread."""
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # re-raised in the caller's thread
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if not concurrent.futures.wait([outcome], seconds).done:
        raise TimeoutError(f"no answer within {seconds:.3g} s")
    return outcome.result()


class ShardFile(ABC):
    """A file for reads at (offset, size).

    Attributes: file_bytes (-1 if a server does not report it), version (changes when the content may have changed).
    """

    file_bytes: int
    version: int

    @abstractmethod
    def pread(self, size: int, offset: int) -> bytes:
        """Read `size` bytes at `offset`; fewer only at the end of the file."""

    def copy(self, write: Callable[[bytes], object]) -> None:
        """Pass the full file to `write`, in order."""
        for offset in range(0, self.file_bytes, _COPY_BYTES):
            write(self.pread(_COPY_BYTES, offset))

    def changed(self) -> bool:
        """Return whether the content may have changed since the file was opened."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Free what the file holds."""


class LocalFile(ShardFile):
    """An open regular file."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self.file_bytes, self.version = self._state()

    def _state(self) -> tuple[int, int]:
        state = os.fstat(self._file.fileno())
        return state.st_size, state.st_mtime_ns

    def pread(self, size: int, offset: int) -> bytes:
        data = os.pread(self._file.fileno(), size, offset)
        while len(data) < size and (more := os.pread(self._file.fileno(), size - len(data), offset + len(data))):
            data += more
        return data

    def changed(self) -> bool:
        return self._state() != (self.file_bytes, self.version)

    def close(self) -> None:
        self._file.close()


class RemoteFile(ShardFile):
    """A remote file. Each read has a time limit: a server may send a byte now and then, and a driver may hang."""

    _least_transfer = 0  # bytes that any read may have to transfer

    def pread(self, size: int, offset: int) -> bytes:
        size = min(size, self.file_bytes - offset)
        if size <= 0:
            return b""
        seconds = TIMEOUT + max(size, self._least_transfer) / _MIN_BYTES_PER_SECOND
        data = within(seconds, lambda: self._read(size, offset))
        if len(data) != size:
            raise OSError(f"{size} bytes were requested, the server sent {len(data)}")
        return data

    @abstractmethod
    def _read(self, size: int, offset: int) -> bytes:
        """Read at a place inside the file, without a time limit."""


class HttpFile(RemoteFile):
    """A file read by range requests over a persistent connection.

    Every response carries the file's size and tag, so each read detects whether the file has changed. `ranges` is false
    if the server cannot read ranges of the file or does not report its size.
    """

    def __init__(self, url: str):
        self._url = self._final = url  # _final: after redirects
        self._pool = urllib3.PoolManager(retries=False, timeout=TIMEOUT)  # `retry` repeats failed reads
        within(TIMEOUT, self._open)

    def _open(self) -> None:
        response = self._get({"Range": "bytes=0-0"})
        self.file_bytes, self.version = _http_state(response)
        self.ranges = response.status == 206 and self.file_bytes >= 0  # "bytes 0-0/*" has no size
        if self.ranges:
            response.read(2)  # one byte, so that the connection is kept
        else:
            response.close()  # the body may be the full file

    def _read(self, size: int, offset: int) -> bytes:
        response = self._get({"Range": f"bytes={offset}-{offset + size - 1}"})
        if response.status != 206 or _http_state(response) != (self.file_bytes, self.version):
            raise ShardFault("shard_changed", f"{self._url} changed during the run")
        content_range = response.headers.get("Content-Range", "")
        if not content_range.removeprefix("bytes").strip().startswith(f"{offset}-"):
            raise OSError(f"bytes from {offset} were requested, the server sent {content_range}")
        return response.read(size + 1)

    def copy(self, write: Callable[[bytes], object]) -> None:
        response = within(TIMEOUT, lambda: self._get({}))  # urllib3 compares the length with the promised one
        while part := within(TIMEOUT, lambda: response.read1(_READ_BYTES)):
            write(part)

    def close(self) -> None:
        self._pool.clear()

    def _get(self, headers: dict[str, str]) -> urllib3.BaseHTTPResponse:
        options = {"headers": {"Accept-Encoding": "identity"} | headers, **_AS_SENT}
        response = self._pool.request("GET", self._final, **options)
        for _ in range(_REDIRECTS):
            if not (to := response.get_redirect_location()):
                break
            response.close()
            self._final = urljoin(self._final, to)
            if is_of_this_host(self._final) and not is_of_this_host(self._url):
                raise ShardFault("unsupported_url", f"{self._url} redirects to {self._final}, which is of this host")
            response = self._pool.request("GET", self._final, **options)
        if response.status < 300:
            if (coding := response.headers.get("Content-Encoding", "identity")) != "identity":
                response.close()
                raise ShardFault("shard_unreadable", f"{self._url}: the server compresses it ({coding})")
            return response
        response.close()
        what = f"http status {response.status} {response.reason}"
        if self._final != self._url or response.status in _TEMPORARY:
            self._final = self._url  # the redirect may have been temporary
            raise OSError(what)
        if response.status in (404, 410):
            raise FileNotFoundError(what)
        raise ShardFault("shard_unreadable", f"{self._url}: {what}")


def _http_state(response: urllib3.BaseHTTPResponse) -> tuple[int, int]:
    """Return (file size, version) of a response; the size is -1 if the response has none."""
    size = response.headers.get("Content-Range", "").rpartition("/")[2] or response.headers.get("Content-Length", "")
    tag = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
    return int(size) if size.isascii() and size.isdigit() else -1, _number_of(tag)


def is_of_this_host(url: str) -> bool:
    """Return whether a url has a loopback or link-local address, as services of this host or its cloud have."""
    found = socket.getaddrinfo(urlsplit(url).hostname, None)
    addresses = [ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found]
    return any(address.is_loopback or address.is_link_local or address.is_unspecified for address in addresses)


@contextlib.contextmanager
def _driver() -> Iterator[None]:
    """Turn whatever a driver of fsspec raises into an OSError, which is retried."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, reason(error)) from error


class FsspecFile(RemoteFile):
    """A file read by ranges through an fsspec driver, or through one of fsspec's caches (filecache::URL)."""

    def __init__(self, url: str):
        try:
            import fsspec

            self._files, self._path = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            why = f"fsspec's driver for it is missing (s3fs for s3, gcsfs for gs): {error}"
            raise ShardFault("unsupported_url", f"{url}: {why}") from error
        self.file_bytes, self.version = self._state()
        if "::" in url:  # the first read copies the full file to the cache
            self._least_transfer = self.file_bytes

    @_driver()
    def _state(self) -> tuple[int, int]:
        self._asked = time.monotonic()
        info = within(TIMEOUT, lambda: self._files.info(self._path))
        tag = next((str(info[name]) for name in ("ETag", "etag", "mtime", "LastModified", "md5") if name in info), "")
        return int(info["size"]), _number_of(tag)

    @_driver()
    def _read(self, size: int, offset: int) -> bytes:
        return self._files.cat_file(self._path, start=offset, end=offset + size)

    def changed(self) -> bool:
        """Check at most once per minute: a check per read would double the requests."""
        if time.monotonic() < self._asked + _SECONDS_BETWEEN_CHECKS:
            return False
        self._files.invalidate_cache(self._path)
        return self._state() != (self.file_bytes, self.version)

    def close(self) -> None:
        pass  # each read opens the file


def _number_of(tag: str) -> int:
    return int.from_bytes(blake2b(tag.encode(), digest_size=7).digest(), "big") if tag else 0


def _bounded(file: IO[bytes]) -> Callable[[bytes], None]:
    """Return a `write` to `file`. It raises TimeoutError if the data comes too slowly, ShardFault on a full disk."""
    deadline, written = time.monotonic() + TIMEOUT, 0

    def write(data: bytes) -> None:
        nonlocal written
        written += len(data)
        if time.monotonic() > deadline + written / _MIN_BYTES_PER_SECOND:
            raise TimeoutError(f"slower than {_MIN_BYTES_PER_SECOND >> 10} KB/s")
        if (free := shutil.disk_usage(file.fileno()).free) < _FREE_BYTES:
            folder = tempfile.gettempdir()
            raise ShardFault("shard_unreadable", f"{free / 1e6:.0f} MB are free for a copy in {folder} (TMPDIR)")
        file.write(data)

    return write


def _copy_pipe(command: str, write: Callable[[bytes], None]) -> None:
    """Write a shell command's output. Raises OSError if it fails, stalls (then it is killed) or writes nothing."""
    copied = 0
    with subprocess.Popen(
        command, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None, "it is a pipe"
        output = process.stdout.fileno()
        try:
            while part := within(TIMEOUT, lambda: os.read(output, _READ_BYTES)):
                write(part)
                copied += len(part)
            status = within(TIMEOUT, process.wait)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if status != 0 or copied == 0:
        raise OSError(f"exit status {status} after {copied} bytes")


def open_regular(path: str | os.PathLike, flags: int = os.O_RDONLY) -> int:
    """Open a regular file and return its descriptor; usable as open(opener=...), which passes `flags`.

    Raises OSError if there is no such file, and `ShardFault` "not_a_file" for a FIFO, a device, a socket or a folder,
    from which a read might never return.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # checked first: opening a device may have side effects
        raise ShardFault("not_a_file", f"{os.fspath(path)} is not a regular file")
    return os.open(path, flags | os.O_NONBLOCK)  # never block on a FIFO that has replaced the file meanwhile


@contextlib.contextmanager
def open_lines(path: str | os.PathLike, *, errors: str = "strict") -> Iterator[Iterator[str]]:
    """Open a text file as an iterator of lines. Raises ValueError if it is unreadable or a line exceeds MAX_LINE."""

    def bounded(file: TextIO) -> Iterator[str]:
        while line := file.readline(MAX_LINE):
            if len(line) == MAX_LINE:
                raise ValueError(f"{file.name}: a line of more than {MAX_LINE >> 20} MB: is this a text file?")
            yield line

    try:
        with open(path, encoding="utf-8-sig", errors=errors, newline="", opener=open_regular) as file:
            yield bounded(file)
    except ShardFault as fault:
        raise ValueError(str(fault)) from fault
    except OSError as error:
        why = "download it, as it is read from a local file" if is_remote(str(path)) else error.strerror
        raise ValueError(f"{os.fspath(path)}: {why}") from error
