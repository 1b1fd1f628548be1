"""Ranks meet before they train: absent ones are named, different software is refused, a lost host ends the run."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from infcl.parallel import _use_interface
from infcl.parallel import host_info as facts
from infcl.parallel import rendezvous as meeting
from infcl.parallel.heartbeat import HOST_LOST, HostWatch
from infcl.parallel.host_info import differences, software
from infcl.parallel.rendezvous import Node, interface_address, meet, nodes_of, open_store
from tests.lib.checkout import ROOT
from tests.lib.ranks import free_port
from tests.lib.waiting import wait_until

SHORT, LONG = timedelta(seconds=2), timedelta(seconds=60)  # for who does not come; for who does, on a busy machine


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LONG)


def meet_all(store, monkeypatch, ranks: list[tuple[str, dict]], ranks_per_node: int, timeout=LONG, settings=()) -> list:
    """Every rank in a thread, on hosts of `ranks_per_node`; what each got or raised. ranks: (host, other software).

    settings: of each rank, none for the rest.
    """
    results: list = [None] * len(ranks)
    names = {}
    monkeypatch.setattr(socket, "gethostname", lambda: names[threading.get_ident()][0])
    monkeypatch.setattr(meeting, "software", lambda: {"torch": "2.13.0"} | names[threading.get_ident()][1])

    def take_part(rank):
        names[threading.get_ident()] = ranks[rank]
        try:
            own = {"settings": settings[rank]} if settings else {}
            results[rank] = meet(store.clone(), rank, rank % ranks_per_node, len(ranks), timeout=timeout, **own)
        except Exception as error:  # the tests look at what it is
            results[rank] = error

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(len(ranks)) if ranks[rank]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_all_ranks_learn_the_nodes_in_the_order_of_ranks(store, monkeypatch):
    nodes = [Node("a", 0, 2), Node("b", 2, 2), Node("c", 4, 2)]
    assert meet_all(store, monkeypatch, [(host, {}) for host in "aabbcc"], 2) == [nodes] * 6


def test_ranks_that_do_not_come_are_named_to_all_that_did(store, monkeypatch):
    results = meet_all(store, monkeypatch, [("a", {}), ("a", {}), None, None, ("c", {}), None], 2, SHORT)
    for rank in (0, 1, 4):
        assert "ranks 2-3, 5 of 6 did not come" in str(results[rank]) and "those on a, c" in str(results[rank])


def test_who_is_waited_for_is_said_meanwhile(store, monkeypatch, capsys):
    monkeypatch.setattr(meeting, "PATIENCE", 0.3)
    meet_all(store, monkeypatch, [("a", {}), ("a", {}), None, None], 2, SHORT)
    assert "waiting for ranks 2-3 of 4 for 0 s; here are those on a\n" in capsys.readouterr().err


def test_different_software_is_refused_with_who_has_what(store, monkeypatch):
    ranks = [("a", {}), ("b", {"torch": "2.12.1"}), ("c", {})]
    for error in meet_all(store, monkeypatch, ranks, 1):
        assert isinstance(error, ValueError)
        assert "torch: 2.13.0 on a (rank 0), c (rank 2); 2.12.1 on b (rank 1)" in str(error)


def test_different_settings_are_refused_on_all_ranks_with_who_has_what(store, monkeypatch):
    ranks = [("a", {}), ("a", {}), ("b", {}), ("b", {})]
    one, other = {"--lr": "1", "--deepspeed_config stage": "1"}, {"--lr": "1", "--deepspeed_config stage": "3"}
    for error in meet_all(store, monkeypatch, ranks, 2, settings=[one, {}, other, {}]):
        assert isinstance(error, ValueError)
        assert str(error) == (
            "the hosts were not given the same: --deepspeed_config stage: 1 on a (ranks 0-1); 3 on b (ranks 2-3)"
        )


@pytest.mark.parametrize("name", ["pretrain_clip.py", "megatron_patches/x.py", "infcl/models/configs/x.json"])
def test_the_source_is_all_code_and_the_model_configs(tmp_path, monkeypatch, name):
    for path in (name, "infcl/parallel/host_info.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("one")
    monkeypatch.setattr(facts, "__file__", str(tmp_path / "infcl" / "cluster" / "facts.py"))
    before = software()["source"]
    (tmp_path / name).write_text("other")
    assert software()["source"] != before


def test_equal_software_has_no_differences_and_every_kind_is_looked_at():
    here = software()
    assert differences({"a": here, "b": dict(here)}) == []
    assert here["torch"] and here["deepspeed"] and here["source"] and here["python"]
    for name in here:
        assert len(differences({"a": here, "b": here | {name: "other"}})) == 1


STARTS = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', *sys.argv[2:]]))"
ASKS = """
from pathlib import Path
from infcl.parallel.rendezvous import require_hostfile

try:
    require_hostfile()
except ValueError as error:
    print(error)
Path("hosts").write_text("a slots=1")
require_hostfile()
"""


@pytest.mark.parametrize("given", [["-H", "hosts"], ["--hostfile=hosts"], ["--num_gpus", "2"]])
def test_a_hostfile_that_is_not_there_is_refused(tmp_path, given):
    """DeepSpeed warns, and would train on one host. Stand-ins for its runner, its launcher and a rank."""
    rank = [ASKS, "rank"]
    launcher = [STARTS, "deepspeed.launcher.launch", *rank]
    runner = [sys.executable, "-c", STARTS, "deepspeed", *launcher, *given]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(runner, cwd=tmp_path, env=environment, capture_output=True, text=True)
    refusal = "deepspeed was given --hostfile hosts, which is not there"
    assert done.returncode == 0 and (refusal in done.stdout) == ("2" not in given), done.stdout + done.stderr


def test_a_node_begins_where_the_local_rank_is_0():
    assert nodes_of([("x", 0), ("x", 1), ("x", 0), ("y", 0)]) == [Node("x", 0, 2), Node("x", 2, 1), Node("y", 3, 1)]


def listening_on(port: int) -> set[str]:
    rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]]
    return {local.split(":")[0] for _, local, _, state, *_ in rows if state == "0A" and local.endswith(f":{port:04X}")}


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_store_of_one_host_listens_on_the_loopback_alone(monkeypatch, world_size):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    store = open_store(0, world_size, interface=None, timeout=LONG)
    assert listening_on(int(os.environ["MASTER_PORT"])) == {"0100007F"}
    del store


@pytest.mark.parametrize("listens", ["on the loopback", "everywhere"])
def test_two_runs_on_one_port_do_not_meet_and_the_second_is_told(monkeypatch, listens):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(port := free_port()))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    if listens == "everywhere":
        monkeypatch.setattr(meeting, "_listen_address", lambda host, interface: None)
    launchers = {}
    for launcher in (1, 2):
        monkeypatch.setattr(meeting, "deepspeed_launcher", lambda launcher=launcher: launcher)
        if launcher == 1:
            launchers[launcher, 0] = open_store(0, 2, interface=None, timeout=LONG)
        else:
            with pytest.raises(ValueError, match=f"port {port} of localhost is in use, .* deepspeed --master_port"):
                open_store(0, 2, interface=None, timeout=LONG)
        launchers[launcher, 1] = open_store(1, 2, interface=None, timeout=LONG)
        launchers[launcher, 1].set("rank 1", str(launcher))
    assert launchers[1, 0].get("rank 1") == b"1"


@pytest.mark.parametrize("second", [("b", 2), ("a", 3)])
def test_a_rank_that_meets_another_run_is_told_whose(monkeypatch, second):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    first = open_store(0, 2, interface=None, timeout=LONG, run="a")
    assert open_store(1, 2, interface=None, timeout=LONG, run="a").add("met", 1) == first.add("met", 0) == 1
    name, size = second
    with pytest.raises(ValueError, match=f"another run meets \\(a of 2 ranks, this one is {name} of {size} ranks\\)"):
        open_store(1, size, interface=None, timeout=LONG, run=name)


def test_an_unknown_interface_is_refused_with_those_that_there_are():
    assert interface_address("lo") == "127.0.0.1"
    with pytest.raises(ValueError, match="--interface eth9: no such interface .*there are: .*lo"):
        interface_address("eth9")
    with pytest.raises(ValueError, match="--interface eth9: no such interface"):
        _use_interface("eth9")


class Ended(list):
    """Stands for os._exit: remembers the codes."""

    def __call__(self, code):
        self.append(code)


def watch_all(store, nodes, timeout=5.0):
    ended = [Ended() for _ in nodes]
    watches = [HostWatch(store, nodes, node.first_rank, timeout=timeout, exit=end) for node, end in zip(nodes, ended)]
    return watches, ended


NODES = [Node("a", 0, 2), Node("b", 2, 2), Node("c", 4, 2)]


def test_a_silent_host_is_named_and_ends_the_run_on_the_others(store, capfd):
    watches, ended = watch_all(store, NODES)
    watches[2]._closed.set()  # its threads end, nobody is told
    watches[0]._moved[2] = (0, time.monotonic() - 6)
    wait_until(lambda: ended[0] and ended[1], 60, "the run goes on")
    assert ended == [[HOST_LOST], [HOST_LOST], []]
    said = capfd.readouterr().err
    assert "a: c (ranks 4-5) has not been heard of for" in said and "b: c (ranks 4-5) has not been heard of" in said


def test_a_host_that_has_finished_is_not_missed(store):
    watches, ended = watch_all(store, NODES, timeout=60)
    watches[1].close()
    watches[0].interval = 0.01  # how long it waits for others to read who is lost
    for number, expected in ((1, []), (2, [HOST_LOST])):
        watches[0]._moved[number] = (0, time.monotonic() - 61)
        watches[0]._look()
        assert ended[0] == expected
    for watch in watches:
        watch.close()


def test_a_host_that_cannot_reach_rank_0_ends_by_itself(capfd):
    ended, store = Ended(), _Unreachable()
    HostWatch(store, NODES, 2, timeout=1, exit=ended)
    wait_until(lambda: ended, 60, "the run goes on")
    store.mended.set()  # this process is not to wait for it when it ends
    assert set(ended) == {HOST_LOST}
    assert "b: rank 0's host, a (ranks 0-1), has not answered for" in capfd.readouterr().err


class _Unreachable:
    """A store behind a pulled cable: nothing answers, nothing fails, until it is mended."""

    def __init__(self):
        self.asked, self.mended = threading.Event(), threading.Event()

    def clone(self):
        return self

    def add(self, *_):
        self.asked.set()
        self.mended.wait()
        raise dist.DistError("too late")


def test_a_process_that_ends_waits_until_its_watch_has_come_back_from_a_slow_store():
    """On a host with more ranks than cores two seconds were too few: it was aborted, after all it had to do."""
    store = _Unreachable()
    watch = HostWatch(store, NODES, 2, timeout=3, exit=Ended())
    assert store.asked.wait(10)
    threading.Timer(2.5, store.mended.set).start()
    watch._leave()
    assert not any(thread.is_alive() for thread in watch.threads)


def test_what_ranks_say_is_plain_json(store, monkeypatch):
    meet_all(store, monkeypatch, [("a", {})], 1)
    assert json.loads(store.get("all")) == {"ranks": [["a", 0]]}


ENDS_WHILE_WATCHING = """
import sys, time
import torch.distributed as dist
from infcl.parallel.rendezvous import Node
from infcl.parallel.heartbeat import HostWatch

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
watches = [HostWatch(store, [Node("here", 0, 1)], 0, timeout=5.0) for _ in range(24)]
for watch in watches:
    watch.interval = 1e-6  # the threads are in the store most of the time
time.sleep(1.2)
sys.exit(2)
"""


def test_a_process_that_ends_while_it_watches_keeps_its_exit_code():
    """A thread that came back from the store while the interpreter was taken down aborted the process (134)."""
    result = subprocess.run([sys.executable, "-c", ENDS_WHILE_WATCHING], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
