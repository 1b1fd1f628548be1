"""launch/slurm.sbatch under a real Slurm: two hosts (hosts.py), two tasks on each."""

import json
import re

import pytest

from tests.lib.checkout import ROOT
from tests.lib.cluster_run import MARKS, flags
from tests.lib.entry import losses
from tests.lib.hosts import PATH, Hosts
from tests.lib.slurm import Slurm, missing

pytestmark = [*MARKS, pytest.mark.skipif(bool(missing()), reason=str(missing()))]


@pytest.fixture(scope="module")
def daemons(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    with Hosts(2, nics=2, folder=folder / "hosts") as hosts, Slurm(hosts, folder / "slurm") as made:
        yield made


@pytest.fixture
def slurm(daemons):
    yield daemons
    daemons.cancel_all()


def submit(slurm, demo_folder, logs, *more: str, tasks: int = 1, interface: str = "") -> str:
    """The number of a job of so many tasks on each of two nodes, which trains 80 steps of 4 samples per task."""
    options = f"--nodes 2 --ntasks-per-node {tasks} --gpus-per-node 0 --cpus-per-task 1".split()
    options += ["--export", f"ALL,OMP_NUM_THREADS=1,INTERFACE={interface}"]
    words = flags(demo_folder, logs, "--batch-size", "4", "--accum-freq", "1", "--steps", "80", *more)
    return slurm.submit([*options, "--output", logs / "job.log", "launch/slurm.sbatch", *words[1:]], cwd=ROOT)


def wait_for_losses(slurm, logs, count: int) -> None:
    slurm.wait_until(lambda: (logs / "run" / "metrics.jsonl").exists() and len(losses(logs)) >= count, 120)


def test_each_task_may_use_all_cores_of_cpus_per_task(tmp_path, slurm):
    """As its loader's workers have to; `srun` alone would give it one core of the two."""
    (tmp_path / "python").write_text(f"#!/bin/sh\nnproc > {tmp_path}/cores.$SLURM_PROCID\nexit 2\n")
    (tmp_path / "python").chmod(0o755)
    options = "--nodes 2 --ntasks-per-node 1 --gpus-per-node 0 --cpus-per-task 2".split()
    options += ["--export", f"ALL,PATH={tmp_path}:{PATH}", "--output", tmp_path / "job.log"]
    job = slurm.submit([*options, "launch/slurm.sbatch", "--logs", tmp_path, "--name", "run"], cwd=ROOT)
    assert slurm.wait(job)["ExitCode"] == "2:0", (tmp_path / "job.log").read_text()
    assert [(tmp_path / f"cores.{task}").read_text() for task in (0, 1)] == ["2\n", "2\n"]


def test_a_job_that_saved_lost_a_task_or_lost_a_node_is_queued_again_until_the_run_is_finished(
    demo_folder, tmp_path, slurm
):
    """Over a network that is not the one of the nodes' names. For a lost node it waits."""
    job = submit(slurm, demo_folder, tmp_path, "--save-frequency", "0", "--dist-timeout", "7.5", interface="eth1")
    log = tmp_path / "job.log"
    wait_for_losses(slurm, tmp_path, 3)
    slurm.run("scancel", "--signal=USR1", job)  # as --signal=USR1@300 does before the time limit
    slurm.wait_until(lambda: slurm.state(job).get("Restarts") == "1", 120)
    saved = len(losses(tmp_path))
    assert 3 <= saved < 80
    wait_for_losses(slurm, tmp_path, saved + 3)
    slurm.hosts[1].run(["pkill", "-KILL", "--oldest", "--full", "pretrain_clip.py"])

    trained = re.compile(f'"kind": "train", "step": {saved + 1},')
    slurm.wait_until(lambda: len(trained.findall((tmp_path / "run" / "metrics.jsonl").read_text())) == 2, 120)
    slurm.hosts[1].crash()
    slurm.wait_until(lambda: "DOWN" in slurm.state(job).get("Reason", ""), 120)
    assert slurm.state(job)["JobState"] == "PENDING"
    slurm.return_node(1)
    state = slurm.wait(job)
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("COMPLETED", "0:0", "3"), log.read_text()
    assert re.findall(r"queued again(.*)", log.read_text())[:2] == ["", ", restart 1 of 10"], log.read_text()
    assert f"after step_{saved:08d}; queued again" in log.read_text(), log.read_text()
    assert log.read_text().count(f"at step {saved}\n") == 3, log.read_text()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["world_size"], summary["steps"], summary["samples_seen"]) == (2, 80, 640)
    assert len(losses(tmp_path)) == 80 and not (tmp_path / "run.failures").exists()


def test_a_usage_error_ends_the_job_and_a_cancelled_one_stays_so(demo_folder, tmp_path, slurm):
    """With srun's --kill-on-bad-exit the exit code was 143, that of the other tasks, and the job never ended."""
    state = slurm.wait(submit(slurm, demo_folder, tmp_path, "--lr", "nan"))
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("FAILED", "2:0", "0")
    assert "--lr nan must be a finite number" in (tmp_path / "job.log").read_text()

    job = submit(slurm, demo_folder, tmp_path, "--steps", "4000", tasks=2)
    wait_for_losses(slurm, tmp_path, 1)
    assert "4 x cpu" in (tmp_path / "job.log").read_text()
    slurm.run("scancel", job)
    assert slurm.wait(job)["JobState"] == "CANCELLED"
    for host in slurm.hosts.all:
        slurm.wait_until(lambda host=host: host.run(["pgrep", "--full", "pretrain_clip.py"]).returncode == 1, 60)
    assert slurm.run("squeue", "-h") == ""
