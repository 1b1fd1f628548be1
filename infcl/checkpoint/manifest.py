"""The manifest of a checkpoint, infcl.json: its content, and the checks against damage.

Format 3 has a checksum of the manifest itself. It also has a run and a step, which the metadata of each tensor file
must repeat. Format 2 has neither: its manifests are checked by schema, and its files by size and checksum. A checksum
detects damaged and mixed-up files; it is not a signature.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from infcl.checkpoint.run_folder import sha256, why_not_written

MANIFEST = "infcl.json"
FORMAT = 3  # version of infcl.json and the files it lists
CHECKPOINT_NAME = re.compile(r"step_\d{8,}")
_UNSEALED_FORMAT = 2
_TENSOR_FILE = re.compile(r"state_[0-9]{5,}\.safetensors")
_MISSING = object()
_MAX_BYTES = 1 << 28  # limit of a manifest; tens of thousands of ranks need a few MB


class DamagedCheckpoint(ValueError):
    """The files of a checkpoint differ from those that were written."""


def sealed(manifest: dict) -> dict:
    """Return the manifest with its own checksum added, as format 3 requires."""
    written = json.loads(json.dumps(manifest))
    return {**written, "sha256": _checksum(written)}


def file_metadata(run: str, step: int) -> dict[str, str]:
    """Return the metadata of a tensor file: the run that wrote it, and the step."""
    return {"run": run, "step": str(step)}


def read_manifest(path: Path) -> dict:
    """Read the manifest of a checkpoint folder and check it.

    Raises:
        FileNotFoundError: the folder has no manifest.
        DamagedCheckpoint: the manifest is damaged.
    """
    if not (path / MANIFEST).is_file():
        raise FileNotFoundError(path / MANIFEST)
    try:
        if (path / MANIFEST).stat().st_size > _MAX_BYTES:
            raise DamagedCheckpoint(f"{MANIFEST} has more than {_MAX_BYTES >> 20} MiB")
        manifest = json.loads((path / MANIFEST).read_bytes())
        checksum = _checksum(manifest) if isinstance(manifest, dict) else None
    except OSError as error:
        raise DamagedCheckpoint(f"{MANIFEST} cannot be read ({why_not_written(error)})") from None
    except DamagedCheckpoint:
        raise
    except (ValueError, RecursionError):
        raise DamagedCheckpoint(f"{MANIFEST} is damaged") from None
    if not isinstance(manifest, dict) or manifest.get("format") not in (FORMAT, _UNSEALED_FORMAT):
        raise DamagedCheckpoint(f"{MANIFEST} is not of format {FORMAT} or {_UNSEALED_FORMAT}")
    if (manifest["format"] == FORMAT or "sha256" in manifest) and manifest.get("sha256") != checksum:
        raise DamagedCheckpoint(f"{MANIFEST} has another checksum than was written")
    for name, is_right in (_SEALED_SCHEMA if manifest["format"] == FORMAT else _SCHEMA).items():
        if not is_right(_at(manifest, name)):
            raise DamagedCheckpoint(f"{MANIFEST} is damaged: {name} is missing or not what a checkpoint has there")
    if len(manifest["files"]) != manifest["world_size"]:
        raise DamagedCheckpoint(f"{MANIFEST} lists {len(manifest['files'])} files of {manifest['world_size']} ranks")
    step = manifest["trainer"]["step"]
    if CHECKPOINT_NAME.fullmatch(path.name) and int(path.name.removeprefix("step_")) != step:
        raise DamagedCheckpoint(f"{MANIFEST} is of step {step}")
    return manifest


def check_file(path: Path, name: str, manifest: dict) -> list[str]:
    """Check a tensor file that the manifest lists.

    Returns:
        The names of its tensors.

    Raises:
        DamagedCheckpoint: the file is missing or damaged.
    """
    expected, file = manifest["files"][name], path / name
    try:
        if not file.exists():
            raise DamagedCheckpoint(f"{name} is missing")
        if not file.is_file() or file.resolve().parent != path.resolve():
            raise DamagedCheckpoint(f"{name} is not a file of this folder")
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise DamagedCheckpoint(f"{name} has {size} bytes, {expected['bytes']} were written")
        if sha256(file) != expected["sha256"]:
            raise DamagedCheckpoint(f"{name} has another checksum than was written")
        return _check_header(file, manifest)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise DamagedCheckpoint(f"{name} cannot be read ({why_not_written(error)})") from None


def check_names(names: Iterable[str]) -> None:
    """Raise DamagedCheckpoint if two tensors of a checkpoint have the same name."""
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise DamagedCheckpoint(f"{len(repeated)} tensors are in more than one file, {min(repeated)} first")


# ---- helpers ----


def _checksum(manifest: dict) -> str:
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _check_header(file: Path, manifest: dict) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as tensors:
            names, about = list(tensors.keys()), tensors.metadata() or {}
            dtypes = {name: tensors.get_slice(name).get_dtype() for name in names}
    except SafetensorError as error:
        raise DamagedCheckpoint(f"{file.name} is no safetensors file ({error})") from None
    if manifest["format"] == FORMAT:
        expected = file_metadata(manifest["run"], manifest["trainer"]["step"])
        if wrong := [key for key, value in expected.items() if about.get(key) != value]:
            raise DamagedCheckpoint(
                f"{file.name} is of {wrong[0]} {about.get(wrong[0])}, not of {wrong[0]} {expected[wrong[0]]}"
            )
    for name, dtype in dtypes.items():
        if dtype != "F32":
            raise DamagedCheckpoint(f"{file.name}: tensor {name} has dtype {dtype}, not F32")
    return names


def _at(manifest: dict, name: str) -> Any:
    """Return the value at the path "a.b" of nested objects, or _MISSING."""
    value: Any = manifest
    for key in name.split("."):
        value = value.get(key, _MISSING) if isinstance(value, dict) else _MISSING
    return value


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < float(1 << 63)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_counters(counters: object) -> bool:
    return isinstance(counters, dict) and all(_is_number(value) for value in counters.values())


def _are_files(files: object) -> bool:
    """Return whether every entry has a name that the writer uses (no path to another folder), a size and a checksum."""
    return isinstance(files, dict) and bool(files) and all(map(_is_file_entry, files.items()))


def _is_file_entry(item: tuple[str, object]) -> bool:
    name, about = item
    if not (_TENSOR_FILE.fullmatch(name) and isinstance(about, dict) and _is_count(about.get("bytes"))):
        return False
    return isinstance(about.get("sha256"), str) and re.fullmatch("[0-9a-f]{64}", about["sha256"]) is not None


def _or_missing(is_right: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is _MISSING or is_right(value)


def _are_graphs(graphs: object) -> bool:
    """Return whether the value is what train/resident.py stores: {}, or the kept graphs and the batch sizes."""
    if not isinstance(graphs, dict):
        return False
    of = graphs.get("of")
    return not graphs or (_is_count(graphs.get("kept")) and isinstance(of, list) and all(map(_is_count, of)))


_SCHEMA: dict[str, Callable[[object], bool]] = {
    "files": _are_files,
    "optimizer": _is_text,
    "world_size": _is_count,
    "counters": _are_counters,
    "counters.global_steps": _is_count,
    "counters.global_samples": _is_count,
    "counters.micro_steps": _is_count,
    "counters.skipped_steps": _is_count,
    "counters.optimizer_step": _is_number,
    "trainer.step": _is_count,
    "trainer.samples_seen": _is_count,
    "trainer.skipped_steps": _is_count,
    "trainer.skipped_in_a_row": _or_missing(_is_count),
    "trainer.train_seconds": _is_number,
    "trainer.graphs": _or_missing(_are_graphs),
    "trainer.loader.epoch": _is_count,
    "trainer.loader.step": _is_count,
}
_SEALED_SCHEMA = {**_SCHEMA, "run": _is_text}
