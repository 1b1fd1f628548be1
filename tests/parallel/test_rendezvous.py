"""Rendezvous: ranks that do not join are reported, different software and settings are rejected."""

import socket
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from infcl.parallel import host_info, rendezvous
from infcl.parallel.host_info import differences, software
from infcl.parallel.rendezvous import Node, join_all, open_store
from tests.lib.ranks import free_port

SHORT, LONG = timedelta(seconds=1), timedelta(seconds=60)  # for who does not come; for who does, on a busy machine


def new_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LONG)


@pytest.fixture
def store():
    return new_store()


@pytest.fixture
def address(monkeypatch):
    """A function that sets MASTER_ADDR and MASTER_PORT."""

    def listen(host: str, port: int = 0) -> None:
        monkeypatch.setenv("MASTER_ADDR", host)
        monkeypatch.setenv("MASTER_PORT", str(port))

    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return listen


def start_all(
    store, monkeypatch, ranks: list[tuple[str, dict]], ranks_per_node: int, timeout=LONG, settings=()
) -> list:
    """Every rank in a thread, on hosts of `ranks_per_node`; what each got or raised. ranks: (host, other software).

    settings: of each rank.
    """
    results: list = [None] * len(ranks)
    names = {}
    monkeypatch.setattr(socket, "gethostname", lambda: names[threading.get_ident()][0])
    monkeypatch.setattr(rendezvous, "software", lambda: {"torch": "2.13.0"} | names[threading.get_ident()][1])

    def take_part(rank):
        names[threading.get_ident()] = ranks[rank]
        try:
            own = {"settings": settings[rank]} if settings else {}
            results[rank] = join_all(store.clone(), rank, rank % ranks_per_node, len(ranks), timeout=timeout, **own)
        except Exception as error:  # the tests look at what it is
            results[rank] = error

    threads = []
    for rank in reversed([rank for rank in range(len(ranks)) if ranks[rank]]):  # rank 0 last: it waits for the others
        threads.append(threading.Thread(target=take_part, args=(rank,)))
        threads[-1].start()
        store.wait([f"rank {rank}"], LONG)
    for thread in threads:
        thread.join()
    return results


def test_all_ranks_learn_the_nodes_in_the_order_of_ranks(store, monkeypatch):
    nodes = [Node("a", 0, 2), Node("b", 2, 2), Node("c", 4, 2)]
    assert start_all(store, monkeypatch, [(host, {}) for host in "aabbcc"], 2) == [nodes] * 6


def test_ranks_that_do_not_join_are_reported_during_the_wait_and_to_all_that_did(store, monkeypatch, capsys):
    monkeypatch.setattr(rendezvous, "PATIENCE", 0.3)
    monkeypatch.setattr(rendezvous, "READING", 0.3)
    results = start_all(store, monkeypatch, [("a", {}), ("a", {}), None, None, ("c", {}), None], 2, SHORT)
    for rank in (0, 1, 4):
        assert "ranks 2-3, 5 of 6 did not join within 1 s; joined: those on a, c" in str(results[rank])
    assert "waiting for ranks 2-3, 5 of 6 for " in capsys.readouterr().err


def test_different_software_and_settings_are_rejected_on_all_ranks_with_the_values_of_each_node(monkeypatch):
    one, other = {"--lr": "1", "--deepspeed_config stage": "1"}, {"--lr": "1", "--deepspeed_config stage": "3"}
    software = [("a", {}), ("b", {"torch": "2.12.1"}), ("c", {})]
    for ranks, ranks_per_node, settings, message in (
        (
            software, 1, (),
            "the nodes do not run the same: torch: 2.13.0 on a (rank 0), c (rank 2); 2.12.1 on b (rank 1)",
        ),
        (
            [(host, {}) for host in "aabb"], 2, [one, {}, other, {}],
            "the nodes were not given the same: --deepspeed_config stage: 1 on a (ranks 0-1); 3 on b (ranks 2-3)",
        ),
    ):  # fmt: skip
        found = start_all(new_store(), monkeypatch, ranks, ranks_per_node, settings=settings)
        assert [(type(error), str(error)) for error in found] == [(ValueError, message)] * len(ranks)


def test_equal_software_has_no_differences_and_every_kind_is_looked_at():
    here = software()
    assert differences({"a": here, "b": dict(here)}) == []
    assert here["torch"] and here["deepspeed"] and here["source"] and here["python"]
    for name in here:
        assert len(differences({"a": here, "b": here | {name: "other"}})) == 1


def test_the_second_of_two_runs_on_one_port_is_rejected(address, monkeypatch):
    address("localhost", port := free_port())
    launchers = {}
    for launcher in (1, 2):
        monkeypatch.setattr(rendezvous, "launcher", lambda _, launcher=launcher: launcher)
        if launcher == 1:
            launchers[launcher, 0] = open_store(0, 2, timeout=LONG)
        else:
            with pytest.raises(ValueError, match=f"port {port} of localhost is in use, .* deepspeed --master_port"):
                open_store(0, 2, timeout=LONG)
        launchers[launcher, 1] = open_store(1, 2, timeout=LONG)
        launchers[launcher, 1].set("rank 1", str(launcher))
    assert launchers[1, 0].get("rank 1") == b"1"


@pytest.mark.parametrize("second", [("b", 2), ("a", 3)])
def test_a_rank_that_joins_another_run_reports_which(address, second):
    address("localhost")
    first = open_store(0, 2, timeout=LONG, run="a")
    assert open_store(1, 2, timeout=LONG, run="a").add("met", 1) == first.add("met", 0) == 1
    name, size = second
    with pytest.raises(
        ValueError, match=f"rendezvous of another run \\(a of 2 ranks, this one is {name} of {size} ranks\\)"
    ):
        open_store(1, size, timeout=LONG, run=name)


def test_a_name_without_an_address_is_a_usage_error(address):
    """The resolver's own exception says neither the name nor what to do."""
    address("nowhere.invalid")
    with pytest.raises(
        ValueError, match="MASTER_ADDR=nowhere.invalid has no address on .*: give the address of rank 0"
    ):
        open_store(1, 2, timeout=LONG)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_ranks_join_over_ipv6(address):
    address("::1")
    first = open_store(0, 2, timeout=LONG)
    assert open_store(1, 2, timeout=LONG).add("met", 1) == first.add("met", 0) == 1


@pytest.mark.parametrize("name", ["pretrain_clip.py", "megatron_patches/x.py", "infcl/models/configs/x.json"])
def test_the_source_is_all_code_and_the_model_configs(tmp_path, monkeypatch, name):
    for path in (name, "infcl/parallel/host_info.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("one")
    monkeypatch.setattr(host_info, "__file__", str(tmp_path / "infcl" / "parallel" / "host_info.py"))
    before = software()["source"]
    (tmp_path / name).write_text("other")
    assert software()["source"] != before
