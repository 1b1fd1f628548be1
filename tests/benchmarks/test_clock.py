"""benchmarks.clock: which GPUs a benchmark needs."""

import importlib
import re
import sys

import pytest
import torch


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
    reported = capsys.readouterr().err
    assert stop.value.code == 2 and reported.count("\n") == 1
    assert re.match(f"benchmarks.{name}: error: .*{message}", reported)
