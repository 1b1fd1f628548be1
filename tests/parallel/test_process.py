"""How a rank's process ends, and which rank reports a usage error: rank 0 if all have it, else the one that has it."""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import time
from unittest import mock

import pytest
import torch.distributed as dist

from infcl.parallel import process
from tests.lib.checkout import ROOT
from tests.lib.ranks import run_ranks

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
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


def test_threads_that_return_from_cpp_leave_the_exit_code_alone():
    """While the interpreter was taken down, each of them could end the process with code 134."""
    result = run(RETURNS_FROM_CPP_ALL_THE_TIME)
    assert result.returncode == 2, result.stderr


@pytest.mark.parametrize(("code", "last"), [(143, ""), (7, "os.close(2)")])
def test_atexit_and_streams_are_served_and_nothing_is_waited_for_or_taken_down(code, last):
    result = run(ENDS.format(code=code, last=last))
    assert result.stdout.splitlines() == ["last registered", "first registered"]
    assert (result.returncode, result.stderr) == (code, "")


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="another user is needed: root, setpriv"
)
def test_too_low_a_limit_of_processes_is_a_usage_error(tmp_path):
    """Of a user who has no processes else; root has no such limit."""
    program = """
from infcl.parallel.process import spare_threads
with spare_threads(20):
    print('20 are enough')
with spare_threads(60):
    pass
"""
    rights = ["--inh-caps=-all,+dac_override", "--ambient-caps=-all,+dac_override"]  # Python may be in root's folder
    user = ["setpriv", "--reuid=64123", "--clear-groups", *rights, "bash", "-c", 'ulimit -u 40; exec "$@"', "-"]
    done = subprocess.run([*user, sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "20 are enough\n" and done.returncode == 1, done.stderr
    assert re.search(r"ValueError: only 3\d more threads can be started, a rank may need 60", done.stderr)


def reported(rank, world_size, makers):
    """What this rank prints of a usage error on the ranks `makers`, rank 0 last."""
    wait, said = process._wait, io.StringIO()
    patience = 10 if 0 in makers else 0.1
    with (
        mock.patch.object(process, "_wait", lambda seconds, until: wait(seconds * patience, until)),
        contextlib.redirect_stderr(said),
    ):
        if rank in makers:
            time.sleep(0.3 if rank == 0 else 0)
            assert process.report_mistake("program", ValueError("wrong")) == 2
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    for key in (process._REPORTED, process._HEARD) if rank == 0 else ():
        store.delete_key(key)
    dist.barrier()
    return said.getvalue()


@pytest.mark.parametrize("makers", [(0, 1, 2), (1,)])
def test_a_usage_error_of_all_ranks_is_reported_by_rank_0_and_that_of_one_rank_by_itself(makers):
    said = run_ranks(reported, 3, makers)
    assert [bool(text) for text in said] == [rank == makers[0] for rank in range(3)], said


def test_a_reader_that_is_gone_does_not_change_the_exit_code():
    result = run(
        "import os\nfrom infcl.parallel.process import end_process\n"
        "r, w = os.pipe()\nos.dup2(w, 1)\nos.close(w)\nos.close(r)\n"
        "print('to nobody')\nend_process(3)"
    )
    assert (result.returncode, result.stderr) == (3, "")
