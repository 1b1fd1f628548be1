"""pretrain_clip.py with a planted fault: python tests/lib/fault_run.py RANK STEP PHASE SIGNAL [its flags].

Rank RANK sends itself SIGNAL (a number; 0: kills its loader's first worker) when phase PHASE (data, encode, loss, ring,
replay, step, save) of step STEP begins. `ring` is inside the loss, after the first block has been posted. `save` is
inside a checkpoint, after this rank's own file.
"""

import concurrent.futures
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))


def plant(rank: int, step: int, phase: str, number: int) -> None:
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


if __name__ == "__main__":
    # Launchers put --local_rank first.
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
    rank, step, phase, number = int(arguments[0]), int(arguments[1]), arguments[2], int(arguments[3])
    assert number in {0, *signal.Signals}
    from infcl.parallel.process import end_process
    from pretrain_clip import main

    plant(rank, step, phase, number)
    end_process(main(arguments[4:]))
