"""Build the data set of open-source icons: shards for training, held-out sets for evaluation, a tokenizer.

    python examples/icons/build.py node_modules/@iconify/json --emoji node_modules/emojibase-data --out .data/icons
    python examples/icons/build.py node_modules/@iconify/json --save icons.jsonl.xz     # 33 MB, to build elsewhere
    python examples/icons/build.py icons.jsonl.xz --out .data/icons

    DIR/train/free-*.tar           MIT, Apache-2.0, CC0, ISC       jpg, txt (the name), json (texts, set, license)
    DIR/train/attribution-*.tar    CC-BY, OFL, MPL, BSD, Unlicense
    DIR/val/00000.tar              the held-out sets, each name once, for retrieval
    DIR/zeroshot/SET/              one held-out set: its names are the classes
    DIR/tokenizer.model            sentencepiece, learned from the captions of train
    DIR/manifest.json              sets, licences, authors, counts; written last

Whole sets are held out, so the scores measure generalisation to another hand. Sets that share their drawings with a
held-out set are left out. The same source gives the same bytes.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing import Pool
from pathlib import Path

from icons import ATTRIBUTION, FREE, SIZE, Icon, IconSet, read_source, render, save_icons

from infcl.data.pack import write_shard
from infcl.data.plan import random_order
from infcl.data.tokenizer.learn import train_tokenizer

HELD_OUT = {"carbon": "lines", "vaadin": "filled", "fluent-emoji-flat": "emoji in colour"}
LEFT_OUT = ("fluent-emoji", "fluent-emoji-high-contrast")  # the drawings of fluent-emoji-flat in other styles
SKIN_TONES = ("-light", "-medium-light", "-medium", "-medium-dark", "-dark")  # of emoji: five copies of a drawing
PER_SHARD = 4096
SEED = 0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder of @iconify/json or of one set, or a file of --save")
    parser.add_argument("--emoji", type=Path, help="folder of emojibase-data: keywords of emoji as further captions")
    parser.add_argument("--out", type=Path, help="folder to write")
    parser.add_argument("--save", type=Path, help="only write the SVG bodies of all sets to this .jsonl.xz file")
    parser.add_argument("--sets", nargs="+", default=[], help="only these sets, with the held-out ones")
    parser.add_argument("--limit", type=int, help="at most so many training icons, chosen at random")
    parser.add_argument("--vocab-size", type=int, default=8000, help="pieces of the tokenizer [8000]")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that render [all cores]")
    args = parser.parse_args(arguments)
    if (args.out is None) == (args.save is None):
        parser.error("give either --out or --save")
    try:
        sets, icons = read_source(args.source, emoji=args.emoji, only=[*args.sets, *HELD_OUT] if args.sets else ())
        if args.save:
            save_icons(args.save, sets, icons)
            print(f"{args.save}: {len(icons):,} icons of {len(sets)} sets, {args.save.stat().st_size / 1e6:.1f} MB")
        else:
            build(args.out, sets, icons, limit=args.limit, workers=args.workers, vocab_size=args.vocab_size)
    except (OSError, ValueError) as error:
        sys.exit(f"build.py: {error}")


def build(
    folder: Path, sets: dict[str, IconSet], icons: list[Icon], *, limit: int | None, workers: int, vocab_size: int
) -> None:
    """Render all icons and write the data set. Raises ValueError if `folder` exists."""
    if folder.exists():
        raise ValueError(f"{folder} exists: remove it, or give another --out")
    started = time.perf_counter()
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    held = {prefix: _unique(_without_skin_tones([i for i in icons if i.prefix == prefix])) for prefix in HELD_OUT}
    train = [icon for icon in icons if icon.prefix not in HELD_OUT and icon.prefix not in LEFT_OUT]
    train = [train[i] for i in random_order(len(train), SEED, 0)[:limit].tolist()]  # a shard mixes the sets
    free = [icon for icon in train if sets[icon.prefix].license in FREE]
    others = [icon for icon in train if sets[icon.prefix].license in ATTRIBUTION]
    try:
        written: list[tuple[str, str]] = []  # (set, caption)
        with Pool(workers) as pool:
            for name, part in (("free", free), ("attribution", others)):
                jobs = _shards(temporary / "train", name, part)
                write = partial(_write, licences={p: info.license for p, info in sets.items()})
                for done, pairs in enumerate(pool.imap_unordered(write, jobs), 1):
                    written += pairs
                    print(f"\r{name}: {done} shards, {len(written):,} icons", end="", flush=True)
                print()
            pictures = {prefix: pool.map(render, candidates, chunksize=64) for prefix, candidates in held.items()}
        visible = [
            (icon, jpg) for prefix in held for icon, jpg in zip(held[prefix], pictures[prefix]) if jpg is not None
        ]
        names = Counter(caption for _, caption in written)
        counts = _write_held_out(temporary, visible, seen=set(names)) + Counter(prefix for prefix, _ in written)
        train_tokenizer(_captions(train), temporary / "tokenizer.model", vocab_size)
        manifest = _manifest(sets, counts, names)
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"{folder}: {manifest['train_icons']:,} icons to train on, {time.perf_counter() - started:.0f} s")
    print(f"  {manifest['names']:,} different names; {manifest['share_of_shared_names']:.1%} share theirs with others")
    print(f"  held out: {', '.join(f'{prefix} ({counts[prefix]:,})' for prefix in held)}")


def _shards(folder: Path, name: str, icons: list[Icon]) -> Iterator[tuple[Path, list[Icon]]]:
    for number, start in enumerate(range(0, len(icons), PER_SHARD)):
        yield folder / f"{name}-{number:05d}.tar", icons[start : start + PER_SHARD]


def _write(job: tuple[Path, list[Icon]], licences: dict[str, str]) -> list[tuple[str, str]]:
    """Render one shard. Return set and caption of the icons in it; invisible ones are left out."""
    path, icons = job
    written = []

    def samples() -> Iterator[dict[str, bytes]]:
        for icon in icons:
            if (jpg := render(icon)) is not None:
                written.append((icon.prefix, icon.caption))
                yield _sample(icon, jpg, license=licences[icon.prefix])

    write_shard(path, samples())
    return written


def _sample(icon: Icon, jpg: bytes, **metadata: object) -> dict[str, bytes]:
    metadata = {"set": icon.prefix, "name": icon.name, "texts": [icon.caption, *icon.texts], **metadata}
    return {"jpg": jpg, "txt": icon.caption.encode(), "json": json.dumps(metadata, ensure_ascii=False).encode()}


def _without_skin_tones(icons: list[Icon]) -> list[Icon]:
    names = {icon.name for icon in icons}
    return [i for i in icons if not any(i.name.endswith(t) and i.name.removesuffix(t) in names for t in SKIN_TONES)]


def _write_held_out(folder: Path, visible: list[tuple[Icon, bytes]], seen: set[str]) -> Counter[str]:
    """Write each held-out set with its captions as classes, then all of them with each name once."""
    for prefix in HELD_OUT:
        own = [(icon, jpg) for icon, jpg in visible if icon.prefix == prefix]
        where = folder / "zeroshot" / prefix
        samples = (_sample(icon, jpg, label=i, seen=icon.caption in seen) for i, (icon, jpg) in enumerate(own))
        write_shard(where / "00000.tar", samples)
        (where / "classnames.txt").write_text("".join(f"{icon.caption}\n" for icon, _ in own), encoding="utf-8")
        (where / "templates.txt").write_text("{}\n")
    pictures = dict(visible)
    samples = (_sample(icon, pictures[icon], seen=icon.caption in seen) for icon in _unique(list(pictures)))
    write_shard(folder / "val" / "00000.tar", samples)
    return Counter(icon.prefix for icon in pictures)


def _unique(icons: list[Icon]) -> list[Icon]:
    """Return the first icon of each caption."""
    first: dict[str, Icon] = {}
    for icon in icons:
        first.setdefault(icon.caption, icon)
    return list(first.values())


def _captions(icons: list[Icon]) -> Iterator[str]:
    for icon in icons:
        yield from (icon.caption, *icon.texts)


def _manifest(sets: dict[str, IconSet], counts: Counter[str], names: Counter[str]) -> dict:
    return {
        "size": SIZE,
        "held_out": HELD_OUT,
        "train_icons": names.total(),
        "names": len(names),
        "share_of_shared_names": sum(count for count in names.values() if count > 1) / names.total(),
        "sets": [sets[prefix]._asdict() | {"icons": count} for prefix, count in sorted(counts.items())],
    }


if __name__ == "__main__":
    main()
