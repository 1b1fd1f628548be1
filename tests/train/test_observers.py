"""Logged steps have the slowest rank and the ranks' own seconds."""

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from infcl.parallel import Parallel
from infcl.report import read_metrics
from infcl.train.observers import Collapse, Stragglers
from tests.lib.collectives import collectives
from tests.lib.ranks import run_ranks
from tests.lib.steps import step_done
from tests.lib.training import demo_config, new_trainer


def gathered(rank, world_size, encoding_waits):
    """Return the collectives of a step that is not logged and of one that is, and the values of both."""
    parallel = Parallel(rank, world_size, rank, torch.device("cpu"), dist.group.WORLD)
    stragglers = Stragglers(parallel, every=2, encoding_waits=encoding_waits)
    reported = []

    def steps(number: int):
        phases = {"data": 0.25, "encode": 0.5 + rank, "loss": 9.0}
        # the second reading is a rank's own time too
        step = step_done(number, phases=phases, waited=0.5 + 2 * rank, again=0.25)
        stragglers.after_step(step)
        reported.append(step.values)

    return [collectives("", lambda step=step: steps(step)) for step in (1, 2)], reported


@pytest.mark.parametrize(("encoding_waits", "usual", "slowest"), [(False, 1.0, 2.0), (True, 0.5, 2.5)])
def test_only_a_logged_step_communicates_and_once(encoding_waits, usual, slowest):
    """Where encoding waits for other ranks, a rank's own time is its wait for data."""
    for counts, (silent, logged) in run_ranks(gathered, 2, encoding_waits):
        assert counts[0] == 0 and counts[1] == 1
        assert silent == {}
        assert logged == {"seconds_own_usual": usual, "seconds_own_slowest": slowest, "slowest_rank": 1}


def collapse_reports(losses: list[float], spread: float, *, warmup: int = 5) -> list[int]:
    """Return the steps after which a run with these losses among 64 samples is reported as collapsed."""
    observer, reported = Collapse(64, warmup=warmup, advice="Try a smaller --lr"), []
    for number, loss in enumerate(losses, 1):
        values = {"micro_loss_image_to_text": loss, "micro_loss_text_to_image": loss, "feature_spread": spread}
        step = step_done(number, values=values)
        observer.after_step(step)
        reported += [number] * len(step.news)
        assert all("guessing" in line and "among 64 samples" in line and "--lr" in line for line in step.news)
    return reported


def test_a_collapsed_run_is_reported_once_after_twenty_steps_of_guessing():
    chance = math.log(64)
    assert collapse_reports([chance] * 60, 1e-4) == [25], "the warm-up's five steps do not count"
    assert collapse_reports([2.0] + [chance] * 60, 1e-4, warmup=100) == [21], "the loss was lower before"
    assert collapse_reports([chance] * 60, 1e-4, warmup=100) == []
    assert collapse_reports([chance] * 60, 0.5) == [], "the features differ: it has not learned yet"
    assert collapse_reports([2.0] * 60, 1e-4) == []
    assert collapse_reports([chance] * 15 + [2.0] + [chance] * 15, 1e-4) == []


def fit_with_naps(rank, world_size, config, where: str, naps: list[float]) -> None:
    """Train with a nap before each micro-batch is encoded or read, on a clock that stands still otherwise."""
    trainer, clock = new_trainer(config), [0.0]
    encode, steps = trainer.engine.encode, trainer.loader.steps

    def nap(micro_batch):
        clock[0] += naps[rank]
        return micro_batch

    def steps_late(again):
        for micro_batches in steps(again):
            yield map(nap, micro_batches)

    if where == "encoding":
        trainer.engine.encode = lambda **micro_batch: encode(**nap(micro_batch))
    else:
        trainer.loader.steps = steps_late
    with mock.patch("time.perf_counter", lambda: clock[0]):
        trainer.fit()


def slowest_ranks(demo_folder, logs, where: str, naps: list[float], **changes) -> list[tuple[int, float]]:
    """Return (rank, its own seconds) of the slowest rank of each of four logged steps."""
    config = demo_config(demo_folder, logs, batch_size=9, accum_freq=1, steps=4, log_every_n_steps=1, **changes)
    run_ranks(fit_with_naps, len(naps), config, where, naps)
    records = read_metrics(logs / "run" / "metrics.jsonl", "train")
    return [(record["slowest_rank"], record["seconds_own_slowest"]) for record in records]


def test_a_rank_that_is_late_in_every_step_is_the_slowest_one_in_the_metrics(demo_folder, tmp_path):
    found = slowest_ranks(demo_folder, tmp_path, "reading", [0.1, 1.0, 0.1])
    assert len(found) == 4 and all(rank == 1 and seconds >= 1.0 for rank, seconds in found), found


@pytest.mark.long
@pytest.mark.parametrize(("where", "least", "most"), [("encoding", 0.0, 0.8), ("reading", 1.0, 99.0)])
def test_of_ranks_that_share_a_model_only_late_data_counts(demo_folder, tmp_path, where, least, most):
    """They wait for each other in every layer, so all ranks of a slow one's group would look slow."""
    naps = [0.1, 1.0, 0.1, 0.1, 0.1, 0.1]
    found = slowest_ranks(demo_folder, tmp_path, where, naps, tensor_parallel_size=3)
    assert all(least <= seconds < most for _, seconds in found), found
