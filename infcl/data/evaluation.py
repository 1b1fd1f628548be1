"""Evaluation data: every sample once, in order, split over ranks, from shards, an image folder, a table or a list.

In:  webdataset shards, a folder with one sub-folder per class, a .csv or .tsv table (table.py),
     or a .jsonl file of {"image": path relative to the file, "captions": [str, ...]}; image size.
Out: `EvalSample`s: the image after the evaluation transform, the captions, the json member (class labels), the key.
"""

import contextlib
import json
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from infcl.config import TrainConfig
from infcl.config.checks import is_table
from infcl.data.captions import decode_captions, decode_text, parse_json
from infcl.data.config import columns_of, limits_of
from infcl.data.images import IMAGE_SUFFIXES, ImageLimits, decode_image, open_image, reject_damage
from infcl.data.index import DEFAULT_KEYS, MAX_TEXT_BYTES, SampleKeys
from infcl.data.records import BadSample, Record
from infcl.data.shards import expand_shards
from infcl.data.storage import ShardFault, open_lines
from infcl.data.streaming import stream_records
from infcl.data.table import DEFAULT_COLUMNS, TableColumns, TableReader, read_image
from infcl.data.transforms import EvalTransform, PillowTransform
from infcl.models.config import ModelConfig
from infcl.models.preprocess import CLIP_PREPROCESS, Preprocess

EVAL_LIMITS = ImageLimits(min_side=1)
RESIZES = ("torch", "pil")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Settings of an evaluation set.

    Args:
        data: shards, a folder of class folders, a table, or a .jsonl file.
        image_size: side S of the square images, in pixels.
        keys: which members of a shard form a sample.
        columns: which columns of a table form a sample.
        limits: which images are rejected by their header.
        captions: "one" or "lines", as --captions.
        resize: "torch" as in training, or "pil" (Pillow) as for published results (`PillowTransform`).
        preprocess: how images are resized.
    """

    data: str
    image_size: int
    keys: SampleKeys = DEFAULT_KEYS
    columns: TableColumns = DEFAULT_COLUMNS
    limits: ImageLimits = EVAL_LIMITS
    captions: str = "one"
    resize: str = "torch"
    preprocess: Preprocess = CLIP_PREPROCESS

    @classmethod
    def of(cls, flags: TrainConfig, data: str, model: ModelConfig, **others: Any) -> "EvalConfig":
        """Return the set `data` as a run with these flags and this model reads it."""
        image, text = f"{flags.image_key};{DEFAULT_KEYS.image}", f"{flags.text_key};{DEFAULT_KEYS.text}"
        return cls(
            data=data,
            image_size=model.vision_cfg.image_size,
            keys=SampleKeys(image, text, flags.json_text_key),
            columns=columns_of(flags),
            limits=limits_of(flags, EVAL_LIMITS),
            captions=flags.captions,
            preprocess=model.preprocess,
            **others,
        )


class EvalSample(NamedTuple):
    """One transformed sample of an evaluation set."""

    image: torch.Tensor  # uint8 [3, S, S]
    captions: list[str]  # [] without a caption
    metadata: dict[str, Any]  # the json member, or {}
    key: str

    @property
    def caption(self) -> str:
        """The first caption, or ""."""
        return self.captions[0] if self.captions else ""


class EvalSamples:
    """Iterate over the samples of an evaluation set in order; sample i goes to rank i % world_size.

    Threads decode ahead; the decoders and the resize release the GIL. Samples without a usable image are left out and
    counted by cause in `skipped`. A missing caption is no error, since classification needs none. Every rank streams
    all shards, and rank 0 counts the damaged ones; of image files a rank reads only its own.

    Args:
        source: the shards, or the records of image files, whose `where` is the image's path.
        config: how samples are made.
        rank, world_size: determine the samples of this rank.
        threads: number of decoding threads.
        limit: stop after this many samples; `is_cut` is then true if there are more.
    """

    def __init__(
        self,
        source: list[str] | Callable[[], Iterable[Record]],
        config: EvalConfig,
        *,
        rank: int = 0,
        world_size: int = 1,
        threads: int = 4,
        limit: int | None = None,
    ):
        self.transform = (PillowTransform if config.resize == "pil" else EvalTransform)(
            config.image_size, config.preprocess
        )
        self.source, self.keys, self.limits, self.lines = source, config.keys, config.limits, config.captions == "lines"
        self.rank, self.world_size, self.threads = rank, world_size, threads
        self.limit, self.is_cut = limit, False
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
        def shard_failed(cause: str, url: str, error: Exception) -> None:
            self.skipped[cause] += self.rank == 0

        records: Iterable[tuple[str, Record]]
        if callable(self.source):
            records = ((record.where, record) for record in self.source())
        else:
            records = stream_records(self.source, self.keys, shard_failed)
        for i, named in enumerate(records):
            if i == self.limit:
                self.is_cut = True
                return
            if i % self.world_size == self.rank:
                yield named

    def _decode(self, key: str, record: Record) -> EvalSample | BadSample:
        if record.fault is not None:
            return BadSample(record.fault.cause, str(record.fault))
        try:
            image = self._pixels(read_image(record.where) if callable(self.source) else record.image or b"")
            metadata = parse_json(record.json) if record.json is not None else {}
        except ShardFault as fault:
            return BadSample(fault.cause, str(fault))
        except BadSample as bad:
            return bad
        return EvalSample(image, self._captions(record, metadata), metadata, key)

    def _pixels(self, data: bytes) -> torch.Tensor:
        if not isinstance(self.transform, PillowTransform):
            return self.transform(decode_image(data, self.limits))
        with reject_damage():
            return self.transform(open_image(data, self.limits))

    def _captions(self, record: Record, metadata: dict[str, Any]) -> list[str]:
        """Return the captions of the given json key, else the json list "captions", else those of the other keys."""
        listed = metadata.get("captions")
        for keys in (self.keys, DEFAULT_KEYS):
            if keys.json_text is None and isinstance(listed, list):
                return [decode_text(text, MAX_TEXT_BYTES, []) for text in listed if isinstance(text, str)]
            with contextlib.suppress(BadSample):
                return decode_captions(record, keys, max_bytes=MAX_TEXT_BYTES, lines=self.lines)[0]
        return []


def eval_source(config: EvalConfig) -> Callable[..., EvalSamples]:
    """Return a function that takes the options of EvalSamples and returns the samples. The set is listed once.

    The metadata of a sample in a class folder is {"label": name of the folder}. In a .jsonl file, it is the line's
    object. Raises ValueError if the data does not exist or cannot be read.
    """
    path = Path(config.data)
    if path.suffix == ".jsonl":
        files = caption_list(path)
    elif is_table(config.data):
        return partial(EvalSamples, TableReader(config.data, columns=config.columns).captions, config)
    elif path.is_dir() and not any(path.glob("*.tar")):
        files = class_folders(path)
    else:
        return partial(EvalSamples, expand_shards(config.data), config)
    records = [Record(None, None, json.dumps(metadata).encode(), str(path)) for path, metadata in files]
    return partial(EvalSamples, lambda: records, config)


def class_folders(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return [(image path, {"label": name of its folder}), ...] of folder/<class>/**/<image>, sorted.

    Hidden files and folders (.cache, .ipynb_checkpoints, ._a.jpg) are neither classes nor images.
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
    """Return the names of the sub-folders that are not hidden, sorted."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


def caption_list(path: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return [(image path, {"captions": [...], ...}), ...] of a .jsonl file. Raises ValueError on a bad line."""
    files, number = [], 0
    try:
        with open_lines(path, encoding="utf-8-sig") as lines:
            for line in lines:
                number += 1
                if not line.strip():
                    continue
                record = parse_json(line.encode())
                captions, image = record.get("captions"), record.get("image")
                if not isinstance(captions, list) or not all(isinstance(text, str) for text in [image, *captions]):
                    raise BadSample("bad_json", 'not of the form {"image": "a.jpg", "captions": ["...", ...]}')
                files.append((path.parent / str(image), record))
    except BadSample as bad:
        raise ValueError(f"{path}, line {number}: {bad}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
    if not files:
        raise ValueError(f"{path}: no samples in it")
    return files
