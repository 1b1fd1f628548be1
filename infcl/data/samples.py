"""Samples: decode a record to an image and texts, and collate samples to a micro-batch.

image:  decoded (images.py) and transformed (transforms.py) to uint8 [3, S, S]; the device normalises it
texts:  K captions drawn from those of the sample (captions.py), then a hard negative if requested

Bytes are only parsed as an image, as text or as JSON. Nothing is unpickled or evaluated.
"""

import hashlib
import json
import time
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from infcl.data.captions import decode_captions, decode_text, folded, is_caption, parse_json, texts_in
from infcl.data.embeddings import decode_embeddings
from infcl.data.images import ImageLimits, decode_image
from infcl.data.index import SampleKeys
from infcl.data.plan import draw, uniforms
from infcl.data.records import MAX_CAPTION_BYTES, BadSample, Record
from infcl.data.tokenizer.open_clip import AnyTokenizer
from infcl.data.transforms import TRANSFORM_DRAWS, TrainTransform
from infcl.data.workers import MicroBatch, NoBatch, ReadLog, new_log, stack, worker_memory_mb

_BAD_IN_A_ROW = 10_000  # whether too many are bad is decided by their share (loader.py)
_STORAGE_SECONDS = 60.0  # of bad samples in a row, if storage fails
_TRANSFORM_STREAM = 0  # of `draw`; replacements of bad samples use streams 1, 2, ...
_CAPTION_STREAM = 1 << 33
_CHOICE_STREAM, _NEGATIVE_STREAM = (1 << 33) + 1, (1 << 33) + 2  # choices of captions and of hard negatives


@dataclass(frozen=True)
class SampleTexts:
    """Which texts of a sample a run uses, and which samples count as duplicates.

    Args:
        captions: K, the number of captions drawn per image; captions repeat if a sample has fewer.
        lines: each line of a text member is a caption (--captions lines).
        negatives: key of the json member with a hard negative (a text, or a list of which one is drawn), or None.
        same: samples are duplicates if these are equal: "image" (bytes), "caption" (`folded` text) or "key:NAME" (value
            in the json member). None: samples are not compared.
    """

    captions: int = 1
    lines: bool = False
    negatives: str | None = None
    same: str | None = None

    @property
    def count(self) -> int:
        """Texts per image, t."""
        return self.captions + (self.negatives is not None)

    @property
    def needs_json(self) -> bool:
        return self.negatives is not None or (self.same or "").startswith("key:")


class DecodedSample(NamedTuple):
    """One sample after decoding and transform, before tokenization."""

    image: torch.Tensor  # uint8 [3, S, S]
    texts: list[str]  # the captions, then the hard negative
    teacher: torch.Tensor | None  # float16 [2, E], embeddings of the image and of the first caption
    same: list[int]  # equal for duplicates (SampleTexts.same), at least 0; then the id of a hard negative, by caption


@dataclass(frozen=True, eq=False)
class SampleDecoder:
    """Decoder of records to samples, and of samples to a micro-batch.

    A micro-batch is {"images": uint8 [m, 3, S, S], "texts": int64 [m t, L], "ids": int64 [m]}, with "same_ids": int64
    [m, 1] if `SampleTexts.same` is set, or [m, 2] with the ids of hard negatives if captions are compared. `ids` are
    sample numbers. t is SampleTexts.count; the texts of an image are adjacent. For a teacher it has "teacher_texts":
    int64 [m, L'], or "teacher": float16 [m, 2, E] if its embeddings are stored (`SampleKeys.teacher`).

    Args:
        teacher: tokenizer of a teacher, which encodes the first caption of each image.
    """

    tokenizer: AnyTokenizer
    transform: TrainTransform
    _: KW_ONLY
    seed: int
    keys: SampleKeys
    limits: ImageLimits
    texts: SampleTexts = SampleTexts()
    teacher: AnyTokenizer | None = None

    def batch_bytes(self, size: int) -> int:
        """Return the size in bytes of a micro-batch of `size` samples."""
        tokens = self.texts.count * self.tokenizer.context_length + (self.teacher.context_length if self.teacher else 0)
        return size * (3 * self.transform.image_size**2 + 8 * tokens + 4 * self.keys.teacher_width + 16)

    def decode(self, record: Record, epoch: int, position: int, log: ReadLog) -> DecodedSample:
        """Decode a record. (seed, epoch, position) determine all random choices. Raises BadSample."""
        if record.fault is not None:
            raise BadSample(record.fault.cause, str(record.fault))
        if record.image is None:
            raise BadSample("no_image")

        def numbers(stream: int, count: int) -> np.ndarray:
            return draw(self.seed, epoch, position, stream=stream, count=count)

        def some(texts: list[str], count: int, stream: int) -> list[int]:
            order = np.argsort(numbers(stream, len(texts)), kind="stable") if len(texts) > 1 else [0]
            return [int(order[i % len(texts)]) for i in range(count)]

        order = uniforms(numbers(_CAPTION_STREAM, len(self.keys.json_keys))) if self.keys.json_probs else None
        captions, notes = decode_captions(record, self.keys, order, lines=self.texts.lines)
        random = uniforms(numbers(_TRANSFORM_STREAM, TRANSFORM_DRAWS))
        image = decode_image(record.image, self.limits, lambda h, w: self.transform.shrink(h, w, random))
        drawn = some(captions, self.texts.captions, _CHOICE_STREAM)
        texts, teacher = [captions[i] for i in drawn], None
        if self.keys.teacher:
            rows = decode_embeddings(record.teacher, captions=len(captions), width=self.keys.teacher_width)
            teacher = torch.from_numpy(rows[[0, 1 + drawn[0]]])
        values = _json_of(record) if self.texts.needs_json else {}
        same = [_same_id(self.texts.same, record.image, texts[0], values)]
        if self.texts.negatives is not None:
            own = [*captions, *(text for key in self.keys.json_keys for text in texts_in(values.get(key)))]
            negatives = _negatives(values, self.texts.negatives, own, notes)
            texts += [negatives[i] for i in some(negatives, 1, _NEGATIVE_STREAM)]
            same += [_same_id("caption", b"", texts[-1], values)] if self.texts.same == "caption" else []
        log["noted"].extend(notes)
        return DecodedSample(self.transform(image, random), texts, teacher, same)

    def batch(self, samples: list[DecodedSample], ids: list[int], log: ReadLog) -> MicroBatch:
        """Collate samples and their global numbers to a micro-batch; note truncated captions in `log`."""
        before = self.tokenizer.truncated
        texts = self.tokenizer([text for sample in samples for text in sample.texts])
        log["noted"].extend(["caption_truncated"] * (self.tokenizer.truncated - before))
        batch = {"images": stack([sample.image for sample in samples]), "texts": texts, "ids": torch.tensor(ids)}
        if self.teacher is not None:
            batch["teacher_texts"] = self.teacher([sample.texts[0] for sample in samples])
        if self.keys.teacher:
            batch["teacher"] = stack([sample.teacher for sample in samples if sample.teacher is not None])
        return batch | ({"same_ids": torch.tensor([sample.same for sample in samples])} if self.texts.same else {})


class BatchBuilder:
    """The micro-batches of a reader: decode records, log and leave out bad ones, collate."""

    def __init__(self, decoder: SampleDecoder):
        self.decoder, self.log = decoder, new_log()  # of the current micro-batch
        self._bad_in_a_row, self._since, self._storage_fails = 0, 0.0, False

    def skip(self, cause: str, shard: str, why: object) -> None:
        self.log["skipped"].append((cause, shard, str(why)))

    def decode(self, record: Record, epoch: int, position: int, number: int) -> tuple[DecodedSample, int] | None:
        """Return (decoded sample, number), or None if it is bad. Raises NoBatch after too many in a row."""
        try:
            sample = self.decoder.decode(record, epoch, position, self.log)
        except BadSample as bad:
            self.skip(bad.cause, record.shard, bad if record.fault is not None else f"{record.where}: {bad}")
            if self._bad_in_a_row == 0:
                self._since, self._storage_fails = time.monotonic(), False
            self._bad_in_a_row += 1
            self._storage_fails |= record.fault is not None
            too_long = self._storage_fails and time.monotonic() >= self._since + _STORAGE_SECONDS
            if self._bad_in_a_row >= _BAD_IN_A_ROW or too_long:
                last = self.log["skipped"][-1]
                raise NoBatch.after(self._bad_in_a_row, last, storage_fails=self._storage_fails) from bad
            return None
        self._bad_in_a_row = 0
        return sample, number

    def batch(self, samples: list[tuple[DecodedSample, int]]) -> tuple[MicroBatch | None, ReadLog]:
        """Return the micro-batch of (sample, number) pairs, or None if there are none, and its log."""
        decoded, numbers = [sample for sample, _ in samples], [number for _, number in samples]
        batch = self.decoder.batch(decoded, numbers, self.log) if samples else None
        log, self.log = self.log, new_log()
        log["memory_mb"].append(worker_memory_mb())
        return batch, log


def join_batches(parts: list[MicroBatch], rows: int) -> tuple[MicroBatch | None, list[MicroBatch]]:
    """Return a micro-batch of `rows` samples, or None if the parts have fewer; and the parts that are left."""
    if sum(len(part["ids"]) for part in parts) < rows:
        return None, parts
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    size = len(joined["ids"])
    begin = {name: value[: rows * len(value) // size] for name, value in joined.items()}
    rest = {name: value[len(begin[name]) :] for name, value in joined.items()}
    return begin, [rest] if size > rows else []


def hash_63(data: bytes) -> int:
    """Return a 63-bit hash. A billion different values have a collision with probability 0.05."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1


def _json_of(record: Record) -> dict[str, Any]:
    if record.json is None:
        raise BadSample("no_json", "the json member is missing")
    return parse_json(record.json)


def _negatives(values: dict[str, Any], key: str, own: list[str], notes: list[str]) -> list[str]:
    """Return the texts under `key` that differ from the image's own captions, of which each line counts too."""
    texts = [decode_text(text.encode("utf-8", "replace"), MAX_CAPTION_BYTES, []) for text in texts_in(values.get(key))]
    if not (texts := [text for text in texts if is_caption(text)]):
        raise BadSample("no_negative", f"json has no text under {key!r} (--negatives-key)")
    captions = {folded(part) for text in own for part in (text, *text.split("\n"))}
    if not (usable := [text for text in texts if folded(text) not in captions]):
        raise BadSample("negative_is_caption", f"all texts under {key!r} (--negatives-key) are captions of the image")
    notes.extend(["negative_is_caption"] * (len(texts) - len(usable)))
    return usable


def _same_id(same: str | None, image: bytes, caption: str, values: dict[str, Any]) -> int:
    """Return the hash of the compared value."""
    if same is None:
        return 0
    if same.startswith("key:"):
        if (value := values.get(same[4:])) is None:
            raise BadSample("no_key", f"json has nothing under {same[4:]!r} (--duplicates)")
        data = json.dumps(value, sort_keys=True).encode()
    else:
        data = image if same == "image" else folded(caption).encode("utf-8", "replace")
    return hash_63(data)
