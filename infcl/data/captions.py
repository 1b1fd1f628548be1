"""Captions: the text or json member of a record -> its texts, or `BadSample` with the cause.

A caption is at most 4 KB. It is in the text member; where there is none, or where `SampleKeys.json_text` asks for it,
in the json member. Bytes that are not UTF-8 are replaced and noted; a caption without a letter or digit is a bad
sample. Lines of a text member, and a list in json, are several captions.
"""

import codecs
import json
import math
from typing import Any

import numpy as np

from infcl.data.index import DEFAULT_KEYS, SampleKeys
from infcl.data.records import MAX_CAPTION_BYTES, BadSample, Record


def decode_caption(
    record: Record,
    keys: SampleKeys = DEFAULT_KEYS,
    random: np.ndarray | None = None,
    max_bytes: int = MAX_CAPTION_BYTES,
) -> tuple[str, list[str]]:
    """(caption, notes): the whole text member, or the first text of the json member. Raises BadSample."""
    notes: list[str] = []
    caption = decode_text(_raw_captions(record, keys, random)[0], max_bytes, notes)
    if not is_caption(caption):
        raise BadSample("empty_caption")
    return caption, notes


def decode_captions(
    record: Record, keys: SampleKeys = DEFAULT_KEYS, random: np.ndarray | None = None
) -> tuple[list[str], list[str]]:
    """(captions, notes): the lines of the text member, or the list in the json member. Raises BadSample for none.

    A text member with one line that is a caption is one caption, as it is.
    """
    notes: list[str] = []
    texts = [decode_text(raw, MAX_CAPTION_BYTES, notes) for raw in _raw_captions(record, keys, random)]
    if record.text is not None and keys.json_text is None:
        lines = [line for line in texts[0].split("\n") if is_caption(line)]
        texts = lines if len(lines) > 1 else texts
    captions = [text for text in texts if is_caption(text)]
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


def decode_text(raw: bytes, max_bytes: int, notes: list[str]) -> str:
    if len(raw) > max_bytes:
        notes.append("caption_cut")
    # An incremental decoder drops a character that the cut has split, instead of replacing it.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(raw[:max_bytes], final=len(raw) <= max_bytes)
    if "\ufffd" in text:
        notes.append("caption_not_utf8")
    return text


def is_caption(text: str) -> bool:
    return any(character.isalnum() for character in text)


def texts_in(value: Any) -> list[str]:
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
    found = [texts for name in names if (texts := texts_in(values.get(name)))]
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
