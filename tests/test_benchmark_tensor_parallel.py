"""A row of benchmarks.tensor_parallel: what it says does not depend on how long was measured."""

import sys

import pytest

from benchmarks.tensor_parallel import _measure, _parse, settings
from tests.ranks import run_ranks


def loss_after(rank: int, world_size: int, setting: dict) -> float:
    return _measure(setting)["loss"]


def setting_of(repeats: str, monkeypatch) -> dict:
    flags = "--gpus 1 --models demo --sizes 1 --stages 1 --batch-sizes 4 --device cpu --compile-blocks off".split()
    monkeypatch.setattr(sys, "argv", ["benchmarks.tensor_parallel", *flags, "--repeats", repeats])
    (setting,) = settings(_parse())
    return setting


def test_the_loss_of_a_row_is_that_of_one_step_whatever_the_repeats(monkeypatch):
    losses = [run_ranks(loss_after, 1, setting_of(repeats, monkeypatch)) for repeats in ("3", "5")]
    assert losses[0] == losses[1]


def test_fewer_repeats_than_it_has_to_run_are_refused(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        setting_of("2", monkeypatch)
    assert "--repeats 2 is below 3" in capsys.readouterr().err
