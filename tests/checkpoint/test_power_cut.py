"""A power cut at any moment of a save leaves an intact checkpoint: ext4 in an image file, copied around each call."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from infcl.checkpoint import write as checkpoint_writer
from infcl.checkpoint.load import newest_intact, weights_of
from infcl.checkpoint.run_folder import RunFolder
from tests.lib.manifests import trainer_state_of, writer_on
from tests.lib.ranks import run_ranks


@contextlib.contextmanager
def mounted(image: Path, folder: Path) -> Iterator[Path]:
    """The file system of an image file, in this folder; skips the test where it cannot be mounted."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-o", "loop", image, folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs root and loop devices ({done.stderr.strip()})")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def saved_with_cuts(rank, world_size, image: Path, disk: Path, commits: bool) -> int:
    """Save steps 1, 2 and 3, each in place of the one before; after the first, copy the image around each call.

    Args:
        commits: whether ext4 commits its journal before each copy, as it does every 5 s: names and removals are then
            on the disk, and contents only where they were flushed.

    Returns:
        The number of copies, IMAGE.0, IMAGE.1, ...
    """
    run, calls = RunFolder(disk / "run"), {"copies": 0}
    writer = writer_on(run, keep_last=1)
    fsync = os.fsync

    def cut() -> None:
        if commits:
            with open(disk / "other", "w") as other:
                other.write(str(calls["copies"]))
                other.flush()
                fsync(other.fileno())
        shutil.copyfile(image, f"{image}.{calls['copies']}")
        calls["copies"] += 1

    def cut_around(call):
        def cut_then_call(*arguments, **options):
            cut()
            result = call(*arguments, **options)
            cut()
            return result

        return cut_then_call

    for step in (1, 2, 3):
        tensors = {"model/a": torch.full((50_000,), float(step))}
        with contextlib.ExitStack() as patches:
            patches.enter_context(mock.patch.object(checkpoint_writer, "_own_tensors", lambda *_, own=tensors: own))
            for name in ("os.fsync", "os.replace", "os.rename", "shutil.rmtree") if step > 1 else ():
                owner, attribute = {"os": os, "shutil": shutil}[name.split(".")[0]], name.split(".")[1]
                patches.enter_context(mock.patch(name, cut_around(getattr(owner, attribute))))
            writer.begin(step, trainer_state_of(step))
            assert writer.publish() is not None
    return calls["copies"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mkfs.ext4") is None, reason="needs mkfs.ext4")
@pytest.mark.parametrize("commits", [False, True])
def test_a_power_cut_at_any_moment_of_a_save_leaves_an_intact_checkpoint(tmp_path, commits):
    image = tmp_path / "disk"
    with open(image, "wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    with mounted(image, tmp_path / "mounted") as disk:
        copies = run_ranks(saved_with_cuts, 1, image, disk, commits)[0]
    assert copies >= 20
    steps = []
    for number in range(copies):
        with mounted(Path(f"{image}.{number}"), tmp_path / "after") as disk:
            path, manifest = newest_intact(disk / "run")
            step = manifest["trainer"]["step"]
            assert (weights_of(path, manifest)["a"] == step).all()
            steps.append(step)
        os.remove(f"{image}.{number}")
    assert steps == sorted(steps) and steps[0] == 1 and steps[-1] == 3
