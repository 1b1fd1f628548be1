import json
import sys

import pytest

from benchmarks.data import hardware
from benchmarks.data_memory import LIMIT, growth_after, soak
from tests.lib.checkout import ROOT


@pytest.mark.slow
def test_workers_do_not_grow_over_twenty_epochs():
    memory = soak(epochs=20, images=256, size=96, workers=2)
    assert growth_after(memory, settle=4) < LIMIT


@pytest.mark.parametrize("program", ["data", "data_memory"])
def test_the_figures_name_the_command_that_made_them(program, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"/somewhere/benchmarks/{program}.py", "--images", "8"])
    assert hardware()["command"] == f"python -m benchmarks.{program} --images 8"
    stored = json.loads((ROOT / "docs" / "results" / f"{program}.json").read_text())["command"]
    assert stored.startswith(f"python -m benchmarks.{program} --")
