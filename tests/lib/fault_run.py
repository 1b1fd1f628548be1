"""Faults in a rank of a run."""

import concurrent.futures
import multiprocessing
import os
import time


def plant(rank: int, step: int, phase: str, number: int) -> None:
    """Let rank `rank` send itself a signal when phase `phase` of step `step` begins. Call on all ranks.

    Args:
        number: the signal; 0 kills its loader's first worker instead.
        phase: data, encode, loss, ring (inside the loss, after the first block has been posted), replay, step, or save
            (inside a checkpoint, after this rank's own file).
    """
    from infcl.checkpoint import write as checkpoint_writer
    from infcl.loss import ring
    from infcl.parallel import read_environment
    from infcl.train import diagnostics

    def finish_writing(self):
        if self._writing is not None:
            concurrent.futures.wait([self._writing])
        return False

    checkpoint_writer.CheckpointWriter.busy = property(finish_writing)  # no race for the last checkpoint
    if read_environment()[0] != rank:
        return
    steps_done = {"count": 0}

    def strike():
        if number:
            os.kill(os.getpid(), number)
        else:
            multiprocessing.active_children()[0].kill()
            time.sleep(60)  # until the worker's death is reported

    plain_mark = diagnostics.PhaseTimer.mark

    def mark_phase(self, name):
        if name == "encode":
            steps_done["count"] += 1
        if steps_done["count"] == step and name == phase:
            strike()
        plain_mark(self, name)

    diagnostics.PhaseTimer.mark = mark_phase
    plain_wait = ring.RingExchange.wait

    def wait(self, *arguments, **options):
        if phase == "ring" and steps_done["count"] == step:
            strike()
        return plain_wait(self, *arguments, **options)

    ring.RingExchange.wait = wait
    plain_write = checkpoint_writer._write_tensors

    def write(path, *content):
        written = plain_write(path, *content)
        if phase == "save" and steps_done["count"] >= step:
            strike()
        return written

    checkpoint_writer._write_tensors = write
