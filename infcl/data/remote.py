"""Remote shards: open a url as a file for reads at (offset, size), or copy the full shard to local disk.

Local files are opened in place, and http(s) urls are read by range requests. `pipe:` is the output of a command, and
fsspec handles all other urls. A url without random access (a pipe, a server that ignores ranges) is opened as a local
copy in the spool. A transfer that stalls, or is slower than 16 KB/s, raises TimeoutError; storage.retry tries again.

http(s) uses urllib3 instead of fsspec. If a server ignores the range, fsspec reads a full shard into memory. It also
reports every failure as a missing file, and hides the file size and tag in each response.
"""

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urljoin

import urllib3

from infcl.data.spool import MIN_BYTES_PER_SECOND, TOO_SLOW, spooled
from infcl.data.storage import DEFAULT_STORAGE, LocalFile, ShardFault, StorageOptions, is_remote, retry

T = TypeVar("T")
_COPY_BYTES = 8 << 20
_READ_BYTES = 1 << 18
_SECONDS_BETWEEN_CHECKS = 60.0  # of size and tag, if responses do not carry them
_RETRIES = urllib3.Retry(connect=False, read=False, other=False, redirect=5)  # storage.retry repeats failed reads
_TEMPORARY = (408, 425, 429, 500, 502, 503, 504)  # HTTP statuses that are retried


def open_shard(url: str, options: StorageOptions = DEFAULT_STORAGE) -> "ShardFile":
    """Open a shard, in one attempt.

    Raises:
        OSError: the attempt failed and may be retried.
        ShardFault: the shard cannot be used.
        ValueError: the url is not allowed (`pipe:`), or its fsspec driver is missing.
    """
    if not is_remote(url):
        return LocalFile(url)
    if url.startswith("pipe:"):
        return LocalFile(_spooled(url, options), fixed_version=0)
    file = _remote_file(url, options)
    if file.ranges:
        return file
    return LocalFile(_spooled(url, options), fixed_version=file.version)


def local_copy(url: str, options: StorageOptions) -> str:
    """Return a local path of the full shard, for sequential reads. Raises ShardFault."""
    return retry(lambda: _spooled(url, options), url, options) if is_remote(url) else url


def _spooled(url: str, options: StorageOptions) -> str:
    if not url.startswith("pipe:"):
        return str(spooled(url, lambda out: _remote_file(url, options).copy(out), options))
    if not options.allow_pipe:
        raise ValueError(f"{url!r} runs a shell command: give --allow-pipe-urls if you trust it")
    return str(spooled(url, lambda out: _copy_pipe(url[5:], out, options), options))


def _remote_file(url: str, options: StorageOptions) -> "HttpFile | FsspecFile":
    return HttpFile(url, options) if url.startswith(("http://", "https://")) else FsspecFile(url, options)


class HttpFile:
    """A file read by range requests over a persistent connection.

    Every response carries the file's size and tag, so each read detects whether the file has changed.

    Attributes: file_bytes (-1 if the server does not report it), version, ranges (whether the server supports them).
    """

    def __init__(self, url: str, options: StorageOptions):
        self._url, self._options = url, options
        self._final = url  # after redirects
        self._pool = urllib3.PoolManager(retries=_RETRIES, timeout=options.timeout)
        response = self._request({"Range": "bytes=0-0"})
        self.file_bytes, self.version = _http_state(response)
        self.ranges = response.status == 206 and self.file_bytes >= 0  # "bytes 0-0/*" has no size
        if self.ranges:
            response.read()  # one byte, so that the connection is kept
        else:
            response.close()  # the body is the full file

    def pread(self, size: int, offset: int) -> bytes:
        size = min(size, self.file_bytes - offset)
        if size <= 0:
            return b""
        limit = self._options.timeout + size / MIN_BYTES_PER_SECOND
        return within(limit, lambda: self._read(size, offset), f"{self._url}: {TOO_SLOW}")

    def _read(self, size: int, offset: int) -> bytes:
        response = self._answer({"Range": f"bytes={offset}-{offset + size - 1}"})
        if response.status != 206 or _http_state(response) != (self.file_bytes, self.version):
            raise ShardFault("shard_changed", f"{self._url} changed during the run")
        content_range = response.headers.get("Content-Range", "")
        if not content_range.removeprefix("bytes").strip().startswith(f"{offset}-"):
            raise OSError(f"bytes from {offset} were requested, the server sent {content_range}")
        data = response.read(size + 1)
        if len(data) != size:
            raise OSError(f"{size} bytes were requested, the server sent {len(data)} or more")
        return data

    def copy(self, out: BinaryIO) -> None:
        """Write the full file to `out`. Raises OSError if its length differs from the size that the server reports.

        If the server reports no size, `out` limits the size and the duration.
        """
        timeout, limit = self._options.timeout, self._options.copy_bytes
        response = self._request({})
        promised = _http_state(response)[0]
        if promised > limit:
            what = f"{self._url} has {promised / 1e9:.3g} GB, more than {limit / 1e9:.3g} GB (--data-cache-gb)"
            raise ShardFault("shard_unreadable", what)
        while part := within(timeout, lambda: response.read1(_READ_BYTES), f"no answer within {timeout:g} s"):
            out.write(part)

    def changed(self) -> bool:
        return False  # pread checks each response

    def close(self) -> None:
        self._pool.clear()

    def _request(self, headers: dict[str, str]) -> urllib3.BaseHTTPResponse:
        """Call `_answer` with a deadline: a socket's own time-out restarts with each byte of a header."""
        timeout = self._options.timeout
        return within(timeout, lambda: self._answer(headers), f"no answer within {timeout:g} s")

    def _answer(self, headers: dict[str, str]) -> urllib3.BaseHTTPResponse:
        first = self._final
        headers = {"Accept-Encoding": "identity"} | headers
        response = self._pool.request("GET", first, headers=headers, preload_content=False)
        for redirect in response.retries.history if response.retries else ():
            self._final = urljoin(self._final, redirect.redirect_location or "")
        if response.status < 400:
            return response
        response.close()
        what = f"http status {response.status} {response.reason}"
        if first != self._url or response.status in _TEMPORARY:
            self._final = self._url  # the redirect may have been temporary: start from the url next time
            raise OSError(what)
        if response.status in (404, 410):
            raise FileNotFoundError(what)
        raise ShardFault("shard_unreadable", f"{self._url}: {what}")


def _http_state(response: urllib3.BaseHTTPResponse) -> tuple[int, int]:
    """Return (file size, version) of a response; the size is -1 if the response has none."""
    size = response.headers.get("Content-Range", "").rpartition("/")[2] or response.headers.get("Content-Length", "")
    tag = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
    return int(size) if size.isdigit() else -1, _number_of(tag)


class FsspecFile:
    """A file read by ranges through an fsspec driver. Each call has a time-out, even if the driver hangs."""

    ranges = True

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
        limit = self._options.timeout + size / MIN_BYTES_PER_SECOND
        data = self._ask(limit, lambda: self._files.cat_file(self._path, start=offset, end=end))
        if len(data) != end - offset:
            raise OSError(f"read {len(data)} of {end - offset} bytes")
        return data

    def copy(self, out: BinaryIO) -> None:
        """Write the full file."""
        for offset in range(0, self.file_bytes, _COPY_BYTES):
            out.write(self.pread(_COPY_BYTES, offset))

    def _ask(self, limit: float, call: Callable[[], T]) -> T:
        return within(limit, call, f"{self._url}: no answer within {limit:.0f} s")

    def changed(self) -> bool:
        """Check at most once per minute: a check per read would double the requests."""
        if time.monotonic() < self._asked + _SECONDS_BETWEEN_CHECKS:
            return False
        self._files.invalidate_cache(self._path)
        return self._state() != (self.file_bytes, self.version)

    def close(self) -> None:
        pass


ShardFile = LocalFile | HttpFile | FsspecFile


def within(seconds: float, call: Callable[[], T], why: str) -> T:
    """Return call(), or raise TimeoutError (`why`) after `seconds`; a hanging call stays in its daemon thread.

    Raises OSError and ShardFault as they are, and other exceptions (of urllib3, of a driver) as OSError.
    """
    outcome: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            outcome.append((True, call()))
        except BaseException as error:  # re-raised in the caller's thread
            outcome.append((False, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(why)
    succeeded, value = outcome[0]
    if succeeded:
        return value
    if isinstance(value, (OSError, ShardFault)):
        raise value
    raise OSError(f"{type(value).__name__}: {value}") from value


def _copy_pipe(command: str, out: BinaryIO, options: StorageOptions) -> None:
    """Write a shell command's output. Raises OSError if it fails, stalls (then it is killed) or writes nothing."""
    copied = 0
    with subprocess.Popen(
        command, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None, "it is a pipe"
        try:
            while select.select([process.stdout], [], [], options.timeout)[0]:
                part = os.read(process.stdout.fileno(), _READ_BYTES)
                if not part:
                    break
                out.write(part)
                copied += len(part)
            else:
                raise TimeoutError(f"no output for {options.timeout:g} s")
            status = process.wait(options.timeout)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"did not end within {options.timeout:g} s of its last output") from error
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if status != 0 or copied == 0:
        raise OSError(f"exit status {status} after {copied} bytes")


def _number_of(tag: str) -> int:
    return int.from_bytes(blake2b(tag.encode(), digest_size=7).digest(), "big") if tag else 0
