"""Shards: expand --train-data into a list of indexed tars and their sample counts.

In:  `--train-data`: a path, braces (`{00000..00041}.tar`), a `::` list, a glob, a folder (its *.tar),
     or `@FILE` with one of these per line.
Out: `Manifest`: the sample counts for the plan and the paths for the workers.

`python -m infcl.data.shards index URLS` builds the indexes before a run and prints the problems of the shards.
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from glob import escape, glob
from itertools import chain

import numpy as np

from infcl.config import OneLineParser, counted
from infcl.config.redaction import check_text, redact_output
from infcl.config.settings import JoinSources
from infcl.config.words import printable
from infcl.data.index import DEFAULT_KEYS, SampleKeys, Shard, ensure_index
from infcl.data.storage import ShardFault, is_remote, open_lines

_SHOWN_KEYS = 100  # printed per cause
_OPENED_AT_ONCE = 16  # shards per process: remote storage answers after 50 to 100 ms
_SOURCES = re.compile("(?<!filecache)::")  # filecache::URL is one URL, of fsspec's cache


def expand_shards(urls: str, *, allow_pipe: bool = False) -> list[str]:
    """Return the shards of `urls` in order. Raises the same errors as `find_shards`."""
    return list(chain.from_iterable(find_shards(urls, allow_pipe=allow_pipe)))


def find_shards(urls: str, *, allow_pipe: bool = False) -> list[list[str]]:
    """Return the shards of each source: expand `::` lists, braces, globs and folders. Remote urls are not checked.

    Args:
        allow_pipe: accept `pipe:COMMAND`, which runs a shell command.

    Raises:
        ValueError: shards are missing, no shard is found, a shard is listed twice, or `pipe:` is not allowed.
    """
    from braceexpand import braceexpand

    sources: list[list[str]] = []
    missing: list[str] = []
    for name in split_sources(urls):
        sources.append([])
        for part in braceexpand(name):
            if part.startswith("pipe:") and not allow_pipe:
                raise ValueError(
                    f"{part!r} runs a shell command: it needs --dataset-type streaming, and --allow-pipe-urls if you "
                    "trust it"
                )
            is_folder = os.path.isdir(part)
            if is_remote(part) or (os.path.exists(part) and not is_folder):
                sources[-1].append(part)
            elif found := sorted(glob(os.path.join(escape(part), "*.tar") if is_folder else part)):
                sources[-1] += found
            else:
                hint = " (no *.tar in this folder; --dataset-type csv reads loose images)" if is_folder else ""
                missing.append(part + hint)
    shards = list(chain.from_iterable(sources))
    if missing:
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise ValueError(f"{len(missing)} of {len(missing) + len(shards)} shards are missing: {shown}")
    times = Counter(shard if is_remote(shard) else os.path.abspath(shard) for shard in shards)
    if twice := [shard for shard, count in times.items() if count > 1]:
        raise ValueError(
            f"{len(twice)} of {len(times)} shards are listed more than once: {', '.join(twice[:3])}"
            f"{', ...' * (len(twice) > 3)}: their samples would be each other's negatives; "
            "--train-data-upsampling-factors shows a source's samples more often"
        )
    if not shards:
        raise ValueError(
            f"no shards in {urls!r}: give tars, a folder of tars, or braces like 'data/{{00000..00041}}.tar'"
        )
    return sources


def split_sources(urls: str) -> list[str]:
    """Return the `::` parts of `urls`; each line of an `@FILE` is a part. Each part has one upsampling factor.

    Raises:
        ValueError: an `@FILE` cannot be read, or a url has a password.
    """
    names = filter(None, _SOURCES.split(urls))
    found = [name for source in names for name in (_names_in(source[1:]) if source[:1] == "@" else [source])]
    for name in filter(is_remote, found):
        check_text(f"one of the {len(found)} urls", name)
    return found


def _names_in(path: str) -> list[str]:
    """Return the names in an `@FILE`. Unlike a flag's value, they pass no shell between launcher and node."""
    try:
        with open_lines(path, errors="surrogateescape") as lines:
            names = [line.strip() for line in lines]
    except ValueError as error:
        why = str(error).removeprefix(path).lstrip(": ")
        raise ValueError(f"cannot read the urls of @{path}: {why}") from error
    return [name for name in names if name and not name.startswith("#")]


def check_factors(factors: Sequence[float] | None, sources: Sequence) -> Sequence[float]:
    """Return one factor per source, 1 by default. Raises ValueError if their number differs."""
    if factors is not None and len(factors) != len(sources):
        raise ValueError(f"{len(sources)} sources need as many upsampling factors, not {list(factors)}")
    return factors or [1.0] * len(sources)


@dataclass(frozen=True)
class Manifest:
    """All shards of a data set.

    `sha256` covers file names, sizes, sample counts and factors. It omits folders, so a copy has the same hash.
    """

    shards: tuple[Shard, ...]

    @cached_property
    def ends(self) -> np.ndarray:
        """Return int64 [shards]: the cumulative sample counts, so shard i ends before global sample number ends[i]."""
        return np.cumsum([shard.samples for shard in self.shards], dtype=np.int64)

    @property
    def num_samples(self) -> int:
        return int(self.ends[-1])

    @cached_property
    def sha256(self) -> str:
        lines = [
            f"{os.path.basename(shard.path)} {shard.file_bytes} {shard.samples}"
            + (f" x {shard.factor!r}" if shard.factor != 1 else "")
            for shard in self.shards
        ]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @property
    def rejected(self) -> Counter[str]:
        """Return cause -> number of samples that the indexes leave out."""
        return sum((Counter(shard.rejected) for shard in self.shards), Counter())

    @property
    def found(self) -> dict[str, int]:
        """Return the counters of a report that are known before the first read."""
        damaged = sum(shard.damage is not None for shard in self.shards)
        counts = self.rejected | Counter(damaged_shards=damaged)
        return {f"index/{cause}": count for cause, count in counts.items() if count}

    @property
    def warnings(self) -> list[str]:
        return [
            f"damaged shard, its intact samples are used: {shard.path}: {printable(shard.damage)}"
            for shard in sorted(self.shards)
            if shard.damage
        ]


def load_manifest(
    urls: str,
    *,
    factors: Sequence[float] | None = None,
    keys: SampleKeys = DEFAULT_KEYS,
    index_cache: str | None = None,
    indexed: Mapping[str, Shard] | None = None,
) -> Manifest:
    """Index every shard that has no valid index yet, and return the list of all shards.

    Args:
        factors: upsampling factors, one for each `::` part of `urls`.
        index_cache: folder for indexes that cannot be stored next to their shards.
        indexed: path -> shard, of those that other processes of this node have indexed. They are not opened.

    Raises:
        ValueError: a shard is missing or cannot be read.
    """
    sources = find_shards(urls)
    factor_of = {
        path: float(factor) for paths, factor in zip(sources, check_factors(factors, sources)) for path in paths
    }
    known = dict(indexed or {})
    known |= index_shards([path for path in factor_of if path not in known], keys, index_cache)
    return Manifest(tuple(known[path]._replace(factor=factor) for path, factor in factor_of.items()))


def index_shards(paths: Sequence[str], keys: SampleKeys, index_cache: str | None) -> dict[str, Shard]:
    """Return path -> indexed shard. Raises ValueError if a shard cannot be read."""
    try:
        with ThreadPoolExecutor(_OPENED_AT_ONCE) as pool:
            return dict(zip(paths, pool.map(partial(ensure_index, keys=keys, cache_folder=index_cache), paths)))
    except ShardFault as fault:
        raise ValueError(f"1 of {counted(len(paths), 'shard')} cannot be used: {fault}") from fault


def main(arguments: Sequence[str] | None = None) -> None:
    redact_output()
    parser = OneLineParser(prog="python -m infcl.data.shards", description="Build the index of each shard.")
    parser.add_argument("command", choices=["index"])
    parser.add_argument("urls", nargs="+", action=JoinSources, help="tars, braces, '::' lists, globs, folders or @FILE")
    parser.add_argument("--index-cache", help="folder of indexes of remote and read-only shards")
    parser.add_argument("--image-key", default=DEFAULT_KEYS.image, help="image extensions, split by ';'")
    parser.add_argument("--text-key", default=DEFAULT_KEYS.text, help="caption extensions, split by ';'")
    parser.add_argument("--jobs", type=int, default=1, help="shards indexed at the same time")
    args = parser.parse_args(arguments)
    keys = SampleKeys(image=args.image_key, text=args.text_key)
    indexed: dict[str, Shard] = {}
    try:
        if args.jobs > 1:
            paths = expand_shards(args.urls)
            index = partial(index_shards, keys=keys, index_cache=args.index_cache)
            with ProcessPoolExecutor(args.jobs) as pool:
                for part in pool.map(index, [paths[job :: args.jobs] for job in range(args.jobs)]):
                    indexed |= part
        manifest = load_manifest(args.urls, keys=keys, index_cache=args.index_cache, indexed=indexed)
    except ValueError as error:
        parser.error(str(error))
    print(f"{counted(len(manifest.shards), 'shard')}, {manifest.num_samples} samples, sha256 {manifest.sha256[:16]}")
    for cause, count in sorted(manifest.rejected.items()):
        found = [
            f"{shard.path}: {ascii(key)[1:-1]}" for shard in manifest.shards for key in shard.bad_keys.get(cause, ())
        ]
        print(f"  left out, {cause}: {count}")
        for key in found[:_SHOWN_KEYS]:
            print(f"    {key}")
        if count > len(found[:_SHOWN_KEYS]) > 0:
            print(f"    and {count - len(found[:_SHOWN_KEYS])} more")
    for warning in manifest.warnings:
        print(f"  {warning}")
    if manifest.num_samples == 0:
        parser.exit(
            2, f"{parser.prog}: error: no sample has an image ({args.image_key}) and a caption ({args.text_key})\n"
        )


if __name__ == "__main__":
    main()
