"""benchmarks.clock: how many steps a setting may take, and which GPUs a benchmark needs."""

import importlib
import re
import sys

import pytest
import torch

from benchmarks.clock import affordable


@pytest.mark.parametrize("milliseconds", [0.0, 1.0, 99.0, 101.0, 340.0, 600.0, 999.0])
@pytest.mark.parametrize("warm_up", [0, 2])
def test_steps_stay_within_the_seconds_and_one_is_timed(milliseconds, warm_up):
    compiling, warming, timed = affordable(1.0, milliseconds, warm_up, 5)
    assert (compiling + warming + timed) * milliseconds <= 1000 and 1 <= timed <= 5
    full = (3 if warm_up else 0, warm_up, 5)
    assert ((compiling, warming, timed) == full) == (sum(full) * milliseconds <= 1000)


def test_a_step_that_is_too_long_is_left_out_and_without_a_limit_none_is():
    assert affordable(1.0, 1001.0, 2, 5) is None
    assert affordable(float("inf"), 1e9, 2, 5) == (3, 2, 5)


@pytest.mark.parametrize(
    ("command", "gpus", "message"),
    [
        ("loss", 0, "it measures on GPUs, and none is visible"),
        ("loss --check", 0, "none is visible"),
        ("loss --gpus 4", 1, "--gpus 4: 1 visible here"),
        ("loss --impl inf_cl,foo", 0, "--impl: unknown loss 'foo'; one of inf_cl, clip, .*nt_xent"),
        ("loss --impl clip, --check", 1, "--impl: unknown loss ''; one of"),
        ("retrieval --gpus 1", 0, "none is visible"),
        ("step --device cuda --model demo", 0, "--device cuda: no GPU is visible"),
    ],
)
def test_a_benchmark_without_its_gpus_or_with_an_unknown_loss_is_one_line(command, gpus, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    name, *flags = command.split()
    monkeypatch.setattr(sys, "argv", [name, *flags])
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(f"benchmarks.{name}").main()
    told = capsys.readouterr().err
    assert stop.value.code == 2 and told.count("\n") == 1
    assert re.match(f"benchmarks.{name}: error: .*{message}", told)
