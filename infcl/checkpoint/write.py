"""Writing checkpoints during training.

`begin` copies this rank's share of the state to host memory, which is all that the step waits for; a thread writes it
to the disk. When every rank's thread is done, `publish` writes the manifest and moves the checkpoint into place. The
caller has the ranks agree on when that is, since publishing is collective.

A checkpoint is written under a temporary name, flushed to the disk with its folder, and renamed when complete; the
rename is flushed before `latest` moves and older checkpoints are removed. A crash in between leaves the previous one
untouched, and a partial folder that the next one removes.

    full disk       the failed checkpoint is reported and removed, and training continues; after too many in a row the
                    trainer stops the run
    disk unmounted  nothing is written to the empty folder in its place: `checkpoints` is created once, at the start
    disk hangs      on some nodes, or for rank 0's renames: the run stops after `patience` seconds
    disk is slow    for all ranks: all wait
"""

import contextlib
import json
import logging
import math
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from infcl.checkpoint.load import PARTIAL, checkpoint_step, complete_checkpoints, prune_checkpoints
from infcl.checkpoint.manifest import FORMAT, MANIFEST, file_metadata, sealed
from infcl.checkpoint.run_folder import FolderTaken, RunFolder, sha256, sync_folder, why_not_written, write_atomic
from infcl.engine.engine import Engine
from infcl.parallel import Parallel, from_first_rank, rank_and_host

log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")


class StorageHangs(RuntimeError):
    """A rank's writing thread hangs. An exit that waits for threads, as after other exceptions, would hang too."""


class CheckpointWriter:
    """One checkpoint at a time.

    Attributes (the same on every rank):
        begun_step: step of the last checkpoint begun that did not fail.
        newest: the last one published.
        failed: how many could not be written.
        failed_in_a_row: of these, how many since the newest.
        problem: why the last one could not.
        patience: seconds that some ranks may still write when others have written, and that rank 0 may take alone.
    """

    def __init__(
        self,
        engine: Engine,
        run: RunFolder,
        parallel: Parallel,
        *,
        keep_last: int,
        keep_every: int,
        patience: float = math.inf,
    ):
        self.engine, self.run, self.parallel, self.patience = engine, run, parallel, patience
        self.keep = {"keep_last": keep_last, "keep_every": keep_every}
        self.failed = self.failed_in_a_row = 0
        self.problem = ""
        self.newest: Path | None = None
        self.begun_step: int | None = None
        self._damaged: set[str] = set()  # on rank 0
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> bool:
        """A checkpoint was begun and is not published; the same on every rank."""
        return self._thread is not None

    @property
    def busy(self) -> bool:
        """This rank is still writing."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def hint(self) -> str:
        """From where the run would continue, for messages."""
        return f"--resume latest continues from {self.newest.name}" if self.newest else "no checkpoint is written yet"

    def continue_from(self, checkpoint: Path, step: int) -> None:
        """Note that the run continues from this checkpoint; later ones of its folder are damaged and do not count."""
        self.begun_step = step
        if checkpoint.resolve().parent == self.run.checkpoints.resolve():
            self.newest = checkpoint
            if self.parallel.rank == 0:
                self._damaged = {p.name for p in complete_checkpoints(self.run) if checkpoint_step(p) > step}

    def begin(self, step: int, state: dict, *, prunes: bool = True) -> None:
        """Start checkpoints/step_<step>; an earlier one is published first. Collective; raises what `publish` does.

        Args:
            state: what the trainer needs to continue (step, data position, ...), JSON-able.
            prunes: remove older checkpoints when this one is written.
        """
        self.publish()
        self._prunes = prunes
        self.begun_step = step
        self._final = self.run.checkpoints / f"step_{step:08d}"
        self._partial = self._final.with_name(self._final.name + PARTIAL)
        self._manifest = {
            "format": FORMAT,
            "run": self.run.root.name,
            "counters": self.engine.counters(),
            "optimizer": self.engine.optimizer_name,
            "zero_stage": self.engine.zero_stage,
            "world_size": self.parallel.world_size,
            "trainer": state,
        }
        own = _own_tensors(self.engine, self.parallel)
        self._on_rank_0(self._remove_parts)
        self._written: dict | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, args=(own, step), name="checkpoint")
        self._thread.start()

    def publish(self) -> Path | None:
        """Wait for the writing and move the checkpoint into place; None if there is none or it failed. Collective.

        Raises:
            FolderTaken: on all ranks, another process has begun to train in the folder.
            StorageHangs: on all ranks, some still write after `patience` and others do not.
        """
        if self._thread is None:
            return None
        hangs = self._still_writes()
        self._thread = None
        if self._error is not None and not isinstance(self._error, OSError):
            raise self._error
        why = why_not_written(self._error) if self._error is not None else ""
        if hangs:
            why = f"still writes after {self.patience:.0f} s"
        problem = f"{rank_and_host(self.parallel)}: {why}" if why else None
        answers: list = [None] * self.parallel.world_size
        dist.all_gather_object(answers, (_file_name(self.parallel.rank), self._written, problem, hangs))
        problems = _in_words([answer[2] for answer in answers if answer[2]])
        if any(answer[3] for answer in answers):
            raise StorageHangs(f"the storage of {self.run.checkpoints} hangs ({problems}); {self.hint}")
        manifest = self._manifest | {"files": {name: written for name, written, *_ in answers}}
        taken_by, problem = self._on_rank_0(lambda: self._move_into_place(manifest, problems))
        if taken_by is not None:
            raise FolderTaken(
                f"{self.run.root} is trained by {taken_by} since: this run ends, and leaves the folder to it"
            )
        if problem:
            self.failed, self.failed_in_a_row = self.failed + 1, self.failed_in_a_row + 1
            self.begun_step, self.problem = None, problem
            if self.parallel.rank == 0:
                log.warning("%s could not be written (%s); training continues", self._final.name, problem)
            return None
        self.newest, self.failed_in_a_row = self._final, 0
        return self._final

    def _move_into_place(self, manifest: dict, problem: str) -> tuple[str | None, str]:
        """Return (who has taken the folder, why there is no checkpoint); remove a failed checkpoint. Rank 0."""
        if other := self.run.taken_by():
            return other, problem
        problem = problem or _publish(self._partial, self._final, manifest, self.run) or ""
        if problem:
            shutil.rmtree(self._partial, ignore_errors=True)
        elif self._prunes:
            self.prune(self._final)
        return None, problem

    def _remove_parts(self) -> None:
        """Remove what killed runs have left, of any step. Rank 0."""
        with contextlib.suppress(OSError):  # what fails here fails the writing too
            for left in self.run.checkpoints.glob(f"step_*{PARTIAL}"):
                shutil.rmtree(left, ignore_errors=True)

    def _on_rank_0(self, work: Callable[[], _Answer]) -> _Answer:
        """What `work` returns on rank 0, on all ranks; StorageHangs if it takes longer than `patience`. Collective."""
        return from_first_rank(work if self.parallel.world_size == 1 else lambda: self._within_patience(work))

    def _within_patience(self, work: Callable[[], _Answer]) -> _Answer:
        """Run the work in a thread, which is abandoned after `patience`."""
        done: Future = Future()
        threading.Thread(target=_do, args=(work, done), name="checkpoint, rank 0", daemon=True).start()
        try:
            return done.result(None if self.patience == math.inf else self.patience)
        except NotInTime:
            why = f"{rank_and_host(self.parallel)}: no answer for {self.patience:.0f} s"
            raise StorageHangs(f"the storage of {self.run.checkpoints} hangs ({why}); {self.hint}") from None

    def _still_writes(self) -> bool:
        """Wait until all ranks have written, or `patience` where some have; whether this one has not. Collective."""
        assert self._thread is not None, "begun"
        while True:
            self._thread.join(None if self.patience == math.inf else self.patience)
            writing = [None] * self.parallel.world_size
            dist.all_gather_object(writing, self._thread.is_alive())
            if not all(writing):
                return self._thread.is_alive()

    def prune(self, written: Path) -> None:
        """Remove old checkpoints after this new one. Rank 0."""
        self._damaged.discard(written.name)
        prune_checkpoints(self.run, **self.keep, damaged=self._damaged)

    def _write(self, own: dict[str, torch.Tensor], step: int) -> None:
        try:
            self._partial.mkdir(exist_ok=True)
            file, about = self._partial / _file_name(self.parallel.rank), file_metadata(self.run.root.name, step)
            self._written = _write_tensors(file, own, about)
        except BaseException as error:  # raised again in publish, on the main thread
            self._error = error


def _do(work: Callable[[], object], done: Future) -> None:
    try:
        done.set_result(work())
    except BaseException as error:  # raised again on the main thread
        done.set_exception(error)


def _in_words(problems: list[str]) -> str:
    return f"{problems[0]}, and {len(problems) - 1} more" if len(problems) > 1 else "".join(problems)


def _file_name(rank: int) -> str:
    return f"state_{rank:05d}.safetensors"


def _own_tensors(engine: Engine, parallel: Parallel) -> dict[str, torch.Tensor]:
    """This rank's share: every world_size-th parameter, on the CPU. All ranks take part in reading each."""
    own = {}
    for index, (name, parameter) in enumerate(engine.state.parameters()):
        for key in (None, *engine.state.keys(parameter)):
            value = engine.state.read(parameter, key)
            if index % parallel.world_size == parallel.rank:
                own[f"{key or 'model'}/{name}"] = value.to("cpu", copy=True).contiguous()
    if parallel.rank == 0:  # as fp32, which holds a count of batches up to 2^24
        own |= {f"model/{name}": value.to("cpu", torch.float32, copy=True) for name, value in engine.state.buffers()}
    return own


def _write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> dict:
    """Write, flush, and describe: {"bytes": n, "sha256": hex}. OSError when the disk does not take it."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:  # its own type for a failed write
        raise OSError(str(error)) from error
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def _publish(partial: Path, final: Path, manifest: dict, run: RunFolder) -> str | None:
    """Write the manifest, rename the folder, move `latest`; return the reason when that fails. Rank 0.

    Each is on the disk before the next begins, as the tensor files are before all of it: a power cut leaves this
    checkpoint or the one before it, which is removed only afterwards.
    """
    try:
        write_atomic(partial / MANIFEST, json.dumps(sealed(manifest), indent=2) + "\n")
        damaged = final.with_name(f"{final.name}.damaged{PARTIAL}")  # one that the run could not continue from
        if final.exists():
            os.replace(final, damaged)
        os.replace(partial, final)
        sync_folder(run.checkpoints)
        shutil.rmtree(damaged, ignore_errors=True)
        write_atomic(run.checkpoints / "latest", final.name + "\n")
    except OSError as error:
        return why_not_written(error)
    return None
