"""What launchers say of ranks and nodes, each in its own way; the launcher that started a rank."""

import subprocess
import sys

import pytest

from infcl.parallel.environment import NODE_SIZES, read_ranks_per_node
from tests.lib.checkout import ROOT


@pytest.mark.parametrize(
    "environment, ranks_per_node",
    [
        ({}, None),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),  # torchrun
        ({"LOCAL_SIZE": "4"}, 4),  # deepspeed
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"SLURM_TASKS_PER_NODE": "8(x16)"}, 8),
        ({"SLURM_TASKS_PER_NODE": "8(x2),4"}, None),  # unequal nodes
    ],
)
def test_ranks_per_node_are_read_from_every_launcher(monkeypatch, environment, ranks_per_node):
    for name in NODE_SIZES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert read_ranks_per_node() == ranks_per_node


@pytest.mark.parametrize("module", ["deepspeed.launcher.launch", "infcl.cluster.torchrun"])
def test_a_rank_recognizes_the_launcher_whose_death_ends_it(module):
    """A killed launcher leaves its ranks running. A stand-in for it starts a rank that asks for its parent."""
    starts = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', *sys.argv[2:]]))"
    environment = ROOT / "infcl" / "parallel" / "environment.py"  # without the package, whose imports take seconds
    asks = f"import os, runpy; launcher = runpy.run_path({str(environment)!r})['launcher']\n"
    asks += "print(launcher('deepspeed.launcher.launch', 'infcl.cluster.torchrun') == os.getppid(), launcher('other'))"
    command = [sys.executable, "-c", starts, module, asks]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "True None\n"
