"""How a rank's process ends. Each case is a process of its own."""

import os
import subprocess
import sys

import pytest

from tests.test_entry import ROOT

RETURNS_FROM_CPP_ALL_THE_TIME = """
import threading, time
import torch.distributed as dist
from infcl.program import run_program

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

def count(client):
    while True:
        client.add("count", 1)

def main():
    for _ in range(24):
        threading.Thread(target=count, args=(store.clone(),), daemon=True).start()
    time.sleep(1)
    return 2

run_program(main)
"""
ENDS = """
import atexit, os, threading, time
from infcl.program import run_program

class LeftBehind:
    def __del__(self):
        os.write(1, b"taken down")  # what the interpreter would do at its end

def main():
    global left_behind
    left_behind = LeftBehind()
    of_a_frame = LeftBehind() if {raises} else None  # those of a traceback are taken down after atexit, too
    atexit.register(print, "first registered")
    atexit.register(print, "last registered")
    threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
    {end}

run_program(main)
"""


def run(code: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


def test_threads_that_return_from_cpp_leave_the_exit_code_alone():
    """While the interpreter was taken down, each of them could end the process with code 134."""
    result = run(RETURNS_FROM_CPP_ALL_THE_TIME)
    assert result.returncode == 2, result.stderr


@pytest.mark.parametrize(
    ("end", "code", "error"),
    [
        ("return 0", 0, ""),
        ("return 143", 143, ""),
        ("raise RuntimeError('no more memory')", 1, "RuntimeError: no more memory"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
        ("os.close(2); return 7", 7, ""),
    ],
)
def test_threads_atexit_and_streams_are_served_and_nothing_is_taken_down(end, code, error):
    result = run(ENDS.format(end=end, raises=end.startswith("raise")))
    assert result.stdout.splitlines() == ["thread", "last registered", "first registered"]
    assert result.returncode == code
    assert error in result.stderr and bool(error) == bool(result.stderr), result.stderr


INTERRUPTED_AT_ITS_END = """
import atexit, os, signal, sys, threading, time
from infcl.program import run_program

def interrupt(waiting):
    while sys._current_frames()[threading.main_thread().ident].f_code.co_name != waiting:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

def main():
    threading.Thread(target=threading.Event().wait).start()  # for good
    threading.Thread(target=interrupt, args=("_shutdown",), daemon=True).start()
    atexit.register(print, "at exit")
    return 130

run_program(main)
"""


def test_a_second_interrupt_ends_the_wait_for_threads_and_nothing_else():
    result = run(INTERRUPTED_AT_ITS_END)
    assert (result.returncode, result.stdout, result.stderr) == (130, "at exit\n", "")


def test_a_reader_that_is_gone_does_not_change_the_exit_code():
    result = run("import os, sys\nfrom infcl.program import run_program\nr, w = os.pipe()\nos.dup2(w, 1)\nos.close(w)\n"
                 "os.close(r)\nrun_program(lambda: print('to nobody') or 3)")  # fmt: skip
    assert (result.returncode, result.stderr) == (3, "")


def test_what_argparse_ends_is_ended_as_ever():
    result = run("import sys\nfrom infcl.program import run_program\nrun_program(lambda: sys.exit('why'))")
    assert (result.returncode, result.stderr) == (1, "why\n")
