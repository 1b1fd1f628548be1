"""Passwords and tokens in urls: one rule rejects them where urls are given, one hides them in all that is printed."""

import re
import sys
from typing import Any

# scheme://user:password@host or https://TOKEN@host; in other schemes the text before @ is a user name (ssh://me@host)
_PASSWORD = re.compile(r"""://[^/@\s:]*:[^/\s]+@|https?://[^/\s?#"']+@""", re.IGNORECASE)
_USER = re.compile(r"""(://)[^/\s?#'"]+@""")
_QUERY = re.compile(r"""([?&][^=&?\s]{1,100}=)[^&\s'"<>]*[^&\s'"<>:;,.)]""")  # ?X-Amz-Signature=..., ?sig=...


def check_text(where: str, text: str) -> None:
    """Raise ValueError if a flag or url, given at `where`, has a password or token, or is not UTF-8."""
    if _PASSWORD.search(text):
        raise ValueError(
            f"{where} holds a password or token: command lines, messages and the run folder would show it. Put it in a "
            "file on the hosts (~/.netrc and 'pipe:curl --netrc ...', ~/.aws/credentials)"
        )
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{where} {text!r} is not UTF-8")


def redacted(text: str) -> str:
    """Return a text with the users, passwords and query values of its urls replaced by ***."""
    return _QUERY.sub(r"\1***", _USER.sub(r"\1***@", text))


def redact_output() -> None:
    """Hide secrets in all that this process prints from now on, tracebacks and logs of libraries among it."""
    sys.stdout, sys.stderr = _redacting(sys.stdout), _redacting(sys.stderr)


def _redacting(stream: Any) -> Any:
    return stream if stream is None or isinstance(stream, _Redacted) else _Redacted(stream)


class _Redacted:
    """A stream that writes `redacted` texts."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(redacted(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
