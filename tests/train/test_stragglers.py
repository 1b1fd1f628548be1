"""A rank or host that the others wait for is named: by its own seconds, after some logs in a row, and nobody else."""

import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from infcl.cluster import links
from infcl.parallel import Parallel
from infcl.parallel.rendezvous import Node
from infcl.report import read_metrics
from infcl.train.stragglers import AGAIN, IN_A_ROW, Stragglers, Warnings, slow_ranks
from tests.lib.collectives import collectives
from tests.lib.ranks import run_ranks
from tests.lib.steps import step_done
from tests.lib.training import demo_config

HOSTS = (Node("a", 0, 4), Node("b", 4, 4), Node("c", 8, 4))


def named(slow: dict[int, float], waits: dict[int, float] | None = None, nodes=HOSTS, count: int = 12, step=4.0):
    """Who is named where the ranks of `slow` take so many seconds of their own, and all others 1."""
    owns = [slow.get(rank, 1.0) for rank in range(count)]
    return slow_ranks(owns, [(waits or {}).get(rank, 0.1) for rank in range(count)], step, nodes)


def called(slow: dict[str, str]) -> list[str]:
    return [line.split(" is slower")[0] for line in slow.values()]


def test_a_host_is_named_once_and_a_rank_with_its_host():
    assert named({}) == {} and named({5: 1.2}) == {}
    assert called(named({5: 1.3})) == ["b (rank 5)"]
    everybody = named({1: 1.3, 2: 1.5, **dict.fromkeys(range(8, 12), 2.0)})
    assert called(everybody) == ["a (ranks 1, 2)", "c (ranks 8-11)"]
    assert called(named({1: 1.3}, nodes=(), count=2)) == ["rank 1"]  # of two the faster is usual


def test_what_a_step_does_not_feel_is_not_said():
    assert named({5: 1.3}, step=10.0) == {}
    assert called(named({5: 1.6}, step=10.0)) == ["b (rank 5)"]


def test_the_line_has_the_figures_and_tells_a_loader_that_is_late_from_a_slow_gpu():
    (slow_gpu,) = named({5: 2.0}).values()
    assert slow_gpu == (
        "b (rank 5) is slower than the others: 2 s of a step until its samples are read and encoded, where 1 s is "
        "usual (0.1 s of them waiting for data, usually 0.1). All wait for it, 25% of a step; look at other programs "
        "there, clocks and heat of its GPUs"
    )
    (late_loader,) = named({5: 2.0}, waits={5: 1.1}).values()
    assert "(1.1 s of them waiting for data, usually 0.1)" in late_loader and "look at its storage" in late_loader


def test_where_encoding_waits_for_others_the_line_is_of_the_wait_for_data():
    (line,) = slow_ranks([1.0, 2.0], None, 4.0, ()).values()
    assert line == (
        "rank 1 is slower than the others: 2 s of a step waiting for its data, where 1 s is usual. All wait for it, "
        "25% of a step; look at its storage, cores and --workers"
    )


def test_two_hosts_of_one_name_are_two():
    pods = (Node("pod", 0, 2), Node("pod", 2, 2), Node("c", 4, 4))
    both = dict.fromkeys(range(4), 2.0)
    assert called(named(both, nodes=pods, count=8)) == ["pod (ranks 0-1)", "pod (ranks 2-3)"]
    warnings, turns = Warnings(), [{0: 2.0, 1: 2.0}, {2: 2.0, 3: 2.0}]
    assert not any(warnings(named(turns[log % 2], nodes=pods, count=8)) for log in range(2 * IN_A_ROW))


def test_who_stays_slow_is_warned_of_and_seldom_again():
    warnings = Warnings()
    said = [warnings({"b": "b is slow"}) for _ in range(IN_A_ROW + 2 * AGAIN)]
    assert [number for number, line in enumerate(said) if line] == [
        number * AGAIN + IN_A_ROW - 1 for number in (0, 1, 2)
    ]
    assert not any(warnings(slow) for slow in [{"c": "c is slow"}, {}] * AGAIN)  # never in a row
    assert [warnings({"c": "c is slow", "d": "d too"}) for _ in range(IN_A_ROW)][-1] == "c is slow\nd too"


def test_a_host_is_slow_in_a_row_whichever_of_its_ranks_are():
    warnings = Warnings()
    said = [warnings(named({5: 2.0, 6: 1.0 + log % 2})) for log in range(IN_A_ROW + AGAIN)]
    assert [log for log, line in enumerate(said) if line] == [IN_A_ROW - 1, IN_A_ROW - 1 + AGAIN]


def test_what_is_waited_for_in_the_second_reading_is_a_ranks_own():
    """Else it would wait longer for data than it takes to read and encode."""
    for encoding_waits, own in ((False, 1.5), (True, 0.7)):
        stragglers = Stragglers(
            Parallel(0, 2, 0, torch.device("cpu"), dist.group.WORLD), every=1, encoding_waits=encoding_waits
        )
        with mock.patch.object(stragglers, "_gather", lambda means: ([means[0]] * 2, [means[1]] * 2)):
            step = step_done(phases={"data": 0.2, "encode": 0.8}, waited_for_data=0.7, waited_again=0.5)
            stragglers.after_step(step)
        assert step.values["seconds_own_usual"] == pytest.approx(own)


def gathered(rank, world_size):
    """Collectives of a step that is not logged, and of one that is; what both tell."""
    stragglers = Stragglers(Parallel(rank, world_size, rank, torch.device("cpu"), dist.group.WORLD), every=2)
    told = []

    def steps(number: int):
        step = step_done(number, phases={"data": 0.5, "encode": 0.5 + rank, "loss": 9.0}, waited_for_data=0.5)
        stragglers.after_step(step)
        told.append((step.values, step.news))

    return [collectives("", lambda step=step: steps(step)) for step in (1, 2)], told


def test_only_a_logged_step_asks_the_others_and_once():
    for counts, told in run_ranks(gathered, 2):
        assert counts[0] == 0 and counts[1] == 1
        assert told[0] == ({}, [])
        assert told[1] == ({"seconds_own_usual": 1.0, "seconds_own_slowest": 2.0, "slowest_rank": 1}, [])


def fit_with_naps(rank, world_size, config, where: str, naps: list[float]) -> list[str]:
    """Trains with a nap of each rank before each micro-batch is encoded, or read; what rank 0 said."""
    from infcl.checkpoint.run_folder import claim_run_folder
    from infcl.parallel import init_parallel
    from infcl.train.build import resolve_inputs
    from infcl.train.trainer import Trainer

    parallel = init_parallel("cpu")
    if config.tensor_parallel_size > 1:
        from megatron_patches.groups import init_tensor_parallel

        parallel = init_tensor_parallel(parallel, config.tensor_parallel_size, on_host=True)
    trainer = Trainer(resolve_inputs(config, parallel), parallel, claim_run_folder(config, parallel))
    encode, steps, said = trainer._encode, trainer.loader.steps, []

    def encode_late(micro_batch):
        time.sleep(naps[rank])
        return encode(micro_batch)

    def steps_late(again):
        for micro_batches in steps(again):
            yield (time.sleep(naps[rank]) or micro_batch for micro_batch in micro_batches)

    if where == "encoding":
        trainer._encode = encode_late
    else:
        trainer.loader.steps = steps_late
    trainer.metrics.say = said.append
    trainer.fit()
    return said


def slower(demo_folder, logs, where: str, naps: list[float], **changes) -> list[str]:
    config = demo_config(demo_folder, logs, batch_size=9, accum_freq=1, steps=8, log_every_n_steps=2, **changes)
    said = run_ranks(fit_with_naps, len(naps), config, where, naps, timeout=200)[0]
    return [line for line in said if "slower" in line]


@pytest.mark.parametrize(("where", "look_at"), [("encoding", "clocks and heat"), ("reading", "its storage")])
def test_a_rank_that_is_late_in_every_step_is_named_once(demo_folder, tmp_path, where, look_at):
    (line,) = slower(demo_folder, tmp_path, where, [0.1, 1.0, 0.1])
    assert line.startswith("rank 1 is slower than the others: 1") and look_at in line
    logged = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl", "train") if "slowest_rank" in r]
    assert [record["step"] for record in logged] == [2, 4, 6, 8]
    for record in logged:
        assert record["slowest_rank"] == 1 and record["seconds_own_slowest"] > 1.0


@pytest.mark.parametrize(("where", "slow"), [("encoding", []), ("reading", ["rank 1"])])
def test_of_ranks_that_share_a_model_only_one_whose_data_are_late_is_named(demo_folder, tmp_path, where, slow):
    """They wait for each other in every layer: a slow one's whole group was named."""
    said = slower(demo_folder, tmp_path, where, [0.1, 1.0, 0.1, 0.1, 0.1, 0.1], tensor_parallel_size=3)
    assert [line.split(" is slower")[0] for line in said] == slow


def test_even_ranks_are_not_named(demo_folder, tmp_path):
    assert slower(demo_folder, tmp_path, "encoding", [0.6, 0.6, 0.6]) == []


def measured_beside_a_run(rank, world_size):
    """Hosts of a rank each, of which the third takes ten times the others' seconds for what it sends and gets."""
    nodes = tuple(Node(f"host-{number}", number, 1) for number in range(world_size))
    parallel = Parallel(rank, world_size, 0, torch.device("cpu"), dist.group.WORLD, nodes=nodes)
    send_and_receive, met = links._send_and_receive, set()

    def slowly(parallel, block, *, to, source, **options):
        send_and_receive(parallel, block, to=to, source=source, **options)
        met.add(to)
        return 0.1 if 2 in (rank, to) else 1.0

    with mock.patch.object(links, "_send_and_receive", slowly):
        stragglers = Stragglers(parallel, every=1)
        steps = [step_done(n, phases={"data": 0.5, "encode": 0.5}, waited_for_data=0.5) for n in range(1, 5)]
        for step in steps:
            stragglers.after_step(step)
    return [step.news for step in steps], met


@pytest.mark.parametrize("hosts", [3, 4])
def test_a_host_with_slow_links_is_named_from_within_a_run(hosts):
    for rank, (told, met) in enumerate(run_ranks(measured_beside_a_run, hosts)):
        assert met == {(rank - 1) % hosts, (rank + 1) % hosts}
        slow = "slow link: all of host-2, 0.1 GB/s (usual 1); launch/check.sh compares it with all others"
        assert told == [[], [], [slow], []]


def test_of_two_hosts_one_link_is_not_measured():
    ((told, met), _) = run_ranks(measured_beside_a_run, 2)
    assert (told, met) == ([[]] * 4, set())
