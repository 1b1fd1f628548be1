"""Images: decode the bytes of a file to RGB uint8 [H, W, 3], or raise `BadSample` with the cause.

simplejpeg (libjpeg-turbo, strict) decodes JPEG. Pillow decodes other formats and each JPEG that simplejpeg rejects.
Alpha is composited on white, and 16-bit grey is scaled, not clipped. Of an animation, the first frame is used. EXIF
orientation is applied (ImageLimits.upright). The image size and a JPEG's number of scans are checked before decoding.
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

_PILLOW_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # Pillow decodes these without an external program
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_MAX_SCANS = 100  # in a JPEG: encoders write about ten, and each one costs decoding time
_EXIF_BYTES = 1 << 16  # searched in a JPEG: EXIF is its first or second segment
_ORIENTATION = 0x0112  # tag number in EXIF
# orientation -> (counterclockwise quarter turns, then whether to mirror left and right)
_TO_UPRIGHT = dict(zip(range(2, 9), [(0, True), (2, False), (2, True), (3, True), (3, False), (1, True), (1, False)]))


@dataclass(frozen=True)
class ImageLimits:
    """Limits on the size in an image's header, and how to treat its EXIF orientation.

    Args:
        max_pixels: largest width x height (--max-image-pixels).
        min_side: smallest side, in pixels.
        max_aspect: largest ratio of the sides.
        upright: apply the EXIF orientation. open_clip ignores it.
    """

    max_pixels: int = 25_000_000
    min_side: int = 8
    max_aspect: float = 20.0
    upright: bool = True

    def check(self, width: int, height: int) -> None:
        """Raise BadSample if an image of this size (pixels) exceeds a limit."""
        short, long = sorted((width, height))
        if width * height > self.max_pixels:
            raise BadSample("image_too_large", f"{width} x {height} pixels, --max-image-pixels {self.max_pixels}")
        if short < self.min_side or long > short * self.max_aspect:
            raise BadSample("image_too_small_or_thin", f"{width} x {height} pixels")


DEFAULT_LIMITS = ImageLimits()


def decode_image(
    data: bytes, limits: ImageLimits = DEFAULT_LIMITS, shrink: Callable[[int, int], int] | None = None
) -> np.ndarray:
    """Decode the bytes of an image file to RGB, uint8 [H, W, 3].

    Args:
        data: the bytes of the file.
        limits: which images are rejected by their header.
        shrink: (height, width) -> 1, 2, 4 or 8. A JPEG is decoded at 1 / that factor of its size, which is faster.

    Raises:
        BadSample: the image cannot be decoded or exceeds the limits. No other exception is raised for bad bytes.
    """
    if data[:3] == b"\xff\xd8\xff":
        import simplejpeg

        try:
            height, width, _, _ = simplejpeg.decode_jpeg_header(data)
            limits.check(width, height)
            _check_scans(data)
            orientation = _orientation(data) if limits.upright else 1
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
        # after the pixels are read: Pillow applies the orientation of a TIFF itself
        return _upright(pixels, _orientation(image)) if limits.upright else pixels


def _check_scans(jpeg: bytes) -> None:
    scans = jpeg.count(b"\xff\xda")  # exact: coded data has only 0 and 0xd0-0xd7 after 0xff
    if scans > _MAX_SCANS:
        raise BadSample("too_many_scans", f"a JPEG of {scans} scans, {_MAX_SCANS} allowed")


def _orientation(source: "bytes | Image.Image") -> int:
    """Return the EXIF orientation of a JPEG's bytes or of an image, 1 to 8; 1 if it is missing or unreadable."""
    try:
        if isinstance(source, bytes):
            at = source.find(b"Exif\0\0", 0, _EXIF_BYTES)
            if at < 0:
                return 1
            from PIL import Image

            exif = Image.Exif()
            exif.load(source[at : at - 2 + int.from_bytes(source[at - 2 : at], "big")])
        else:
            exif = source.getexif()
        value = exif.get(_ORIENTATION, 1)
    except Exception:  # Pillow raises many types on malformed EXIF; the image is still usable
        return 1
    return value if value in range(1, 9) else 1


def _upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Rotate and mirror uint8 [H, W, 3] by its EXIF orientation."""
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
    """Return uint8 [H, W, 3]: transparency is composited on white, 16-bit grey is scaled."""
    if image.mode.startswith("I"):  # two bytes per pixel; Pillow's own conversion would clip it to white
        deep = np.asarray(image).astype(np.float32)
        return np.repeat(np.clip(deep / 257 + 0.5, 0, 255).astype(np.uint8)[:, :, None], 3, axis=2)
    if image.mode == "F":
        raise BadSample("unsupported_image_mode", "floating-point pixels")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        from PIL import Image

        image, transparent = Image.new("RGB", image.size, "white"), image.convert("RGBA")
        image.paste(transparent, mask=transparent)
    return np.array(image.convert("RGB"))
