"""Images: decode the bytes of a file to RGB uint8 [H, W, 3], or raise `BadSample` with the cause.

simplejpeg (libjpeg-turbo, strict) decodes JPEG. Pillow decodes PNG, WebP, TIFF, BMP, and each JPEG that simplejpeg
rejects. Alpha is composited on white, and 16-bit grey is scaled, not clipped. Of an animation, the first frame is used.
The orientation in EXIF or XMP is applied (ImageLimits.upright).

What an image may cost is bounded before its pixels are decoded: by its size and a JPEG's scans (ImageLimits), and by
what is read of its header (`_Header`). The decoders get a JPEG without its metadata and without what follows its end.
"""

import contextlib
import io
import math
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from infcl.data.records import BadSample

if TYPE_CHECKING:
    from PIL import Image

_FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff", ".bmp", ".gif")  # a GIF is counted as unusable
_MAX_SCANS = 100  # in a JPEG: encoders write about ten, and each one costs decoding time
_MAX_SEGMENTS = 100_000  # in a JPEG
_HEADER_BYTES = 16 << 20  # of metadata, and of a compressed text of a PNG
_MARKER = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")  # in a JPEG; after 0xff, coded data has only 0 and 0xd0-0xd7
_METADATA = (*range(0xE1, 0xEE), 0xEF, 0xFE)  # markers of segments without an effect on pixels
_JPEG = b"\xff\xd8\xff"  # the first bytes
_ORIENTATION = 0x0112  # tag number in EXIF
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([1-8])')
# orientation -> (counterclockwise quarter turns, then whether to mirror left and right)
_TO_UPRIGHT = dict(zip(range(2, 9), [(0, True), (2, False), (2, True), (3, True), (3, False), (1, True), (1, False)]))


@dataclass(frozen=True)
class ImageLimits:
    """Limits on the size in an image's header, and how to treat its orientation.

    Args:
        max_pixels: largest width x height (--max-image-pixels). A JPEG of so many pixels may have 20 scans.
        min_side: smallest side, in pixels.
        max_aspect: largest ratio of the sides.
        upright: apply the orientation in EXIF or XMP. open_clip ignores it.
    """

    max_pixels: int = 25_000_000
    min_side: int = 8
    max_aspect: float = 20.0
    upright: bool = True

    def check(self, width: int, height: int, scans: int = 1) -> None:
        """Raise BadSample if an image of this size (pixels) and number of scans exceeds a limit."""
        short, long = sorted((width, height))
        if width * height > self.max_pixels:
            raise BadSample("image_too_large", f"{width} x {height} pixels, --max-image-pixels {self.max_pixels}")
        if short < self.min_side or long > short * self.max_aspect:
            raise BadSample("image_too_small_or_thin", f"{width} x {height} pixels")
        if scans > (allowed := min(_MAX_SCANS, 20 * self.max_pixels // (width * height))):
            raise BadSample("too_many_scans", f"a JPEG of {scans} scans; at {width} x {height} pixels {allowed} may be")


DEFAULT_LIMITS = ImageLimits()


def decode_image(
    data: bytes, limits: ImageLimits = DEFAULT_LIMITS, shrink: Callable[[int, int], int] | None = None
) -> np.ndarray:
    """Decode the bytes of an image file to RGB, uint8 [H, W, 3].

    Args:
        shrink: (height, width) -> 1, 2, 4 or 8. A JPEG is decoded at 1 / that factor of its size, which is faster.

    Raises:
        BadSample: the image cannot be decoded or exceeds the limits. No other exception is raised for bad bytes.
    """
    orientation = None
    if data[:3] == _JPEG:
        import simplejpeg

        data, scans, orientation = _plain_jpeg(data)
        try:
            height, width, _, _ = simplejpeg.decode_jpeg_header(data)
            limits.check(width, height, scans)
            orientation = orientation if limits.upright else 1
            shown = (height, width) if orientation < 5 else (width, height)
            factor = shrink(*shown) if shrink else 1
            smaller = {"min_height": math.ceil(height / factor), "min_width": math.ceil(width / factor)}
            pixels = simplejpeg.decode_jpeg(data, "RGB", **(smaller if factor > 1 else {}))
            return _upright(pixels, orientation)
        except ValueError:
            pass  # CMYK, or damage that Pillow may tolerate
    with reject_damage():
        image = open_image(data, limits)
        pixels = _rgb(image)
        # after the pixels are read: a PNG may have its metadata at the end
        return _upright(pixels, orientation or _orientation_of(image)) if limits.upright else pixels


def _plain_jpeg(jpeg: bytes) -> tuple[bytes, int, int]:
    """Return a JPEG without its metadata and without what follows its end; its number of scans; its orientation."""
    kept, begin, at, scans, exif, xmp = [], 0, 2, 0, b"", b""
    for _ in range(_MAX_SEGMENTS):
        if (found := _MARKER.search(jpeg, at)) is None:
            break
        marker, at = found[1][0], found.end()
        if marker == 0xD9:  # the end; phones store a film after it
            jpeg = jpeg[:at]
            break
        scans += marker == 0xDA
        segment = jpeg[at : (at := at + int.from_bytes(jpeg[at : at + 2], "big"))]
        if marker in _METADATA:
            kept.append(jpeg[begin : found.start()])
            begin = at
            exif = exif or (segment[2:] if segment.startswith(b"Exif\0\0", 2) else b"")
            xmp = xmp or (segment if segment.startswith(b"http://ns.adobe.com/xap/1.0/\0", 2) else b"")
    else:
        raise BadSample("too_much_metadata", f"a JPEG of more than {_MAX_SEGMENTS:,} segments")
    return b"".join([*kept, jpeg[begin:]]), scans, _orientation(exif, xmp)


def _orientation_of(image: "Image.Image") -> int:
    """Return the orientation of a PNG or WebP. Pillow turns a TIFF itself, and a BMP has none."""
    exif, xmp = image.info.get("exif", b""), image.info.get("xmp", b"")
    if profile := image.info.get("Raw profile type exif"):  # ImageMagick's, in hexadecimal after three lines
        with contextlib.suppress(ValueError):
            exif = exif or bytes.fromhex("".join(str(profile).split("\n")[3:]))
    return 1 if image.format == "TIFF" else _orientation(exif, xmp)


def _orientation(exif: bytes, xmp: bytes) -> int:
    """Return the orientation that EXIF has, else XMP, 1 to 8; 1 if it is missing or unreadable.

    Pillow's parser is not used: it copies the values of all tags, which may overlap.
    """
    exif = exif.removeprefix(b"Exif\0\0")
    order = ">" if exif[:2] == b"MM" else "<"
    with contextlib.suppress(struct.error):  # it is cut off
        (at,) = struct.unpack_from(f"{order}I", exif, 4)
        for entry in range(struct.unpack_from(f"{order}H", exif, at)[0]):
            tag, _, _, value = struct.unpack_from(f"{order}HHIH", exif, at + 2 + 12 * entry)
            if tag == _ORIENTATION:
                return value if value in range(1, 9) else 1
    found = _XMP_ORIENTATION.search(xmp)
    return int(found[1]) if found else 1


def _upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Rotate and mirror uint8 [H, W, 3] by its orientation."""
    if orientation == 1:
        return pixels
    turns, mirrored = _TO_UPRIGHT[orientation]
    turned = np.rot90(pixels, turns)
    return np.ascontiguousarray(turned[:, ::-1] if mirrored else turned)


@contextlib.contextmanager
def reject_damage() -> Iterator[None]:
    """Turn every exception of Pillow within the context into BadSample."""
    try:
        yield
    except BadSample:
        raise
    except Exception as error:  # Pillow's decoders raise many types on malformed bytes; there is no I/O here
        raise BadSample("broken_image", f"{type(error).__name__}: {error}") from error


def open_image(data: bytes, limits: ImageLimits = DEFAULT_LIMITS) -> "Image.Image":
    """Open a Pillow image and read only its header. Use it within `reject_damage`. Raises BadSample."""
    from PIL import Image, PngImagePlugin

    if not data:
        raise BadSample("empty_image_file")
    scans = 1
    if data[:3] == _JPEG:
        data, scans, _ = _plain_jpeg(data)
    PngImagePlugin.MAX_TEXT_CHUNK = _HEADER_BYTES  # bytes that a compressed text may have; Pillow allows 1 MiB
    file = _Header(data)
    try:
        image = Image.open(file, formats=_FORMATS)
    except Image.DecompressionBombError as error:
        raise BadSample("image_too_large", str(error)) from error
    except Image.UnidentifiedImageError as error:
        raise BadSample("not_an_image", f"starts with {data[:16]!r}: not {', '.join(_FORMATS)}") from error
    limits.check(*image.size, scans)
    if image.format == "TIFF":
        file.left = math.inf  # its pixels are read in blocks that overlap
    return image


class _Header(io.BytesIO):
    """An image whose metadata Pillow may read once: tags of a TIFF may overlap, and a PNG may have millions of chunks.

    Raises BadSample in a read beyond that. Each read counts as 256 bytes more than it returns.
    """

    def __init__(self, data: bytes):
        super().__init__(data)
        self.left: float = 4 * len(data) + _HEADER_BYTES

    def read(self, size: int | None = -1) -> bytes:
        part = super().read(size)
        self.left -= len(part) + 256
        if self.left < 0:
            raise BadSample("too_much_metadata", f"more than {_HEADER_BYTES >> 20} MiB, or parts that overlap")
        return part


def _rgb(image: "Image.Image") -> np.ndarray:
    """Return uint8 [H, W, 3]: transparency is composited on white, 16-bit grey is scaled."""
    if image.mode.startswith("I"):  # two bytes per pixel; Pillow's own conversion would clip it to white
        deep = np.asarray(image).astype(np.float32)
        if deep.min() < 0 or deep.max() > 65535:  # of a TIFF with 32 or signed bits
            raise BadSample("unsupported_image_mode", "integers outside 0 to 65,535")
        return np.repeat(np.clip(deep / 257 + 0.5, 0, 255).astype(np.uint8)[:, :, None], 3, axis=2)
    if image.mode == "F":
        raise BadSample("unsupported_image_mode", "floating-point pixels")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        from PIL import Image

        image, transparent = Image.new("RGB", image.size, "white"), image.convert("RGBA")
        image.paste(transparent, mask=transparent)
    return np.array(image.convert("RGB"))
