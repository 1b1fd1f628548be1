"""Read JSON from the disk, which a crash, a full disk or a stranger may have changed: one strict check for all records.

A record is a dataclass or a TypedDict. pydantic compares its keys and types, and converts nothing, except that a list
may be a tuple and an int a float.
"""

import codecs
from pathlib import Path
from typing import Any, Literal, TypeVar

MAX_BYTES = 64 << 20  # of a file
_SHOWN = 60  # characters of a wrong value
Extra = Literal["allow", "ignore", "forbid"]
Record = TypeVar("Record")
_adapters: dict[Any, Any] = {}


def read_record(path: Path, kind: type[Record], *, extra: Extra = "allow") -> Record:
    """Read a JSON file as a record.

    Args:
        kind: type of the record, such as dict for any object.
        extra: whether a key that the record lacks is kept (where it can be), left out, or an error.

    Raises:
        ValueError: the file cannot be read, or is no such record: one line with the file, the field and its value.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1).removeprefix(codecs.BOM_UTF8)  # of Windows' editors
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    return parse_record(data, kind, str(path), extra=extra)


def parse_record(data: str | bytes, kind: type[Record], source: str, *, extra: Extra = "allow") -> Record:
    """Parse JSON as a record, as `read_record` does. `source` is the file, for messages."""
    from pydantic import ValidationError

    if len(data) > MAX_BYTES:
        raise ValueError(f"{source}: larger than {MAX_BYTES >> 20} MiB")
    try:
        return _adapter(kind).validate_json(data, strict=True, extra=extra)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    field, problem = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        raise ValueError(f"{source}: not JSON: {first['ctx']['error']}")
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        raise ValueError(f"{source}: unknown key {field!r}")
    if first["type"] in ("missing", "value_error"):
        raise ValueError(f"{source}: {f'{field} is missing' if first['type'] == 'missing' else problem}")
    value = repr(first["input"])
    shown = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
    raise ValueError(f"{source}: {field or 'the record'} is {shown}: {problem}")


def _adapter(kind: Any) -> Any:
    """Return pydantic's adapter of a type, which takes milliseconds to build."""
    if kind not in _adapters:
        from pydantic import TypeAdapter

        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]
