"""Write checkpoints in the background during training.

`begin` copies this rank's share of the state to host memory; the step waits only for this copy. A thread writes the
copy to the disk. When the threads of all ranks have finished, `publish` writes the manifest and renames the
checkpoint. Publishing is collective, so the caller makes the ranks agree on the step at which they publish.

A checkpoint is written under a temporary name, flushed with its folder, and renamed when complete. The rename is
flushed before `latest` changes and older checkpoints are removed, so a crash in between keeps the previous checkpoint.
`checkpoints` is created once, at the start, so that nothing is written to the empty mount point of a lost disk.
"""

import contextlib
import json
import logging
import os
import shutil
import threading
from concurrent.futures import Future, wait
from pathlib import Path

import torch

from infcl.checkpoint.load import checkpoint_step, complete_checkpoints
from infcl.checkpoint.manifest import FORMAT, MANIFEST, sealed
from infcl.checkpoint.run_folder import FolderTaken, RunFolder, sha256
from infcl.config.disk import save_tensors, sync_folder, write_atomic
from infcl.config.words import reason
from infcl.engine.engine import Engine
from infcl.parallel import Parallel, from_first_rank, gather_objects, rank_and_host

log = logging.getLogger(__name__)
PARTIAL = ".partial"  # suffix of a checkpoint that is being written or removed


class CheckpointWriter:
    """Checkpoint writer; handles one checkpoint at a time.

    Attributes (the same on every rank):
        begun_step: step of the last checkpoint that was begun; None if it failed.
        newest: the checkpoint that was published last.
        failed: number of checkpoints that could not be written.
        failed_in_a_row: number of failures since `newest`.
        problem: reason of the last failure.
    """

    def __init__(
        self,
        engine: Engine,
        run: RunFolder,
        parallel: Parallel,
        *,
        keep_last: int,
    ):
        self.engine, self.run, self.parallel = engine, run, parallel
        self.keep_last = keep_last
        self.failed = self.failed_in_a_row = 0
        self.problem = ""
        self.newest: Path | None = None
        self.begun_step: int | None = None
        self._damaged: set[str] = set()  # filled on rank 0 only
        self._writing: Future[dict] | None = None  # size and checksum of this rank's file

    @property
    def pending(self) -> bool:
        """Whether a checkpoint was begun and is not published yet; the same on every rank."""
        return self._writing is not None

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing."""
        return self._writing is not None and not self._writing.done()

    @property
    def hint(self) -> str:
        """The checkpoint from which the run would continue, for messages."""
        return f"--resume latest continues from {self.newest.name}" if self.newest else "no checkpoint is written yet"

    def continue_from(self, checkpoint: Path, step: int) -> None:
        """Record the checkpoint that the run resumed from. Later ones in the folder are damaged and do not count."""
        self.begun_step = step
        if checkpoint.resolve().parent == self.run.checkpoints.resolve():
            self.newest = checkpoint
            if self.parallel.rank == 0:
                self._damaged = {p.name for p in complete_checkpoints(self.run) if checkpoint_step(p) > step}

    def begin(self, step: int, state: dict, *, prunes: bool = True) -> None:
        """Begin to write checkpoints/step_<step>, after publishing an earlier one. Collective.

        Args:
            state: the trainer's state (step, data position, ...), serializable as JSON.
            prunes: remove older checkpoints when this one is written.

        Raises:
            FolderTaken: as `publish` does.
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
        from_first_rank(self._remove_parts)
        self._writing = self._in_thread(own, step)

    def publish(self) -> Path | None:
        """Wait until all ranks have written, and move the checkpoint into place. Collective.

        Returns:
            The checkpoint, or None if none was begun or it could not be written.

        Raises:
            FolderTaken: on all ranks, if another process has begun to train in the folder.
        """
        if self._writing is None:
            return None
        writing, self._writing = self._writing, None
        wait([writing])
        written, problem = None, None
        if (error := writing.exception()) is None:
            written = writing.result()
        else:  # of any kind: the other ranks wait for the answer
            problem = f"{rank_and_host(self.parallel)}: {reason(error)}"
        answers = gather_objects((_file_name(self.parallel.rank), written, problem))
        found = [answer[2] for answer in answers if answer[2]]
        problems = f"{found[0]}, and {len(found) - 1} more" if len(found) > 1 else "".join(found)
        manifest = self._manifest | {"files": {name: written for name, written, _ in answers}}
        taken_by, problem = from_first_rank(lambda: self._move_into_place(manifest, problems))
        if taken_by is not None:
            raise FolderTaken(f"{taken_by} trains in {self.run.root} now; this run exits and leaves the folder to it")
        if problem:
            self.failed, self.failed_in_a_row = self.failed + 1, self.failed_in_a_row + 1
            self.begun_step, self.problem = None, problem
            if self.parallel.rank == 0:
                log.warning("%s could not be written (%s); training continues", self._final.name, problem)
            return None
        self.newest, self.failed_in_a_row = self._final, 0
        return self._final

    def _move_into_place(self, manifest: dict, problem: str) -> tuple[str | None, str]:
        """Publish the checkpoint, or remove it after a failure. Rank 0 only.

        Returns:
            The other process that trains in the folder, or None; the reason of a failure, or "".
        """
        if other := self.run.taken_by():
            return other, problem
        if not problem:
            try:
                self._rename(manifest)
            except OSError as error:
                problem = reason(error)
        if problem:
            shutil.rmtree(self._partial, ignore_errors=True)
        elif self._prunes:
            self.prune(self._final)
        return None, problem

    def _rename(self, manifest: dict) -> None:
        """Write the manifest, rename the folder and update `latest`. Rank 0 only.

        Each step is flushed to the disk before the next one begins; the tensor files were flushed before. So a power
        cut leaves this checkpoint or the one before it, which is removed later.
        """
        write_atomic(self._partial / MANIFEST, json.dumps(sealed(manifest), indent=2) + "\n")
        damaged = self._final.with_name(f"{self._final.name}.damaged{PARTIAL}")  # a damaged one of the same step
        if self._final.exists():
            os.replace(self._final, damaged)
        os.replace(self._partial, self._final)
        sync_folder(self.run.checkpoints)
        shutil.rmtree(damaged, ignore_errors=True)
        write_atomic(self.run.checkpoints / "latest", self._final.name + "\n")

    def _remove_parts(self) -> None:
        """Remove the partial checkpoints that killed runs have left. Rank 0 only."""
        with contextlib.suppress(OSError):  # an error here also fails the write, which reports it
            for left in self.run.checkpoints.glob(f"step_*{PARTIAL}"):
                shutil.rmtree(left, ignore_errors=True)

    def prune(self, written: Path) -> None:
        """Remove all but the `keep_last` newest checkpoints (0: none) after `written` was published. Rank 0 only."""
        self._damaged.discard(written.name)
        paths = complete_checkpoints(self.run)
        last = [path for path in paths if path.name not in self._damaged][: self.keep_last]
        if not last or len(last) < self.keep_last:
            return
        for path in paths[paths.index(last[-1]) + 1 :]:
            with contextlib.suppress(OSError):  # renamed first, as a half-removed one must not look complete
                removed = path.rename(path.with_name(path.name + PARTIAL))
                shutil.rmtree(removed, ignore_errors=True)

    def _in_thread(self, own: dict[str, torch.Tensor], step: int) -> Future[dict]:
        """Write this rank's file in a thread. An executor's thread would be waited for when the process exits."""
        done: Future[dict] = Future()

        def write() -> None:
            try:
                self._partial.mkdir(exist_ok=True)
                metadata = {"run": self.run.root.name, "step": str(step)}
                done.set_result(_write_tensors(self._partial / _file_name(self.parallel.rank), own, metadata))
            except BaseException as error:  # raised again on the main thread
                done.set_exception(error)

        threading.Thread(target=write, name="checkpoint").start()
        return done


def _file_name(rank: int) -> str:
    return f"state_{rank:05d}.safetensors"


def _own_tensors(engine: Engine, parallel: Parallel) -> dict[str, torch.Tensor]:
    """Return this rank's share of the state: every world_size-th parameter, on the CPU. Collective."""
    own = {}
    for index, (name, parameter) in enumerate(engine.state.parameters()):
        for key in (None, *engine.state.keys(parameter)):
            value = engine.state.read(parameter, key)
            if index % parallel.world_size == parallel.rank:
                own[f"{key or 'model'}/{name}"] = value.to("cpu", copy=True).contiguous()
    if parallel.rank == 0:  # FP32 represents a count of batches exactly up to 2^24
        own |= {f"model/{name}": value.to("cpu", torch.float32, copy=True) for name, value in engine.state.buffers()}
    return own


def _write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> dict:
    """Write a file; return {"bytes": n, "sha256": hex}. Raises OSError."""
    save_tensors(path, tensors, metadata)
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}
