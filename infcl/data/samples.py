"""One sample: the undecoded members of a tar record -> (image, caption), or `BadSample` with the cause.

image:   uint8 [H, W, 3], RGB. JPEG by simplejpeg (libjpeg-turbo, strict), everything else and every JPEG that it
         refuses by Pillow. Alpha is composited on white, 16-bit grey is scaled (not clipped), the first frame of an
         animation is taken, EXIF orientation is applied (ImageLimits.upright). Sizes, and a JPEG's number of scans,
         are checked before anything is decoded.
caption: str, at most 4 KB. The text member; where there is none, or where `SampleKeys.json_text` asks for it, the json
         member. Bytes that are not UTF-8 are replaced and noted; a caption without a letter or digit is a bad sample.
         Lines of a text member, and a list in json, are several captions: K of them are drawn (`SampleTexts`).
then:    a transform (transforms.py) -> uint8 [3, S, S]; normalisation happens on the device.

Bytes are only ever parsed as an image, as text or as JSON. Nothing is unpickled or evaluated.
"""

import codecs
import contextlib
import hashlib
import io
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from infcl.data.index import DEFAULT_KEYS, SampleKeys
from infcl.data.open_clip_tokenizer import AnyTokenizer
from infcl.data.plan import draw, uniforms
from infcl.data.records import MAX_CAPTION_BYTES, Record
from infcl.data.transforms import TRANSFORM_DRAWS, TrainTransform
from infcl.data.workers import stack

if TYPE_CHECKING:
    from PIL import Image

_PILLOW_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # none of them runs a program to decode
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")  # of files
_MAX_SCANS = 100  # of a JPEG: programs write about ten, and decoding takes time for each
_EXIF_BYTES = 1 << 16  # of a JPEG: EXIF is the first of its segments, or the second
_ORIENTATION = 0x0112  # EXIF's tag
# orientation -> (quarter turns against the clock, then whether left and right change places)
_TO_UPRIGHT = dict(zip(range(2, 9), [(0, True), (2, False), (2, True), (3, True), (3, False), (1, True), (1, False)]))
_BAND_PIXELS = 1 << 20  # composited at a time
_TRANSFORM_STREAM = 0  # of `draw`; replacements of bad samples use streams 1, 2, ...
_CAPTION_STREAM = 1 << 33
_CHOICE_STREAM, _NEGATIVE_STREAM = (1 << 33) + 1, (1 << 33) + 2  # which of several captions, of hard negatives

# What comes with a micro-batch: {"skipped": [(cause, shard, message), ...], "noted": [cause, ...]}
ReadLog = dict[str, list]


class BadSample(Exception):
    """A sample that cannot be used. `cause` is a counter's name, the message says more."""

    def __init__(self, cause: str, message: str = ""):
        super().__init__(message or cause)
        self.cause = cause


@dataclass(frozen=True)
class ImageLimits:
    """What is rejected by its header. `max_pixels` is open_clip's --max-image-pixels.

    upright: turn and mirror what is left as EXIF says; open_clip takes images as they are stored.
    """

    max_pixels: int = 25_000_000
    min_side: int = 8
    max_aspect: float = 20.0
    upright: bool = True

    def check(self, width: int, height: int) -> None:
        short, long = sorted((width, height))
        if width * height > self.max_pixels:
            raise BadSample("image_too_large", f"{width} x {height} pixels, --max-image-pixels {self.max_pixels}")
        if short < self.min_side or long > short * self.max_aspect:
            raise BadSample("image_too_small_or_thin", f"{width} x {height} pixels")


DEFAULT_LIMITS = ImageLimits()


def decode_record(
    record: Record,
    *,
    keys: SampleKeys = DEFAULT_KEYS,
    limits: ImageLimits = DEFAULT_LIMITS,
    random: np.ndarray | None = None,
    shrink: Callable[[int, int], int] | None = None,
) -> tuple[np.ndarray, list[str], list[str]]:
    """(image uint8 [H, W, 3], captions, notes). Notes name what was tolerated. Raises BadSample.

    `random`, float64 [json keys] in [0, 1), is needed where `keys` has json_probs. shrink: see `decode_image`.
    """
    if record.fault is not None:
        raise BadSample(record.fault.cause, str(record.fault))
    if record.image is None:
        raise BadSample("no_image")
    captions, notes = decode_captions(record, keys, random)
    return decode_image(record.image, limits, shrink), captions, notes


def decode_caption(
    record: Record,
    keys: SampleKeys = DEFAULT_KEYS,
    random: np.ndarray | None = None,
    max_bytes: int = MAX_CAPTION_BYTES,
) -> tuple[str, list[str]]:
    """(caption, notes): the whole text member, or the first text of the json member. Raises BadSample."""
    notes: list[str] = []
    caption = _decode_text(_raw_captions(record, keys, random)[0], max_bytes, notes)
    if not _is_caption(caption):
        raise BadSample("empty_caption")
    return caption, notes


def decode_captions(
    record: Record, keys: SampleKeys = DEFAULT_KEYS, random: np.ndarray | None = None
) -> tuple[list[str], list[str]]:
    """(captions, notes): the lines of the text member, or the list in the json member. Raises BadSample for none.

    A text member with one line that is a caption is one caption, as it is.
    """
    notes: list[str] = []
    texts = [_decode_text(raw, MAX_CAPTION_BYTES, notes) for raw in _raw_captions(record, keys, random)]
    if record.text is not None and keys.json_text is None:
        lines = [line for line in texts[0].split("\n") if _is_caption(line)]
        texts = lines if len(lines) > 1 else texts
    captions = [text for text in texts if _is_caption(text)]
    if not captions:
        raise BadSample("empty_caption")
    return captions, notes


def _raw_captions(record: Record, keys: SampleKeys, random: np.ndarray | None) -> list[bytes]:
    if record.text is not None and keys.json_text is None:
        return [record.text]
    if record.json is None:
        raise BadSample("no_caption")
    captions = _json_captions(parse_json(record.json), keys, random)
    return [caption.encode("utf-8", "replace") for caption in captions]  # lone surrogate: '?'


def _decode_text(raw: bytes, max_bytes: int, notes: list[str]) -> str:
    if len(raw) > max_bytes:
        notes.append("caption_cut")
    # An incremental decoder drops a character that the cut has split, instead of replacing it.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(raw[:max_bytes], final=len(raw) <= max_bytes)
    if "\ufffd" in text:
        notes.append("caption_not_utf8")
    return text


def _is_caption(text: str) -> bool:
    return any(character.isalnum() for character in text)


def _texts_in(value: Any) -> list[str]:
    """A JSON string, or the strings in a JSON list."""
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]


def _json_captions(values: dict[str, Any], keys: SampleKeys, random: np.ndarray | None) -> list[str]:
    """The first text, or list of texts, under the keys, in their order or in a drawn one."""
    names = keys.json_keys
    if keys.json_probs:
        assert random is not None, "keys with probabilities need a draw"
        weights = [*keys.json_probs, *[0.0] * (len(names) - len(keys.json_probs))]
        # exponential waiting times put the keys in an order drawn without replacement (Efraimidis and Spirakis 2006)
        waits = [-math.log1p(-u) / w if w else math.inf for u, w in zip(random.tolist(), weights)]
        names = [name for _, _, name in sorted(zip(waits, range(len(names)), names))]
    found = [texts for name in names if (texts := _texts_in(values.get(name)))]
    if not found:
        there = ", ".join(name[:30] for name, value in list(values.items())[:9] if isinstance(value, str)) or "none"
        others = {name: type(values[name]).__name__ for name in names if name in values}
        but = "".join(f" (a JSON {kind} is under {name!r})" for name, kind in others.items())
        wanted = keys.json_text or "caption"
        raise BadSample("no_caption", f"json has no text under {wanted!r}{but}; texts: {there} (--json-text-key)")
    return next((texts for texts in found if any(text.strip() for text in texts)), found[0])


def parse_json(data: bytes) -> dict[str, Any]:
    """A sample's json member. Raises BadSample when it is not a JSON object."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadSample("bad_json", str(error)) from error
    if not isinstance(value, dict):
        raise BadSample("bad_json", f"a JSON {type(value).__name__}, not an object")
    return value


def decode_image(
    data: bytes, limits: ImageLimits = DEFAULT_LIMITS, shrink: Callable[[int, int], int] | None = None
) -> np.ndarray:
    """uint8 [H, W, 3] RGB. Raises BadSample, whatever the bytes are.

    shrink: (height, width) -> 1, 2, 4 or 8; a JPEG is then decoded at that fraction of its size, which costs less.
    """
    if data[:3] == b"\xff\xd8\xff":
        import simplejpeg

        try:
            height, width, _, _ = simplejpeg.decode_jpeg_header(data)
            limits.check(width, height)
            _check_scans(data)
            orientation = _jpeg_orientation(data) if limits.upright else 1
            shown = (height, width) if orientation < 5 else (width, height)
            factor = shrink(*shown) if shrink else 1
            if factor > 1:
                pixels = simplejpeg.decode_jpeg(
                    data, "RGB", min_height=math.ceil(height / factor), min_width=math.ceil(width / factor)
                )
            else:
                pixels = simplejpeg.decode_jpeg(data, "RGB")
            return _upright(pixels, orientation)
        except ValueError:
            pass  # CMYK, or damage that Pillow may bridge
    with damage_refused():
        image = open_image(data, limits)
        pixels = _rgb(image)
        # after the pixels are read: Pillow turns a TIFF by itself
        return _upright(pixels, _orientation(image.getexif)) if limits.upright else pixels


def _check_scans(jpeg: bytes) -> None:
    scans = jpeg.count(b"\xff\xda")  # in the coded data, 0xff never comes before a number other than 0 and 0xd0-0xd7
    if scans > _MAX_SCANS:
        raise BadSample("too_many_scans", f"a JPEG of {scans} scans, {_MAX_SCANS} allowed")


def _jpeg_orientation(data: bytes) -> int:
    """1 to 8 by EXIF: 1 where there is none, or none that can be read."""
    at = data.find(b"Exif\0\0", 0, _EXIF_BYTES)
    if at < 0:
        return 1
    from PIL import Image

    def exif() -> Image.Exif:
        size = int.from_bytes(data[at - 2 : at], "big")
        found = Image.Exif()
        found.load(data[at : at - 2 + size])
        return found

    return _orientation(exif)


def _orientation(exif: "Callable[[], Image.Exif]") -> int:
    try:
        value = exif().get(_ORIENTATION, 1)
    except Exception:  # Pillow raises many types on malformed EXIF, which is no reason to lose an image
        return 1
    return value if value in range(1, 9) else 1


def _upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """uint8 [H, W, 3], turned and mirrored as EXIF's orientation says that the image is to be shown."""
    if orientation == 1:
        return pixels
    turns, mirrored = _TO_UPRIGHT[orientation]
    turned = np.rot90(pixels, turns)
    return np.ascontiguousarray(turned[:, ::-1] if mirrored else turned)


@contextlib.contextmanager
def damage_refused() -> Iterator[None]:
    """BadSample for whatever Pillow raises within."""
    try:
        yield
    except BadSample:
        raise
    except Exception as error:  # Pillow's decoders raise many types on malformed bytes; no I/O happens within
        raise BadSample("broken_image", f"{type(error).__name__}: {error}") from error


def open_image(data: bytes, limits: ImageLimits = DEFAULT_LIMITS) -> "Image.Image":
    """Pillow's image, of which only the header is read so far. Raises BadSample, within `damage_refused`."""
    from PIL import Image

    if not data:
        raise BadSample("empty_image_file")
    if data[:3] == b"\xff\xd8\xff":
        _check_scans(data)
    try:
        image = Image.open(io.BytesIO(data), formats=_PILLOW_FORMATS)
    except Image.DecompressionBombError as error:
        raise BadSample("image_too_large", str(error)) from error
    except Image.UnidentifiedImageError as error:
        raise BadSample("not_an_image", f"starts with {data[:16]!r}") from error
    limits.check(*image.size)
    return image


def _rgb(image: "Image.Image") -> np.ndarray:
    """uint8 [H, W, 3]; transparency on white, 16 bits scaled."""
    if image.mode.startswith("I"):  # 16 bits per pixel; Pillow's own conversion would clip it to white
        deep = np.asarray(image).astype(np.float32)
        return np.repeat(np.clip(deep / 257 + 0.5, 0, 255).astype(np.uint8)[:, :, None], 3, axis=2)
    if image.mode == "F":
        raise BadSample("unsupported_image_mode", "floating-point pixels")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        width, height = image.size
        result = np.empty((height, width, 3), np.uint8)
        rows = max(1, _BAND_PIXELS // width)
        for top in range(0, height, rows):
            band = image.crop((0, top, width, min(height, top + rows))).convert("RGBA")
            pixels = np.asarray(band).astype(np.uint16)
            alpha = pixels[:, :, 3:]
            result[top : top + rows] = (pixels[:, :, :3] * alpha + 255 * (255 - alpha) + 127) // 255
        return result
    return np.array(image.convert("RGB"))


@dataclass(frozen=True)
class SampleTexts:
    """Which texts of a sample a run takes, and what makes two samples the same.

    captions: K, drawn of those that a sample has; all and some again where it has fewer.
    negatives: key of the json whose text, or one drawn of its list, follows the captions as a hard negative.
    same: "image" or "caption" (equal bytes), or "key:NAME" (equal values in the json); None: nothing is compared.
    """

    captions: int = 1
    negatives: str | None = None
    same: str | None = None

    @property
    def count(self) -> int:
        """Texts of each image."""
        return self.captions + (self.negatives is not None)

    @property
    def needs_json(self) -> bool:
        return self.negatives is not None or (self.same or "").startswith("key:")


DEFAULT_TEXTS = SampleTexts()


class DecodedSample(NamedTuple):
    image: torch.Tensor  # uint8 [3, S, S]
    texts: list[str]  # the captions, then the hard negative
    same: int  # the id of SampleTexts.same, at least 0


class SampleDecoder:
    """Records -> one micro-batch and its log.

    {"images" uint8 [m, 3, S, S], "texts" int64 [m t, L], "ids" int64 [m]}, with "same_ids" int64 [m] where
    `SampleTexts.same` is given; t = SampleTexts.count, an image's texts are neighbours.
    """

    def __init__(
        self,
        tokenizer: AnyTokenizer,
        transform: TrainTransform,
        *,
        seed: int,
        keys: SampleKeys,
        limits: ImageLimits,
        texts: SampleTexts = DEFAULT_TEXTS,
    ):
        self.tokenizer, self.transform, self.seed, self.keys, self.limits = tokenizer, transform, seed, keys, limits
        self.texts = texts

    def batch_bytes(self, size: int) -> int:
        """The memory of a micro-batch of `size` samples."""
        return size * (3 * self.transform.image_size**2 + 8 * self.texts.count * self.tokenizer.context_length + 16)

    def decode(self, record: Record, epoch: int, position: int, log: ReadLog) -> DecodedSample:
        """The sample; what is drawn is a function of (seed, epoch, position). Raises BadSample."""
        choice = None
        if self.keys.json_probs:
            raw = draw(self.seed, epoch, position, stream=_CAPTION_STREAM, count=len(self.keys.json_keys))
            choice = uniforms(raw)
        random = uniforms(draw(self.seed, epoch, position, stream=_TRANSFORM_STREAM, count=TRANSFORM_DRAWS))

        def shrink(height: int, width: int) -> int:
            return self.transform.shrink(height, width, random)

        def some(texts: list[str], count: int, stream: int) -> list[str]:
            if len(texts) == 1:
                return texts * count
            order = np.argsort(draw(self.seed, epoch, position, stream=stream, count=len(texts)), kind="stable")
            return [texts[order[i % len(texts)]] for i in range(count)]

        image, captions, notes = decode_record(record, keys=self.keys, limits=self.limits, random=choice, shrink=shrink)
        texts = some(captions, self.texts.captions, _CHOICE_STREAM)
        values = _json_of(record) if self.texts.needs_json else {}
        same = _same_id(self.texts.same, record.image or b"", texts[0], values)
        if self.texts.negatives is not None:
            texts += some(_negatives(values, self.texts.negatives), 1, _NEGATIVE_STREAM)
        log["noted"].extend(notes)
        return DecodedSample(self.transform(image, random), texts, same)

    def batch(self, samples: list[DecodedSample], ids: list[int], log: ReadLog) -> dict[str, Any]:
        before = self.tokenizer.truncated
        texts = self.tokenizer([text for sample in samples for text in sample.texts])
        log["noted"].extend(["caption_truncated"] * (self.tokenizer.truncated - before))
        batch = {"images": stack([sample.image for sample in samples]), "texts": texts, "ids": torch.tensor(ids)}
        return batch | ({"same_ids": torch.tensor([sample.same for sample in samples])} if self.texts.same else {})


def _json_of(record: Record) -> dict[str, Any]:
    if record.json is None:
        raise BadSample("no_json", "the json member is missing")
    return parse_json(record.json)


def _negatives(values: dict[str, Any], key: str) -> list[str]:
    texts = [
        _decode_text(text.encode("utf-8", "replace"), MAX_CAPTION_BYTES, []) for text in _texts_in(values.get(key))
    ]
    if not (usable := [text for text in texts if _is_caption(text)]):
        raise BadSample("no_negative", f"json has no text under {key!r} (--negatives-key)")
    return usable


def _same_id(same: str | None, image: bytes, caption: str, values: dict[str, Any]) -> int:
    """63 bits of a hash. Two different ones of a billion are equal with probability 0.05."""
    if same is None:
        return 0
    if same.startswith("key:"):
        if (value := values.get(same[4:])) is None:
            raise BadSample("no_key", f"json has nothing under {same[4:]!r} (--duplicates-by)")
        data = json.dumps(value, sort_keys=True).encode()
    else:
        data = image if same == "image" else " ".join(caption.split()).encode("utf-8", "replace")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1
