"""Access to a shard: its url says how it is opened, or copied whole.

Local files are opened where they lie, http(s) urls by ranges, `pipe:` by its command's output, the others by fsspec.
What cannot be read at random (a pipe, a server that ignores ranges) is opened as its copy in the spool.
"""

from typing import BinaryIO

from infcl.data.remote import FsspecFile, HttpFile, copy_http, copy_pipe
from infcl.data.spool import spooled
from infcl.data.storage import DEFAULT_STORAGE, LocalFile, ShardFile, StorageOptions, is_remote, retry

_COPY_BYTES = 8 << 20


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
