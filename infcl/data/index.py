"""The index of one shard: where each sample's image, caption and json lie in the tar, found by reading headers only.

In:  a tar as webdataset and img2dataset write it (members of a sample share the name up to the first dot).
Out: an int64 array [samples, 6] of byte offsets and lengths, in the order in which the samples first appear, kept in a
     sidecar file `SHARD.tar.idx` so that it is built once.
Why: with offsets, any sample is one `pread` away, so an epoch can be a permutation, a resume costs nothing and a bad
     sample can be replaced; reading headers only is an order of magnitude cheaper than streaming the tar. Nothing is
     ever extracted, member names are opaque keys, and members that are not asked for are never read.

The header layout is POSIX ustar, with PAX ('x') and GNU ('L') long names and base-256 sizes. A tar that is damaged
gives the samples that are complete before the damage, and says so.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

COLUMNS = ("image_offset", "image_bytes", "text_offset", "text_bytes", "json_offset", "json_bytes")
ABSENT = -1  # offset and length of a member that the sample does not have
MAX_IMAGE_BYTES = 256 << 20  # a larger image member is rejected unread
MAX_JSON_BYTES = 1 << 20  # a larger json member is treated as absent
_FORMAT = "infcl-index-1"
_BLOCK = 512
_KEY = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")  # webdataset's rule: the key ends at the base name's first dot


@dataclass(frozen=True)
class SampleKeys:
    """Which members make a sample; open_clip's --image-key, --text-key and --json-text-key (alternatives split by ';').

    `json_text`: take the caption from this key of the json member. None: from the text member, and where a sample has
    none, from the json member's "caption".
    """

    image: str = "jpg;png;jpeg;webp"
    text: str = "txt"
    json_text: str | None = None


DEFAULT_KEYS = SampleKeys()


@dataclass(frozen=True)
class ShardIndex:
    """members: int64 [n, 6] by COLUMNS; rejected: samples left out, by cause; damage: what is wrong with the tar."""

    members: np.ndarray
    rejected: dict[str, int]
    damage: str | None
    file_bytes: int
    mtime_ns: int


def scan_shard(path: str, keys: SampleKeys) -> ShardIndex:
    """Index one tar by its headers. Raises OSError if it cannot be read, ValueError if it is compressed."""
    image_ext, text_ext = keys.image.lower().split(";"), keys.text.lower().split(";")
    rows: dict[str, list[int]] = {}
    rejected = dict.fromkeys(("no_image", "no_caption", "duplicate_member", "image_file_too_large"), 0)
    damage = None
    with open(path, "rb", buffering=0) as file:
        stat = os.fstat(file.fileno())
        if os.pread(file.fileno(), 3, 0) in (b"\x1f\x8b\x08", b"BZh", b"\xfd7z"):
            raise ValueError(
                f"{path} is compressed and cannot be read at random: unpack it, or use the streaming reader"
            )
        try:
            for name, offset, size in _tar_members(file.fileno(), stat.st_size):
                match = _KEY.match(name)
                if match is None:
                    continue
                key, extension = match.group(1), match.group(2).lower()
                if extension in image_ext:
                    column = 0
                elif extension in text_ext:
                    column = 2
                elif extension == "json":
                    column = 4
                else:
                    continue
                row = rows.setdefault(key, [ABSENT] * 6)
                if row[column] != ABSENT:
                    rejected["duplicate_member"] += 1
                elif column != 4 or size <= MAX_JSON_BYTES:
                    row[column : column + 2] = offset, size
        except _Damage as error:
            damage = str(error)
    usable = []
    for row in rows.values():
        if row[0] == ABSENT:
            rejected["no_image"] += 1
        elif row[2] == row[4] == ABSENT:
            rejected["no_caption"] += 1
        elif row[1] > MAX_IMAGE_BYTES:
            rejected["image_file_too_large"] += 1
        else:
            usable.append(row)
    members = np.array(usable, dtype=np.int64).reshape(-1, 6)
    return ShardIndex(members, {k: n for k, n in rejected.items() if n}, damage, stat.st_size, stat.st_mtime_ns)


def ensure_index(path: str, keys: SampleKeys, cache_folder: str | None = None) -> tuple[str, dict]:
    """(sidecar path, its header) of a shard; built where missing or older than the shard.

    The header: format, image_key, text_key, file_bytes, mtime_ns, samples, rejected, damage. The sidecar is `PATH.idx`;
    where that place cannot be written to, it goes to `cache_folder` (default ~/.cache/infcl/index). Writing is atomic,
    so processes that race write the same file.
    """
    stat = os.stat(path)
    expected = {"format": _FORMAT, "image_key": keys.image, "text_key": keys.text}
    expected |= {"file_bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    digest = hashlib.sha256(os.path.abspath(path).encode()).hexdigest()[:32]
    folder = Path(cache_folder) if cache_folder else Path.home() / ".cache" / "infcl" / "index"
    places = [Path(f"{path}.idx"), folder / f"{digest}.idx"]
    for place in places:
        header = _read_header(place)
        if header is not None and all(header[k] == v for k, v in expected.items()):
            return str(place), header
    index = scan_shard(path, keys)
    header = expected | {"file_bytes": index.file_bytes, "mtime_ns": index.mtime_ns, "samples": len(index.members)}
    header |= {"rejected": index.rejected, "damage": index.damage}
    try:
        _write(places[0], header, index.members)
        return str(places[0]), header
    except OSError:  # a read-only or full data set folder
        places[1].parent.mkdir(parents=True, exist_ok=True)
        _write(places[1], header, index.members)
        return str(places[1]), header


def open_members(index_path: str, samples: int) -> np.ndarray:
    """The [samples, 6] int64 array of a sidecar, memory-mapped: reading a row touches one page."""
    if samples == 0:
        return np.empty((0, 6), dtype=np.int64)
    offset = os.path.getsize(index_path) - samples * 48
    return np.memmap(index_path, dtype="<i8", mode="r", offset=offset, shape=(samples, 6))


def _read_header(path: Path) -> dict | None:
    """The first line of a sidecar, or None when there is none that is whole."""
    try:
        with open(path, "rb") as file:
            line = file.readline()
            header = json.loads(line)
            whole = len(line) + header["samples"] * 48 == os.fstat(file.fileno()).st_size
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return header if whole and header.get("format") == _FORMAT else None


def _write(path: Path, header: dict, members: np.ndarray) -> None:
    line = json.dumps(header).encode()
    line += b" " * (-(len(line) + 1) % 64) + b"\n"  # so that the rows are aligned
    temporary = path.with_name(f"{path.name}.{os.urandom(4).hex()}.tmp")  # hosts may share the folder
    try:
        temporary.write_bytes(line + members.astype("<i8").tobytes())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class _Damage(Exception):
    """The tar cannot be followed past this point."""


def _tar_members(fd: int, file_bytes: int) -> Iterator[tuple[str, int, int]]:
    """(name, data offset, size) of each regular member that lies whole in the file; _Damage where it ends badly."""
    position, long_name, long_size = 0, None, None
    while True:
        header = os.pread(fd, _BLOCK, position)
        if len(header) < _BLOCK:
            raise _Damage(f"ends at byte {file_bytes} without an end-of-archive block")
        if not any(header):
            return
        size, kind = _number(header[124:136]), header[156:157]
        checksum = sum(header) - sum(header[148:156]) + 8 * 32
        if size is None or _number(header[148:156]) != checksum:
            raise _Damage(f"bad header at byte {position}")
        if long_size is not None and kind in b"0\x007":
            size = long_size
        data = position + _BLOCK
        position = data + (size + _BLOCK - 1) // _BLOCK * _BLOCK
        if data + size > file_bytes:
            raise _Damage(f"ends at byte {file_bytes} inside a member that needs {data + size}")
        if kind == b"L":
            long_name = os.pread(fd, min(size, 1 << 16), data).split(b"\0", 1)[0]
        elif kind == b"x":
            records = _pax_records(os.pread(fd, min(size, 1 << 20), data))
            long_name = records.get(b"path", long_name)
            long_size = int(records[b"size"]) if records.get(b"size", b"").isdigit() else None
        elif kind in b"0\x007":
            name = long_name or _short_name(header)
            long_name = long_size = None
            yield name.decode("utf-8", "surrogateescape"), data, size
        elif kind not in b"gK":  # a link, folder or device: nothing to read
            long_name = long_size = None


def _short_name(header: bytes) -> bytes:
    name, prefix = header[:100].split(b"\0", 1)[0], header[345:500].split(b"\0", 1)[0]
    return prefix + b"/" + name if prefix and header[257:263] == b"ustar\0" else name


def _number(field: bytes) -> int | None:
    """A numeric header field: octal digits, or base 256 when the first bit is set; None if it is neither."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big") if field[0] == 0x80 else None  # 0xff: negative, never valid here
    try:
        return int(field.strip(b" \0") or b"0", 8)
    except ValueError:
        return None


def _pax_records(data: bytes) -> dict[bytes, bytes]:
    """{key: value} of PAX 'length key=value\\n' records; stops at the first one that is malformed."""
    records = {}
    while data:
        length, _, _ = data.partition(b" ")
        if not length.isdigit() or not len(length) + 1 < int(length) <= len(data):
            break
        key, equals, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
        if equals:
            records[key] = value
        data = data[int(length) :]
    return records
