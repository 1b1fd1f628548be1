"""Captions: decode the text or json member of a record to texts, or raise `BadSample` with the cause.

Captions come from the text member. They come from the json member if there is no text member, or if
`SampleKeys.json_text` is set. The entries of a list in json are separate captions. A text member is one caption,
whatever its lines, unless the caller asks for `lines`.
A caption is cut after 4 KB. Bytes that are not UTF-8 are replaced and noted. A caption without a letter or digit is
rejected.
"""

import codecs
import json
import math
import re
from typing import Any

import numpy as np

from infcl.data.index import DEFAULT_KEYS, SampleKeys
from infcl.data.records import MAX_CAPTION_BYTES, BadSample, Record

_BLANK = r"[\s!-/:-@\[-`{-~\u00a1\u00ab\u00b7\u00bb\u00bf\u2000-\u206f\u3000-\u303f]"  # white space, punctuation
_BLANKS = re.compile(rf"(?<!\d){_BLANK}|{_BLANK}(?!\d)")  # not between digits: 1.5 is not 15


def decode_captions(
    record: Record,
    keys: SampleKeys = DEFAULT_KEYS,
    random: np.ndarray | None = None,
    *,
    max_bytes: int = MAX_CAPTION_BYTES,
    lines: bool = False,
) -> tuple[list[str], list[str]]:
    """Decode the captions of a record: its text member, or the texts in the json member.

    Args:
        random: float64 [json keys] in [0, 1), needed if `keys` has json_probs.
        max_bytes: a caption is cut after these.
        lines: each valid line of a text member is a caption (--captions lines).

    Returns:
        The captions, at least one, and notes on what was tolerated.

    Raises:
        BadSample: there is no valid caption.
    """
    notes: list[str] = []
    if record.text is not None and keys.json_text is None:
        text = decode_text(record.text, max_bytes, notes)
        texts = text.splitlines() if lines else [text]
    elif record.json is None:
        raise BadSample("no_caption")
    else:
        found = _json_captions(parse_json(record.json), keys, random)
        texts = [decode_text(text, max_bytes, notes) for text in found]
    captions = [text for text in texts if is_caption(text)]
    if not captions:
        raise BadSample("empty_caption")
    return captions, notes


def decode_text(raw: bytes | str, max_bytes: int, notes: list[str]) -> str:
    """Decode UTF-8, cut after `max_bytes`; append to `notes` what was changed. A lone surrogate of JSON becomes '?'.

    Some editors write a byte order mark first, which is left out.
    """
    raw = raw.encode("utf-8", "replace") if isinstance(raw, str) else raw
    if len(raw) > max_bytes:
        notes.append("caption_cut")
    # an incremental decoder drops a character that the cut splits, instead of replacing it
    decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
    text = decoder.decode(raw[:max_bytes], final=len(raw) <= max_bytes)
    if "\ufffd" in text:
        notes.append("caption_not_utf8")
    return text


def is_caption(text: str) -> bool:
    """Return whether a text has a letter or digit."""
    return any(character.isalnum() for character in text)


def folded(text: str) -> str:
    """Return a text without case, punctuation and white space: equal for captions that say the same."""
    return _BLANKS.sub("", text.casefold())


def texts_in(value: Any) -> list[str]:
    """Return a JSON string, or the strings of a JSON list, as a list."""
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]


def _json_captions(values: dict[str, Any], keys: SampleKeys, random: np.ndarray | None) -> list[str]:
    """Return the texts of the first key that has any. With probabilities, the order of the keys is random."""
    names = keys.json_keys
    if keys.json_probs:
        assert random is not None, "keys with probabilities need a draw"
        weights = [*keys.json_probs, *[0.0] * (len(names) - len(keys.json_probs))]
        # sorting by exponential waiting times draws the keys without replacement (Efraimidis and Spirakis 2006)
        waits = [-math.log1p(-u) / w if w else math.inf for u, w in zip(random.tolist(), weights)]
        names = [name for _, _, name in sorted(zip(waits, range(len(names)), names))]
    found = [texts for name in names if (texts := texts_in(values.get(name)))]
    if not found:
        there = ", ".join(name[:30] for name, value in list(values.items())[:9] if isinstance(value, str)) or "none"
        others = {name: type(values[name]).__name__ for name in names if name in values}
        but = "".join(f" (a JSON {kind} is under {name!r})" for name, kind in others.items())
        wanted = keys.json_text or "caption"
        raise BadSample("no_caption", f"json has no text under {wanted!r}{but}; texts: {there} (--json-text-key)")
    return next((texts for texts in found if any(text.strip() for text in texts)), found[0])


def parse_json(data: bytes) -> dict[str, Any]:
    """Parse a sample's json member. Raises BadSample if it is not a JSON object."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadSample("bad_json", str(error)) from error
    if not isinstance(value, dict):
        raise BadSample("bad_json", f"a JSON {type(value).__name__}, not an object")
    return value
