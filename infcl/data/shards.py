"""Shards: from what the user names to a list of indexed tars and their sample counts.

In:  `--train-data`: a path, braces (`{00000..00041}.tar`), a `::` list, a glob, a folder (its *.tar),
     or `@FILE` with one of these a line.
Out: `Manifest`, which is all that a plan needs (counts) and all that a worker needs (paths).

`python -m infcl.data.shards index URLS` builds the indexes ahead of a run and prints what is wrong with the shards.
"""

import argparse
import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from glob import escape, glob
from itertools import chain
from typing import NamedTuple

import numpy as np

from infcl.config import counted
from infcl.data.index import DEFAULT_KEYS, SampleKeys, ensure_index
from infcl.data.spool import spool_path
from infcl.data.storage import DEFAULT_STORAGE, ShardFault, StorageOptions, is_remote, open_lines

_SHOWN_KEYS = 100  # of each cause


def expand_shards(urls: str | Sequence[str], *, allow_pipe: bool = False) -> list[str]:
    """Return the shards of `urls` in order. Raises ValueError as `find_shards` does."""
    return list(chain.from_iterable(find_shards(urls, allow_pipe=allow_pipe)[0]))


def find_shards(
    urls: str | Sequence[str], *, allow_pipe: bool = False, max_missing: float = 0.0
) -> tuple[list[list[str]], list[str]]:
    """Expand `::` lists, braces, globs and folders. Other urls with a scheme are passed on unchecked.

    Returns:
        The shards of each source, and the local ones that are missing.

    Raises:
        ValueError: more than `max_missing` (a fraction) of the shards are missing, there is none, one is named twice,
            or a `pipe:` is not allowed.
    """
    sources, missing = _expand(split_sources(urls), allow_pipe)
    shards = list(chain.from_iterable(sources))
    _check_missing(missing, len(shards), max_missing)
    times = Counter(shard if is_remote(shard) else os.path.abspath(shard) for shard in shards)
    if twice := [shard for shard, count in times.items() if count > 1]:
        raise ValueError(
            f"{len(twice)} of {len(times)} shards are named more than once, {', '.join(twice[:3])}"
            f"{', ...' * (len(twice) > 3)}: their samples would be each other's negatives; "
            "--train-data-upsampling-factors shows a source's samples more often"
        )
    if not shards:
        raise ValueError(
            f"no shards in {urls!r}: name tars, a folder of tars, or braces like 'data/{{00000..00041}}.tar'"
        )
    return sources, missing


def split_sources(urls: str | Sequence[str]) -> list[str]:
    """Return the `::` parts of `urls`, which upsampling factors belong to; each line of an `@FILE` is one."""
    names = [name for url in ([urls] if isinstance(urls, str) else urls) for name in url.split("::") if name]
    return [name for source in names for name in (_names_in(source[1:]) if source[:1] == "@" else [source])]


def _names_in(path: str) -> list[str]:
    """The lines of a file of names, `@FILE`: unlike a flag's value, no shell between launcher and node changes them."""
    try:
        with open_lines(path, errors="surrogateescape") as lines:
            names = [line.strip() for line in lines]
    except ValueError as error:
        raise ValueError(f"@{path}: no file of urls can be read there ({error})") from error
    return [name for name in names if name and not name.startswith("#")]


def check_factors(factors: Sequence[float] | None, sources: Sequence) -> Sequence[float]:
    """Return a factor for each source, 1 by default. Raises ValueError for another number of them."""
    if factors is not None and (len(factors) != len(sources) or min(factors) <= 0):
        raise ValueError(f"{len(sources)} sources need as many upsampling factors above 0, not {list(factors)}")
    return factors or [1.0] * len(sources)


def _expand(names: list[str], allow_pipe: bool) -> tuple[list[list[str]], list[str]]:
    """(the shards of each name, those that are missing)."""
    from braceexpand import braceexpand

    sources: list[list[str]] = []
    missing: list[str] = []
    for name in names:
        shards: list[str] = []
        for part in braceexpand(name):
            if part.startswith("pipe:") and not allow_pipe:
                raise ValueError(f"{part!r} runs a shell command: give --allow-pipe-urls if you trust it")
            if is_remote(part):
                shards.append(part)
            elif os.path.isdir(part):
                found = sorted(glob(os.path.join(escape(part), "*.tar")))
                nothing = f"{part} (no *.tar in this folder; --dataset-type csv reads loose images)"
                (shards if found else missing).extend(found or [nothing])
            elif os.path.exists(part):
                shards.append(part)
            else:
                found = sorted(glob(part))
                (shards if found else missing).extend(found or [part])
        sources.append(shards)
    return sources, missing


def _check_missing(missing: Sequence[str], found: int, allowed: float) -> None:
    if len(missing) > allowed * (len(missing) + found):
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise ValueError(
            f"{len(missing)} of {len(missing) + found} shards are missing: {shown}"
            + (f" (--max-missing-shards allows {allowed:g} of them)" if allowed else "")
        )


class Shard(NamedTuple):
    path: str
    index_path: str
    samples: int
    file_bytes: int
    version: int  # storage.py: differs when the content may differ
    factor: float = 1.0  # how often an epoch sees each of its samples (plan.py)


def _check_spool(shards: Sequence[Shard], storage: StorageOptions) -> None:
    """A permutation of all samples needs all of them at hand: shards that are spooled have to fit in the spool."""
    spooled = [
        s for s in shards if is_remote(s.path) and (s.path[:5] == "pipe:" or spool_path(s.path, storage).exists())
    ]
    needed = sum(shard.file_bytes for shard in spooled)
    if needed > storage.cache_bytes:
        raise ValueError(
            f"{len(spooled)} shards of {needed / 1e9:.3g} GB cannot be read at random and do not fit in the spool of "
            f"{storage.cache_bytes / 1e9:.3g} GB: raise --data-cache-gb, or use --dataset-type streaming"
        )


@dataclass(frozen=True)
class Manifest:
    """All shards of a data set. `sha256` covers names, sizes, counts and factors, not folders: a copy is the same."""

    shards: tuple[Shard, ...]
    rejected: dict[str, int]  # samples that the indexes left out, by cause
    damaged: dict[str, str]  # shard -> what is wrong with it
    missing: dict[str, str]  # shard that was named -> why it is not used
    sha256: str
    bad_keys: dict[str, list[str]]  # some of the samples that `rejected` counts, by cause: "SHARD: KEY"

    @cached_property
    def ends(self) -> np.ndarray:
        """Return [shards] int64: the global number after each shard's last sample."""
        return np.cumsum([shard.samples for shard in self.shards], dtype=np.int64)

    @property
    def num_samples(self) -> int:
        return int(self.ends[-1])

    @property
    def found(self) -> dict[str, int]:
        """What a report counts before the first read."""
        found = {f"index/{cause}": count for cause, count in self.rejected.items()}
        for name, shards in (("damaged", self.damaged), ("missing", self.missing)):
            found |= {f"index/{name}_shards": len(shards)} if shards else {}
        return found

    @property
    def warnings(self) -> list[str]:
        damaged = [f"damaged shard, its intact samples are used: {path}: {why}" for path, why in self.damaged.items()]
        return damaged + [f"shard left out: {path}: {why}" for path, why in self.missing.items()]


def load_manifest(
    urls: str | Sequence[str],
    *,
    factors: Sequence[float] | None = None,
    keys: SampleKeys = DEFAULT_KEYS,
    index_cache: str | None = None,
    storage: StorageOptions = DEFAULT_STORAGE,
    max_missing: float = 0.0,
    rank: int = 0,
    world_size: int = 1,
) -> Manifest:
    """Index every shard that has no valid index yet, and list them all.

    Every rank calls this and gets the same answer. Ranks start at different shards and find what others have indexed
    meanwhile, so they share the work without communication. `factors`: one for each `::` part of `urls`. Raises
    ValueError when more than `max_missing` (a fraction) of the shards are missing or cannot be read.
    """
    sources, absent = find_shards(urls, allow_pipe=storage.allow_pipe, max_missing=max_missing)
    missing = dict.fromkeys(absent, "not found")
    paths = list(chain.from_iterable(sources))
    factor_of = [factor for source, factor in zip(sources, check_factors(factors, sources)) for _ in source]
    shards: list[Shard | None] = [None] * len(paths)
    rejected: Counter[str] = Counter()
    damaged: dict[str, str] = {}
    bad_keys: dict[str, list[str]] = {}
    for step in range(len(paths)):
        i = (step + rank * len(paths) // world_size) % len(paths)
        try:
            index_path, header = ensure_index(paths[i], keys, index_cache, storage)
        except ShardFault as fault:
            missing[paths[i]] = str(fault)
            _check_missing(list(missing.values()), len(paths) + len(absent) - len(missing), max_missing)
            continue
        shards[i] = Shard(
            paths[i], index_path, header["samples"], header["file_bytes"], header["version"], float(factor_of[i])
        )
        rejected.update(header["rejected"])
        for cause, found in header.get("bad_keys", {}).items():  # indexes of before had none
            bad_keys.setdefault(cause, []).extend(f"{paths[i]}: {ascii(key)[1:-1]}" for key in found)
        if header["damage"]:
            damaged[paths[i]] = header["damage"]
    present = tuple(shard for shard in shards if shard is not None)
    if not present:
        raise ValueError(f"none of the {len(missing)} shards of {urls!r} can be read")
    _check_spool(present, storage)
    lines = [
        f"{os.path.basename(shard.path)} {shard.file_bytes} {shard.samples}"
        + (f" x {shard.factor!r}" if shard.factor != 1 else "")
        for shard in present
    ]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return Manifest(
        present, dict(rejected), dict(sorted(damaged.items())), dict(sorted(missing.items())), digest, bad_keys
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m infcl.data.shards", description="Build the index of each shard.")
    parser.add_argument("command", choices=["index"])
    parser.add_argument("urls", nargs="+", help="tars, braces, '::' lists, globs, folders or @FILE")
    parser.add_argument("--index-cache", help="folder of indexes of remote and read-only shards")
    parser.add_argument("--allow-pipe-urls", action="store_true", help="run the shell commands of pipe: urls")
    parser.add_argument("--max-missing-shards", type=float, default=0.0, help="fraction that may be missing")
    parser.add_argument("--image-key", default=DEFAULT_KEYS.image, help="image extensions, split by ';'")
    parser.add_argument("--text-key", default=DEFAULT_KEYS.text, help="caption extensions, split by ';'")
    parser.add_argument("--jobs", type=int, default=1, help="shards indexed at the same time")
    args = parser.parse_args(arguments)
    keys = SampleKeys(image=args.image_key, text=args.text_key)
    storage = StorageOptions(allow_pipe=args.allow_pipe_urls)
    options = {
        "keys": keys,
        "index_cache": args.index_cache,
        "storage": storage,
        "max_missing": args.max_missing_shards,
    }
    try:
        if args.jobs > 1:
            with ProcessPoolExecutor(args.jobs) as pool:  # ranks that begin at different shards, as in a run
                shares = [{"rank": rank, "world_size": args.jobs} for rank in range(args.jobs)]
                parts = [pool.submit(load_manifest, args.urls, **share, **options) for share in shares]
                for part in parts:
                    part.result()
        manifest = load_manifest(args.urls, **options)
    except ValueError as error:
        parser.error(str(error))
    print(f"{counted(len(manifest.shards), 'shard')}, {manifest.num_samples} samples, sha256 {manifest.sha256[:16]}")
    for cause, count in sorted(manifest.rejected.items()):
        print(f"  left out, {cause}: {count}")
        shown = manifest.bad_keys.get(cause, [])[:_SHOWN_KEYS]
        for key in shown:
            print(f"    {key}")
        if count > len(shown) > 0:
            print(f"    and {count - len(shown)} more")
    for path, damage in manifest.damaged.items():
        print(f"  damaged, its intact samples are used: {path}: {damage}")
    for path, why in manifest.missing.items():
        print(f"  left out: {path}: {why}")
    if manifest.num_samples == 0:
        parser.exit(
            2, f"{parser.prog}: error: no sample has an image ({args.image_key}) and a caption ({args.text_key})\n"
        )


if __name__ == "__main__":
    main()
