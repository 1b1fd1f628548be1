"""Storage that is gone or loses power, when a checkpoint is written."""

import errno
import os
import re
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch

from infcl.checkpoint import write as checkpoint_writer
from infcl.checkpoint.run_folder import RunFolder
from infcl.config.words import reason
from tests.lib.manifests import writer_on
from tests.lib.ranks import run_ranks


def failed_saves(rank, world_size, folder) -> list[str]:
    """Return what is reported of three checkpoints, which fail for want of memory and of a folder on rank 1, and of
    room for the renamed folder on rank 0; a fourth one is written."""
    run, write, problems = RunFolder(folder / "run"), checkpoint_writer._write_tensors, []
    writer, replace = writer_on(run, rank, world_size), os.replace

    def replace_or_fail(source, target):
        if Path(target).name == "step_00000003":
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        replace(source, target)

    def write_or_fail(path, *content):
        if rank == 1 and "step_00000001" in str(path):
            raise MemoryError("no 8 GB")
        return write(path, *content)

    with (
        mock.patch.object(checkpoint_writer, "_own_tensors", lambda *_: {}),
        mock.patch.object(checkpoint_writer, "_write_tensors", write_or_fail),
        mock.patch("os.replace", replace_or_fail),
    ):
        for step in (1, 2, 3, 4):
            writer.run = RunFolder(folder / "unmounted" / "run") if (rank, step) == (1, 2) else run
            writer.begin(step, {})
            assert (writer.publish() is None) == (step < 4)
            problems.append(writer.problem)
    assert not (folder / "unmounted").exists() and writer.failed == 3 and writer.failed_in_a_row == 0
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["latest", "step_00000004"]
    return problems[:3]


def test_an_error_of_any_kind_on_one_host_reaches_all_ranks_with_its_name(tmp_path):
    reported = [f"rank 1 on worker-2: {error}" for error in ("MemoryError: no 8 GB", "No such file or directory")]
    reported.append("Disk quota exceeded")
    assert run_ranks(failed_saves, 2, tmp_path) == [reported, reported]


def order_on_the_disk(rank, world_size, folder) -> list[str]:
    """What is flushed, renamed and removed, in order, while step 2 is saved over a damaged one of the same step."""
    run, done = RunFolder(folder / "run"), []
    for step in (1, 2):
        (run.checkpoints / f"step_{step:08d}").mkdir(parents=True)
        (run.checkpoints / f"step_{step:08d}" / "infcl.json").write_text("{}")
    writer = writer_on(run, keep_last=1)
    fsync, replace, rename, rmtree = os.fsync, os.replace, os.rename, shutil.rmtree

    def name(path) -> str:
        return re.sub(r"\.[0-9a-f]{8}\.tmp$", ".tmp", str(Path(path).relative_to(run.root)))

    def record(what, call, named, *arguments, **options):
        done.append(" ".join([what, *map(name, named)]))
        return call(*arguments, **options)

    with (
        mock.patch.object(checkpoint_writer, "_own_tensors", lambda *_: {"model/a": torch.zeros(2)}),
        mock.patch("os.fsync", lambda fd: record("fsync", fsync, [os.readlink(f"/proc/self/fd/{fd}")], fd)),
        mock.patch("os.replace", lambda a, b: record("rename", replace, [a, b], a, b)),
        mock.patch("os.rename", lambda a, b: record("rename", rename, [a, b], a, b)),
        mock.patch("shutil.rmtree", lambda path, **options: record("remove", rmtree, [path], path, **options)),
    ):
        writer.begin(2, {})
        assert writer.publish() is not None
    return done


def test_a_checkpoint_is_on_the_disk_before_it_is_published_and_older_ones_are_removed_after_it(tmp_path):
    new, old = "checkpoints/step_00000002", "checkpoints/step_00000001"
    assert run_ranks(order_on_the_disk, 1, tmp_path)[0] == [
        f"fsync {new}.partial/state_00000.safetensors",
        f"fsync {new}.partial/infcl.json.tmp",
        f"rename {new}.partial/infcl.json.tmp {new}.partial/infcl.json",
        f"fsync {new}.partial",
        f"rename {new} {new}.damaged.partial",
        f"rename {new}.partial {new}",
        "fsync checkpoints",
        f"remove {new}.damaged.partial",
        "fsync checkpoints/latest.tmp",
        "rename checkpoints/latest.tmp checkpoints/latest",
        "fsync checkpoints",
        f"rename {old} {old}.partial",
        f"remove {old}.partial",
    ]


def test_a_failed_write_gives_the_systems_reason(tmp_path):
    """safetensors raises its own type, whose text has the number of the error."""
    with pytest.raises(FileNotFoundError) as failed:
        checkpoint_writer._write_tensors(tmp_path / "none" / "state.safetensors", {"a": torch.zeros(2)}, {})
    assert reason(failed.value) == "No such file or directory"
