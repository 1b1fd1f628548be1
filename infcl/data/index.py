"""The index of one shard: the offsets of the members of each sample in the tar, found from its headers.

In:  a tar as webdataset and img2dataset write it: the members of a sample share the name up to the first dot.
Out: an int64 array [samples, 6] of the byte offsets and lengths of image, caption and json, or [samples, 8] if a
     teacher's embeddings are read too, in the order in which the samples first appear. A sidecar file
     `SHARD.tar.infcl.idx` keeps it, so that it is built once for each choice of keys.
Why: with offsets, one `pread` reads any sample. An epoch can then be a permutation, a resume costs nothing, and a bad
     sample can be replaced. Reading only headers is an order of magnitude cheaper than streaming the tar. Nothing is
     extracted, member names are opaque keys, and other members are never read.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from typing_extensions import NotRequired, TypedDict

from infcl.config.disk import write_atomic
from infcl.config.json_file import parse_record
from infcl.data.storage import ShardFault, ShardFile, is_remote, open_regular, open_shard, retry
from infcl.data.tar import tar_members

ABSENT = -1  # offset and length of a member that the sample does not have
MAX_IMAGE_BYTES = 256 << 20  # larger image members are rejected without reading them
MAX_JSON_BYTES = 1 << 20  # larger json and teacher members are treated as absent
MAX_TEXT_BYTES = 1 << 20  # read of a text member, which may have many captions
_FORMAT = "infcl-index-4"
_MAX_HEADER = 1 << 20  # bytes of a sidecar's first line
_SIDECAR = ".infcl.idx"  # other programs use .idx and .tar.idx
_SHOWN_KEYS, _SHOWN_CHARACTERS = 20, 200  # per cause and shard; per key
_READ_AHEAD = 4 << 20  # remote storage: headers are so dense that nearly everything is read anyway


@dataclass(frozen=True)
class SampleKeys:
    """Which members form a sample, as open_clip's --image-key, --text-key and --json-text-key.

    Each value lists alternatives, separated by ';'. If a sample has several of them, the one listed first is used.

    Args:
        image: extensions of the image member.
        text: extensions of the text member.
        json_text: keys of the json member; the caption is the text of the first key that has any. None: the caption is
            the text member, or "caption" of the json member if a sample has no text member.
        json_probs: weights by which the order of the json keys is drawn for each sample and epoch. A key with weight 0,
            or without a weight, comes last.
        teacher: extension of the member with a teacher's embeddings (embeddings.py); "" for none.
        teacher_width: numbers per embedding.
    """

    image: str = "jpg;png;jpeg;webp"
    text: str = "txt"
    json_text: str | None = None
    json_probs: tuple[float, ...] = ()
    teacher: str = ""
    teacher_width: int = 0

    def __post_init__(self):
        count = len(self.json_keys) if self.json_text else 0
        if len(self.json_probs) > count or any(p < 0 for p in self.json_probs):
            raise ValueError(
                f"--json-text-key-probs {self.json_probs}: at most one weight >= 0 for each of the {count} json keys"
            )

    @property
    def json_keys(self) -> list[str]:
        return (self.json_text or "caption").split(";")

    @property
    def extensions(self) -> list[list[str]]:
        """Alternatives for each member of a sample: image, text, json, and a teacher's embeddings."""
        kinds = [self.image.lower().split(";"), self.text.lower().split(";"), ["json"]]
        return [*kinds, [self.teacher.lower()]] if self.teacher else kinds


DEFAULT_KEYS = SampleKeys()


class Shard(NamedTuple):
    """An indexed tar.

    Attributes:
        path, index_path: the tar and its sidecar.
        file_bytes, version: of the tar when it was read (storage.py); the index is stale if they change.
        rejected: cause -> number of samples left out.
        damage: description of the tar's damage, or None.
        bad_keys: cause -> keys of the first `_SHOWN_KEYS` samples left out.
        factor: how often an epoch contains each of its samples (plan.py).
    """

    path: str
    index_path: str
    samples: int
    file_bytes: int
    version: int
    rejected: dict[str, int]
    damage: str | None
    bad_keys: dict[str, list[str]]
    factor: float = 1.0


_IN_HEADER = Shard._fields[2:-1]  # of a sidecar
_Cause = Literal["no_image", "no_caption", "duplicate_member", "dotted_name", "image_file_too_large"]


class _Header(TypedDict):
    """First line of a sidecar."""

    format: str
    image_key: str
    text_key: str
    teacher_key: NotRequired[str]
    samples: int
    file_bytes: int
    version: int
    rejected: dict[_Cause, int]
    damage: str | None
    bad_keys: dict[_Cause, list[str]]


def find_samples(
    pread: Callable[[int, int], bytes], file_bytes: int, path: str, keys: SampleKeys
) -> tuple[dict[str, list[int]], dict[str, list[str]], str | None]:
    """Group the members of a tar by sample, from their headers.

    Args:
        pread: (size, offset) -> bytes of the tar.

    Returns:
        Key of the sample -> offsets and lengths of its members, in the order of the tar;
        cause -> keys of samples that lost a member ("duplicate_member", "dotted_name") or have no image ("no_image"),
        then with the extensions that they have instead;
        description of the tar's damage, or None.

    Raises:
        ValueError: the tar is compressed.
    """
    if pread(3, 0) in (b"\x1f\x8b\x08", b"BZh", b"\xfd7z"):
        raise ValueError(f"{path} is compressed: unpack it, or read it through a pipe ('pipe:zcat FILE')")
    wanted = [*enumerate(keys.extensions)]
    kinds = {extension: (kind, i) for kind, of_kind in wanted[::-1] for i, extension in [*enumerate(of_kind)][::-1]}
    rows: dict[str, list[int]] = {}
    used: dict[str, list[int]] = {}  # which of the alternatives each member of a sample is
    bad_keys: dict[str, list[str]] = {"duplicate_member": [], "dotted_name": []}
    dotted: tuple[set[str], set[str]] = set(), set()  # names of images and captions with a second dot: a.5x.jpg
    others: dict[str, set[str]] = {}  # extensions of the members that are not used
    damage: list[str] = []
    for name, offset, size in tar_members(pread, file_bytes, damage):
        key, extension = split_name(name)
        if extension not in kinds:
            others.setdefault(key, set()).add(extension)
            inner, _, last = extension.rpartition(".")
            if inner and last in kinds:
                dotted[kinds[last][0] > 0].add(f"{key}.{inner}")
            continue
        kind, alternative = kinds[extension]
        row = rows.setdefault(key, [ABSENT] * 2 * len(wanted))
        found = used.setdefault(key, [ABSENT] * len(wanted))
        if found[kind] == alternative:
            bad_keys["duplicate_member"].append(key)
        elif (found[kind] == ABSENT or alternative < found[kind]) and (kind < 2 or size <= MAX_JSON_BYTES):
            row[2 * kind : 2 * kind + 2], found[kind] = (offset, size), alternative
    for key in [key for key, row in rows.items() if row[0] == ABSENT]:
        del rows[key]
        met = f" (it has {', '.join(sorted(others[key]))})" if key in others else ""
        bad_keys.setdefault("no_image", []).append(key + met)
    bad_keys["dotted_name"] += sorted(dotted[0] & dotted[1])
    what = "; ".join(damage[:3]) + (f"; and {len(damage) - 3} more" if len(damage) > 3 else "")
    return rows, bad_keys, what or None


def scan_shard(path: str, keys: SampleKeys) -> tuple[Shard, np.ndarray]:
    """Return one tar, without a sidecar, and its index (module docstring), from the tar's headers.

    Raises:
        ShardFault: it cannot be read.
        ValueError: it is compressed.
    """
    with contextlib.closing(retry(lambda: open_shard(path), path)) as file:
        pread = _read_ahead(file, path) if is_remote(path) else lambda *at: retry(lambda: file.pread(*at), path)
        rows, bad_keys, damage = find_samples(pread, file.file_bytes, path, keys)
    usable = []
    for key, row in rows.items():
        if row[2] == row[4] == ABSENT:
            bad_keys.setdefault("no_caption", []).append(key)
        elif row[1] > MAX_IMAGE_BYTES:
            bad_keys.setdefault("image_file_too_large", []).append(key)
        else:
            usable.append(row)
    counts = {cause: len(found) for cause, found in bad_keys.items() if found}
    shown = {cause: [key[:_SHOWN_CHARACTERS] for key in bad_keys[cause][:_SHOWN_KEYS]] for cause in counts}
    shard = Shard(path, "", len(usable), file.file_bytes, file.version, counts, damage, shown)
    return shard, np.array(usable, dtype=np.int64).reshape(-1, 2 * len(keys.extensions))


def ensure_index(path: str, keys: SampleKeys, cache_folder: str | None = None) -> Shard:
    """Index a shard, unless it has a sidecar of its present version.

    The sidecar is `PATH.infcl.idx`. If the shard is remote or its folder is read-only, the sidecar is in `cache_folder`
    (default ~/.cache/infcl/index). Writes are atomic, so processes that race write the same file. Keys other than
    DEFAULT_KEYS have their own sidecar, because another run with other keys may use the same shard at the same time.

    Raises:
        ShardFault: the shard cannot be read, or its index cannot be stored anywhere.
    """
    file = retry(lambda: open_shard(path), path)
    file.close()
    expected: dict[str, Any] = {"format": _FORMAT, "image_key": keys.image, "text_key": keys.text}
    expected |= {"teacher_key": keys.teacher} if keys.teacher else {}
    digest = _digest(path if is_remote(path) else os.path.abspath(path))
    named = [keys.image, keys.text, *filter(None, [keys.teacher])]
    is_default = named == [DEFAULT_KEYS.image, DEFAULT_KEYS.text]
    of_keys = "" if is_default else f".{_digest(' '.join(named))[:8]}"
    folder = Path(cache_folder) if cache_folder else Path(os.path.expanduser("~/.cache/infcl/index"))
    sidecars = [folder / f"{digest}{of_keys}.idx"]
    if not is_remote(path):
        sidecars.insert(0, Path(path + of_keys + _SIDECAR))
    for sidecar in sidecars:
        header = _read_header(sidecar, expected | {"file_bytes": file.file_bytes, "version": file.version}, keys)
        if header is not None:
            return Shard(path, str(sidecar), **{name: header[name] for name in _IN_HEADER})
    shard, members = scan_shard(path, keys)
    header = expected | {name: getattr(shard, name) for name in _IN_HEADER}
    content = json.dumps(header).encode() + b"\n" + members.astype("<i8").tobytes()
    for sidecar in sidecars[:-1]:
        with contextlib.suppress(OSError):  # a read-only or full data set folder
            write_atomic(sidecar, content)
            return shard._replace(index_path=str(sidecar))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(sidecars[-1], content)
    except OSError as error:
        why = f"the index of {path} cannot be stored in {folder} ({error.strerror}): set --index-cache"
        raise ShardFault("index_not_stored", why) from None
    return shard._replace(index_path=str(sidecars[-1]))


def split_name(name: str) -> tuple[str, str]:
    """Split a member's name into (key, lower-case extension) as webdataset does: at the base name's first dot.

    Both are "" for a name without key or extension. webdataset's own regular expression is not used: its time is
    quadratic in the length of the name, which the author of the tar controls.
    """
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return (folder + slash + stem, extension.lower()) if stem and extension else ("", "")


def _read_ahead(file: ShardFile, path: str) -> Callable[[int, int], bytes]:
    """Return a pread for a sequential scan of remote storage: it reads large blocks, each with retries."""
    start, block = 0, b""

    def pread(size: int, offset: int) -> bytes:
        nonlocal start, block
        if not start <= offset <= offset + size <= start + len(block):
            block = retry(lambda: file.pread(max(size, _READ_AHEAD), offset), path)
            start = offset
        return block[offset - start :][:size]

    return pread


def read_sidecar(shard: Shard, keys: SampleKeys) -> np.ndarray | None:
    """Return the index of a shard, or None if its sidecar is damaged or points outside the shard.

    The file is read, not mapped (48 or 64 bytes per sample): truncating a mapped file kills its reader with SIGBUS.
    """
    try:
        with open(shard.index_path, "rb", opener=open_regular) as file:
            file.seek(-_row_bytes(keys) * shard.samples, os.SEEK_END)
            members = np.frombuffer(file.read(), dtype="<i8").reshape(shard.samples, 2 * len(keys.extensions))
    except (OSError, ValueError, ShardFault):
        return None
    begins, sizes = members[:, ::2], members[:, 1::2]
    outside = (members < ABSENT).any() or (begins > shard.file_bytes).any() or (sizes > shard.file_bytes - begins).any()
    uneven = ((begins == ABSENT) != (sizes == ABSENT)).any() or (members[:, 0] == ABSENT).any()
    # members of a tar do not overlap
    limits = [MAX_IMAGE_BYTES, 2**62, MAX_JSON_BYTES, MAX_JSON_BYTES][: sizes.shape[1]]
    large = sizes.clip(0).sum() > shard.file_bytes or (sizes > limits).any()
    return None if outside or uneven or large else members


def _read_header(path: Path, expected: dict[str, Any], keys: SampleKeys) -> dict | None:
    """Return the header of a sidecar, or None if it is missing or incomplete, or has other values than `expected`."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            line = file.readline(_MAX_HEADER)
            header: Any = parse_record(line, _Header, str(path))
            is_complete = len(line) + header["samples"] * _row_bytes(keys) == os.fstat(file.fileno()).st_size
    except (OSError, ValueError, ShardFault):
        return None
    return header if is_complete and expected.items() <= header.items() else None


def _row_bytes(keys: SampleKeys) -> int:
    """Return the bytes of a sample in a sidecar: two int64 for each member."""
    return 16 * len(keys.extensions)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]
