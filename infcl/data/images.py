"""Images: the bytes of a file -> uint8 [H, W, 3], RGB, or `BadSample` with the cause.

simplejpeg (libjpeg-turbo, strict) decodes JPEG, Pillow everything else and every JPEG that simplejpeg rejects. Alpha is
composited on white, 16-bit grey is scaled (not clipped), the first frame of an animation is taken, EXIF orientation is
applied (ImageLimits.upright). Sizes, and a JPEG's number of scans, are checked before anything is decoded.
"""

import contextlib
import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from infcl.data.records import BadSample

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
    with reject_damage():
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
def reject_damage() -> Iterator[None]:
    """BadSample for whatever Pillow raises within."""
    try:
        yield
    except BadSample:
        raise
    except Exception as error:  # Pillow's decoders raise many types on malformed bytes; no I/O happens within
        raise BadSample("broken_image", f"{type(error).__name__}: {error}") from error


def open_image(data: bytes, limits: ImageLimits = DEFAULT_LIMITS) -> "Image.Image":
    """Pillow's image, of which only the header is read so far. Raises BadSample, within `reject_damage`."""
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
    """uint8 [H, W, 3]; transparency on white, 16-bit grey scaled."""
    if image.mode.startswith("I"):  # two bytes per pixel; Pillow's own conversion would clip it to white
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
