"""Count the samples of shards by the files next to them, without opening one: for the streaming reader.

Looked for in this order for each local shard: its index (`SHARD.tar.infcl.idx`); `sizes.json` in its folder
({file: number}); img2dataset's `SHARD_stats.json` ("successes"); img2dataset's `SHARD.parquet` (rows with status
"success"; needs pyarrow). Else, for a whole folder: `__len__`, a file that holds the number.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from infcl.data.index import SIDECAR
from infcl.data.storage import ShardFault, is_remote, open_regular

_MAX_BYTES = 64 << 20  # of a file that tells


def known_samples(shards: Sequence[str]) -> int | None:
    """The number of samples in all `shards`, or None when nothing tells."""
    paths = [Path(shard) for shard in shards]
    if any(is_remote(shard) for shard in shards):
        return None
    sizes = {folder: _json(folder / "sizes.json") for folder in {path.parent for path in paths}}
    total = 0
    for path in paths:
        count = _of_shard(path, sizes[path.parent])
        if count is None:
            return _whole_folder(paths)
        total += count
    return total


def _of_shard(path: Path, sizes: dict) -> int | None:
    stem = str(path).removesuffix(".tar")
    found = (
        _json(Path(f"{path}{SIDECAR}"), first_line=True).get("samples"),
        sizes.get(path.name),
        _json(Path(f"{stem}_stats.json")).get("successes"),
    )
    count = next((int(n) for n in found if isinstance(n, (int, float)) or (isinstance(n, str) and n.isdigit())), None)
    return count if count is not None else _rows(Path(f"{stem}.parquet"))


def _json(path: Path, *, first_line: bool = False) -> dict:
    try:
        with open(path, "rb", opener=open_regular) as file:
            value = json.loads(file.readline(_MAX_BYTES) if first_line else file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError, ShardFault):
        return {}
    return value if isinstance(value, dict) else {}


def _rows(path: Path) -> int | None:
    if not path.exists():
        return None
    try:
        from pyarrow import ArrowException, compute, parquet
    except ImportError:
        return None
    try:
        status = parquet.read_table(path, columns=["status"])["status"]
        return int(compute.sum(compute.equal(status, "success")).as_py() or 0)
    except (ArrowException, OSError, KeyError):
        return None


def _whole_folder(paths: list[Path]) -> int | None:
    """The number in `__len__`, where the shards are all that their one folder holds."""
    folder = paths[0].parent
    if any(path.parent != folder for path in paths) or len(set(paths)) != len(list(folder.glob("*.tar"))):
        return None
    try:
        with open(folder / "__len__", "rb", opener=open_regular) as file:
            return int(file.read(_MAX_BYTES).strip() or "x")
    except (OSError, ValueError, ShardFault):
        return None
