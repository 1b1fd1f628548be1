"""Evaluation data: every sample once, in order, split over ranks; from shards, an image folder, or a list of captions.

In:  shards (anything that webdataset opens), or a folder with one sub-folder per class, or a .jsonl file of
     {"image": path relative to the file, "captions": [str, ...]}; image size.
Out: `EvalSample`s: the image after the evaluation transform, captions, the json member (class labels), key.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from infcl.data.index import DEFAULT_KEYS, SampleKeys
from infcl.data.records import Record
from infcl.data.samples import BadSample, EvalTransform, ImageLimits, decode_caption, decode_image, parse_json
from infcl.data.shards import expand_shards
from infcl.data.streaming import stream_records

EVAL_LIMITS = ImageLimits(min_side=1)
RESIZES = ("torch", "pil")
_IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")


class EvalSample(NamedTuple):
    image: torch.Tensor  # uint8 [3, S, S]
    caption: str  # "" where the sample has none; of several, as they stand in the text member (one a line)
    metadata: dict[str, Any]  # the json member, {} where there is none
    key: str


class EvalShards:
    """Iterate over the samples of evaluation shards; sample i goes to rank i % world_size, whatever the shards.

    Every rank streams every shard and decodes its own part. Samples without a usable image are left out and counted by
    cause in `skipped`; a missing caption is not an error here (classification needs none). resize: "torch" as in
    training, or "pil": Pillow's, which published figures used (`PillowTransform`).
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        image_size: int,
        rank: int = 0,
        world_size: int = 1,
        keys: SampleKeys = DEFAULT_KEYS,
        limits: ImageLimits = EVAL_LIMITS,
        resize: str = "torch",
    ):
        self.shards = expand_shards(urls)
        self.transform = (PillowTransform if resize == "pil" else EvalTransform)(image_size)
        self.rank, self.world_size = rank, world_size
        self.keys, self.limits = keys, limits
        self.skipped: Counter[str] = Counter()

    def __iter__(self) -> Iterator[EvalSample]:
        for i, (key, record) in enumerate(self._records()):
            if i % self.world_size != self.rank:
                continue
            try:
                image = self.transform(decode_image(self._bytes(record), self.limits))
                metadata = parse_json(record.json) if record.json is not None else {}
            except BadSample as bad:
                self.skipped[bad.cause] += 1
                continue
            try:
                caption, _ = decode_caption(record, self.keys)
            except BadSample:
                caption = ""
            yield EvalSample(image, caption, metadata, key)

    def _records(self) -> Iterable[tuple[str, Record]]:
        def shard_failed(cause: str, url: str, error: Exception) -> None:
            self.skipped[cause] += 1

        return stream_records(self.shards, self.keys, shard_failed)

    def _bytes(self, record: Record) -> bytes:
        return record.image or b""


class EvalFiles(EvalShards):
    """The same over image files: [(path, metadata), ...], read by the rank whose turn it is."""

    def __init__(
        self, files: Sequence[tuple[Path, dict[str, Any]]], *, image_size: int, resize: str = "torch", **share
    ):
        self.files = files
        self.transform = (PillowTransform if resize == "pil" else EvalTransform)(image_size)
        self.rank, self.world_size = share.get("rank", 0), share.get("world_size", 1)
        self.keys, self.limits = DEFAULT_KEYS, EVAL_LIMITS
        self.skipped = Counter()

    def _records(self) -> Iterable[tuple[str, Record]]:
        for path, metadata in self.files:
            yield str(path), Record(None, None, json.dumps(metadata).encode(), str(path))

    def _bytes(self, record: Record) -> bytes:
        try:
            return Path(record.where).read_bytes()
        except OSError as error:
            raise BadSample("unreadable_file", str(error)) from error


def eval_source(data: str) -> Callable[..., EvalShards]:
    """What --data names -> a function (image_size=, rank=, world_size=, keys=, resize=) -> iterable of EvalSamples.

    ValueError when it is not there. Samples of a class folder have {"label": folder's name}, those of a .jsonl file its
    record, in which "captions" is a list.
    """
    path = Path(data)
    if path.suffix == ".jsonl":
        files = caption_list(path)
    elif path.is_dir() and not any(path.glob("*.tar")):
        files = class_folders(path)
    else:
        expand_shards(data)
        return lambda **options: EvalShards(data, **options)
    return lambda keys=None, **options: EvalFiles(files, **options)


def class_folders(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """[(image, {"label": its folder's name}), ...] of folder/<class>/**/<image>, sorted."""
    classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    files = [
        (image, {"label": name})
        for name in classes
        for image in sorted((folder / name).rglob("*"))
        if image.suffix.lower() in _IMAGE_SUFFIXES
    ]
    if not files:
        raise ValueError(f"{folder}: neither *.tar shards nor class folders with images ({len(classes)} sub-folders)")
    return files


def caption_list(path: Path) -> list[tuple[Path, dict[str, Any]]]:
    """[(image, {"captions": [...], ...}), ...] of a .jsonl file; ValueError names the first wrong line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    files = []
    for number, line in enumerate(lines, 1):
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


class PillowTransform(EvalTransform):
    """The same resize and crop through Pillow: the pixels of open_clip's and CLIP's own evaluation.

    Pillow rounds to 8 bits between the two passes of its bicubic filter, torch does not: pixels differ by one level in
    places, features in the third digit, and a published top-1 by up to a few hundredths of a percent.
    """

    def __call__(self, image: np.ndarray) -> torch.Tensor:
        """uint8 [H, W, 3] -> uint8 [3, S, S]."""
        from PIL import Image

        height, width = self.resized(*image.shape[:2])
        if (height, width) != image.shape[:2]:
            image = np.array(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))
        return self.crop(torch.from_numpy(image).permute(2, 0, 1))
