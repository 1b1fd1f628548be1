"""Opening a shard by its url: as a file that is read at (offset, size), or copied whole to local disk.

Local files are opened where they are, http(s) urls by ranges, `pipe:` by its command's output, the others by fsspec.
What cannot be read at random (a pipe, a server that ignores ranges) is opened as its copy in the spool.

http(s): ranged requests over a kept connection, by the standard library: one socket, so every wait has a time-out.
Other schemes: fsspec's `cat_file`, each call under a deadline. pipe: the output of a command, exit status checked.
A transfer that stalls, or trickles below 16 KB/s, ends by TimeoutError; storage.retry tries again.
"""

import contextlib
import hashlib
import http.client
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urljoin, urlsplit

from infcl.data.spool import spooled
from infcl.data.storage import DEFAULT_STORAGE, LocalFile, ShardFault, ShardFile, StorageOptions, is_remote, retry

T = TypeVar("T")
_COPY_BYTES = 8 << 20
_MIN_BYTES_PER_SECOND = 16 << 10
_TOO_SLOW = f"slower than {_MIN_BYTES_PER_SECOND >> 10} KB/s"
_READ_BYTES = 1 << 18
_SECONDS_BETWEEN_CHECKS = 60.0  # of a file's size and tag, where reading does not tell them
_REDIRECTS, _REDIRECT = 5, (301, 302, 303, 307, 308)
_TEMPORARY = (408, 425, 429, 500, 502, 503, 504)  # http answers that are worth another try


def open_shard(url: str, options: StorageOptions = DEFAULT_STORAGE) -> ShardFile:
    """One attempt to open. Raises OSError or http.client.HTTPException (try again), ShardFault, or ValueError."""
    if not is_remote(url):
        return LocalFile(url)
    if url.startswith("pipe:"):
        _require_allowed(url, options)
        return LocalFile(spooled(url, lambda out: copy_pipe(url[5:], out, options), options), fixed_version=0)
    if url.startswith(("http://", "https://")):
        file = HttpFile(url, options)
        if file.ranges:
            return file
        file.close()
        return LocalFile(spooled(url, lambda out: copy_http(url, out, options), options), fixed_version=file.version)
    return FsspecFile(url, options)


def local_copy(url: str, options: StorageOptions) -> str:
    """A local path with the whole of a shard, for reading it from front to end. Raises ShardFault."""

    def write(out: BinaryIO) -> None:
        if url.startswith("pipe:"):
            copy_pipe(url[5:], out, options)
        elif url.startswith(("http://", "https://")):
            copy_http(url, out, options)
        else:
            _copy_ranges(url, out, options)

    if not is_remote(url):
        return url
    if url.startswith("pipe:"):
        _require_allowed(url, options)
    return str(retry(lambda: spooled(url, write, options), url, options))


def _require_allowed(url: str, options: StorageOptions) -> None:
    if not options.allow_pipe:
        raise ValueError(f"{url!r} runs a shell command: give --allow-pipe-urls if you trust it")


def _copy_ranges(url: str, out: BinaryIO, options: StorageOptions) -> None:
    file = open_shard(url, options)
    try:
        for offset in range(0, file.file_bytes, _COPY_BYTES):
            out.write(file.pread(_COPY_BYTES, offset))
    finally:
        file.close()


class HttpFile:
    """Ranged requests. Every answer carries the file's size and tag, so a change is seen with the bytes it concerns."""

    def __init__(self, url: str, options: StorageOptions):
        self._url, self._options, self._final = url, options, url
        self._connection: http.client.HTTPConnection | None = None
        self._socket: socket.socket | None = None  # the answer's, which the connection may have let go of
        response = self._request({"Range": "bytes=0-0"})
        self.file_bytes, self.version = _http_state(response)
        self.ranges = response.status == 206 and self.file_bytes >= 0  # "bytes 0-0/*" tells no size
        if self.ranges:
            response.read()
        else:
            self.close()  # the whole file would follow

    def pread(self, size: int, offset: int) -> bytes:
        size = min(size, self.file_bytes - offset)
        if size <= 0:
            return b""
        try:
            response = self._request({"Range": f"bytes={offset}-{offset + size - 1}"})
            if response.status != 206 or _http_state(response) != (self.file_bytes, self.version):
                raise ShardFault("shard_changed", f"{self._url} changed during the run")
            if not _starts_at(response, offset):
                raise OSError(f"bytes from {offset} were asked for, {response.getheader('Content-Range')} came")
            parts, came = [], 0
            limit = self._options.timeout + size / _MIN_BYTES_PER_SECOND
            with _cut_after(limit, lambda: self._socket, f"{self._url}: {_TOO_SLOW}"):
                while part := response.read1(_READ_BYTES):
                    parts.append(part)
                    came += len(part)
                    if came > size:
                        raise OSError(f"more than {size} bytes came")
        except BaseException:
            self.close()  # the connection is in the middle of an answer
            raise
        data = b"".join(parts)
        if len(data) != size:
            self.close()
            raise OSError(f"{len(data)} of {size} bytes came")
        return data

    def copy(self, out: BinaryIO) -> None:
        """The whole file, by a request without a range; OSError unless as many bytes come as the server has promised.

        `out` bounds what is written where the server tells no size.
        """
        response, limit, started = self._request({}), self._options.copy_bytes, time.monotonic()
        promised, copied = _http_state(response)[0], 0
        if promised > limit:
            what = f"{self._url} has {promised / 1e9:.3g} GB, more than {limit / 1e9:.3g} GB (--data-cache-gb)"
            raise ShardFault("shard_unreadable", what)
        while True:
            with _cut_after(self._options.timeout, lambda: self._socket):
                part = response.read1(_READ_BYTES)
            if not part:
                break
            out.write(part)
            copied += len(part)
            _check_deadline(started + self._options.timeout + copied / _MIN_BYTES_PER_SECOND, self._url)
        if promised >= 0 and copied != promised:
            raise OSError(f"{copied} of {promised} bytes came")

    def changed(self) -> bool:
        return False  # pread has looked

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _request(self, headers: dict[str, str]) -> http.client.HTTPResponse:
        if self._connection is not None:
            try:
                response = self._ask(self._final, headers)
                if response.status not in _REDIRECT:
                    return response
            except (OSError, http.client.HTTPException, ShardFault):
                pass  # the server has closed the kept connection, or the address was for a while: from the start
            self.close()
        url = self._url
        for _ in range(_REDIRECTS + 1):
            parts = urlsplit(url)
            if not parts.hostname:
                raise ShardFault("shard_unreadable", f"{self._url}: {url} names no host")
            kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
            self._connection = kind(parts.hostname, parts.port, timeout=self._options.timeout)
            response = self._ask(url, headers)
            if response.status not in _REDIRECT:
                self._final = url
                return response
            url = urljoin(url, response.getheader("Location", ""))
            self.close()
        raise OSError(f"more than {_REDIRECTS} redirects")

    def _ask(self, url: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        assert self._connection is not None, "the caller has made one"
        parts = urlsplit(url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection = self._connection
        with _cut_after(self._options.timeout, lambda: connection.sock):
            connection.request("GET", target, headers={"Accept-Encoding": "identity"} | headers)
            self._socket = connection.sock
            response = connection.getresponse()
        if response.status in (404, 410):
            raise FileNotFoundError(f"http status {response.status}")
        if response.status in _TEMPORARY:
            raise OSError(f"http status {response.status}")
        if response.status >= 400:
            raise ShardFault("shard_unreadable", f"{self._url}: http status {response.status} {response.reason}")
        return response


@contextlib.contextmanager
def _cut_after(seconds: float, get_socket: Callable[[], socket.socket | None], why: str = "") -> Iterator[None]:
    """TimeoutError (`why`) when the block takes longer: a socket's own time-out begins again with each byte, and
    the standard library reads headers, and the lengths of chunks, to the end of their lines."""
    why, late = why or f"no answer within {seconds:g} s", threading.Event()

    def cut() -> None:
        late.set()
        if (connected := get_socket()) is not None:
            with contextlib.suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        if late.is_set():
            raise TimeoutError(why) from error
        raise
    finally:
        timer.cancel()
    if late.is_set():
        raise TimeoutError(why)


def _http_state(response: http.client.HTTPResponse) -> tuple[int, int]:
    """(bytes of the whole file, version) that an answer tells; -1 bytes where it does not tell."""
    whole = response.getheader("Content-Range", "").rpartition("/")[2] or response.getheader("Content-Length", "")
    tag = response.getheader("ETag") or response.getheader("Last-Modified") or ""
    return int(whole) if whole.isdigit() else -1, _number_of(tag)


def _starts_at(response: http.client.HTTPResponse, offset: int) -> bool:
    return response.getheader("Content-Range", "").removeprefix("bytes").strip().startswith(f"{offset}-")


class FsspecFile:
    """Storage that fsspec has a driver for, by ranged reads. Each call ends by time-out, whatever the driver does."""

    def __init__(self, url: str, options: StorageOptions):
        try:
            import fsspec

            self._files, self._path = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            scheme = url.partition("://")[0]
            raise ValueError(
                f"{url}: reading {scheme}:// needs fsspec's driver for it (s3fs for s3, gcsfs for gs): {error}"
            ) from error
        self._url, self._options = url, options
        self.file_bytes, self.version = self._state()

    def _state(self) -> tuple[int, int]:
        self._asked = time.monotonic()
        info = self._ask(self._options.timeout, lambda: self._files.info(self._path))
        tag = next((str(info[name]) for name in ("ETag", "etag", "mtime", "LastModified", "md5") if name in info), "")
        return int(info["size"]), _number_of(tag)

    def pread(self, size: int, offset: int) -> bytes:
        end = min(offset + size, self.file_bytes)
        if end <= offset:
            return b""
        limit = self._options.timeout + size / _MIN_BYTES_PER_SECOND
        data = self._ask(limit, lambda: self._files.cat_file(self._path, start=offset, end=end))
        if len(data) != end - offset:
            raise OSError(f"{len(data)} of {end - offset} bytes came")
        return data

    def _ask(self, limit: float, call: Callable[[], T]) -> T:
        try:
            return within(limit, call, self._url)
        except OSError:
            raise
        except Exception as error:  # drivers raise their libraries' own types; all of them mean: try again
            raise OSError(f"{type(error).__name__}: {error}") from error

    def changed(self) -> bool:
        """Asked anew once a minute: a request for each read would double them."""
        if time.monotonic() < self._asked + _SECONDS_BETWEEN_CHECKS:
            return False
        self._files.invalidate_cache(self._path)
        return self._state() != (self.file_bytes, self.version)

    def close(self) -> None:
        pass


def within(seconds: float, call: Callable[[], T], what: str) -> T:
    """call(), or TimeoutError after `seconds`; a call that hangs is left behind in its daemon thread."""
    outcome: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            outcome.append((True, call()))
        except BaseException as error:  # raised again below, in the caller's thread
            outcome.append((False, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"{what}: no answer within {seconds:.0f} s")
    succeeded, value = outcome[0]
    if succeeded:
        return value
    raise value


def copy_http(url: str, out: BinaryIO, options: StorageOptions) -> None:
    """Write the whole of a url to `out`: HttpFile.copy."""
    file = HttpFile(url, options)
    try:
        file.copy(out)
    finally:
        file.close()


def copy_pipe(command: str, out: BinaryIO, options: StorageOptions) -> None:
    """The output of a shell command; OSError when it fails, stalls, or writes nothing. Its children end with it."""
    process = subprocess.Popen(
        command, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None, "it is a pipe"
    copied, started = 0, time.monotonic()
    try:
        while True:
            if not select.select([process.stdout], [], [], options.timeout)[0]:
                raise TimeoutError(f"no output for {options.timeout:g} s")
            part = os.read(process.stdout.fileno(), _READ_BYTES)
            if not part:
                break
            out.write(part)
            copied += len(part)
            _check_deadline(started + options.timeout + copied / _MIN_BYTES_PER_SECOND, command)
        status = process.wait(options.timeout)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"did not end within {options.timeout:g} s of its last output") from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()
    if status != 0 or copied == 0:
        raise OSError(f"exit status {status} after {copied} bytes")


def _check_deadline(deadline: float, what: str) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"{what}: {_TOO_SLOW}")


def _number_of(tag: str) -> int:
    return int.from_bytes(hashlib.blake2b(tag.encode(), digest_size=7).digest(), "big") if tag else 0
