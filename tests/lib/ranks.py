"""Run a function on W gloo ranks: `run_ranks(function, world_size, *args, **kwargs)` -> results of ranks 0 to W-1.

The processes of a world size are started once per test file and reused in it. They are forked from a process that has
imported everything (preload.py), because imports cost each rank seconds of CPU time and a call milliseconds.
`end_ranks` ends them after each file (conftest.py): every process group of a test leaves threads that wake a hundred
times per second, and a hundred such processes took a third of two cores.

A function takes (rank, world_size, *args), must be importable (module level), and may use torch.distributed's WORLD
group. An exception on any rank is raised here with its traceback; a hang ends after `timeout` seconds. In both cases
the processes of that world size are killed, because their collectives may be out of step.

Forked ranks share Python's hash seed, launched ones do not: a result that depends on the order of a set differs between
ranks only under a launcher. In each call, Python's and numpy's random states are new on each rank, and torch's is the
same on all ranks.
Arguments and results use plain pickle, not torch's shared-memory reductions, which outlive a killed process.
"""

import atexit
import contextlib
import os
import pickle
import random
import socket
import time
import traceback
from collections.abc import Collection
from multiprocessing import connection
from typing import Any

import torch.multiprocessing as mp

_pools: dict[int, "_Pool"] = {}
STARTING = 240.0  # seconds for the start and imports of the ranks, in addition to the timeout of the first call


def run_ranks(function, world_size: int, *args, timeout: float = 300.0, **kwargs) -> list:
    """Call function(rank, world_size, *args, **kwargs) on all ranks; return the results of ranks 0 to W-1.

    Raises:
        RuntimeError: the function failed on a rank, or the rank died; has the tracebacks, after the deaths.
        TimeoutError: a rank did not answer within `timeout` seconds.
    """
    if world_size not in _pools:
        _pools[world_size] = _Pool(world_size)
    return _pools[world_size].run(function, args, kwargs, timeout)


def rejected(function, *args, **kwargs) -> str | None:
    """Return the message of the ValueError that function(*args, **kwargs) raises on a rank, or None."""
    try:
        function(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return None


class _Pool:
    def __init__(self, world_size: int):
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["tests.lib.preload"])
        self.world_size = world_size
        port = free_port()
        self.pipes, self.processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(STARTING):
                self.close()
                raise TimeoutError(f"rank {rank} of {world_size} did not start within {STARTING:.0f} s")
            pipe.recv_bytes()

    def run(self, function, args, kwargs, timeout: float) -> list:
        try:
            for pipe in self.pipes:
                pipe.send_bytes(pickle.dumps((function, args, kwargs)))
            answers = self._answers(timeout)
            if any(kind != "result" for kind, _ in answers.values()):
                answers |= self._answers(2.0, answers)  # one that died explains the errors of those that waited for it
            failures = [value for wanted in ("died", "error") for kind, value in answers.values() if kind == wanted]
            if failures:
                raise RuntimeError("\n".join(failures))
            if late := sorted(set(range(self.world_size)) - set(answers)):
                raise TimeoutError(f"ranks {late} of {self.world_size} did not answer within {timeout:.0f} s")
        except BaseException:  # also KeyboardInterrupt and pytest's timeout: the state of the ranks is unknown
            self.close()
            raise
        return [answers[rank][1] for rank in range(self.world_size)]

    def _answers(self, timeout: float, known: Collection[int] = ()) -> dict[int, tuple[str, Any]]:
        """Return {rank: ("result" | "error" | "died", value)} of ranks that are not `known`.

        Without `known` ranks it ends when one has failed.
        """
        answers: dict[int, tuple[str, Any]] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in known}
        deadline = time.monotonic() + timeout
        while waiting and (known or all(kind == "result" for kind, _ in answers.values())):
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    kind, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self.processes[rank].join(5)
                    kind, value = "died", f"it died with exit code {self.processes[rank].exitcode}"
                failed = f"rank {rank} of {self.world_size} failed:\n{value}"
                answers[rank] = (kind, value if kind == "result" else failed)
        return answers

    def close(self):
        _pools.pop(self.world_size, None)
        for process in self.processes:
            process.kill()


def _serve(rank: int, world_size: int, port: int, pipe) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        DS_ACCELERATOR="cpu",
    )
    import numpy
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pipe.send_bytes(b"ready")
    while True:
        try:
            function, args, kwargs = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        # as in a new process, independent of the previous test
        numpy.random.seed(), random.seed(), torch.manual_seed(0)
        try:
            answer = pickle.dumps(("result", function(rank, world_size, *args, **kwargs)))
        except BaseException:  # run() raises it in the test
            answer = pickle.dumps(("error", traceback.format_exc()))
        pipe.send_bytes(answer)


def free_port() -> int:
    """Return a free port outside the system's range for outgoing connections, which could take it again."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)  # ignores seeds of tests: suites run in parallel
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


@atexit.register
def end_ranks() -> None:
    for pool in _pools.values():
        for pipe in pool.pipes:
            pipe.close()  # a waiting rank exits and writes its coverage
    for pool in list(_pools.values()):
        for process in pool.processes:
            process.join(5)
        pool.close()
