"""Evaluation data: every sample once, in order, split over ranks; from shards, an image folder, a table or a list.

In:  shards (anything that webdataset opens), a folder with one sub-folder per class, a .csv or .tsv table (table.py),
     or a .jsonl file of {"image": path relative to the file, "captions": [str, ...]}; image size.
Out: `EvalSample`s: the image after the evaluation transform, captions, the json member (class labels), key.
"""

import contextlib
import json
import os
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from infcl.config.checks import is_table
from infcl.data.captions import decode_caption, parse_json
from infcl.data.images import IMAGE_SUFFIXES, ImageLimits, damage_refused, decode_image, open_image
from infcl.data.index import DEFAULT_KEYS, MAX_IMAGE_BYTES, SampleKeys
from infcl.data.records import BadSample, Record
from infcl.data.shards import expand_shards
from infcl.data.storage import ShardFault, open_regular
from infcl.data.streaming import stream_records
from infcl.data.table import DEFAULT_COLUMNS, TableColumns, TableReader
from infcl.data.transforms import EvalTransform
from infcl.models.preprocess import CLIP_PREPROCESS, Preprocess

if TYPE_CHECKING:
    from PIL import Image

EVAL_LIMITS = ImageLimits(min_side=1)
RESIZES = ("torch", "pil")
MAX_TEXT_BYTES = 1 << 20  # of a text member, which may hold many captions
MAX_LINE = 16 << 20  # characters of a caption list's line


class EvalSample(NamedTuple):
    image: torch.Tensor  # uint8 [3, S, S]
    caption: str  # "" where the sample has none; of several, as they stand in the text member (one a line)
    metadata: dict[str, Any]  # the json member, {} where there is none
    key: str


class EvalSamples(ABC):
    """Iterate over the samples of an evaluation set in order; sample i goes to rank i % world_size.

    A few threads decode ahead (the decoders and the resize let go of the interpreter). Samples without a usable image
    are left out and counted by cause in `skipped`; a missing caption is not an error here (classification needs none).
    limit: the set ends after so many, and `is_cut` says whether it was longer.
    preprocess: how images are brought to size.
    resize: "torch" as in training, or "pil": Pillow's, which published figures used (`PillowTransform`).
    """

    def __init__(
        self,
        *,
        image_size: int,
        rank: int = 0,
        world_size: int = 1,
        keys: SampleKeys = DEFAULT_KEYS,
        limits: ImageLimits = EVAL_LIMITS,
        resize: str = "torch",
        preprocess: Preprocess = CLIP_PREPROCESS,
        threads: int = 4,
        limit: int | None = None,
    ):
        pixels = _pillow_pixels if resize == "pil" else _torch_pixels
        self.pixels = pixels(image_size, limits, preprocess)
        self.rank, self.world_size, self.threads = rank, world_size, threads
        self.keys, self.limit, self.is_cut = keys, limit, False
        self.skipped: Counter[str] = Counter()

    def __iter__(self) -> Iterator[EvalSample]:
        own = self._own()
        ahead: deque[Future] = deque()
        with ThreadPoolExecutor(self.threads) as pool:
            while True:
                ahead.extend(pool.submit(self._decode, *named) for named in islice(own, 4 * self.threads - len(ahead)))
                if not ahead:
                    return
                sample = ahead.popleft().result()
                if isinstance(sample, BadSample):
                    self.skipped[sample.cause] += 1
                else:
                    yield sample

    def _own(self) -> Iterator[tuple[str, Record]]:
        for i, named in enumerate(self._records()):
            if i == self.limit:
                self.is_cut = True
                return
            if i % self.world_size == self.rank:
                yield named

    def _decode(self, key: str, record: Record) -> EvalSample | BadSample:
        try:
            image = self.pixels(self._bytes(record))
            metadata = parse_json(record.json) if record.json is not None else {}
        except BadSample as bad:
            return bad
        return EvalSample(image, self._caption(record), metadata, key)

    def _caption(self, record: Record) -> str:
        """By the keys, or else where the format has captions; "" without one."""
        for keys in (self.keys, DEFAULT_KEYS):
            with contextlib.suppress(BadSample):
                return decode_caption(record, keys, max_bytes=MAX_TEXT_BYTES)[0]
        return ""

    @abstractmethod
    def _records(self) -> Iterable[tuple[str, Record]]:
        """(key, undecoded sample) of the whole set, the same on every rank."""

    def _bytes(self, record: Record) -> bytes:
        return record.image or b""


class EvalShards(EvalSamples):
    """Webdataset shards: every rank streams all of them. What a damaged shard costs is counted by the first rank."""

    def __init__(self, urls: str | Sequence[str], **options):
        super().__init__(**options)
        self.shards = expand_shards(urls)

    def _records(self) -> Iterable[tuple[str, Record]]:
        def shard_failed(cause: str, url: str, error: Exception) -> None:
            self.skipped[cause] += self.rank == 0

        return stream_records(self.shards, self.keys, shard_failed)


class EvalFiles(EvalSamples):
    """Image files, [(path, metadata), ...]: a rank reads its own."""

    def __init__(self, files: Sequence[tuple[Path, dict[str, Any]]], **options):
        super().__init__(**options)
        self.files = files

    def _records(self) -> Iterable[tuple[str, Record]]:
        for path, metadata in self.files:
            yield str(path), Record(None, None, json.dumps(metadata).encode(), str(path))

    def _bytes(self, record: Record) -> bytes:
        try:
            with open(record.where, "rb", opener=open_regular) as file:
                if os.fstat(file.fileno()).st_size > MAX_IMAGE_BYTES:
                    raise BadSample("image_file_too_large", f"{record.where}: over {MAX_IMAGE_BYTES} bytes")
                return file.read(MAX_IMAGE_BYTES)
        except (OSError, ShardFault) as error:
            raise BadSample("unreadable_file", str(error)) from error


class EvalTable(EvalSamples):
    """Rows of a table, each an image file and a caption: a rank reads its own."""

    def __init__(self, table: TableReader, **options):
        super().__init__(**options)
        self.table = table

    def _records(self) -> Iterable[tuple[str, Record]]:
        for row in range(int(self.table.counts.sum())):
            (record,) = self.table.read(np.array([row]), images=False)
            yield record.where, record

    def _bytes(self, record: Record) -> bytes:
        try:
            return self.table.image(record.where)
        except ShardFault as fault:
            raise BadSample(fault.cause, str(fault)) from fault


def eval_source(data: str, columns: TableColumns = DEFAULT_COLUMNS) -> Callable[..., EvalSamples]:
    """What --data names -> a function of EvalSamples' options that gives the set.

    ValueError when it is not there. Samples of a class folder have {"label": folder's name}, those of a .jsonl file its
    record, in which "captions" is a list.
    """
    path = Path(data)
    if is_table(data):
        table = TableReader(data, columns=columns)
        return lambda **options: EvalTable(table, **options)
    if path.suffix == ".jsonl":
        files = caption_list(path)
    elif path.is_dir() and not any(path.glob("*.tar")):
        files = class_folders(path)
    else:
        expand_shards(data)
        return lambda **options: EvalShards(data, **options)
    return lambda **options: EvalFiles(files, **options)


def class_folders(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """[(image, {"label": its folder's name}), ...] of folder/<class>/**/<image>, sorted.

    What is hidden (.cache, .ipynb_checkpoints, ._a.jpg) is no class and no image.
    """
    classes = class_names(folder)
    files = [
        (image, {"label": name})
        for name in classes
        for image in sorted((folder / name).rglob("*"))
        if image.suffix.lower() in IMAGE_SUFFIXES
        and not any(part.startswith(".") for part in image.relative_to(folder).parts)
    ]
    if not files:
        raise ValueError(f"{folder}: neither *.tar shards nor class folders with images ({len(classes)} sub-folders)")
    return files


def class_names(folder: Path) -> list[str]:
    """The sub-folders, sorted; hidden ones are no classes."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


def caption_list(path: Path) -> list[tuple[Path, dict[str, Any]]]:
    """[(image, {"captions": [...], ...}), ...] of a .jsonl file; ValueError names the first wrong line."""
    files = []
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line.encode())
        except BadSample as bad:
            raise ValueError(f"{path}, line {number}: {bad}") from None
        captions, image = record.get("captions"), record.get("image")
        if (
            not isinstance(image, str)
            or not isinstance(captions, list)
            or not all(isinstance(c, str) for c in captions)
        ):
            raise ValueError(f'{path}, line {number}: not of the form {{"image": "a.jpg", "captions": ["...", ...]}}')
        files.append((path.parent / image, record))
    if not files:
        raise ValueError(f"{path}: no samples in it")
    return files


def _lines(path: Path) -> Iterator[str]:
    """Lines as json has them: str.splitlines would split captions, at U+2028."""
    try:
        with open(path, encoding="utf-8-sig", opener=open_regular) as file:
            while line := file.readline(MAX_LINE):
                if len(line) == MAX_LINE:
                    raise ValueError(f"{path}: a line of more than {MAX_LINE >> 20} MB: is this a list of captions?")
                yield line
    except ShardFault as fault:
        raise ValueError(str(fault)) from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None


def _torch_pixels(image_size: int, limits: ImageLimits, preprocess: Preprocess) -> Callable[[bytes], torch.Tensor]:
    """Bytes of an image -> uint8 [3, S, S] as in training."""
    transform = EvalTransform(image_size, preprocess)
    return lambda data: transform(decode_image(data, limits))


def _pillow_pixels(image_size: int, limits: ImageLimits, preprocess: Preprocess) -> Callable[[bytes], torch.Tensor]:
    """The same, decoded and resized by Pillow."""
    transform = PillowTransform(image_size, preprocess)

    def pixels(data: bytes) -> torch.Tensor:
        with damage_refused():
            return transform(open_image(data, limits))

    return pixels


class PillowTransform(EvalTransform):
    """The same resize and crop through Pillow: the pixels of open_clip's and CLIP's own evaluation.

    As there, an image becomes RGB after it is resized: with a palette the nearest pixels are taken, and transparency is
    dropped. The two round differently: up to 1 % of the values of RGB images differ from EvalTransform's, mostly by one
    level.
    """

    def __call__(self, image: "np.ndarray | Image.Image") -> torch.Tensor:
        """uint8 [H, W, 3], or an image of Pillow's -> uint8 [3, S, S]."""
        from PIL import Image

        if isinstance(image, np.ndarray):
            image = Image.fromarray(image)
        height, width = self.resized(image.height, image.width)
        if (width, height) != image.size:
            image = image.resize((width, height), Image.Resampling[self.mode.upper()])
        return self.crop(torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1))
