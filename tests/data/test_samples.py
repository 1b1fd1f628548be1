import io
import re
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps, PngImagePlugin

from infcl.data.captions import decode_captions
from infcl.data.images import ImageLimits, decode_image, open_image, reject_damage
from infcl.data.plan import draw, uniforms
from infcl.data.records import BadSample, Record
from infcl.data.transforms import TRANSFORM_DRAWS, EvalTransform, TrainTransform, resize
from tests.lib.shard_files import encode, picture, png_part

# Pillow warns about the very images that these tests are about
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PIL.Image.DecompressionBombWarning")


def record(image: bytes = b"", text: bytes | None = None, metadata: bytes | None = None) -> Record:
    return Record(image, text, metadata, "here")


def cause_of(function, *arguments) -> str:
    with pytest.raises(BadSample) as caught:
        function(*arguments)
    return caught.value.cause


@pytest.mark.parametrize(
    ("format", "mode", "tolerance"),
    [("JPEG", "RGB", 2), ("JPEG", "L", 2), ("JPEG", "CMYK", 2), ("PNG", "1", 0), ("PNG", "L", 0), ("PNG", "P", 0)]
    + [(format, "RGB", 0) for format in ("PNG", "BMP", "TIFF", "WEBP")],
)  # 2: two builds of libjpeg-turbo
def test_every_format_and_colour_space_decodes_to_rgb(format, mode, tolerance):
    options = {"JPEG": {"quality": 95}, "WEBP": {"lossless": True}}
    data = encode(Image.fromarray(picture(1)).convert(mode), format, **options.get(format, {}))
    decoded = decode_image(data)
    assert decoded.dtype == np.uint8 and decoded.shape == (20, 24, 3)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.abs(decoded.astype(int) - expected).max() <= tolerance


def test_sixteen_bit_grey_is_scaled_and_wider_integers_are_rejected_not_clipped_to_white():
    deep = (np.linspace(0, 65535, 400).reshape(20, 20)).astype(np.uint16)
    decoded = decode_image(encode(Image.fromarray(deep)))
    np.testing.assert_array_equal(decoded[:, :, 1], np.round(deep / 257).astype(np.uint8))
    for wide in (deep.astype(np.int32) + 1, deep.astype(np.int32) - 1):
        with pytest.raises(BadSample, match="integers outside 0 to 65,535"):
            decode_image(encode(Image.fromarray(wide), "TIFF"))
    assert 120 < decoded.mean() < 135


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_composited_on_white(mode):
    rgba = np.dstack([picture(3) // 2, np.zeros((20, 24), np.uint8)])
    rgba[:10, :, 3] = 255
    image = Image.fromarray(rgba).convert("LA" if mode == "LA" else "RGBA")
    decoded = decode_image(encode(image.quantize(16) if mode == "P" else image))
    assert (decoded[12:] == 255).all() and (decoded[:8] < 250).any()
    half = np.full((10, 10, 4), (100, 0, 255, 51), np.uint8)
    assert decode_image(encode(half))[0, 0].tolist() == [224, 204, 255]


@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_the_first_frame_of_an_animation_is_taken(format):
    red, blue = (Image.new("RGB", (16, 16), colour) for colour in ("red", "blue"))
    data = encode(red, format, save_all=True, append_images=[blue], duration=100)
    assert decode_image(data)[8, 8].tolist()[2] < 30


def test_cut_and_too_large_jpegs_are_rejected():
    data = encode(picture(0, 64, 64), "JPEG")
    for size in range(0, len(data) - 2, 37):
        assert cause_of(decode_image, data[:size])
    with pytest.raises(BadSample, match="64 x 64 pixels, --max-image-pixels 4000"):
        decode_image(data, ImageLimits(max_pixels=4000))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF", "CMYK"])
@pytest.mark.parametrize("orientation", range(0, 10))
def test_images_are_turned_as_exif_says(format, orientation):
    image = Image.fromarray(picture(5, 16, 32)).convert("CMYK" if format == "CMYK" else "RGB")
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(image, "JPEG" if format == "CMYK" else format, exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")).astype(int)
    decoded = decode_image(data)
    assert decoded.shape == expected.shape == ((32, 16, 3) if 5 <= orientation <= 8 else (16, 32, 3))
    assert decoded.flags.c_contiguous and np.abs(decoded - expected).max() <= 2  # two builds of libjpeg-turbo
    stored = decode_image(data, ImageLimits(upright=False))
    assert stored.shape == expected.shape if format == "TIFF" else stored.shape == (16, 32, 3)  # Pillow turns a TIFF
    if format == "JPEG":
        sizes = []
        half = decode_image(data, shrink=lambda *size: sizes.append(size) or 2)
        assert sizes == [expected.shape[:2]] and half.shape[:2] == (expected.shape[0] // 2, expected.shape[1] // 2)


XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_images_are_turned_as_xmp_says_where_exif_says_nothing(format):
    def turned(**metadata) -> bool:
        if format == "PNG":
            text = PngImagePlugin.PngInfo()
            text.add_itxt("XML:com.adobe.xmp", XMP.decode())
            metadata["pnginfo"] = text
        data = encode(picture(5, 16, 32), format, **({} if format == "PNG" else {"xmp": XMP}), **metadata)
        expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).size[::-1]
        assert decode_image(data).shape[:2] == expected
        return expected == (32, 16)

    upright = Image.Exif()
    upright[0x0112] = 1
    assert turned() and not turned(exif=upright)


def test_what_follows_the_end_of_a_jpeg_and_its_metadata_do_not_count(monkeypatch):
    """Phones store a film after the image, and an image in its metadata."""
    data = encode(picture(4, 64, 64), "JPEG")
    noise = b"\xff\xda\x00\x02" * 5000
    thumbnail = b"\xff\xe2" + (2 + len(noise)).to_bytes(2, "big") + noise
    with_both = data[:2] + thumbnail + data[2:] + noise
    np.testing.assert_array_equal(decode_image(with_both), decode_image(data))
    np.testing.assert_array_equal(np.array(open_image(with_both)), np.array(open_image(data)))


def test_compressed_text_of_a_png_may_have_megabytes():
    text = PngImagePlugin.PngInfo()
    text.add_text("parameters", "x" * (3 << 20), zip=True)
    assert decode_image(encode(picture(0), pnginfo=text)).shape == (20, 24, 3)


def overlapping_tags(count: int, size: int) -> bytes:
    """Return a TIFF, or an EXIF, in which `count` tags have the same `size` bytes as their value."""
    tags = [struct.pack("<HHII", 1000 + i, 7, size, 8) for i in range(count)]
    return b"II*\0" + struct.pack("<I", 8 + size) + bytes(size) + struct.pack("<H", count) + b"".join(tags) + bytes(4)


def test_metadata_costs_no_more_than_its_bytes(monkeypatch):
    """Tags that overlap would be copied out one by one, and each segment or chunk takes its time."""
    png, jpeg = encode(picture(0)), encode(picture(0), "JPEG")
    for bomb in (
        overlapping_tags(300, 1 << 20),
        png[:33] + png_part(b"teSt", b"") * 60_000 + png[33:],
        jpeg[:2] + b"\xff\xfe\x00\x02" * 120_000 + jpeg[2:],
    ):
        assert cause_of(decode_image, bomb) == "too_much_metadata"
    monkeypatch.setattr(Image.Exif, "load", None)  # Pillow would copy them
    exif = overlapping_tags(3000, 20_000)
    for data in (png[:33] + png_part(b"eXIf", exif) + png[33:], encode(picture(0), "JPEG", exif=exif)):
        assert decode_image(data).shape == (20, 24, 3)


def test_exif_that_cannot_be_read_is_ignored():
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(picture(5, 16, 32), "JPEG", exif=exif)
    at = data.index(b"Exif")
    for cut in range(1, 27):  # a TIFF header and a directory of one entry
        assert decode_image(data[: at + 6] + b"\xff" * cut + data[at + 6 + cut :]).shape == (16, 32, 3)


def test_a_jpeg_of_very_many_scans_is_rejected_before_it_is_decoded():
    data = encode(picture(4, 64, 64), "JPEG", progressive=True)
    begin = data.rindex(b"\xff\xda")
    assert decode_image(data).shape == (64, 64, 3)
    many = data[:begin] + data[begin:-2] * 10_000 + data[-2:]
    assert cause_of(decode_image, many) == "too_many_scans"
    thirty = data[:begin] + data[begin:-2] * 21 + data[-2:]
    assert decode_image(thirty).shape == (64, 64, 3)
    with pytest.raises(BadSample, match="a JPEG of 30 scans; at 64 x 64 pixels 20 may be"):
        decode_image(thirty, ImageLimits(max_pixels=64 * 64))  # an image of the most pixels costs the most per scan
    with reject_damage():
        assert cause_of(open_image, many) == "too_many_scans"


@pytest.mark.long
def test_of_a_large_animation_only_the_first_frame_takes_memory(tmp_path):
    """8 frames of 3000 x 3000 with transparency; a frame at 4 bytes per pixel has 36 MB."""
    frames = [Image.new("RGBA", (3000, 3000), (9 * i, 2, 3, 200)) for i in range(8)]
    options = {"save_all": True, "append_images": frames[1:], "lossless": True, "method": 0, "quality": 0}
    (tmp_path / "a.webp").write_bytes(encode(frames[0], "WEBP", **options))
    script = (
        "import resource, sys; from infcl.data.images import decode_image; data = open(sys.argv[1], 'rb').read()\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "before = peak(); decode_image(data); print(peak() - before)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "a.webp")]
    assert float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) < 225


def test_mutated_images_never_raise_anything_but_bad_sample():
    rng = np.random.default_rng(0)
    for format in ("JPEG", "PNG", "WEBP", "BMP", "TIFF"):
        original = np.frombuffer(encode(picture(0), format), np.uint8)
        for _ in range(40):
            data = original.copy()
            data[rng.integers(0, len(data), 5)] = rng.integers(0, 256, 5)
            try:
                image = decode_image(data.tobytes())
            except BadSample:
                continue
            assert image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3


def test_malformed_captions_are_repaired_and_noted():
    assert decode_captions(record(text="caf\u00e9".encode("latin-1"))) == (["caf\ufffd"], ["caption_not_utf8"])
    (caption,), notes = decode_captions(record(text="\u00e9a".encode() * 2000))  # the cut falls inside a character
    assert notes == ["caption_cut"] and len(caption.encode()) <= 4096 and "\ufffd" not in caption
    assert decode_captions(record(metadata=b'{"caption": "lone \\ud800 surrogate"}'))[0] == ["lone ? surrogate"]


def random_numbers(position: int) -> np.ndarray:
    return uniforms(draw(0, 0, position, stream=0, count=TRANSFORM_DRAWS))


def test_random_crops_keep_scale_and_ratio_and_lie_inside():
    transform = TrainTransform(8, scale=(0.3, 0.8), ratio=(0.75, 1.33))
    areas = []
    for position in range(300):
        top, left, height, width = transform._crop(90, 120, random_numbers(position))
        assert 0 <= top <= 90 - height and 0 <= left <= 120 - width
        assert 0.73 < width / height < 1.36
        areas.append(height * width / (90 * 120))
    assert 0.28 < min(areas) and max(areas) < 0.82 and 0.5 < np.mean(areas) < 0.6
    centre = TrainTransform(8, scale=(0.9, 1.0))._crop(10, 100, random_numbers(0))
    assert centre == (0, 43, 10, 13)  # an image that admits no crop


def test_the_train_transform_is_crop_then_antialiased_bicubic():
    image, random = picture(5, 50, 60), random_numbers(3)
    transform = TrainTransform(16, scale=(0.2, 0.9))
    top, left, height, width = transform._crop(50, 60, random)
    crop = torch.from_numpy(image[top : top + height, left : left + width].copy()).permute(2, 0, 1)[None]
    expected = torch.nn.functional.interpolate(crop, size=(16, 16), mode="bicubic", antialias=True)[0]
    result = transform(image, random)
    assert result.dtype == torch.uint8 and torch.equal(result, expected)
    floating = torch.nn.functional.interpolate(crop.double(), size=(16, 16), mode="bicubic", antialias=True)[0]
    assert (result.double() - floating.clamp(0, 255)).abs().max() <= 1.01


def test_flipping_is_off_unless_asked_for():
    image, random = picture(6, 16, 16), random_numbers(0)
    still = TrainTransform(16, scale=(1, 1), ratio=(1, 1))(image, random)
    flipped = TrainTransform(16, scale=(1, 1), ratio=(1, 1), hflip=1.0)(image, random)
    assert torch.equal(still, torch.from_numpy(image.copy()).permute(2, 0, 1)) and torch.equal(flipped, still.flip(-1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": (0, 1)}, "scale (0, 1): need (low, high) with 0 < low <= high <= 1"),
        ({"scale": (1.5, 2.0)}, "<= 1 (shares of the image's area)"),
        ({"scale": (0.1, 0.5, 0.9)}, "scale (0.1, 0.5, 0.9): need (low, high)"),
        ({"scale": 0.5}, "scale 0.5: need (low, high)"),
        ({"ratio": (2, 1)}, "ratio (2, 1): need (low, high) with 0 < low <= high"),
        ({"hflip": 2}, "hflip 2: need a probability, 0 to 1"),
        ({"hflip": (0, 1)}, "hflip (0, 1): need a probability"),
        ({"scaled_decode": 3}, "scaled_decode 3: need True or False"),
        ({"color_jitter": 0.4, "color_jitter_prob": 1}, "color_jitter 0.4: (brightness, contrast, saturation, hue)"),
        ({"color_jitter": (0.4,), "color_jitter_prob": 1}, "color_jitter (0.4,)"),
        ({"color_jitter": (0.4, 0.4, 0.4, 0.6), "color_jitter_prob": 1}, "color_jitter (0.4, 0.4, 0.4, 0.6)"),
        ({"color_jitter": (-1, 0, 0, 0), "color_jitter_prob": 1}, "color_jitter (-1, 0, 0, 0)"),
        ({"color_jitter": (0.4, 0.4, 0.4, 0.1)}, "only work together"),
    ],
)
def test_impossible_augmentation_is_rejected(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        TrainTransform(16, **options)


@pytest.mark.parametrize("height, width", [(40, 60), (60, 40), (7, 9), (16, 16), (1, 5)])
def test_the_eval_transform_resizes_the_short_side_and_takes_the_centre(height, width):
    image = picture(7, height, width)
    result = EvalTransform(16)(image)
    assert result.shape == (3, 16, 16) and result.dtype == torch.uint8
    if (height, width) == (40, 60):
        assert torch.equal(result, resize(image, 16, 24)[:, :, 4:20])
    padded = EvalTransform(16).crop(torch.ones(3, 13, 15))  # as torchvision: one row and no column before it
    assert padded.shape == (3, 16, 16) and padded[:, 1:14, :15].all() and padded.sum() == 3 * 13 * 15


def test_a_scaled_decode_shows_the_same_crop_and_is_off_by_default():
    data, random = encode(picture(3, 160, 200), "JPEG", quality=95), random_numbers(1)
    exact, scaled = TrainTransform(16), TrainTransform(16, scaled_decode=True)
    assert exact.shrink(160, 200, random) == 1 and scaled.shrink(160, 200, random) == 4
    assert scaled.shrink(24, 30, random) == 1 and scaled.shrink(2000, 2400, random) == 8
    small = decode_image(data, shrink=lambda height, width: 4)
    assert small.shape == (40, 50, 3)
    difference = scaled(small, random).float() - exact(decode_image(data), random).float()
    assert difference.abs().mean() < 8  # the crop is rounded to pixels of four times the size
    png = encode(picture(3))
    assert decode_image(png, shrink=lambda height, width: 8).shape == (20, 24, 3)  # a PNG has no such way
