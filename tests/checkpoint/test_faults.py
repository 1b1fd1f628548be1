"""A run survives what happens to runs: kills, signals, full disks, damaged checkpoints.

In each case all processes end, the exit code is not zero, and `--resume latest` gives the losses of the
uninterrupted run: no sample skipped or repeated, at most the work since the last save done again.

What is hit is forked by a stand-in of the deepspeed launcher, or runs under the launcher itself where that is hit; what
only trains, before and after, runs in the ranks of run_ranks.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from infcl.report import read_metrics
from tests.lib.checkout import ROOT
from tests.lib.cluster_run import small_disk
from tests.lib.entry import ON_CPU, command, forked
from tests.lib.gpus import environment
from tests.lib.kill_run import Starter
from tests.lib.ranks import free_port
from tests.lib.waiting import finish, wait_for_checkpoint, wait_until

STEPS, SAVE_EVERY, FAULT_STEP, SIGNAL_STEP = 8, 3, 5, 7


def flags(demo_folder, logs, *more: str) -> list[str]:
    every = str(SAVE_EVERY)
    return command(
        demo_folder, logs, "--batch-size", "8", "--steps", str(STEPS), "--save-every-n-steps", every,
        "--save-frequency", "0", "--log-every-n-steps", "1", "--dist-timeout", "2", "--device", "cpu", *more,
    )[1:]  # fmt: skip


def train(arguments: list[str]) -> str:
    """What a run that finishes prints."""
    done = forked(["pretrain_clip.py", *arguments, "--workers", "0"], 2)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def ranks_alive(logs: Path) -> list[psutil.Process]:
    alive = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = process.info["cmdline"] or []
        if str(logs) in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            alive.append(process)
    return alive


def losses(logs: Path) -> list[float]:
    records = read_metrics(logs / "run" / "metrics.jsonl", "train")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    return [record["loss"] for record in records]


@pytest.fixture(scope="module")
def uninterrupted(demo_folder, tmp_path_factory):
    logs = tmp_path_factory.mktemp("whole")
    train(flags(demo_folder, logs))
    return losses(logs)


@pytest.fixture(scope="module")
def starter():
    starter = Starter()
    yield starter
    starter.process.kill()


def resume_and_compare(demo_folder, logs, uninterrupted):
    output = train(flags(demo_folder, logs, "--resume", "latest"))
    assert losses(logs) == uninterrupted
    return output


@pytest.mark.long
def test_a_killed_rank_ends_the_run_and_it_resumes_exactly(demo_folder, tmp_path, uninterrupted, starter):
    """At random moments: test_random_kills."""
    fault = (1, FAULT_STEP, "replay", signal.SIGKILL)
    codes, output = starter.finish(flags(demo_folder, tmp_path), tmp_path, fault)
    assert codes[0] != 0 and codes[1] == -signal.SIGKILL, output
    assert (tmp_path / "run" / "checkpoints" / "step_00000003").is_dir(), output
    output = resume_and_compare(demo_folder, tmp_path, uninterrupted)
    assert "at step 3" in output


@pytest.mark.long
def test_a_signal_saves_and_ends_with_its_code(demo_folder, tmp_path, uninterrupted, starter):
    fault = (1, SIGNAL_STEP, "encode", signal.SIGTERM)
    codes, output = starter.finish(flags(demo_folder, tmp_path), tmp_path, fault)
    assert codes == [143, 143] and f"SIGTERM received at step {SIGNAL_STEP}" in output, output
    output = resume_and_compare(demo_folder, tmp_path, uninterrupted)
    assert f"at step {SIGNAL_STEP}" in output


def handles(process: subprocess.Popen, number: signal.Signals) -> bool:
    """Return whether the process has a handler for a signal, which would otherwise end it."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return bool(int(status.split("SigCgt:")[1].split()[0], 16) >> (number - 1) & 1)


@pytest.mark.long
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="Linux tells of handlers in /proc")
def test_sigusr1_in_the_first_second_of_a_start_is_kept_until_there_is_something_to_save(demo_folder, tmp_path):
    """To one rank, while it imports; each start of a job whose time ends within it gets on by a step."""
    arguments, port = flags(demo_folder, tmp_path, "--workers", "0"), free_port()
    first, second = (
        subprocess.Popen(
            [sys.executable, "pretrain_clip.py", *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, env=os.environ | ON_CPU | environment(rank, 2, port),
        )
        for rank in range(2)
    )  # fmt: skip
    wait_until(lambda: handles(second, signal.SIGUSR1), 120, "the rank installed no handler", second)
    assert not (tmp_path / "run").exists()
    second.send_signal(signal.SIGUSR1)
    code, output = finish(first, 300)
    assert (code, finish(second, 60)[0]) == (138, 138), output
    assert "SIGUSR1 received at step 1; --resume latest continues from step_00000001" in output, output


@pytest.mark.long
def test_a_full_disk_is_reported_and_training_goes_on(demo_folder, tmp_path, uninterrupted):
    with small_disk(tmp_path / "small", 2) as logs:
        done = forked(["pretrain_clip.py", *flags(demo_folder, logs, "--workers", "0")], 2)
        code, output = done.returncode, done.stdout + done.stderr
        assert "could not be written" in output and "training continues" in output, output
        assert f"step {STEPS}/{STEPS}" in output
        assert code == 74 and "No space left" in output and "start again with --resume latest" in output, output
        assert "Timed out" not in output  # nobody waits for the rank that could not write
        assert not (logs / "run" / "summary.json").exists()
        assert not list((logs / "run" / "checkpoints").glob("step_*"))
        assert losses(logs) == uninterrupted


@pytest.mark.long
def test_when_the_launcher_dies_the_ranks_save_and_end(demo_folder, tmp_path):
    """SIGKILL of the launcher makes the deepspeed command report success and would leave the ranks running."""
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "-q", "--num_gpus", "2", "--master_port"]
    process = subprocess.Popen(
        [*launcher, str(free_port()), "pretrain_clip.py", *flags(demo_folder, tmp_path, "--steps", "100000")],
        cwd=ROOT, env=os.environ | ON_CPU, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    wait_for_checkpoint(tmp_path, process)
    command = psutil.Process(process.pid)
    for one in command.children(recursive=True):
        if "deepspeed.launcher.launch" in " ".join(one.cmdline()):
            one.kill()
    wait_until(lambda: not ranks_alive(tmp_path), 200, "ranks stayed behind")
    _, output = finish(process, 300)
    stopped_at = int(output.split("SIGTERM received at step ")[1].split(";")[0])
    newest = (tmp_path / "run" / "checkpoints" / "latest").read_text().strip()
    assert newest == f"step_{stopped_at:08d}"


@pytest.mark.long
def test_a_loader_s_worker_that_is_killed_is_reported_with_its_rank_and_memory(demo_folder, tmp_path, starter):
    """Not with a traceback of the line in which word of it came: torch raises from the handler of a signal."""
    codes, output = starter.finish(flags(demo_folder, tmp_path), tmp_path, (0, 2, "replay", 0))
    assert codes[0] == 1, output  # without a report it trains on after a minute
    assert "RuntimeError: a worker of the loader of rank 0 has died" in output
    assert "is killed by signal: Killed; its workers held " in output and "in strike" not in output
