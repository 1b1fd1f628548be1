"""Storage that is gone or loses power, when a checkpoint is written."""

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


def saved_to_storage_that_is_gone(rank, world_size, folder) -> str:
    """Of two checkpoints the first finds no folder on rank 1; return what is reported of it."""
    run = RunFolder(folder / "run")
    writer = writer_on(run, rank, world_size)
    with mock.patch.object(checkpoint_writer, "_own_tensors", lambda *_: {}):
        if rank == 1:
            writer.run = RunFolder(folder / "unmounted" / "run")
        writer.begin(1, {})
        assert writer.publish() is None
        said, writer.run = writer.problem, run
        writer.begin(2, {})
        assert writer.publish() is not None
        assert not (folder / "unmounted").exists()
    return said


def test_storage_that_is_gone_on_one_host_is_named_with_it_and_written_to_no_more(tmp_path):
    for said in run_ranks(saved_to_storage_that_is_gone, 2, tmp_path):
        assert said == "rank 1 on worker-2: No such file or directory"


def a_write_without_memory(rank, world_size, folder) -> str:
    """The problem that the writer reports where rank 1 has no memory for its file."""
    writer = writer_on(RunFolder(folder / "run"), rank, world_size)

    def write(*_):
        if rank == 1:
            raise MemoryError("no 8 GB")
        return {}

    with (
        mock.patch.object(checkpoint_writer, "_own_tensors", lambda *_: {}),
        mock.patch.object(checkpoint_writer, "_write_tensors", write),
    ):
        writer.begin(1, {})
        assert writer.publish() is None
    return writer.problem


def test_an_error_of_any_kind_in_one_writer_reaches_all_ranks(tmp_path):
    reported = "rank 1 on worker-2: MemoryError: no 8 GB"
    assert run_ranks(a_write_without_memory, 2, tmp_path) == [reported, reported]


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
