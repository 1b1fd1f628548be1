"""How a rank's process ends, and which rank reports a usage error: rank 0 if all have it, else the one that has it."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from infcl.parallel import process
from tests.lib.checkout import ROOT

RETURNS_FROM_CPP_ALL_THE_TIME = """
import threading, time
import torch.distributed as dist
from infcl.parallel.process import end_process

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

def count(client):
    while True:
        client.add("count", 1)

def main():
    for _ in range(24):
        threading.Thread(target=count, args=(store.clone(),), daemon=True).start()
    time.sleep(1)
    return 2

end_process(main())
"""
ENDS = """
import atexit, os, threading
from infcl.parallel.process import end_process

class LeftBehind:
    def __del__(self):
        os.write(1, b"taken down")  # what the interpreter would do at its end

left_behind = LeftBehind()
atexit.register(print, "first registered")
atexit.register(print, "last registered")
threading.Thread(target=threading.Event().wait).start()  # for good
{last}
end_process({code})
"""


def run(code: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


def test_threads_that_return_from_cpp_leave_the_exit_code_alone():
    """While the interpreter was taken down, each of them could end the process with code 134."""
    result = run(RETURNS_FROM_CPP_ALL_THE_TIME)
    assert result.returncode == 2, result.stderr


NOBODY_READS = "r, w = os.pipe()\nos.dup2(w, 1)\nos.close(w)\nos.close(r)\nos.close(2)"


@pytest.mark.parametrize(("code", "last"), [(143, ""), (7, NOBODY_READS)])
def test_atexit_and_streams_are_served_and_nothing_is_waited_for_or_taken_down(code, last):
    """The exit code stays where the output has no reader, too."""
    result = run(ENDS.format(code=code, last=last))
    assert result.stdout.splitlines() == ([] if last else ["last registered", "first registered"])
    assert (result.returncode, result.stderr) == (code, "")


@pytest.mark.parametrize(
    ("rank", "local_rank", "waits", "everywhere", "prints"),
    [
        (0, 0, 0, True, True),
        (0, 0, 0, False, True),
        (2, 0, 5, False, True),
        (3, 1, 10, False, True),
        (3, 1, 10, True, False),
    ],
)
def test_rank_0_reports_at_once_and_others_only_what_a_launcher_has_not_stopped(
    monkeypatch, capsys, rank, local_rank, waits, everywhere, prints
):
    slept: list[float] = []
    monkeypatch.setattr(process, "read_environment", lambda: (rank, 4, local_rank))
    monkeypatch.setattr(process, "time", SimpleNamespace(sleep=slept.append))
    assert process.report_mistake("program", ValueError("wrong"), everywhere=everywhere) == 2
    assert (sum(slept), capsys.readouterr().err) == (waits, "program: error: wrong\n" * prints)
