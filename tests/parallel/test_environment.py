"""What launchers say of ranks and nodes, each in its own way; the `deepspeed` command that started a rank."""

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


STARTS = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', *sys.argv[2:]]))"
ASKS = f"""
import runpy
from pathlib import Path

# without the package, whose imports take seconds
require_hostfile = runpy.run_path({str(ROOT / "infcl" / "parallel" / "environment.py")!r})["require_hostfile"]
try:
    require_hostfile()
except ValueError as error:
    print(error)
Path("hosts").write_text("a slots=1")
require_hostfile()
"""


@pytest.mark.parametrize("given", [["-H", "hosts"], ["--hostfile=hosts"], ["--num_gpus", "2"]])
def test_a_missing_hostfile_is_rejected(tmp_path, given):
    """DeepSpeed warns, and would train on one host. Stand-ins for its runner, its launcher and a rank."""
    rank = [ASKS, "rank"]
    launcher = [STARTS, "deepspeed.launcher.launch", *rank]
    runner = [sys.executable, "-c", STARTS, "deepspeed", *launcher, *given]
    done = subprocess.run(runner, cwd=tmp_path, capture_output=True, text=True)
    rejection = "deepspeed was given --hostfile hosts, which does not exist"
    assert done.returncode == 0 and (rejection in done.stdout) == ("2" not in given), done.stdout + done.stderr


@pytest.mark.parametrize("module", ["deepspeed.launcher.launch", "infcl.cluster.torchrun"])
def test_a_rank_recognizes_the_launcher_whose_death_ends_it(module):
    """A killed launcher leaves its ranks running. A stand-in for it starts a rank that asks for its parent."""
    environment = ROOT / "infcl" / "parallel" / "environment.py"
    asks = f"import os, runpy; launcher = runpy.run_path({str(environment)!r})['launcher']\n"
    asks += "print(launcher('deepspeed.launcher.launch', 'infcl.cluster.torchrun') == os.getppid(), launcher('other'))"
    command = [sys.executable, "-c", STARTS, module, asks]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "True None\n"
