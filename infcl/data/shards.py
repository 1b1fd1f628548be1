"""Shards: from what the user names to a list of tars, their sample counts and their bytes.

In:  `--train-data`: a path, braces (`{00000..00041}.tar`), a `::` list, a glob, or a folder (its *.tar).
Out: `Manifest`, which is all that a plan needs (counts) and all that a worker needs (paths), and `ShardReader`, which
     turns global sample numbers into the bytes of their members.

`python -m infcl.data.shards index URLS` builds the indexes ahead of a run and prints what is wrong with the shards.
"""

import argparse
import hashlib
import os
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from glob import escape, glob
from typing import NamedTuple

import numpy as np

from infcl.data.index import ABSENT, DEFAULT_KEYS, SampleKeys, ensure_index, open_members

MAX_CAPTION_BYTES = 4096
_MERGE_GAP = 4096  # members closer than this are read with one call
_MERGE_BYTES = 16 << 20


def expand_shards(urls: str | Sequence[str]) -> list[str]:
    """The shards that `urls` names, in order: `::` lists, braces, globs, folders.

    Raises ValueError when local shards are missing. URLs with a scheme (`pipe:`, `https://`) are passed on unchecked.
    """
    from braceexpand import braceexpand

    names = [name for url in ([urls] if isinstance(urls, str) else urls) for name in url.split("::") if name]
    shards, missing = [], []
    for part in (part for name in names for part in braceexpand(name)):
        if is_remote(part):
            shards.append(part)
        elif os.path.isdir(part):
            found = sorted(glob(os.path.join(escape(part), "*.tar")))
            (shards if found else missing).extend(found or [f"{part} (no *.tar in this folder)"])
        elif os.path.exists(part):
            shards.append(part)
        else:
            found = sorted(glob(part))
            (shards if found else missing).extend(found or [part])
    if missing:
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise ValueError(f"{len(missing)} of {len(missing) + len(shards)} shards are missing: {shown}")
    if not shards:
        raise ValueError(
            f"no shards in {urls!r}: name tars, a folder of tars, or braces like 'data/{{00000..00041}}.tar'"
        )
    return shards


def is_remote(url: str) -> bool:
    return url.startswith("pipe:") or "://" in url


class Shard(NamedTuple):
    path: str
    index_path: str
    samples: int
    file_bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class Manifest:
    """All shards of a data set. `sha256` covers names, sizes and counts, not folders or times: a copy is the same."""

    shards: tuple[Shard, ...]
    rejected: dict[str, int]  # samples that the indexes left out, by cause
    damaged: dict[str, str]  # shard -> what is wrong with it
    sha256: str

    @cached_property
    def ends(self) -> np.ndarray:
        """[shards] int64: the global number after each shard's last sample."""
        return np.cumsum([shard.samples for shard in self.shards], dtype=np.int64)

    @property
    def num_samples(self) -> int:
        return int(self.ends[-1])


def load_manifest(
    urls: str | Sequence[str],
    *,
    keys: SampleKeys = DEFAULT_KEYS,
    index_cache: str | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> Manifest:
    """Index every shard that has no valid index yet, and list them all.

    Every rank calls this and gets the same answer. Ranks start at different shards and find what others have indexed
    meanwhile, so they share the work without communication.
    """
    paths = expand_shards(urls)
    remote = [path for path in paths if is_remote(path)]
    if remote:
        raise ValueError(f"the indexed reader needs files that can seek, not {remote[0]!r}: use the streaming reader")
    shards: list[Shard | None] = [None] * len(paths)
    rejected, damaged = Counter(), {}
    for step in range(len(paths)):
        i = (step + rank * len(paths) // world_size) % len(paths)
        index_path, header = ensure_index(paths[i], keys, index_cache)
        shards[i] = Shard(paths[i], index_path, header["samples"], header["file_bytes"], header["mtime_ns"])
        rejected.update(header["rejected"])
        if header["damage"]:
            damaged[paths[i]] = header["damage"]
    lines = [f"{os.path.basename(shard.path)} {shard.file_bytes} {shard.samples}" for shard in shards]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return Manifest(tuple(shards), dict(rejected), dict(sorted(damaged.items())), digest)


class Record(NamedTuple):
    """The undecoded members of one sample, and where it came from (for messages)."""

    image: bytes | None
    text: bytes | None
    json: bytes | None
    where: str


class ShardReader:
    """Global sample numbers -> records. Holds at most `max_open` open files and maps; nothing else grows.

    I/O errors, and a shard that changed since it was indexed, raise: they are never taken for a bad sample, because
    a step that is read twice must give the same samples twice.
    """

    def __init__(self, manifest: Manifest, keys: SampleKeys = DEFAULT_KEYS, *, max_open: int = 128):
        self.manifest, self.keys, self.max_open = manifest, keys, max_open
        self._open: OrderedDict[int, tuple[int, np.ndarray]] = OrderedDict()  # shard -> (descriptor, members)

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_open": OrderedDict()}  # descriptors stay with their process

    def __del__(self):
        for descriptor, _ in self._open.values():
            os.close(descriptor)

    def read(self, samples: np.ndarray, *, images: bool = True) -> list[Record]:
        """Records of int64 sample numbers [n], in their order. `images=False` leaves the images unread."""
        shard_of = np.searchsorted(self.manifest.ends, samples, side="right")
        records: list[Record | None] = [None] * len(samples)
        for i in np.unique(shard_of).tolist():
            shard = self.manifest.shards[i]
            descriptor, members = self._descriptor(i)
            slots = np.flatnonzero(shard_of == i)
            rows = samples[slots] - (self.manifest.ends[i] - shard.samples)
            wanted = [self._members_of(row, images) for row in members[rows].tolist()]
            data = _read_all(descriptor, [member for three in wanted for member in three], shard.path)
            for k, (slot, row) in enumerate(zip(slots.tolist(), rows.tolist())):
                records[slot] = Record(*data[3 * k : 3 * k + 3], f"{shard.path} sample {row}")
        return records

    def _members_of(self, row: list[int], images: bool) -> list[tuple[int, int]]:
        """(offset, bytes) of image, text and json; a member that is not needed counts as absent."""
        absent = (ABSENT, ABSENT)
        use_json = self.keys.json_text is not None or row[2] == ABSENT
        text = absent if use_json else (row[2], min(row[3], MAX_CAPTION_BYTES + 1))
        return [(row[0], row[1]) if images else absent, text, (row[4], row[5]) if use_json else absent]

    def _descriptor(self, i: int) -> tuple[int, np.ndarray]:
        if i in self._open:
            self._open.move_to_end(i)
            return self._open[i]
        shard = self.manifest.shards[i]
        descriptor = os.open(shard.path, os.O_RDONLY)
        stat = os.fstat(descriptor)
        if (stat.st_size, stat.st_mtime_ns) != (shard.file_bytes, shard.mtime_ns):
            os.close(descriptor)
            raise RuntimeError(
                f"{shard.path} changed during the run: {shard.file_bytes} bytes when indexed, {stat.st_size} now "
                f"(or its time differs); restart the run to index it again"
            )
        self._open[i] = descriptor, open_members(shard.index_path, shard.samples)
        if len(self._open) > self.max_open:
            os.close(self._open.popitem(last=False)[1][0])
        return self._open[i]


def _read_all(descriptor: int, wanted: list[tuple[int, int]], path: str) -> list[bytes | None]:
    """The bytes of each (offset, size), None where absent; neighbours are read with one call."""
    result: list[bytes | None] = [None] * len(wanted)
    order = sorted((i for i, (offset, _) in enumerate(wanted) if offset != ABSENT), key=lambda i: wanted[i])
    at = 0
    while at < len(order):
        begin, end = wanted[order[at]][0], sum(wanted[order[at]])
        stop = at + 1
        while stop < len(order):
            offset, size = wanted[order[stop]]
            if offset - end > _MERGE_GAP or offset + size - begin > _MERGE_BYTES:
                break
            end, stop = max(end, offset + size), stop + 1
        data = _read_exactly(descriptor, begin, end - begin, path)
        for i in order[at:stop]:
            offset, size = wanted[i]
            result[i] = data[offset - begin : offset - begin + size]
        at = stop
    return result


def _read_exactly(descriptor: int, offset: int, size: int, path: str) -> bytes:
    data = os.pread(descriptor, size, offset)
    while len(data) < size:
        more = os.pread(descriptor, size - len(data), offset + len(data))
        if not more:
            raise OSError(
                f"{path}: ends at byte {offset + len(data)}, {offset + size} expected; was it cut after indexing?"
            )
        data += more
    return data


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m infcl.data.shards", description="Build the index of each shard.")
    parser.add_argument("command", choices=["index"])
    parser.add_argument("urls", nargs="+", help="tars, braces, '::' lists, globs or folders")
    parser.add_argument("--index-cache", help="where indexes go when the shards' own folder cannot be written to")
    parser.add_argument("--image-key", default=DEFAULT_KEYS.image, help="image extensions, split by ';'")
    parser.add_argument("--text-key", default=DEFAULT_KEYS.text, help="caption extensions, split by ';'")
    args = parser.parse_args(arguments)
    keys = SampleKeys(image=args.image_key, text=args.text_key)
    manifest = load_manifest(args.urls, keys=keys, index_cache=args.index_cache)
    print(f"{len(manifest.shards)} shards, {manifest.num_samples} samples, sha256 {manifest.sha256[:16]}")
    for cause, count in sorted(manifest.rejected.items()):
        print(f"  left out, {cause}: {count}")
    for path, damage in manifest.damaged.items():
        print(f"  damaged, only the samples before it are used: {path}: {damage}")


if __name__ == "__main__":
    main()
