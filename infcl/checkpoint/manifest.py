"""The manifest of a checkpoint, infcl.json: its checksum, and the size and SHA-256 of each tensor file.

The checksum covers the manifest, so any change of a checkpoint is found. It is not a signature.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infcl.checkpoint.records import Manifest
from infcl.checkpoint.run_folder import sha256
from infcl.config.json_file import parse_record
from infcl.config.words import reason

MANIFEST = "infcl.json"
FORMAT = 3  # version of infcl.json and the files it lists
CHECKPOINT_NAME = re.compile(r"step_\d{8,}")


class DamagedCheckpoint(ValueError):
    """The files of a checkpoint differ from those that were written."""


def sealed(manifest: dict) -> dict:
    """Return the manifest with its own checksum added."""
    written = json.loads(json.dumps(manifest))
    return {**written, "sha256": _checksum(written)}


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint folder and check it.

    Raises:
        DamagedCheckpoint: the folder has no manifest, or a damaged one.
    """
    file = path / MANIFEST
    if not file.is_file():
        missing = f"{MANIFEST} is missing" if path.is_dir() else "there is no such folder"
        raise DamagedCheckpoint(f"no checkpoint of this trainer ({missing}); one is RUN/checkpoints/step_NUMBER")
    try:
        data = file.read_bytes()
        step = parse_record(data, Manifest, MANIFEST)["trainer"]["step"]
        manifest: Manifest = json.loads(data)  # with all keys, which the checksum covers
    except OSError as error:
        raise DamagedCheckpoint(f"{MANIFEST} cannot be read ({reason(error)})") from None
    except ValueError as error:
        raise DamagedCheckpoint(str(error)) from None
    if manifest["sha256"] != _checksum(manifest):
        raise DamagedCheckpoint(f"{MANIFEST} has another checksum than was written")
    if CHECKPOINT_NAME.fullmatch(path.name) and int(path.name[5:]) != step:
        raise DamagedCheckpoint(f"{MANIFEST} is of step {step}")
    return manifest


def check(path: Path, *, rank: int = 0, world_size: int = 1) -> Manifest:
    """Check the manifest, and every `world_size`-th tensor file from the `rank`-th on; return the manifest.

    Raises:
        DamagedCheckpoint: a file is missing or damaged.
    """
    manifest = read_manifest(path)
    for name in sorted(manifest["files"])[rank::world_size]:
        expected, file = manifest["files"][name], path / name
        try:
            if not file.is_file():
                raise DamagedCheckpoint(f"{name} is missing")
            if file.resolve().parent != path.resolve():
                raise DamagedCheckpoint(f"{name} is not a file of this folder")
            if (size := file.stat().st_size) != expected["bytes"]:
                raise DamagedCheckpoint(f"{name} has {size} bytes, {expected['bytes']} were written")
            if sha256(file) != expected["sha256"]:
                raise DamagedCheckpoint(f"{name} has another checksum than was written")
            _check_tensors(file)
        except OSError as error:
            raise DamagedCheckpoint(f"{name} cannot be read ({reason(error)})") from None
    return manifest


def _check_tensors(file: Path) -> None:
    """Raise DamagedCheckpoint if a file whose checksum is right does not hold FP32 tensors of the form KIND/NAME."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():
                if "/" not in key or tensors.get_slice(key).get_dtype() != "F32":
                    raise DamagedCheckpoint(f"{file.name} has a tensor {key!r} that this trainer does not write")
    except SafetensorError as error:
        raise DamagedCheckpoint(f"{file.name} is no safetensors file ({error})") from None


def _checksum(manifest: Mapping[str, Any]) -> str:
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
