"""Damaged and mixed-up manifests and tensor files: each is found, and the older checkpoint is taken."""

import copy
import json
import os
import random
import re
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from infcl.checkpoint.load import consolidated_state_dict, newest_intact
from infcl.checkpoint.manifest import DamagedCheckpoint, read_manifest, sealed
from infcl.checkpoint.run_folder import sha256
from tests.lib.manifests import manifest_of

RUN = "run"
FILES = ("state_00000.safetensors", "state_00001.safetensors")


def entry(file: Path) -> dict:
    return {"bytes": file.stat().st_size, "sha256": sha256(file)}


def write_manifest(folder: Path, manifest: dict) -> None:
    (folder / "infcl.json").write_text(json.dumps(manifest))


def write_checkpoint(run: Path, step: int) -> Path:
    folder = run / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    for number, name in enumerate(FILES):
        tensors = {"model": torch.full((4,), float(step)), "exp_avg": torch.full((4,), step + 0.1)}
        save_file({f"{kind}/{number}": tensor for kind, tensor in tensors.items()}, folder / name)
    write_manifest(folder, manifest_of(step, {name: entry(folder / name) for name in FILES}))
    return folder


@pytest.fixture
def run(tmp_path) -> Path:
    """Of two checkpoints, at steps 1 and 2."""
    for step in (1, 2):
        write_checkpoint(tmp_path / RUN, step)
    return tmp_path / RUN


def taken(run: Path) -> int:
    """The step of the checkpoint that is taken; its weights are those that were written."""
    step = newest_intact(run)[1]["trainer"]["step"]
    weights = consolidated_state_dict(run)
    assert {name: value[0].item() for name, value in weights.items()} == {"0": step, "1": step}
    return step


def leaves(value, at=()):
    yield at
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from leaves(inner, (*at, key))


def changed(manifest: dict, at: tuple, value) -> dict:
    """With another value there; with nothing, where it is ...."""
    manifest = copy.deepcopy(manifest)
    inside = manifest
    for key in at[:-1]:
        inside = inside[key]
    if value is ...:
        del inside[at[-1]]
    else:
        inside[at[-1]] = value
    return manifest


VALUES = (..., None, True, -1, 7, 2**70, 1.5, float("nan"), float("inf"), "x", "../x", [], [[]], {}, {"a": None})


def test_any_change_of_a_manifest_is_found(run):
    newest = run / "checkpoints" / "step_00000002"
    manifest = read_manifest(newest)
    cases = [(at, value) for at in leaves(manifest) if at for value in VALUES]
    assert len(cases) > 300
    for at, value in cases:
        write_manifest(newest, changed(manifest, at, value))
        with pytest.raises(DamagedCheckpoint):
            read_manifest(newest)
    assert taken(run) == 1


def test_texts_that_are_no_manifest_are_found(run):
    newest = run / "checkpoints" / "step_00000002"
    whole, random_numbers = (newest / "infcl.json").read_bytes(), random.Random(0)
    texts = [whole[:length] for length in range(0, len(whole) - 1, 7)]
    texts += [b"[" * 100_000, b'{"a":' * 100_000, b"null", b"[]", b"3", b'{"format": [3]}', b"9" * 5000, b"\xff\xfe"]
    texts += [b'{"format": 3, "a": ' + b"[" * 700 + b"]" * 700 + b"}"]
    for _ in range(150):
        position = random_numbers.randrange(len(whole))
        texts.append(whole[:position] + bytes([random_numbers.randrange(256)]) + whole[position + 1 :])
    for text in texts:
        (newest / "infcl.json").write_bytes(text)
        if newest_intact(run)[0] == newest:  # a byte that means the same
            assert json.loads(text) == json.loads(whole)
    (newest / "infcl.json").unlink()
    os.mkfifo(newest / "infcl.json")
    assert taken(run) == 1


def replaced(newest: Path, *, by) -> None:
    (newest / FILES[1]).unlink()
    by(newest / FILES[1])


def copied(newest: Path, name: str) -> None:
    shutil.copyfile(newest.with_name("step_00000001") / name, newest / name)


@pytest.mark.parametrize(
    ("mix_up", "message"),
    [
        (lambda newest: copied(newest, FILES[1]), "has another checksum than was written"),
        (lambda newest: copied(newest, "infcl.json"), "infcl.json is of step 1"),
        (lambda newest: replaced(newest, by=lambda file: file.write_bytes(b"x" * 100)), "has 100 bytes"),
        (lambda newest: replaced(newest, by=lambda file: file.symlink_to(FILES[1])), "is missing"),
        (lambda newest: replaced(newest, by=Path.mkdir), "is missing"),
    ],
    ids=["other step", "other manifest", "no safetensors", "link to itself", "folder"],
)
def test_tensor_files_that_are_not_those_of_the_checkpoint_are_found(run, caplog, mix_up, message):
    mix_up(run / "checkpoints" / "step_00000002")
    assert taken(run) == 1
    assert message in caplog.text


@pytest.mark.parametrize("name", ["../step_00000001/" + FILES[0], "/etc/hostname", "..", "", "a/b", "infcl.json"])
def test_names_stay_in_the_folder(run, caplog, name):
    newest = run / "checkpoints" / "step_00000002"
    manifest = read_manifest(newest)
    files = {name: manifest["files"][FILES[0]], FILES[1]: manifest["files"][FILES[1]]}
    write_manifest(newest, sealed(manifest | {"files": files}))
    assert taken(run) == 1
    assert re.search("is not a file of this folder|is missing|bytes", caplog.text)


def reseal(folder: Path, manifest: dict) -> None:
    """Write a manifest with the checksum that belongs to it."""
    write_manifest(folder, sealed({key: value for key, value in manifest.items() if key != "sha256"}))


RELIED_ON = [
    *[("trainer", name) for name in ("step", "samples_seen", "skipped_steps", "skipped_in_a_row", "train_seconds")],
    *[("trainer",), ("trainer", "loader"), ("trainer", "loader", "epoch"), ("trainer", "loader", "step")],
    *[("counters", name) for name in ("global_steps", "global_samples", "micro_steps", "skipped_steps")],
    *[("counters",), ("counters", "optimizer_step"), ("optimizer",), ("format",), ("files",)],
    *[("files", FILES[1]), ("files", FILES[1], "bytes"), ("files", FILES[1], "sha256")],
]


@pytest.mark.parametrize("at", RELIED_ON, ids=".".join)
def test_a_manifest_whose_fields_are_missing_or_of_wrong_types_is_damaged_whatever_its_checksum(run, caplog, at):
    newest = run / "checkpoints" / "step_00000002"
    manifest = read_manifest(newest)
    for value in (None, True, [], {}, "x" if at[-1] not in ("optimizer", "sha256") else 3, ...):
        if value is ... and at[-1] == FILES[1]:
            continue  # a checkpoint of one file less
        reseal(newest, changed(manifest, at, value))
        with pytest.raises(DamagedCheckpoint, match=at[-1]) as damage:
            read_manifest(newest)
        assert "\n" not in str(damage.value)
    assert taken(run) == 1


def tensors_of(entry: dict, data: bytes = bytes(16), name: str = "model/1") -> bytes:
    header = json.dumps({name: entry}).encode()
    return struct.pack("<Q", len(header)) + header + data


FLOATS = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
MALFORMED = {
    "empty": b"",
    "header that is no JSON": struct.pack("<Q", 4) + b"xxxx",
    "header of 100,000 levels": struct.pack("<Q", 500_000) + b'{"a":' * 100_000,
    "unknown dtype": tensors_of(FLOATS | {"dtype": "F99"}),
    "integers": tensors_of(FLOATS | {"dtype": "I64", "shape": [2]}),
    "offsets above the file": tensors_of(FLOATS | {"data_offsets": [0, 64]}),
    "shape that overflows": tensors_of(FLOATS | {"shape": [1 << 62, 1 << 62]}),
    "name without a kind": tensors_of(FLOATS, name="model"),
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED)
def test_malformed_tensor_files_are_damaged_whatever_the_manifest_says(run, caplog, content):
    newest = run / "checkpoints" / "step_00000002"
    (newest / FILES[1]).write_bytes(content)
    manifest = read_manifest(newest)
    reseal(newest, changed(manifest, ("files", FILES[1]), entry(newest / FILES[1])))
    assert taken(run) == 1
    assert re.search(f"step_00000002 is skipped: {FILES[1]} (is no safetensors file|has a tensor)", caplog.text)
