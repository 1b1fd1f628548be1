"""Storage that is gone, hangs or loses power, when a checkpoint is written."""

import os
import shutil
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from infcl.checkpoint import write as checkpoint_writer
from infcl.checkpoint.run_folder import RunFolder, why_not_written
from tests.lib.manifests import writer_on
from tests.lib.ranks import run_ranks


def saved_to_storage_that_hangs_or_is_gone(rank, world_size, folder) -> list[str]:
    """Of four checkpoints the first finds no folder on rank 1, the third takes both ranks longer than they are patient,
    the last does not end on rank 1; what is reported of the first and the last."""
    run, released, said = RunFolder(folder / "run"), threading.Event(), []
    writer = writer_on(run, rank, world_size, patience=5)

    def write(path, *content):
        time.sleep(6 * (writer.begun_step == 3))
        assert rank == 0 or writer.begun_step != 4 or released.wait(60)
        path.write_bytes(b"")
        return {}

    with (
        mock.patch.object(checkpoint_writer, "_own_tensors", lambda *_: {}),
        mock.patch.object(checkpoint_writer, "_write_tensors", write),
    ):
        if rank == 1:
            writer.run = RunFolder(folder / "unmounted" / "run")
        writer.begin(1, {})
        assert writer.publish() is None
        said.append(writer.problem)
        writer.run = run
        writer.begin(2, {})
        assert writer.publish() is not None
        writer.begin(3, {})
        assert writer.publish() is not None
        writer.begin(4, {})
        with pytest.raises(checkpoint_writer.StorageHangs) as hangs:
            writer.publish()
        released.set()
        assert not (folder / "unmounted").exists()
    return [*said, str(hangs.value)]


def test_storage_that_is_gone_or_hangs_on_one_host_is_named_with_it_and_written_to_no_more(tmp_path):
    for gone, hangs in run_ranks(saved_to_storage_that_hangs_or_is_gone, 2, tmp_path):
        assert gone == "rank 1 on worker-2: No such file or directory"
        assert "checkpoints hangs (rank 1 on worker-2: still writes after 5 s)" in hangs
        assert hangs.endswith("; --resume latest continues from step_00000003")


def rank_0_waits_for_its_disk(rank, world_size, folder, where: str) -> str:
    """What is reported where rank 0 hears nothing of the disk, when a second checkpoint is begun or published."""
    run, released = RunFolder(folder / where), threading.Event()
    writer = writer_on(run, rank, world_size, patience=2)
    with mock.patch.object(checkpoint_writer, "_own_tensors", lambda *_: {}):
        writer.begin(1, {})
        assert writer.publish() is not None
        (run.checkpoints / "step_00000000.partial").mkdir(exist_ok=True)
        call = {"begin": "shutil.rmtree", "publish": "os.replace"}[where]
        with (
            mock.patch(call, lambda *_, **__: released.wait(60)),
            pytest.raises(checkpoint_writer.StorageHangs) as hangs,
        ):
            writer.begin(2, {})
            assert where == "publish"
            writer.publish()
        released.set()
    return str(hangs.value)


@pytest.mark.parametrize("where", ["begin", "publish"])
def test_a_disk_on_which_rank_0_hangs_alone_ends_all_with_its_host(tmp_path, where):
    for said in run_ranks(rank_0_waits_for_its_disk, 2, tmp_path, where):
        assert "checkpoints hangs (rank 0 on worker-1: no answer for 2 s)" in said
        assert said.endswith("; --resume latest continues from step_00000001")


def order_on_the_disk(rank, world_size, folder) -> list[str]:
    """What is flushed, renamed and removed, in order, while step 2 is saved over a damaged one of the same step."""
    run, done = RunFolder(folder / "run"), []
    for step in (1, 2):
        (run.checkpoints / f"step_{step:08d}").mkdir(parents=True)
        (run.checkpoints / f"step_{step:08d}" / "infcl.json").write_text("{}")
    writer = writer_on(run, keep_last=1)
    fsync, replace, rename, rmtree = os.fsync, os.replace, os.rename, shutil.rmtree

    def name(path) -> str:
        return str(Path(path).relative_to(run.root))

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
    assert why_not_written(failed.value) == "No such file or directory"
