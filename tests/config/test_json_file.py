"""JSON from the disk: one line with file, field and value for whatever is there; what is right keeps every bit."""

import json
import random
from typing import Literal

import pytest
from typing_extensions import NotRequired, TypedDict

from infcl.config.json_file import read_record


class Inner(TypedDict):
    count: int
    share: NotRequired[float]


class Outer(TypedDict):
    kind: Literal["a", "b"]
    inner: Inner
    parts: NotRequired[list[int]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not JSON: EOF"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON: recursion limit"),
        (b'{"kind": ' + b"7" * 5000 + b"}", "not JSON: number out of range"),
        (b'{"kind": "\\ud800"}', "not JSON"),
        (b"[]", r"the record is \[\]: "),
        (b"{}", "kind is missing"),
        (b'{"kind": "c", "inner": {"count": 1}}', "kind is 'c': .*'a' or 'b'"),
        (b'{"kind": "a", "inner": 3}', "inner is 3: "),
        (b'{"kind": "a", "inner": {}}', "inner.count is missing"),
        (b'{"kind": "a", "inner": {"count": true}}', "inner.count is True: "),
        (b'{"kind": "a", "inner": {"count": "%s"}}' % (b"x" * 5000), r"inner.count is 'x{59}\.\.\.: "),
        (b'{"kind": "a", "inner": {"count": 1.0}}', "inner.count is 1.0: "),
        (b'{"kind": "a", "inner": {"count": 1}, "parts": [1, "2"]}', "parts.1 is '2': "),
        (b'{"kind": "a", "inner": {"count": 1, "other": 1}}', "unknown key 'inner.other'"),
    ],
)
def test_a_wrong_file_is_one_line_with_its_field_and_value(text, message, tmp_path):
    (tmp_path / "record.json").write_bytes(text)
    with pytest.raises(ValueError, match=rf"record\.json: {message}") as wrong:
        read_record(tmp_path / "record.json", Outer, extra="forbid")
    assert "\n" not in str(wrong.value) and len(str(wrong.value)) < len(str(tmp_path)) + 200


def test_a_file_that_cannot_be_read_is_one_line(tmp_path):
    for path, message in ((tmp_path / "gone.json", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ValueError, match=message):
            read_record(path, Outer)


def test_what_is_right_is_read_to_the_bit_with_keys_that_the_record_lacks(tmp_path):
    numbers = random.Random(0)
    floats = [numbers.random() * 10.0 ** numbers.randint(-300, 300) for _ in range(2000)]
    record = {
        "kind": "a",
        "inner": {"count": 2**70, "share": 3, "more": floats},
        "other": {"x": [None, True, "\u732b"]},
    }
    (tmp_path / "record.json").write_text(json.dumps(record))
    assert read_record(tmp_path / "record.json", Outer) == record
