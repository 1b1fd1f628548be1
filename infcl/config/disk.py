"""Files that are replaced atomically, and stay after a power cut."""

import contextlib
import errno
import os
from pathlib import Path


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
