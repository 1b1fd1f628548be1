"""Files that are replaced atomically, and stay after a power cut."""

import contextlib
import errno
import os
import re
from pathlib import Path
from typing import Any


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace a file atomically. Readers, and the disk after a power cut, have the full old or new content.

    Raises OSError, and leaves no partial file, if that fails.
    """
    temporary = path.with_name(f"{path.name}.{os.urandom(4).hex()}.tmp")  # random: nodes may share the folder
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    sync_folder(path.parent)


def save_tensors(path: Path, tensors: dict[str, Any], metadata: dict[str, str]) -> None:
    """Write a safetensors file and flush it to the disk. Raises OSError if the write fails."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:  # its own type for a failed write, with the system's error in the text
        number = re.search(r"os error (\d+)", str(error))
        raise (OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error))) from error
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk: files that were created, renamed or removed there.

    File systems that cannot do this (some FUSE and SMB) are skipped.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)
