"""Embeddings of a teacher that are stored with each sample: the member KEY.NAME.npy of a shard (--teacher-key).

In:  float16 [1 + C, E], little-endian, as np.save writes it: the image's embedding, then one for each of C captions.
Out: the same array, checked. One width E holds for all shards.

A sample whose member cannot be used is a bad sample. The header is matched as text, and nothing of it is evaluated.
"""

import re

import numpy as np

from infcl.config import counted
from infcl.data.records import BadSample

_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([^']{1,20})', 'fortran_order': False, 'shape': \(([\d, ]{0,40})\), \} *\n",
    re.DOTALL,
)


def decode_embeddings(data: bytes | None, *, captions: int, width: int) -> np.ndarray:
    """Return the embeddings of a sample, float16 [1 + captions, width].

    Args:
        data: the member; None if the sample has none.
        captions: C, the captions of the sample.
        width: E.

    Raises:
        BadSample: there is none, it has another type or shape, is damaged, or has a number that is not finite.
    """

    def bad(what: str) -> BadSample:
        return BadSample("bad_teacher", f"the member of --teacher-key {what}")

    if data is None:
        raise BadSample("no_teacher", "the member of --teacher-key is missing, or larger than 1 MiB")
    if (header := _HEADER.match(data)) is None:
        raise bad("is no .npy as np.save writes it")
    kind, shape = (part.decode("ascii", "replace") for part in header.groups())
    if (kind, shape) != ("<f2", f"{1 + captions}, {width}"):
        needed = f"<f2 ({1 + captions}, {width}), for the image and {counted(captions, 'caption')}"
        raise bad(f"is {kind} ({shape}), needed {needed}")
    content, needed_bytes = data[header.end() :], 2 * (1 + captions) * width
    if len(content) != needed_bytes:
        raise bad(f"has {len(content)} bytes of {needed_bytes}")
    rows = np.frombuffer(content, dtype="<f2").reshape(1 + captions, width)
    if not np.isfinite(rows).all():
        raise bad("has numbers that are not finite")
    return rows
