"""Write shards: tars of samples that the readers accept, the same bytes for the same samples."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path


def write_shard(path: str | os.PathLike, samples: Iterable[Mapping[str, bytes]]) -> int:
    """Write one tar, and create its folder.

    The keys are the tar's name and a number, as img2dataset's. Nothing depends on the time or the user.

    Args:
        path: the tar to write.
        samples: extension -> content of each member of a sample, such as {"png": ..., "txt": ..., "json": ...}.

    Returns:
        The number of samples.
    """
    from webdataset import TarWriter

    path, count = Path(path), 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with TarWriter(str(path), encoder=False, mtime=0) as writer:
        for count, members in enumerate(samples, 1):
            writer.write({"__key__": f"{path.stem}_{count - 1:06d}", **members})
    return count
