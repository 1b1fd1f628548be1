"""launch/supervise.sh: on which hosts it starts a run again, when it ends, what it rejects."""

import os
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.lib.checkout import ROOT
from tests.lib.launch_scripts import executable, run


def start(tmp_path, *command: str, **environment: str) -> subprocess.Popen:
    program, pipes = ["bash", "launch/supervise.sh", str(tmp_path), *command], subprocess.PIPE
    return subprocess.Popen(program, cwd=ROOT, env=os.environ | environment, stdout=pipes, stderr=pipes, text=True)


@pytest.mark.parametrize(
    ("code", "ended", "message"),
    [
        (7, 7, "exit code 7 at no checkpoint, 3 times in a row; giving up"),
        (0, 1, "exit code 0 at no checkpoint, 3 times in a row; giving up"),
        (2, 2, "the command is wrong"),
        (65, 65, "too many bad samples or non-finite steps (exit code 65); not restarted"),
        (130, 130, "interrupted; not restarted"),
    ],
)
def test_it_gives_up_where_a_restart_does_not_help(tmp_path, code, ended, message):
    process = start(tmp_path, "bash", "-c", f"exit {code}", FIRST_WAIT="0")
    assert message in process.communicate(timeout=300)[1] and process.returncode == ended


@pytest.mark.parametrize(
    ("stream", "line", "command"),
    [
        ("stdout", "trapped", "trap 'exit 143' TERM; echo trapped; sleep 100 & wait"),
        ("stderr", "restart in 300 s", "exit 7"),
    ],
    ids=["in the run", "between two starts"],
)
def test_a_signal_ends_the_command_and_the_supervision_at_once(tmp_path, stream, line, command):
    process = start(tmp_path, "bash", "-c", f"echo >> {shlex.quote(str(tmp_path))}/starts; {command}", FIRST_WAIT="300")
    assert line in getattr(process, stream).readline()
    process.terminate()
    _, said = process.communicate(timeout=300)
    assert process.returncode == 143 and "stopped" in said
    assert (tmp_path / "starts").read_text() == "\n"


def test_a_signal_before_the_command_has_its_group_is_passed_on(tmp_path):
    """On a busy machine setsid starts late; the training continued to its end."""
    executable(tmp_path / "setsid", f'echo begun\nsleep 1\nexec {shutil.which("setsid")} "$@"\n')
    process = start(tmp_path, "sleep", "100", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert process.stdout.readline() == "begun\n"
    process.terminate()
    _, said = process.communicate(timeout=300)
    assert process.returncode == 143 and "stopped" in said


def supervised_hosts(tmp_path, *options, command=(), slots=8):
    """supervise.sh over four hosts of which three answer; its command writes down the hosts that it was given."""
    (tmp_path / "hosts").write_text("".join(f"{name} slots={slots}\n" for name in "abcd"))
    programs = {
        "python": f'exec {shlex.quote(sys.executable)} -S {shlex.quote(str(ROOT))}/"$@"\n',  # without packages
        "ssh": 'case "$*" in *" c true") exit 255;; esac\n',
        "command": f'cat "$HOSTS"; touch {shlex.quote(str(tmp_path))}/summary.json\n',
    }
    arguments = ["--hostfile", tmp_path / "hosts", *options, tmp_path, tmp_path / "bin" / "command", *command]
    return run("supervise.sh", *arguments, tmp_path=tmp_path, programs=programs)


DIVIDED = "supervise: a batch of 49152 is divided by the ranks of 1, 2, 3, 4 of 4 hosts"


@pytest.mark.parametrize(
    ("options", "command", "reported"),
    [
        ([], [], "supervise: at least 1 of 4 hosts\n"),
        (["--min-hosts", "3", "--batch", "49152"], [], DIVIDED),
        (["--min-hosts", "3"], ["--global-batch-size", "7", "--global-batch-size", "49152"], DIVIDED),
        (["--min-hosts", "3"], ["--global-batch-size", "7", "--global-batch-size=49152"], DIVIDED),
    ],
)
def test_supervise_continues_with_the_hosts_that_answer_and_divide_the_batch(tmp_path, options, command, reported):
    """The batch is given to supervise.sh or in its command."""
    result = supervised_hosts(tmp_path, *options, command=command)
    assert (result.returncode, result.stdout) == (0, "a slots=8\nb slots=8\nd slots=8\n"), result.stderr
    assert reported in result.stderr


@pytest.mark.parametrize(
    ("options", "slots", "message"),
    [
        *((["--min-hosts", count], 8, f"--min-hosts {count} must be in [1, 4]") for count in ("0", "5")),
        (["--batch", "7"], 8, "--min-hosts 1"),
        # 24 ranks that do not divide the batch would stop with a usage error, which is not restarted
        (["--min-hosts", "3", "--batch", "32768"], 8, "without one of the hosts: a batch of 32768"),
        (["--min-hosts", "x"], 8, "invalid int value: 'x'"),
        ([], "eight", "line 1: 'a slots=eight': after the host comes slots=N"),
        (["--hostfile", "none/hosts"], 8, "none/hosts: No such file or directory; write one line per node"),
    ],
)
def test_supervise_ends_with_a_usage_error_in_hosts_or_minimum_and_starts_nothing(tmp_path, options, slots, message):
    result = supervised_hosts(tmp_path, *options, slots=slots)
    assert result.returncode == 2 and message in result.stderr and not result.stdout, result.stderr
    assert "restart" not in result.stderr


@pytest.mark.parametrize(
    ("run_folder", "flags", "rejected"),
    [
        ("logs/first", ["--logs", "logs"], True),
        ("{}/logs/first", ["--logs=logs"], False),
        ("logs/first", ["--logs", "logs", "--logs={}/logs"], False),
    ],
)
def test_supervise_rejects_a_run_folder_that_its_launch_script_does_not_write_to(tmp_path, run_folder, flags, rejected):
    """The script goes to the repository; summary.json was looked for where nothing came."""
    where = tmp_path / "elsewhere"
    (where / "logs" / "first").mkdir(parents=True)
    (tmp_path / "logs" / "first").mkdir(parents=True)
    for folder in (where, tmp_path):
        (folder / "logs" / "first" / "summary.json").touch()
    there = tmp_path if run_folder.startswith("{}") else where
    flags = [flag.format(there) for flag in flags]
    command = ["supervise.sh", run_folder.format(there), "bash", tmp_path / "launch" / "local.sh", *flags]
    programs = {"torchrun": "", "python": "true\n"}
    result = run(*command, tmp_path=tmp_path, programs=programs, where=where)
    assert result.returncode == (2 if rejected else 0), result.stderr
    assert ("give both in full, or start there" in result.stderr) == rejected
    result = run("supervise.sh", "logs/first", "bash", "launch/local.sh", tmp_path=tmp_path, programs=programs)
    assert result.returncode == 0, result.stderr
