"""What happens to hosts: pulled cables, crashes, slow links, dead entries, other versions, storage that is not shared.

In each case every rank on every host ends within the time-outs, the exit code is not zero, and the host is named.
"""

import json
import re
import shutil
import signal
import time
from contextlib import suppress

import pytest

from tests.lib.checkout import ROOT
from tests.lib.cluster_run import (
    MARKS,
    flags,
    launch_script,
    ranks_on,
    small_disk,
    start,
    train_without_launcher,
    wait_until_gone,
)
from tests.lib.entry import forked, losses
from tests.lib.hosts import Hosts
from tests.lib.waiting import finish, wait_for_checkpoint, wait_until

pytestmark = MARKS
STEPS, BATCH = 30, 32
HOST_TIMEOUT = 10  # seconds: 1/45 of --dist-timeout


def fault_flags(demo_folder, logs, *more: str) -> list[str]:
    return flags(
        demo_folder, logs, "--steps", str(STEPS), "--global-batch-size", str(BATCH), "--accum-freq", "1",
        "--batch-size", "8", "--save-every-n-steps", "2", "--dist-timeout", str(45 * HOST_TIMEOUT / 60),
        "--resume", "latest", *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def one_rank_losses(demo_folder, tmp_path_factory):
    logs = tmp_path_factory.mktemp("one")
    result = forked(fault_flags(demo_folder, logs, "--batch-size", str(BATCH)), 1)
    assert result.returncode == 0, result.stderr
    return losses(logs)


@pytest.fixture
def hosts(tmp_path):
    with Hosts(2, folder=tmp_path / "hosts") as hosts:
        yield hosts


def test_a_host_that_stands_still_is_waited_for_or_ends_the_run_as_a_pulled_cable_does(
    demo_folder, tmp_path, hosts, one_rank_losses
):
    """On both sides. Of one that stands still the kernel answers: no connection breaks, only its silence shows.

    Spaces and shell characters of the flags survive ssh.
    """
    logs = tmp_path / """a b {00..03} $(id) `id` $HOME it's "so"; & | > x %h *? scale=(0.9,1.0) é"""
    words, latest = fault_flags(demo_folder, logs, "--report-to", ""), logs / "run" / "checkpoints" / "latest"
    process = launch_script(hosts, words)
    wait_for_checkpoint(logs, process)
    stopped = ranks_on(hosts[1])
    for rank in stopped:
        rank.send_signal(signal.SIGSTOP)
    time.sleep(HOST_TIMEOUT / 2)
    saved = latest.read_text()
    for rank in stopped:
        rank.send_signal(signal.SIGCONT)
    wait_until(lambda: latest.read_text() != saved, 60, "no further checkpoint was written", process)
    hosts[1].link("down")
    wait_until_gone(hosts, seconds=6 * HOST_TIMEOUT)
    code, output = finish(process)
    assert code != 0
    assert "worker-1: no heartbeat from worker-2 (rank 1) for" in output, output
    assert json.loads((logs / "run" / "config.json").read_text())["report_to"] == "none"

    hosts[1].link("up")
    saved = latest.read_text()
    process = launch_script(hosts, words)
    wait_until(lambda: latest.read_text() != saved, 300, "no further checkpoint was written", process)
    frozen = hosts[1].processes("pretrain_clip.py")  # the ranks and their launcher
    assert len(frozen) >= 2
    for one in frozen:
        one.send_signal(signal.SIGSTOP)
    wait_until(lambda: not ranks_on(hosts[0]), 6 * HOST_TIMEOUT, "the other host still trains")
    for one in frozen:
        one.send_signal(signal.SIGCONT)
    wait_until_gone(hosts, seconds=6 * HOST_TIMEOUT)
    code, output = finish(process)
    assert code != 0 and "worker-1: no heartbeat from worker-2 (rank 1) for" in output, output
    assert "resumed from" in output and len(losses(logs)) >= 4
    assert losses(logs) == pytest.approx(one_rank_losses[: len(losses(logs))], rel=1e-4)


def test_supervise_continues_without_a_first_host_that_lost_power_and_one_that_crashed(
    demo_folder, tmp_path, one_rank_losses
):
    """On hosts whose ranks divide the batch, another one first. No sample is skipped or repeated.

    Of the first host, where rank 0 and the run's store were, no connection is closed and nothing answers.
    """
    latest = tmp_path / "run" / "checkpoints" / "latest"
    with Hosts(3, folder=tmp_path / "hosts") as hosts:
        command = ["bash", "launch/hostfile.sh", *fault_flags(demo_folder, tmp_path)[1:]]
        options = ["--hostfile", hosts.hostfile, "--min-hosts", "1", "--batch", str(BATCH)]
        program = ["bash", "launch/supervise.sh", *options, tmp_path / "run", *command]
        process = start(hosts, program, on=1, INTERFACE="eth0", FIRST_WAIT="0")
        wait_for_checkpoint(tmp_path, process)
        second = ranks_on(hosts[1])
        hosts[0].link("down")
        hosts[0].crash()
        wait_until(lambda: not any(rank.is_running() for rank in second), 6 * HOST_TIMEOUT, "ranks stayed behind")
        saved = latest.read_text()
        wait_until(lambda: latest.read_text() != saved, 300, "no further checkpoint was written", process)
        hosts[2].crash()
        code, output = finish(process)
    assert code == 0, output
    assert "supervise: on worker-1 slots=1 worker-2 slots=1 \n" in output
    assert "worker-2: no answer from rank 0's node, worker-1 (rank 0), for" in output, output
    assert "supervise: on worker-2 slots=1 worker-3 slots=1 \n" in output and output.count("resumed from") == 2, output
    assert "rank 0 on worker-2: " in output and "the nodes: worker-2 (rank 0), worker-3 (rank 1)" in output, output
    assert "supervise: on worker-2 slots=1 \n" in output
    assert "32 samples per step = 1 data-parallel rank x 4 micro-batches" in output
    assert losses(tmp_path) == pytest.approx(one_rank_losses, rel=1e-4)


def test_a_shared_disk_that_fails_on_one_host_is_full_and_then_gone_is_reported_with_the_host(demo_folder, tmp_path):
    """Read-only on one or full, the run continues; unmounted on all it stops and leaves the empty folders empty."""
    shown = tmp_path / "shown0"  # what rank 0 prints
    shown.touch()
    with small_disk(tmp_path / "shared", 200) as logs, Hosts(2, folder=tmp_path / "hosts") as hosts:
        more = ("--steps", "4000", "--warmup", "5", "--save-every-n-steps", "20")
        words = ["-c", 'exec python "$@" > "$0$RANK" 2>&1', tmp_path / "shown", *fault_flags(demo_folder, logs, *more)]
        processes = train_without_launcher(hosts, words, program="bash")
        latest, filler = logs / "run" / "checkpoints" / "latest", logs / "filler"
        full = "on worker-1: No space left on device"

        def wait_for(text: str) -> None:
            wait_until(lambda: text in shown.read_text(), 150, shown.read_text, processes[0])

        def wait_for_a_checkpoint() -> None:
            before = latest.read_text()
            wait_until(lambda: latest.read_text() != before, 60, shown.read_text, processes[0])

        def fill() -> None:
            """Leave 1 MiB, so that no checkpoint fits. Again and again: a removed checkpoint frees its space."""
            with suppress(OSError), open(filler, "ab") as file:
                file.write(bytes(max(0, shutil.disk_usage(logs).free - 2**20)))

        def remount(option: str) -> None:
            assert hosts[1].run(["mount", "-o", f"remount,bind,{option}", logs]).returncode == 0

        wait_for_checkpoint(logs, processes[0])
        remount("ro")
        wait_for("could not be written (rank 1 on worker-2: Read-only file system); training continues")
        remount("rw")
        wait_for_a_checkpoint()
        wait_until(lambda: fill() or full in shown.read_text(), 150, shown.read_text, processes[0])
        filler.unlink()
        wait_for_a_checkpoint()
        for host in hosts.all:
            assert host.run(["umount", "--lazy", logs]).returncode == 0
        assert all(finish(process)[0] != 0 for process in processes)
        assert hosts[0].run(["ls", logs]).stdout == ""
    output = shown.read_text()
    assert re.search(r"error: 4 checkpoints in a row could not be written to .*more than 3:", output)
    assert "rank 0 on worker-1: No such file or directory, and 1 more" in output, output


def test_a_dead_entry_of_the_hostfile_is_reported(demo_folder, tmp_path, hosts):
    hosts.hostfile.write_text("worker-1 slots=1\nworker-9 slots=1\n")
    code, output = finish(launch_script(hosts, fault_flags(demo_folder, tmp_path, "--dist-timeout", "0.1")))
    assert code != 0 and "worker-9" in output
    assert "ranks 1 of 2 did not join within 6 s; joined: those on worker-1" in output, output
    wait_until_gone(hosts, seconds=20)


@pytest.mark.parametrize(
    ("target", "change", "message"),
    [
        (ROOT / "infcl" / "__init__.py", "# a change\n", r"do not run the same: source: .* on worker-2 \(rank 1\)"),
        ("logs", "folder", r"worker-2: \S+/logs/run is not the folder that worker-1 writes to"),
    ],
    ids=["code", "run folder"],
)
def test_a_host_with_another_file_or_folder_is_rejected_by_name(demo_folder, tmp_path, hosts, target, change, message):
    logs, other = tmp_path / "logs", tmp_path / "other"
    logs.mkdir()
    if change == "folder":
        other.mkdir()
    else:
        other.write_text(target.read_text() + change)
    mounted = hosts[1].run(["mount", "--bind", other, tmp_path / target])
    assert mounted.returncode == 0, mounted.stderr
    code, output = finish(train_without_launcher(hosts, fault_flags(demo_folder, logs))[0])
    assert code == 2 and re.search(message, output), output
