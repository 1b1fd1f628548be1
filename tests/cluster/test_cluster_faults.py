"""What happens to hosts: pulled cables, crashes, slow links, dead entries, other versions, storage that is not shared.

In each case every rank on every host ends within the time-outs, the exit code is not zero, and the host is named.
"""

import json
import re
import signal
import time

import pytest

from tests.lib.checkout import ROOT
from tests.lib.cluster_run import MARKS, flags, launch_script, ranks_on, small_disk, start, wait_until_gone
from tests.lib.entry import alone, losses
from tests.lib.hosts import PATH, Hosts
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
    result = alone(fault_flags(demo_folder, logs, "--batch-size", str(BATCH)))
    assert result.returncode == 0, result.stderr
    return losses(logs)


@pytest.fixture
def hosts(tmp_path):
    with Hosts(2, folder=tmp_path / "hosts") as hosts:
        yield hosts


def test_a_host_that_stands_still_is_waited_for_and_a_pulled_cable_ends_the_run_on_both_sides(
    demo_folder, tmp_path, hosts, one_rank_losses
):
    process = launch_script(hosts, fault_flags(demo_folder, tmp_path))
    wait_for_checkpoint(tmp_path, process)
    stopped, latest = ranks_on(hosts[1]), tmp_path / "run" / "checkpoints" / "latest"
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
    hosts[1].link("up")
    code, output = finish(launch_script(hosts, fault_flags(demo_folder, tmp_path)))
    assert code == 0 and "resumed from" in output, output
    assert losses(tmp_path) == pytest.approx(one_rank_losses, rel=1e-4)


def test_after_a_crash_supervise_continues_with_the_hosts_that_are_left(demo_folder, tmp_path, hosts, one_rank_losses):
    """The global batch stays, --accum-freq doubles, no sample is skipped or repeated."""
    command = ["bash", "launch/hostfile.sh", *fault_flags(demo_folder, tmp_path)[1:]]
    options = ["--hostfile", hosts.hostfile, "--min-hosts", "1", "--batch", str(BATCH)]
    program = ["bash", "launch/supervise.sh", *options, tmp_path / "run", *command]
    process = start(hosts, program, INTERFACE="eth0", FIRST_WAIT="0")
    wait_for_checkpoint(tmp_path, process)
    hosts[1].crash()
    code, output = finish(process)
    assert code == 0, output
    assert "supervise: on worker-1 slots=1 worker-2 slots=1" in output
    assert "rank 0 on worker-1: " in output and "the nodes: worker-1 (rank 0), worker-2 (rank 1)" in output, output
    assert "supervise: on worker-1 slots=1 \n" in output and "resumed from" in output, output
    assert "32 samples per step = 1 data-parallel rank x 4 micro-batches" in output
    assert losses(tmp_path) == pytest.approx(one_rank_losses, rel=1e-4)


def test_after_the_first_host_lost_power_supervise_continues_with_the_others(demo_folder, tmp_path, one_rank_losses):
    """Rank 0 and the run's store were there: no connection is closed, nothing answers. Started on a third host."""
    with Hosts(3, folder=tmp_path / "hosts") as hosts:
        hosts.hostfile.write_text("worker-1 slots=1\nworker-2 slots=1\n")
        command = ["bash", "launch/hostfile.sh", *fault_flags(demo_folder, tmp_path)[1:]]
        options = ["--hostfile", hosts.hostfile, "--min-hosts", "1", "--batch", str(BATCH)]
        program = ["bash", "launch/supervise.sh", *options, tmp_path / "run", *command]
        process = start(hosts, program, on=2, INTERFACE="eth0", FIRST_WAIT="0")
        wait_for_checkpoint(tmp_path, process)
        second = ranks_on(hosts[1])
        hosts[0].link("down")
        hosts[0].crash()
        wait_until(lambda: not any(rank.is_running() for rank in second), 6 * HOST_TIMEOUT, "ranks stayed behind")
        code, output = finish(process)
    assert code == 0, output
    assert "worker-2: no answer from rank 0's node, worker-1 (rank 0), for" in output, output
    assert "supervise: on worker-2 slots=1 \n" in output and "resumed from" in output, output
    assert losses(tmp_path) == pytest.approx(one_rank_losses, rel=1e-4)


def test_a_host_that_stands_still_for_good_ends_the_run_and_is_reported(demo_folder, tmp_path, hosts):
    """Its kernel still answers, so no connection breaks: only its silence shows. It ends when it can run again."""
    process = launch_script(hosts, fault_flags(demo_folder, tmp_path))
    wait_for_checkpoint(tmp_path, process)
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


def test_a_full_shared_disk_is_reported_and_the_run_continues(demo_folder, tmp_path, one_rank_losses):
    """No checkpoint fits, nothing half-written stays; what ends the run is the export, which does not fit either."""
    with small_disk(tmp_path / "small", 2) as logs, Hosts(2, folder=tmp_path / "hosts") as hosts:
        code, output = finish(launch_script(hosts, fault_flags(demo_folder, logs, "--steps", "4", "--warmup", "5")))
        assert "could not be written" in output and "training continues" in output, output
        assert losses(logs)[:3] == pytest.approx(one_rank_losses[:3], rel=1e-4)
        assert not list((logs / "run" / "checkpoints").glob("step_*"))
        assert code != 0 and re.search(r"worker-1: .*No space left on device", output), output
        wait_until_gone(hosts, seconds=30)


def test_a_shared_disk_that_fails_on_one_host_and_then_on_all_is_reported_with_the_host(demo_folder, tmp_path):
    """Read-only on one for a while, the run continues; unmounted on all it stops and leaves the empty folders empty."""
    shown = tmp_path / "shown"
    shown.touch()
    with small_disk(tmp_path / "shared", 200) as logs, Hosts(2, folder=tmp_path / "hosts") as hosts:
        more = ("--steps", "4000", "--warmup", "5", "--save-every-n-steps", "20")
        words = fault_flags(demo_folder, logs, *more)[1:]
        program = ["bash", "-c", 'exec bash launch/hostfile.sh "$@" > "$0" 2>&1', shown, *words]
        process = start(hosts, program, HOSTS=str(hosts.hostfile), INTERFACE="eth0")

        def wait_for(text: str, since: int = 0) -> int:
            """Where the output ends when it has that text."""
            wait_until(lambda: text in shown.read_text()[since:], 150, shown.read_text, process)
            return len(shown.read_text())

        def remount(option: str) -> None:
            assert hosts[1].run(["mount", "-o", f"remount,bind,{option}", logs]).returncode == 0

        wait_for_checkpoint(logs, process)
        remount("ro")
        wait_for("could not be written (rank 1 on worker-2: Read-only file system); training continues")
        remount("rw")
        before = (logs / "run" / "checkpoints" / "latest").read_text()
        wait_until(
            lambda: (logs / "run" / "checkpoints" / "latest").read_text() != before, 60, shown.read_text, process
        )
        for host in hosts.all:
            assert host.run(["umount", "--lazy", logs]).returncode == 0
        gone = time.monotonic()
        code, _ = finish(process)
        print(f"shared disk gone: the command ended after {time.monotonic() - gone:.0f} s, exit code {code}")
        wait_until_gone(hosts, seconds=30)
        assert hosts[0].run(["ls", logs]).stdout == ""
    output = shown.read_text()
    assert code != 0, output
    assert re.search(r"error: 4 checkpoints in a row could not be written to .*more than 3:", output)
    assert "rank 0 on worker-1: No such file or directory, and 1 more" in output, output


def test_a_dead_entry_of_the_hostfile_is_reported(demo_folder, tmp_path, hosts):
    hosts.hostfile.write_text("worker-1 slots=1\nworker-9 slots=1\n")
    code, output = finish(launch_script(hosts, fault_flags(demo_folder, tmp_path, "--dist-timeout", "0.25")))
    assert code != 0 and "worker-9" in output
    assert "ranks 1 of 2 did not join within 15 s; joined: those on worker-1" in output, output
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
    code, output = finish(launch_script(hosts, fault_flags(demo_folder, logs)))
    assert code == 2 and re.search(message, output), output
    wait_until_gone(hosts, seconds=30)


def test_flags_with_spaces_and_shell_characters_survive_ssh(tmp_path, hosts):
    words = ["a b", "{00..03}.tar", "$(id) `id` $HOME", 'it\'s "so"; & | > x', "%h *?", "scale=(0.9,1.0)", "é", ""]
    script = tmp_path / "words.py"
    out = tmp_path / "out"
    script.write_text(
        "import json, os, sys, pathlib\n"
        f"pathlib.Path({str(out)!r} + os.environ['RANK']).write_text(json.dumps(sys.argv[-{len(words)}:]))\n"
    )
    process = start(
        hosts, ["bash", "launch/hostfile.sh", *words], HOSTS=str(hosts.hostfile), SCRIPT=str(script), PATH=PATH
    )
    code, output = finish(process)
    assert code == 0, output
    assert [json.loads((tmp_path / f"out{rank}").read_text()) for rank in (0, 1)] == [words, words]
