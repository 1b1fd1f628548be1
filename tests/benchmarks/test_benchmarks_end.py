"""A benchmark that is ended, by SIGTERM or Ctrl-C, ends what it has started: that would keep the GPUs."""

import os
import signal
import subprocess
import sys

import pytest

from tests.lib.checkout import ROOT
from tests.lib.waiting import finish, wait_until

CODE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
from benchmarks import {name} as benchmark
child = "import os, pathlib, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(600)"
benchmark.command = lambda *given: [sys.executable, "-c", "import sys; " + child, {started!r}]
sys.argv = [benchmark.__name__, *{flags!r}]
benchmark.main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("name", ["step", "peers_train"])
def test_what_it_has_started_ends_with_it(tmp_path, name, number):
    sweep, started = tmp_path / "one.txt", tmp_path / "started"
    sweep.write_text("--batch-size 8\n")
    flags = {
        "step": ["--sweep", str(sweep)],
        "peers_train": ["--programs", "infcl", "--accum-freq", "1", "--blocks", "eager", "--device", "cpu"],
    }[name]
    code = CODE.format(name=name, started=str(started), flags=flags)
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_until(lambda: started.exists() and started.read_text(), 100, "nothing was started", process)
    child = int(started.read_text())
    process.send_signal(number)
    code, output = finish(process, 60)
    assert code != 0 and (number == signal.SIGINT or "ended by SIGTERM" in output), output
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
