"""torchrun as launch/torchrun.sh starts it: what it is given, and whose exit code comes out."""

import os
import signal
import subprocess
import sys

import pytest

from tests.lib.checkout import ROOT
from tests.lib.entry import ON_CPU
from tests.lib.launch_scripts import run
from tests.lib.waiting import wait_until


def test_torchrun_of_several_nodes_needs_rank_and_address(tmp_path):
    programs = {"python": 'printf "%s|" "$NCCL_SOCKET_IFNAME" "$GLOO_SOCKET_IFNAME" "$@"\n', "torchrun": ""}
    given = {"tmp_path": tmp_path, "programs": programs, "NODES": "2", "RANKS": "4", "INTERFACE": "eth0"}
    missing = run("torchrun.sh", **given)
    assert missing.returncode != 0 and "NODE_RANK" in missing.stderr
    started = run("torchrun.sh", "--steps", "1", **given, NODE_RANK="1", MASTER_ADDR="fd77::1").stdout
    where = "--nnodes|2|--node-rank|1|--master-addr|fd77::1|--master-port|29500|--nproc-per-node|4|--|pretrain_clip.py|"
    assert started.startswith(f"=eth0|eth0|-m|infcl.cluster.torchrun|{where}") and started.endswith("|--steps|1|")


@pytest.mark.long
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit(2)", 2),
        ("sys.exit(65)", 65),
        ("os.kill(os.getpid(), 9)", 137),
        pytest.param("sys.exit(0)", 0, marks=pytest.mark.slow),  # with one rank at the end of this file
    ],
)
def test_under_torchrun_a_failed_ranks_code_comes_out(tmp_path, end, code):
    """By which supervise.sh knows what is not to be started again; the other rank is ended by torchrun.

    A usage error (2) is one line of the rank, after which the launcher reported the command in several.
    """
    program = tmp_path / "program.py"
    program.write_text(f"import os, sys, time\nif os.environ['RANK'] == '1': {end}\ntime.sleep({60 if code else 0})\n")
    command = [sys.executable, "-m", "infcl.cluster.torchrun", "--standalone", "--nproc-per-node", "2", "--", program]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == code, ended.stderr
    if code in (0, 2):
        assert not ended.stderr
    else:
        assert f"exitcode  : {'-9' if code == 137 else code}" in ended.stderr, ended.stderr


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGUSR1]
)
def test_torchrun_that_is_signalled_to_end_forwards_it_to_its_ranks_and_has_the_signals_code(tmp_path, number):
    """SIGUSR1, as launch/supervise.sh passes it on, ended torchrun alone and left its ranks behind (one, on a CPU)."""
    program, started, printed = tmp_path / "program.py", tmp_path / "started", tmp_path / "printed"
    program.write_text(
        "import os, pathlib, signal, sys, time\n"
        f"signal.signal({number:d}, lambda *_: (pathlib.Path({str(printed)!r}).touch(), sys.exit(1)))\n"
        f"pathlib.Path({str(started)!r} + os.environ['WORLD_SIZE']).touch()\ntime.sleep(60)\n"
    )
    command, environment = [sys.executable, "-m", "infcl.cluster.torchrun", "--standalone", "--", program], os.environ
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment | ON_CPU
    ) as process:
        wait_until((tmp_path / "started1").exists, 300, "its rank did not start", process)
        process.send_signal(number)
        assert process.wait(300) == 128 + number and printed.exists()
