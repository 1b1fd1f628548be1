"""A run reports its slowest rank after several logged steps in a row, by the rank's own seconds."""

import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from infcl.parallel import Parallel
from infcl.parallel.rendezvous import Node
from infcl.report import read_metrics
from infcl.train.observers import AGAIN, IN_A_ROW, Stragglers, slowest
from tests.lib.collectives import collectives
from tests.lib.ranks import run_ranks
from tests.lib.steps import step_done
from tests.lib.training import demo_config, new_trainer

NODES = (Node("a", 0, 4), Node("b", 4, 4), Node("c", 8, 4))


def reported(slow: dict[int, float], waits: dict[int, float] | None = None, nodes=NODES, count: int = 12, step=4.0):
    """Return (node, line) of the slowest rank if the ranks of `slow` take so many own seconds and all others 1."""
    owns = [slow.get(rank, 1.0) for rank in range(count)]
    return slowest(owns, [(waits or {}).get(rank, 0.1) for rank in range(count)], step, nodes)


@pytest.mark.parametrize(
    ("slow", "options", "node", "rank"),
    [
        ({}, {}, "", ""),
        ({5: 1.2}, {}, "", ""),
        ({5: 1.3}, {}, "b (ranks 4-7)", "b (rank 5)"),
        ({1: 1.3, 9: 2.0}, {}, "c (ranks 8-11)", "c (rank 9)"),
        ({1: 1.3}, {"nodes": (), "count": 2}, "rank 1", "rank 1"),  # of two the faster one is usual
        ({5: 1.3}, {"step": 10.0}, "", ""),  # too small a share of the step
        ({5: 1.6}, {"step": 10.0}, "b (ranks 4-7)", "b (rank 5)"),
        ({2: 2.0}, {"nodes": (Node("pod", 0, 2), Node("pod", 2, 2)), "count": 4}, "pod (ranks 2-3)", "pod (rank 2)"),
    ],
)
def test_the_slowest_rank_is_reported_with_its_node_if_the_others_wait_noticeably(slow, options, node, rank):
    found, line = reported(slow, **options)
    assert (found, line.split(" is slower")[0]) == (node, rank)


@pytest.mark.parametrize(
    ("waits", "words"),
    [
        ([0.1, 0.1], ("(0.1 s of them waiting for data)", "look at other programs")),
        ([0.1, 1.1], ("(1.1 s of them waiting for data)", "look at its storage")),
        (None, ("waiting for its data, 1 s is usual", "look at its storage")),
    ],
)
def test_the_line_has_the_figures_and_distinguishes_a_late_loader_from_a_slow_gpu(waits, words):
    line = slowest([1.0, 2.0], waits, 4.0, ())[1]
    assert all(word in line for word in ("rank 1 is slower", "2 s of a step", "1 s is usual", "25% of a step", *words))


def news_of(own_seconds: list[list[float]]) -> list[int]:
    """Return the logged steps with a line, if the ranks have these own seconds at each of them."""
    parallel = Parallel(0, 12, 0, torch.device("cpu"), dist.group.WORLD, nodes=NODES)
    stragglers, steps = Stragglers(parallel, every=1), [step_done(seconds=4.0) for _ in own_seconds]
    with mock.patch.object(stragglers, "_gather", side_effect=[(owns, [0.1] * 12) for owns in own_seconds]):
        for step in steps:
            stragglers.after_step(step)
    return [number for number, step in enumerate(steps) if step.news]


def test_a_node_that_stays_slow_is_reported_seldom_whichever_of_its_ranks_are_slow():
    even = [1.0] * 12
    slow = [[2.0 if rank == log % 2 else 1.0 for rank in range(12)] for log in range(IN_A_ROW + 2 * AGAIN)]
    assert news_of(slow) == [IN_A_ROW - 1, IN_A_ROW - 1 + AGAIN, IN_A_ROW - 1 + 2 * AGAIN]
    assert news_of([slow[0], even] * AGAIN) == []  # never in a row
    assert news_of([even[:4] + slow[0][:8], slow[0]] * AGAIN) == []  # another node each time


def gathered(rank, world_size):
    """Return the collectives of a step that is not logged and of one that is, and what both report."""
    stragglers = Stragglers(Parallel(rank, world_size, rank, torch.device("cpu"), dist.group.WORLD), every=2)
    reported = []

    def steps(number: int):
        phases = {"data": 0.25, "encode": 0.5 + rank, "loss": 9.0}
        step = step_done(number, phases=phases, waited=0.5, again=0.25)  # the second reading is a rank's own time too
        stragglers.after_step(step)
        reported.append((step.values, step.news))

    return [collectives("", lambda step=step: steps(step)) for step in (1, 2)], reported


def test_only_a_logged_step_communicates_and_once():
    for counts, (silent, logged) in run_ranks(gathered, 2):
        assert counts[0] == 0 and counts[1] == 1
        assert silent == ({}, [])
        assert logged == ({"seconds_own_usual": 1.0, "seconds_own_slowest": 2.0, "slowest_rank": 1}, [])


def fit_with_naps(rank, world_size, config, where: str, naps: list[float]) -> list[str]:
    """Train with a nap before each micro-batch is encoded or read; return the lines that this rank printed."""
    trainer = new_trainer(config)
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
    config = demo_config(demo_folder, logs, batch_size=9, accum_freq=1, steps=4, log_every_n_steps=1, **changes)
    said = run_ranks(fit_with_naps, len(naps), config, where, naps, timeout=200)[0]
    return [line for line in said if "slower" in line]


@pytest.mark.parametrize(("where", "look_at"), [("encoding", "clocks and heat"), ("reading", "its storage")])
def test_a_rank_that_is_late_in_every_step_is_reported_once(demo_folder, tmp_path, where, look_at):
    (line,) = slower(demo_folder, tmp_path, where, [0.1, 1.0, 0.1])
    assert line.startswith("rank 1 is slower than the others: 1") and look_at in line
    logged = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl", "train") if "slowest_rank" in r]
    assert [record["step"] for record in logged] == [1, 2, 3, 4]
    for record in logged:
        assert record["slowest_rank"] == 1 and record["seconds_own_slowest"] > 1.0


@pytest.mark.parametrize(("where", "slow"), [("encoding", []), ("reading", ["rank 1"])])
def test_of_ranks_that_share_a_model_only_one_with_late_data_is_reported(demo_folder, tmp_path, where, slow):
    """They wait for each other in every layer, so a slow rank's whole group would be reported."""
    said = slower(demo_folder, tmp_path, where, [0.1, 1.0, 0.1, 0.1, 0.1, 0.1], tensor_parallel_size=3)
    assert [line.split(" is slower")[0] for line in said] == slow
