"""The built-in demo data set: handwritten digits and rendered scenes, written as webdataset shards from a seed.

    DIR/train/*.tar, val/*.tar   image-text pairs; 40% digits and 60% scenes, and held-out scenes with unique captions
    DIR/zeroshot/*.tar           held-out digits; the json member holds {"label": 0..9}
    DIR/demo.json                the parameters; written last, so its folder is complete

The same parameters give the same bytes: numpy draws the images with elementwise IEEE arithmetic alone. A digit image
shows one digit in one of four corners; the same 40 bitmaps of each class are held out for every seed. A scene shows two
coloured shapes in a spatial relation. No two held-out scenes have the same pair of objects on the same background, so
retrieval does not depend on the spatial relation.

The digits are the 1,797 bitmaps of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, 1998, UCI
Machine Learning Repository, doi.org/10.24432/C50P49), the copy that scikit-learn ships, licensed CC BY 4.0.
"""

import io
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice, permutations, product
from pathlib import Path

import numpy as np

from infcl.config import OneLineParser
from infcl.config.json_file import read_record
from infcl.config.words import reason
from infcl.data.pack import write_shard
from infcl.data.plan import draw, random_order, uniforms
from infcl.data.records import ShardReader
from infcl.data.shards import load_manifest
from infcl.data.tokenizer import Tokenizer
from infcl.data.tokenizer.learn import captions_of, train_tokenizer

SIZE = 32
DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIGIT_FRACTION = 0.4
HELD_OUT_PER_CLASS = 40
VAL_SCENES = 1024
VOCAB_SIZE = 300
SHARD_WEIGHTS = (22, 18, 15, 13, 11, 9, 7, 5)  # percent of the training samples
VAL_WEIGHTS = (60, 40)

_DIGIT_CAPTION = "a handwritten {digit} at {place}, {ink} on {paper}"
_SCENE_CAPTIONS = (
    "a {first} {relation} a {second} on a {background} background",
    "{background} background with a {first} {relation} a {second}",
    "there is a {first} {relation} a {second}, all on {background}",
    "a {second} {inverse} a {first} on a {background} background",
)
_RELATIONS = {True: ("left of", "right of"), False: ("above", "below")}  # horizontal -> (relation, inverse)
_TRAIN, _VAL, _ZEROSHOT, _SPLIT = range(4)  # the `epoch` argument of every draw

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 210, 50),
    "purple": (150, 60, 190),
    "cyan": (60, 200, 210),
}
SHAPES = ("circle", "square", "triangle", "ring", "cross")
BACKGROUNDS = {"black": (15, 15, 15), "white": (242, 242, 242), "grey": (128, 128, 128), "brown": (105, 70, 40)}
PLACES = {  # of a digit: (down, right) position of its square, as fractions of the free space
    "top left": (0.0, 0.0),
    "top right": (0.0, 1.0),
    "bottom left": (1.0, 0.0),
    "bottom right": (1.0, 1.0),
}

_CENTRES = np.arange(SIZE) + 0.5

Pair = tuple[np.ndarray, str, dict]  # uint8 [32, 32, 3], caption, metadata


def prepare_demo(folder: str | os.PathLike, *, num_train: int = 16384, seed: int = 0) -> Path:
    """Write the shards of `num_train` training pairs and the tokenizer, unless they exist. Return the folder.

    The shards are written to a temporary folder, which is renamed. Raises ValueError if `folder` has other contents.
    """
    folder = Path(folder)
    finished, model = folder / "demo.json", folder / "tokenizer.model"
    parameters = {"num_train": num_train, "seed": seed, "version": 2}
    if not finished.exists():
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty and holds no finished demo data set: use another folder")
        temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
        try:
            _render(temporary, num_train, seed)
            (temporary / finished.name).write_text(json.dumps(parameters) + "\n")
            os.replace(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    if (found := read_record(finished, dict)) != parameters:
        raise ValueError(f"{folder} holds a demo data set of {found}, not {parameters}: remove it, or use another")
    if not model.exists():
        reader = ShardReader(load_manifest(str(folder / "train")))
        train_tokenizer(captions_of(reader, num_train), model, VOCAB_SIZE)
    return folder


def _render(folder: Path, num_train: int, seed: int) -> None:
    scenes = (_scene(scene, seed, _VAL, i) for i, scene in enumerate(_compositions(seed)[0]))
    digits = (_digit(number, seed, _ZEROSHOT, i) for i, number in enumerate(load_digits()[3].tolist()))
    _write_shards(folder / "train", train_pairs(num_train, seed), num_train, SHARD_WEIGHTS)
    _write_shards(folder / "val", scenes, VAL_SCENES, VAL_WEIGHTS)
    _write_shards(folder / "zeroshot", digits, 10 * HELD_OUT_PER_CLASS, (1,))
    prompts = [
        _DIGIT_CAPTION.format(digit="{}", place=place, ink=ink, paper=paper)
        for place in PLACES
        for ink, paper in (("white", "black"), ("black", "white"))
    ]
    for name, lines in (("classnames.txt", DIGIT_NAMES), ("templates.txt", prompts)):
        (folder / "zeroshot" / name).write_text("\n".join(lines) + "\n")


@cache
def load_digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (bitmaps uint8 [1797, 8, 8] in 0..16, labels uint8 [1797], training indices, held-out indices)."""
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        bitmaps, labels = file["images"], file["labels"]
    order = random_order(len(labels), 0, _SPLIT)  # the same split for every seed
    held_out = np.concatenate([order[labels[order] == digit][:HELD_OUT_PER_CLASS] for digit in range(10)])
    return bitmaps, labels, np.setdiff1d(order, held_out), np.sort(held_out)


def train_pairs(count: int, seed: int) -> Iterator[Pair]:
    """Yield the `count` pairs of the training set, which mixes digits and scenes."""
    _, _, digits, _ = load_digits()
    scenes = _compositions(seed)[1]
    is_digit = random_order(count, seed, _TRAIN) < round(DIGIT_FRACTION * count)
    for i in range(count):
        pick = int(draw(seed, _TRAIN, i, stream=1, count=1)[0])
        if is_digit[i]:
            yield _digit(int(digits[pick % len(digits)]), seed, _TRAIN, i)
        else:
            yield _scene(scenes[pick % len(scenes)], seed, _TRAIN, i)


@cache
def _compositions(seed: int) -> tuple[list[tuple], list[tuple]]:
    """Return the held-out and the training scenes, each as ((object, object), horizontal, background)."""
    scenes = list(product(permutations(product(COLOURS, SHAPES), 2), (True, False), BACKGROUNDS))
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
    """Draw a bitmap in one of four corners, light on dark or the reverse."""
    bitmaps, labels, _, _ = load_digits()
    u = uniforms(draw(seed, split, i, stream=2, count=8))
    place, light_on_dark = list(PLACES)[int(u[0] * len(PLACES))], bool(u[1] < 0.5)
    ink, paper = ("white", "black") if light_on_dark else ("black", "white")
    caption = _DIGIT_CAPTION.format(digit=DIGIT_NAMES[labels[number]], place=place, ink=ink, paper=paper)
    side = 20 + int(3 * u[3])  # 20..22 pixels
    room = SIZE - side
    top, left = (  # a margin of at least one pixel: some strokes reach the bitmap's edge
        min(room - 1, max(1, round(room * fraction + 2 * (r - 0.5)))) for fraction, r in zip(PLACES[place], u[4:6])
    )
    strokes = np.zeros((SIZE, SIZE))
    strokes[top : top + side, left : left + side] = _enlarge(_enlarge(bitmaps[number] / 16.0, side).T, side).T
    dark, light = 25 * u[6], 255 - 25 * u[7]
    grey = dark + (light - dark) * (strokes if light_on_dark else 1 - strokes)
    picture = _quantise(np.repeat(grey[:, :, None], 3, axis=2))
    return picture, caption, {"label": int(labels[number]), "digit": number}


def _scene(composition: tuple, seed: int, split: int, i: int) -> Pair:
    (first, second), horizontal, background = composition
    u = uniforms(draw(seed, split, i, stream=2, count=16))
    relation, inverse = _RELATIONS[horizontal]
    caption = _SCENE_CAPTIONS[int(u[0] * len(_SCENE_CAPTIONS))].format(
        first=" ".join(first), second=" ".join(second), relation=relation, inverse=inverse, background=background
    )
    return draw_scene((first, second), horizontal, background, u[1:]), caption, {}


def draw_scene(
    objects: tuple[tuple[str, str], tuple[str, str]], horizontal: bool, background: str, random: np.ndarray
) -> np.ndarray:
    """Draw two (colour, shape) objects, the first left of the second or above it. random: float64 [15]."""
    u = random * 2 - 1  # [-1, 1)
    picture = np.ones((SIZE, SIZE, 3)) * BACKGROUNDS[background] + 6 * u[12:15]
    for i, (colour, shape) in enumerate(objects):
        jitter = u[6 * i : 6 * i + 6]
        along, across = SIZE * (0.25 + 0.5 * i) + 1.5 * jitter[0], SIZE / 2 + 4 * jitter[1]
        x, y = (along, across) if horizontal else (across, along)
        distance = _distance(shape, _CENTRES[None, :] - x, _CENTRES[:, None] - y, 6.3 + 0.8 * jitter[2])
        cover = np.clip(0.5 - distance, 0, 1)[:, :, None]  # [S, S, 1]
        picture = picture * (1 - cover) + cover * (COLOURS[colour] + 14 * jitter[3:6])
    return _quantise(picture)


def _distance(shape: str, dx: np.ndarray, dy: np.ndarray, r: float) -> np.ndarray:
    """Return the signed distance (pixels, negative inside) to a shape of radius r at the origin; y points down."""
    ax, ay = np.abs(dx), np.abs(dy)
    if shape == "circle":
        return np.sqrt(dx * dx + dy * dy) - r
    if shape == "square":
        return np.maximum(ax, ay) - 0.85 * r
    if shape == "ring":
        return np.abs(np.sqrt(dx * dx + dy * dy) - 0.75 * r) - 0.25 * r
    if shape == "triangle":  # with the apex up
        return np.maximum(dy - 0.8 * r, 0.876 * (ax - 0.55 * (dy + 1.1 * r)))
    arm = 0.33 * r
    return np.minimum(np.maximum(ax - arm, ay - r), np.maximum(ax - r, ay - arm))


def _enlarge(image: np.ndarray, size: int) -> np.ndarray:
    """Enlarge the rows bilinearly: [h, w] -> [size, w]."""
    at = np.clip((np.arange(size) + 0.5) * (len(image) / size) - 0.5, 0, len(image) - 1)
    low = np.minimum(at.astype(np.int64), len(image) - 2)
    weight = (at - low)[:, None]
    return image[low] * (1 - weight) + image[low + 1] * weight


def _quantise(picture: np.ndarray) -> np.ndarray:
    return np.clip(np.floor(picture + 0.5), 0, 255).astype(np.uint8)


def _write_shards(folder: Path, pairs: Iterator[Pair], count: int, weights: Sequence[int]) -> None:
    """Write `count` pairs as tars, with sample counts in proportion to `weights`."""
    sizes = np.diff(np.cumsum(weights) * count // sum(weights), prepend=0)
    for shard, size in enumerate(sizes.tolist()):
        write_shard(folder / f"{shard:05d}.tar", map(_members, islice(pairs, size)))


def _members(pair: Pair) -> dict[str, bytes]:
    from PIL import Image

    picture, caption, metadata = pair
    png, metadata = io.BytesIO(), {"caption": caption, "width": SIZE, "height": SIZE, **metadata}
    Image.fromarray(picture).save(png, "PNG")
    return {"png": png.getvalue(), "txt": caption.encode(), "json": json.dumps(metadata).encode()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = OneLineParser(prog="python -m infcl.data.demo", description="Write the demo data set.")
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--num-train", type=int, default=16384, help="training pairs")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    start, reused = time.perf_counter(), (Path(args.out) / "tokenizer.model").exists()
    try:
        folder = prepare_demo(args.out, num_train=args.num_train, seed=args.seed)
    except OSError as error:
        parser.error(f"--out {args.out}: {reason(error)}")
    except ValueError as error:  # the folder has other contents, or too few captions for the tokenizer
        parser.error(str(error))
    tokenizer = Tokenizer(folder / "tokenizer.model")
    done = "there already" if reused else f"written in {time.perf_counter() - start:.1f} s"
    print(f"{folder} ({done}): {args.num_train} training pairs in {len(SHARD_WEIGHTS)} shards, {VAL_SCENES} validation")
    print(f"  scenes, {10 * HELD_OUT_PER_CLASS} digits for zero-shot; tokenizer of {tokenizer.vocab_size} pieces")


if __name__ == "__main__":
    main()
