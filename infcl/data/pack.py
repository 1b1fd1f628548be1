"""Write shards: tars of samples that the readers accept, the same bytes for the same samples.

In:  samples; or a folder of images with .txt and .json files of the same names, or a table (table.py).
Out: DIR/00000.tar, ... in a fixed random order, so that samples of a shard do not resemble each other.

`infcl-shards pack SOURCE --out DIR` packs; `infcl-shards index URLS` is that of shards.py.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path

import numpy as np

from infcl.config import OneLineParser, counted
from infcl.config.redaction import redact_output
from infcl.data.images import IMAGE_SUFFIXES
from infcl.data.index import DEFAULT_KEYS
from infcl.data.plan import random_order
from infcl.data.records import Record
from infcl.data.shards import main as index
from infcl.data.storage import ShardFault
from infcl.data.table import DEFAULT_COLUMNS, TableColumns, TableReader, add_column_flags, columns_of, read_file

_SUFFIX_OF = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"RIFF": "webp"}  # first bytes -> extension
assert set(_SUFFIX_OF.values()) <= set(DEFAULT_KEYS.image.split(";"))


def pack(
    source: str | os.PathLike,
    folder: str | os.PathLike,
    *,
    per_shard: int = 10_000,
    columns: TableColumns = DEFAULT_COLUMNS,
) -> tuple[list[int], Counter[str]]:
    """Write the images of a folder or a table as shards. Images are copied as they are.

    Args:
        source: a folder, a .csv or .tsv, or a .jsonl.
        folder: the folder to write; it must not contain shards.

    Returns:
        The samples of each shard, and cause -> number of the samples that are left out.

    Raises:
        ValueError: `folder` has shards, or the source has no usable sample.
    """
    folder, skipped = Path(folder), Counter[str]()
    if any(folder.glob("*.tar")):
        raise ValueError(f"{folder} has shards already: give another folder")
    if os.path.isdir(source):
        if_empty = "an image has a .txt or .json of the same name"
        files = sorted(path for path in Path(source).rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
        records = (_record_of(files[i]) for i in random_order(len(files), 0, 0).tolist())
    else:
        reader = TableReader(str(source), columns=columns)
        if_empty = reader.if_empty
        skipped.update(reader.found)
        order = random_order(int(reader.counts.sum()), 0, 0)
        records = (reader.read(np.array([row]))[0] for row in order.tolist())
    usable = _usable(records, skipped)
    counts: list[int] = []
    for first in usable:
        some = chain([first], islice(usable, per_shard - 1))
        counts.append(write_shard(folder / f"{len(counts):05d}.tar", some))
    if not counts:
        causes = ", ".join(f"{_cause(name)}: {count}" for name, count in skipped.items()) or "it has no images"
        raise ValueError(f"{source}: no sample can be packed ({causes}); {if_empty}")
    return counts, skipped


def write_shard(path: str | os.PathLike, samples: Iterable[Mapping[str, bytes]]) -> int:
    """Write one tar, and create its folder.

    The keys are the tar's name and a number, as img2dataset's. Nothing depends on the time or the user.

    Args:
        samples: extension -> content of each member of a sample, such as {"png": ..., "txt": ..., "json": ...}.

    Returns:
        The number of samples.
    """
    from webdataset import TarWriter

    path, count = Path(path), 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with TarWriter(str(path), encoder=False, mtime=0) as writer:
        for count, members in enumerate(samples, 1):
            writer.write({"__key__": f"{path.stem}_{count - 1:06d}", **members})
    return count


def _record_of(image: Path) -> Record:
    """Return the bytes of an image and of the files with its name; a fault if they cannot be read."""
    others = (image.with_suffix(suffix) for suffix in (".txt", ".json"))
    try:
        text, json = (read_file(str(other)) if other.is_file() else None for other in others)
        return Record(read_file(str(image)), text, json, str(image))
    except ShardFault as fault:
        return Record(None, None, None, str(image), fault=fault)


def _cause(name: str) -> str:
    """Return a counter's name without its prefix."""
    return name.removeprefix("index/")


def _usable(records: Iterable[Record], skipped: Counter[str]) -> Iterator[dict[str, bytes]]:
    """Yield {extension: content} of each sample, and count the others by cause."""
    for record in records:
        image = record.image or b""
        suffix = next((suffix for start, suffix in _SUFFIX_OF.items() if image.startswith(start)), None)
        if record.fault is not None:
            skipped[record.fault.cause] += 1
        elif record.text is None and record.json is None:
            skipped["no_caption"] += 1
        elif suffix is None:
            skipped["image_format"] += 1
        else:
            members = {suffix: image, "txt": record.text, "json": record.json}
            yield {name: content for name, content in members.items() if content is not None}


def main(arguments: Sequence[str] | None = None) -> None:
    redact_output()
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["index"]:
        return index(arguments)
    parser = OneLineParser(
        prog="infcl-shards", description="Pack images into shards, or build the index of each shard."
    )
    parser.add_argument("command", choices=["pack", "index"], help="infcl-shards index --help shows its options")
    parser.add_argument("source", help="a folder of images, each with a .txt of the same name; a .csv, .tsv or .jsonl")
    parser.add_argument("--out", required=True, help="the folder to write")
    parser.add_argument("--per-shard", type=int, default=10_000, help="samples per shard [10,000]")
    add_column_flags(parser)
    args = parser.parse_args(arguments)
    if args.per_shard < 1:
        parser.error(f"--per-shard {args.per_shard} must be greater than 0")
    try:
        shards, skipped = pack(args.source, args.out, per_shard=args.per_shard, columns=columns_of(args))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"{args.out}: {sum(shards):,} samples in {counted(len(shards), 'shard')}")
    for cause, count in sorted(skipped.items()):
        print(f"  left out, {_cause(cause)}: {count}")


if __name__ == "__main__":
    main()
