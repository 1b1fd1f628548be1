"""Small tars and images for the data tests."""

import io
import json
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
from PIL import Image


def write_tar(path: Path, members: list[tuple[str, bytes]], format: int = tarfile.USTAR_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def picture(seed: int, height: int = 20, width: int = 24) -> np.ndarray:
    """Return a smooth random RGB image, uint8 [height, width, 3]."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return np.array(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


def encode(image, format: str = "PNG", **options) -> bytes:
    """Encode an array or a Pillow image."""
    file = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, format, **options)
    return file.getvalue()


def pair_members(number: int, *, key: str | None = None) -> list[tuple[str, bytes]]:
    """Return the members jpg or png, json and txt of a good sample, in img2dataset's order."""
    key = key or f"{number:09d}"
    image = ("png", encode(picture(number))) if number % 2 else ("jpg", encode(picture(number), "JPEG", quality=95))
    metadata = json.dumps({"key": key, "caption": f"from json {number}", "number": number}).encode()
    text = f"picture number {number}".encode()
    return [(f"{key}.{image[0]}", image[1]), (f"{key}.json", metadata), (f"{key}.txt", text)]


def write_shards(folder: Path, sizes: list[int]) -> str:
    """Write tars of good samples, numbered consecutively; return the folder as a URL."""
    number = 0
    for shard, size in enumerate(sizes):
        members = [member for i in range(size) for member in pair_members(number + i)]
        write_tar(folder / f"{shard:05d}.tar", members)
        number += size
    return str(folder)


class Payload:
    """An object that writes a file when it is unpickled, which exposes decoders that unpickle members."""

    def __init__(self, file: Path):
        self.file = str(file)

    def __reduce__(self):
        return (open, (self.file, "w"))


def png_part(kind: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_bomb(width: int, height: int) -> bytes:
    """Return a PNG whose header claims width x height pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_part(b"IHDR", header)
        + png_part(b"IDAT", zlib.compress(bytes(1000)))
        + png_part(b"IEND", b"")
    )
