"""Samples of every kind, good and bad, and what a reader counts each as."""

import pickle
import tempfile
import uuid
from pathlib import Path

import numpy as np
from PIL import Image

from tests.lib.shard_files import Payload, encode, picture, png_bomb, write_tar

EXECUTED = Path(tempfile.gettempdir()) / f"executed-{uuid.uuid4()}"  # is written by who unpickles a member
_PNG, _TEXT = encode(picture(0)), b"a picture"
_JPEG, _PICKLE = encode(picture(0, 64, 64), "JPEG", quality=90), pickle.dumps(Payload(EXECUTED))


def _image(data: bytes, cause: str, extension: str = "png") -> tuple[list[tuple[str, bytes]], str, None]:
    return [(extension, data), ("txt", _TEXT)], cause, None


def _caption(extension: str, data: bytes, cause: str = "", note: str | None = None):
    return [("png", _PNG), (extension, data)], cause, note


# kind -> (members without the key, cause: "" usable, "index/..." left out by the index, else skipped; note)
KINDS = {
    "good": _caption("txt", _TEXT),
    "jpeg": ([("jpg", _JPEG), ("json", b'{"caption": "x"}'), ("txt", _TEXT)], "", None),
    "caption in json": _caption("json", b'{"caption": "in json"}'),
    "broken json next to text": ([("png", _PNG), ("json", b"{"), ("txt", _TEXT)], "", None),
    "megabyte caption": _caption("txt", b"long " * 200_000, note="caption_cut"),
    "latin-1 caption": _caption("txt", "caf\u00e9".encode("latin-1"), note="caption_not_utf8"),
    "NUL in the caption": _caption("txt", b"a\x00b"),
    "16 bit grey": _image(encode(np.full((20, 20), 40_000, np.uint16)), ""),
    "scan with zeros": _image(_JPEG[:700] + bytes(200) + _JPEG[900:], "", "jpg"),
    "duplicate": ([("png", _PNG), ("txt", _TEXT), ("txt", _TEXT)], "", None),
    "pickle": ([("png", _PNG), ("txt", _TEXT), *[(end, _PICKLE) for end in ("pkl", "pickle", "pyd", "pth", "npy")]],
               "", None),
    "truncated JPEG": _image(_JPEG[:700], "broken_image", "jpg"),
    "truncated PNG": _image(encode(picture(0, 64, 64))[:600], "broken_image"),
    "truncated WEBP": _image(encode(picture(0, 64, 64), "WEBP")[:200], "broken_image", "webp"),
    "web page": _image(b"<html>404</html>", "not_an_image", "jpg"),
    "PostScript": _image(b"%!PS-Adobe-3.0 EPSF-3.0\n", "not_an_image"),
    "zeros after a JPEG's mark": _image(b"\xff\xd8\xff" + bytes(100), "not_an_image", "jpg"),
    "GIF": _image(encode(picture(1), "GIF"), "not_an_image", "jpg"),  # Pillow's reader is quadratic in a comment
    "empty image": _image(b"", "empty_image_file", "webp"),
    "bomb": _image(png_bomb(20_000, 20_000), "image_too_large"),
    "bomb that Pillow only warns of": _image(png_bomb(12_000, 12_000), "image_too_large"),
    "one pixel wide": _image(encode(picture(0, 40, 1)), "image_too_small_or_thin"),
    "six pixels high": _image(encode(picture(0, 6, 30)), "image_too_small_or_thin"),
    "thin": _image(encode(picture(0, 10, 300)), "image_too_small_or_thin"),
    "floats": _image(encode(Image.new("F", (20, 20)), "TIFF"), "unsupported_image_mode"),
    "empty caption": _caption("txt", b"", "empty_caption"),
    "blank caption": _caption("txt", b" \n\t ", "empty_caption"),
    "punctuation": _caption("txt", b"?!...", "empty_caption"),
    "broken json": _caption("json", b'{"caption": ', "bad_json"),
    "nested json": _caption("json", b"[" * 100_000, "bad_json"),
    "list in json": _caption("json", b"[1]", "bad_json"),
    "json of other bytes": _caption("json", b"\xff\xfe", "bad_json"),
    "null caption": _caption("json", b'{"caption": null}', "no_caption"),
    "number for a caption": _caption("json", b'{"caption": 3}', "no_caption"),
    "empty json": _caption("json", b"{}", "no_caption"),
    "no image": ([("txt", _TEXT)], "index/no_image", None),
    "no caption": ([("png", _PNG)], "index/no_caption", None),
}  # fmt: skip
USABLE = [kind for kind, (_, cause, _) in KINDS.items() if not cause]
UNUSABLE = [kind for kind in KINDS if kind not in USABLE]


def write_kinds(folder: Path) -> str:
    """Write a shard with a sample of every kind, numbered in their order; return the folder as a URL."""
    members = [(f"{i:02d}.{end}", data) for i, (parts, _, _) in enumerate(KINDS.values()) for end, data in parts]
    write_tar(folder / "0.tar", members)
    return str(folder)
