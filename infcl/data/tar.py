"""Tar members: read name, data offset and size from the headers of an intact or damaged tar.

The header layout is POSIX ustar, with PAX ('x') and GNU ('L') long names. Members of 8 GiB and more count as damage.
After damage, the search continues at the next valid header. Only damaged members are lost, and the caller gets a
report. Python's tarfile stops at damage, and parses a header in 29 us instead of about 6 us.
"""

from collections.abc import Callable, Iterator

_BLOCK = 512
_SEARCH_BYTES = 1 << 20
_MAX_PADDING = 64 << 10  # tar programs pad to a multiple of 10 KB, some of 32 KB


def tar_members(
    pread: Callable[[int, int], bytes], file_bytes: int, damage: list[str]
) -> Iterator[tuple[str, int, int]]:
    """Yield (name, data offset, size) of each complete regular member.

    Args:
        damage: descriptions of all damage are appended to this list.
    """
    position, long_name, after_damage = 0, None, False
    while True:
        header = pread(_BLOCK, position)
        if len(header) < _BLOCK:
            damage.append(f"ends at byte {file_bytes} without an end-of-archive block")
            return
        size = _number(header[124:136])
        if size is None or not _has_checksum(header):
            following, blank = _next_header(pread, position + _BLOCK, file_bytes)
            if any(header):
                damage.append(f"bad header at byte {position}")
            elif following is not None or not blank:
                damage.append(f"data after the end-of-archive block at byte {position}")
            elif not _BLOCK < file_bytes - position <= _MAX_PADDING:  # two zero blocks end a tar, then padding
                damage.append(f"{file_bytes - position} zero bytes at the end: was it cut or never filled?")
            if following is None:
                return
            position, long_name, after_damage = following, None, True
            continue
        kind, data = header[156:157], position + _BLOCK
        position = data + (size + _BLOCK - 1) // _BLOCK * _BLOCK
        if data + size > file_bytes:
            damage.append(f"ends at byte {file_bytes} inside a member that needs {data + size}")
            return
        if kind == b"L":
            long_name = pread(min(size, 1 << 16), data).split(b"\0", 1)[0]
        elif kind == b"x":
            long_name = _pax_records(pread(min(size, 1 << 20), data)).get(b"path", long_name)
        elif kind in b"0\x007":
            name, shortened = long_name or _short_name(header), long_name is None and header[99] != 0
            long_name = None
            if not (after_damage and shortened):  # else the damage may have destroyed its long name
                yield name.decode("utf-8", "surrogateescape"), data, size
            after_damage = False
        elif kind not in b"gK":  # a link, folder or device: nothing to read
            long_name = None


def _next_header(pread: Callable[[int, int], bytes], start: int, file_bytes: int) -> tuple[int | None, bool]:
    """Return (offset of the next valid header at or after `start`, or None; whether only zeros precede it)."""
    blank = True
    for block in range(start, file_bytes, _SEARCH_BYTES):
        data = pread(_SEARCH_BYTES + _BLOCK, block)
        at = data.find(b"ustar")
        while at >= 0:
            begin = at - 257
            header = data[begin : begin + _BLOCK] if begin >= 0 else b""
            if (block + begin) % _BLOCK == 0 and len(header) == _BLOCK and _has_checksum(header):
                return block + begin, blank and not any(data[:begin])
            at = data.find(b"ustar", at + 1)
        blank = blank and data.count(0) == len(data)
    return None, blank


def _has_checksum(header: bytes) -> bool:
    field = header[148:156]  # counted as eight spaces
    return _number(field) == sum(header) - sum(field) + 8 * 32


def _short_name(header: bytes) -> bytes:
    name, prefix = header[:100].split(b"\0", 1)[0], header[345:500].split(b"\0", 1)[0]
    return prefix + b"/" + name if prefix and header[257:263] == b"ustar\0" else name


def _number(field: bytes) -> int | None:
    """Parse the octal digits of a header field; None if it has others."""
    digits = field.strip(b" \0") or b"0"
    return int(digits, 8) if not digits.strip(b"01234567") else None


def _pax_records(data: bytes) -> dict[bytes, bytes]:
    """Parse PAX records 'length key=value\\n' to {key: value}, up to the first malformed one."""
    records, at = {}, 0
    while at < len(data):
        number, _, _ = data[at : at + 20].partition(b" ")
        length = int(number) if number.isdigit() else 0
        if not len(number) + 1 < length <= len(data) - at:
            break
        key, equals, value = data[at + len(number) + 1 : at + length - 1].partition(b"=")
        if equals:
            records[key] = value
        at += length
    return records
