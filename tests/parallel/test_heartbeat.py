"""Heartbeat: a silent node is reported and ends the run, one that has finished is not missed."""

import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from infcl.parallel.heartbeat import HOST_LOST, Heartbeat
from infcl.parallel.rendezvous import Node
from tests.lib.checkout import ROOT
from tests.lib.waiting import wait_until


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


class Ended(set):
    """Stands for os._exit, which ends a process once however many of its threads call it: remembers the codes."""

    def __call__(self, code):
        self.add(code)


NODES = [Node("a", 0, 2), Node("b", 2, 2), Node("c", 4, 2)]


@pytest.fixture
def nodes(store):
    """(heartbeats, what ended) of three nodes whose threads have returned: a test does their steps in its own."""
    ended = [Ended() for _ in NODES]
    beats = [Heartbeat(store, NODES, node.first_rank, timeout=600, exit=end) for node, end in zip(NODES, ended)]
    for heartbeat in beats:
        heartbeat._leave()
        heartbeat._closed.clear()
        heartbeat.interval = 0.01
    yield beats, ended
    for heartbeat in beats:
        heartbeat.close()


def silence(heartbeat, number):
    """Let rank 0 have seen the node's present count of beats longer ago than the time limit."""
    count = heartbeat.store.add(f"beats of {NODES[number].first_rank}", 0)
    heartbeat._moved[number] = (count, time.monotonic() - 601)


def test_a_silent_node_is_reported_and_ends_the_run_on_the_others(nodes, capfd):
    (a, b, _), ended = nodes
    silence(a, 2)
    a._look()
    b._beat()
    assert ended == [{HOST_LOST}, {HOST_LOST}, set()]
    said = capfd.readouterr().err
    assert "a: no heartbeat from c (ranks 4-5) for" in said and "b: no heartbeat from c (ranks 4-5)" in said


def test_a_finished_node_does_not_end_the_run(nodes):
    (a, b, _), ended = nodes
    b.close()
    for number, expected in ((1, set()), (2, {HOST_LOST})):
        silence(a, number)
        a._look()
        assert ended[0] == expected


def test_a_node_that_cannot_reach_rank_0_exits_by_itself(capfd):
    ended, store = Ended(), _Unreachable()
    Heartbeat(store, NODES, 2, timeout=1, exit=ended)
    wait_until(lambda: ended, 60, "the run did not stop")
    store.back.set()  # this process is not to wait for it when it ends
    assert ended == {HOST_LOST}
    assert "b: no answer from rank 0's node, a (ranks 0-1), for" in capfd.readouterr().err


class _Unreachable:
    """A store without a network: nothing answers, nothing fails, until it is back."""

    def __init__(self):
        self.back = threading.Event()

    def clone(self):
        return self

    def add(self, *_):
        self.back.wait()
        raise dist.DistError("too late")


EXITS_DURING_A_BEAT = """
import sys, time
import torch.distributed as dist
from infcl.parallel.rendezvous import Node
from infcl.parallel.heartbeat import Heartbeat

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
beats = [Heartbeat(store, [Node("here", 0, 1)], 0, timeout=5.0) for _ in range(24)]
for heartbeat in beats:
    heartbeat.interval = 1e-6  # the threads are in the store most of the time
time.sleep(1.2)
sys.exit(2)
"""


def test_a_process_with_heartbeat_threads_keeps_its_exit_code():
    """A thread that came back from the store while the interpreter shut down aborted the process (134)."""
    result = subprocess.run([sys.executable, "-c", EXITS_DURING_A_BEAT], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
