"""Evaluation data: every sample once, in order, split over ranks, from shards, an image folder, a table or a list.

In:  webdataset shards, a folder with one sub-folder per class, or a .csv, .tsv or .jsonl table (table.py); image size.
Out: `EvalSample`s: the image after the evaluation transform, the captions, the json member (class labels), the key.
"""

import contextlib
import json
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from infcl.data.config import limits_of
from infcl.data.images import IMAGE_SUFFIXES, ImageLimits, decode_image, open_image, reject_damage
from infcl.data.index import DEFAULT_KEYS, MAX_TEXT_BYTES, SampleKeys
from infcl.data.records import BadSample, Record, stream_records
from infcl.data.shards import expand_shards
from infcl.data.storage import ShardFault, is_remote
from infcl.data.table import DEFAULT_COLUMNS, TableColumns, TableReader, columns_of, read_file
from infcl.data.transforms import EvalTransform, PillowTransform
from infcl.models.config import ModelConfig
from infcl.models.preprocess import CLIP_PREPROCESS, Preprocess

EVAL_LIMITS = ImageLimits(min_side=1)
RESIZES = ("torch", "pil")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Settings of an evaluation set.

    Args:
        data: shards, a folder of class folders, or a table.
        image_size: side S of the square images, in pixels.
        captions: "one" or "lines", as --captions.
        resize: "torch" as in training, or "pil" (Pillow) as for published results (`PillowTransform`).
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
    counted by cause in `skipped`. A missing caption is no error, since classification needs none. A rank reads only
    its own samples, and the headers of all shards, of which rank 0 counts the damaged ones. Remote shards are copied
    as a whole, so shard i goes to rank i % world_size if there are that many.

    Args:
        source: the shards, or the records of image files, whose `where` is the image's path.
        left_out: cause -> number of samples that the source lacks, which rank 0 counts.
        limit: stop after this many samples of this rank; `is_cut` is then true if there are more.
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
        left_out: Mapping[str, int] | None = None,
    ):
        self.transform = (PillowTransform if config.resize == "pil" else EvalTransform)(
            config.image_size, config.preprocess
        )
        self.source, self.keys, self.limits, self.lines = source, config.keys, config.limits, config.captions == "lines"
        self.rank, self.world_size, self.threads = rank, world_size, threads
        self.limit, self.is_cut = limit, False
        self.skipped: Counter[str] = Counter(left_out if rank == 0 else None)

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
            self.skipped[cause] += rank == 0

        records: Iterable[tuple[str, Record]]
        if callable(self.source):
            records = ((record.where, record) for record in islice(self.source(), self.rank, None, self.world_size))
        else:
            shards, rank, ranks = self.source, self.rank, self.world_size
            if ranks <= len(shards) and any(map(is_remote, shards)):  # each is copied, by one of the ranks
                shards, rank, ranks = shards[rank::ranks], 0, 1
            records = stream_records(shards, self.keys, shard_failed, rank=rank, world_size=ranks)
        yield from islice(records, self.limit)
        self.is_cut = next(iter(records), None) is not None

    def _decode(self, key: str, record: Record) -> EvalSample | BadSample:
        if record.fault is not None:
            return BadSample(record.fault.cause, str(record.fault))
        try:
            image = self._pixels(read_file(record.where) if callable(self.source) else record.image or b"")
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

    The metadata of a sample in a class folder is {"label": name of the folder}. In a .jsonl table, it is the line's
    object. Raises ValueError if the data does not exist or cannot be read.
    """
    path = Path(config.data)
    if is_table(config.data):
        table = TableReader(config.data, columns=config.columns)
        left_out = {name.removeprefix("index/"): count for name, count in table.found.items()}
        return partial(EvalSamples, table.captions, config, left_out=left_out)
    if not path.is_dir() or any(path.glob("*.tar")):
        return partial(EvalSamples, expand_shards(config.data), config)
    files = class_folders(path)
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
