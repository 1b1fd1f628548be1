"""A benchmark that is ended, by SIGTERM or Ctrl-C, ends what it has started: that would keep the GPUs."""

import importlib
import multiprocessing
import os
import signal
import sys

import pytest

from tests.lib.waiting import wait_until

CHILD = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(600)"


def run_benchmark(name: str, flags: list[str], folder) -> None:
    """Run a benchmark whose programs write their process id to FOLDER/started, with its output in FOLDER/log."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1), os.dup2(log, 2)
    benchmark = importlib.import_module(f"benchmarks.{name}")
    benchmark.command = lambda *_: [sys.executable, "-c", CHILD, str(folder / "started")]
    sys.argv = [benchmark.__name__, *flags]
    benchmark.main()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("name", ["largest_batch", "peers_train"])
def test_what_it_has_started_ends_with_it(tmp_path, name, number):
    """Forked from the process of tests/lib/ranks.py, which has imported torch."""
    started = tmp_path / "started"
    flags = {
        "largest_batch": ["--batch-size", "8", "--at", "8"],
        "peers_train": ["--programs", "infcl", "--accum-freq", "1", "--blocks", "eager", "--device", "cpu"],
    }[name]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.lib.preload"])
    process = context.Process(target=run_benchmark, args=(name, flags, tmp_path))
    process.start()
    wait_until(lambda: started.exists() and started.read_text(), 100, (tmp_path / "log").read_text)
    child = int(started.read_text())
    os.kill(process.pid, number)
    process.join(60)
    output = (tmp_path / "log").read_text()
    assert process.exitcode and (number == signal.SIGINT or "ended by SIGTERM" in output), output
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
