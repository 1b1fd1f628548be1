"""How numbers are shown: counts with nouns, bytes, durations, rows of a table."""

from collections.abc import Iterable


def counted(number: int, one: str, more: str | None = None) -> str:
    """Return a count with its noun: "1 rank", "2,000 ranks". `more` is an irregular plural of `one`."""
    return f"{number:,} {one if number == 1 else more or f'{one}s'}"


def printable(text: str) -> str:
    """Return a text of a server or a file with its control characters escaped: "\\x1b[31m"."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def reason(error: BaseException) -> str:
    """Return the system's text of an OSError, without its path ("No such file or directory"), else type and message."""
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"


def shown_bytes(count: float) -> str:
    """Return "17.1 GiB", "512 MiB", "20.0 KiB" or "3 B"."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:,.{1 if count < 100 * scale else 0}f} {unit}"
    return f"{count:.0f} B"


def shown_seconds(seconds: float) -> str:
    """Return "0:07", "59:59" or "1:00:00"."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def aligned(rows: Iterable[tuple[str, str | None]]) -> str:
    """Return (name, value) rows as lines with the values in one column; skip rows whose value is None."""
    known = [(name, value) for name, value in rows if value is not None]
    width = max((len(name) for name, _ in known), default=0)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in known)
