"""The built-in demo data set: handwritten digits and rendered scenes, written as webdataset shards from a seed.

    python -m infcl.data.demo --out DIR [--num-train N] [--jobs N] [--gallery FILE.png]

    DIR/train/00000.tar ... 00007.tar   16,384 image-text pairs in shards of unequal size; 40% digits, 60% scenes
    DIR/val/00000.tar, 00001.tar        1,024 held-out scenes with unique captions, for retrieval
    DIR/zeroshot/00000.tar              400 held-out digits; the json member holds {"label": 0..9}
    DIR/zeroshot/classnames.txt         one class per line; templates.txt: one prompt per line, {} is the class
    DIR/tokenizer.model                 sentencepiece model, trained on the training captions
    DIR/demo.json                       the parameters; written last, so its folder is complete

Members are png + txt + json under a nine-digit key, as img2dataset writes them. The same parameters give the same
bytes. A digit image shows one digit in one of four corners, white on black or black on white. The same 40 bitmaps of
each class are held out for every seed. A scene shows two coloured shapes in a spatial relation. Held-out compositions
never occur in training. No two held-out scenes have the same pair of objects on the same background, so retrieval does
not depend on the spatial relation.

The digits are the 1,797 bitmaps of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, 1998, UCI
Machine Learning Repository, doi.org/10.24432/C50P49), the copy that scikit-learn ships, licensed CC BY 4.0.
"""

import argparse
import io
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import permutations
from pathlib import Path

import numpy as np

from infcl.data.plan import draw, random_order, uniforms
from infcl.data.render import (
    BACKGROUNDS,
    COLOURS,
    DIGIT_DRAWS,
    PLACES,
    SCENE_DRAWS,
    SHAPES,
    draw_digit,
    draw_scene,
)
from infcl.data.tokenizer import Tokenizer
from infcl.data.tokenizer.learn import shard_captions, train_tokenizer

DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIGIT_FRACTION = 0.4
HELD_OUT_PER_CLASS = 40
VAL_SCENES = 1024
VOCAB_SIZE = 300
SHARD_WEIGHTS = (22, 18, 15, 13, 11, 9, 7, 5)  # percent of the training samples
VAL_WEIGHTS = (60, 40)

_DIGIT_CAPTIONS = ("a handwritten {digit} at {place}, {ink} on {paper}",)
_SCENE_CAPTIONS = (
    "a {first} {relation} a {second} on a {background} background",
    "{background} background with a {first} {relation} a {second}",
    "there is a {first} {relation} a {second}, all on {background}",
    "a {second} {inverse} a {first} on a {background} background",
)
_RELATIONS = {True: ("left of", "right of"), False: ("above", "below")}  # horizontal -> (relation, inverse)
_TRAIN, _VAL, _ZEROSHOT, _SPLIT = range(4)  # the `epoch` argument of every draw

Pair = tuple[np.ndarray, str, dict]  # uint8 [32, 32, 3], caption, metadata


def prepare_demo(folder: str | os.PathLike, *, num_train: int = 16384, seed: int = 0, jobs: int = 1) -> Path:
    """Render the shards and train the tokenizer unless they exist. Return the folder."""
    folder = render_demo(folder, num_train=num_train, seed=seed, jobs=jobs)
    model = folder / "tokenizer.model"
    if not model.exists():
        train_tokenizer(shard_captions(str(folder / "train"), num_train), model, VOCAB_SIZE)
    return folder


def render_demo(folder: str | os.PathLike, *, num_train: int = 16384, seed: int = 0, jobs: int = 1) -> Path:
    """Render all shards into a temporary folder and rename it. Reuse a finished folder with the same parameters.

    Args:
        folder: where the data set is written.
        num_train: number of training samples.
        seed: of the images and captions.
        jobs: processes that write the training shards; the bytes do not depend on it.

    Raises:
        ValueError: `folder` has other contents.
    """
    folder = Path(folder)
    parameters = {"num_train": num_train, "seed": seed, "version": 2}
    if (folder / "demo.json").exists():
        found = json.loads((folder / "demo.json").read_text())
        if found != parameters:
            raise ValueError(f"{folder} holds a demo data set of {found}, not {parameters}: remove it, or use another")
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty and holds no finished demo data set: use another folder")
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    try:
        _write_shards(temporary / "train", partial(train_pairs, num_train, seed), num_train, SHARD_WEIGHTS, jobs)
        _write_shards(temporary / "val", partial(val_scenes, seed), VAL_SCENES, VAL_WEIGHTS)
        _write_shards(temporary / "zeroshot", partial(zeroshot_digits, seed), 10 * HELD_OUT_PER_CLASS, (1,))
        (temporary / "zeroshot" / "classnames.txt").write_text("\n".join(DIGIT_NAMES) + "\n")
        (temporary / "zeroshot" / "templates.txt").write_text("\n".join(prompt_templates()) + "\n")
        (temporary / "demo.json").write_text(json.dumps(parameters) + "\n")
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def prompt_templates() -> list[str]:
    """Return prompts for zero-shot classification: the training caption for each corner and colouring."""
    return [
        template.format(digit="{}", place=place, ink=ink, paper=paper)
        for template in _DIGIT_CAPTIONS
        for place in PLACES
        for ink, paper in (("white", "black"), ("black", "white"))
    ]


@cache
def load_digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (bitmaps uint8 [1797, 8, 8] in 0..16, labels uint8 [1797], training indices, held-out indices)."""
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        bitmaps, labels = file["images"], file["labels"]
    order = random_order(len(labels), 0, _SPLIT)  # the same split for every seed
    held_out = np.concatenate([order[labels[order] == digit][:HELD_OUT_PER_CLASS] for digit in range(10)])
    return bitmaps, labels, np.setdiff1d(order, held_out), np.sort(held_out)


def train_pairs(count: int, seed: int, first: int = 0, last: int | None = None) -> Iterator[Pair]:
    """Yield the pairs first to last - 1 of the training set of `count` pairs; it mixes digits and scenes."""
    _, _, digits, _ = load_digits()
    scenes = _compositions(seed)[1]
    is_digit = random_order(count, seed, _TRAIN) < round(DIGIT_FRACTION * count)
    for i in range(first, count if last is None else last):
        pick = int(draw(seed, _TRAIN, i, stream=1, count=1)[0])
        if is_digit[i]:
            yield _digit(int(digits[pick % len(digits)]), seed, _TRAIN, i)
        else:
            yield _scene(scenes[pick % len(scenes)], seed, _TRAIN, i)


def val_scenes(seed: int, first: int, last: int) -> Iterator[Pair]:
    """Yield the held-out scenes first to last - 1."""
    for i in range(first, last):
        yield _scene(_compositions(seed)[0][i], seed, _VAL, i)


def zeroshot_digits(seed: int, first: int, last: int) -> Iterator[Pair]:
    """Yield the held-out digits first to last - 1."""
    _, _, _, held_out = load_digits()
    for i in range(first, last):
        yield _digit(int(held_out[i]), seed, _ZEROSHOT, i)


@cache
def _compositions(seed: int) -> tuple[list[tuple], list[tuple]]:
    """Return the held-out and the training scenes, each as ((object, object), horizontal, background)."""
    objects = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    scenes = [
        ((a, b), horizontal, background)
        for a, b in permutations(objects, 2)
        for horizontal in (True, False)
        for background in BACKGROUNDS
    ]
    held_out: list[tuple] = []
    training: list[tuple] = []
    words: set[tuple] = set()
    for i in random_order(len(scenes), seed, _SPLIT).tolist():
        (a, b), _, background = scenes[i]
        bag = (*sorted((a[0], b[0])), *sorted((a[1], b[1])), background)
        is_new = bag not in words and len(held_out) < VAL_SCENES
        words.add(bag)
        (held_out if is_new else training).append(scenes[i])
    return held_out, training


def _digit(number: int, seed: int, split: int, i: int) -> Pair:
    bitmaps, labels, _, _ = load_digits()
    u = uniforms(draw(seed, split, i, stream=2, count=DIGIT_DRAWS + 3))
    place, light_on_dark = list(PLACES)[int(u[0] * len(PLACES))], bool(u[1] < 0.5)
    ink, paper = ("white", "black") if light_on_dark else ("black", "white")
    template = _DIGIT_CAPTIONS[int(u[2] * len(_DIGIT_CAPTIONS))]
    caption = template.format(digit=DIGIT_NAMES[labels[number]], place=place, ink=ink, paper=paper)
    picture = draw_digit(bitmaps[number], place, light_on_dark, u[3:])
    return picture, caption, {"label": int(labels[number]), "digit": number}


def _scene(composition: tuple, seed: int, split: int, i: int) -> Pair:
    (first, second), horizontal, background = composition
    u = uniforms(draw(seed, split, i, stream=2, count=SCENE_DRAWS + 1))
    relation, inverse = _RELATIONS[horizontal]
    caption = _SCENE_CAPTIONS[int(u[0] * len(_SCENE_CAPTIONS))].format(
        first=" ".join(first), second=" ".join(second), relation=relation, inverse=inverse, background=background
    )
    return draw_scene((first, second), horizontal, background, u[1:]), caption, {}


def _write_shards(
    folder: Path, pairs: Callable[[int, int], Iterator[Pair]], count: int, weights: Sequence[int], jobs: int = 1
) -> None:
    """Write `count` pairs as tars, with sample counts in proportion to `weights`. pairs(first, last) yields a range."""
    folder.mkdir(parents=True)
    ends = (np.cumsum(weights) * count // sum(weights)).tolist()
    tasks = list(zip(range(len(ends)), [0, *ends[:-1]], ends))
    if jobs == 1:
        for task in tasks:
            _write_shard(folder, pairs, *task)
        return
    with ProcessPoolExecutor(min(jobs, len(tasks))) as pool:
        for done in [pool.submit(_write_shard, folder, pairs, *task) for task in tasks]:
            done.result()


def _write_shard(folder: Path, pairs: Callable[[int, int], Iterator[Pair]], shard: int, first: int, last: int) -> None:
    from PIL import Image
    from webdataset import TarWriter

    # mtime=0 and bytes only: the same pairs give the same file
    with TarWriter(str(folder / f"{shard:05d}.tar"), encoder=False, mtime=0) as writer:
        for i, (picture, caption, metadata) in enumerate(pairs(first, last)):
            png, key = io.BytesIO(), f"{shard:05d}{i:04d}"
            Image.fromarray(picture).save(png, "PNG")
            height, width, _ = picture.shape
            metadata = {"key": key, "caption": caption, "width": width, "height": height, **metadata}
            members = {"png": png.getvalue(), "txt": caption.encode(), "json": json.dumps(metadata).encode()}
            writer.write({"__key__": key, **members})


def write_gallery(folder: str | os.PathLike, file: str | os.PathLike) -> None:
    """Write a PNG of the first training images with their captions."""
    import textwrap

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from infcl.data.evaluation import EvalShards

    rows, columns = 3, 6
    figure = Figure(figsize=(2.1 * columns, 2.6 * rows), dpi=110)
    FigureCanvasAgg(figure)
    for i, sample in enumerate(EvalShards(str(Path(folder) / "train"), image_size=32)):
        if i == rows * columns:
            break
        axes = figure.add_subplot(rows, columns, i + 1)
        axes.imshow(sample.image.permute(1, 2, 0).numpy(), interpolation="nearest")
        axes.set_title("\n".join(textwrap.wrap(sample.caption, 24)), fontsize=8)
        axes.set_axis_off()
    figure.tight_layout()
    figure.savefig(file)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m infcl.data.demo", description="Write the embedded data set.")
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--num-train", type=int, default=16384, help="training pairs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes that render")
    parser.add_argument("--gallery", help="also write a picture of some training pairs to this PNG")
    args = parser.parse_args(arguments)
    start, reused = time.perf_counter(), (Path(args.out) / "tokenizer.model").exists()
    try:
        folder = prepare_demo(args.out, num_train=args.num_train, seed=args.seed, jobs=args.jobs)
    except OSError as error:
        parser.error(f"--out {args.out}: {error}")
    except ValueError as error:  # the folder has other contents, or too few captions for the tokenizer
        parser.error(str(error))
    tokenizer = Tokenizer(folder / "tokenizer.model")
    done = "there already" if reused else f"written in {time.perf_counter() - start:.1f} s"
    print(f"{folder} ({done}): {args.num_train} training pairs in {len(SHARD_WEIGHTS)} shards, {VAL_SCENES} validation")
    print(f"  scenes, {10 * HELD_OUT_PER_CLASS} digits for zero-shot; tokenizer of {tokenizer.vocab_size} pieces")
    if args.gallery:
        write_gallery(folder, args.gallery)
        print(f"  gallery: {args.gallery}")


if __name__ == "__main__":
    main()
