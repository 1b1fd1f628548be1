"""Signals become notes, Ctrl-C too."""

import os
import signal
import subprocess

import pytest

from infcl.train import saves
from infcl.train.saves import StopSignals, lost_its_parent
from tests.lib.waiting import wait_until


@pytest.fixture(autouse=True)
def python_handles_interrupts():
    """A suite that a script started in the background inherits ignored interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_first_ctrl_c_is_noted_and_one_some_seconds_later_ends_the_process(monkeypatch):
    """Launchers repeat the first and add SIGTERM, which must not make another exit code of it."""
    before = signal.getsignal(signal.SIGINT)
    with StopSignals() as signals:
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
            sum(range(1000))
        assert signals.received == signal.SIGINT
        monkeypatch.setattr("infcl.train.saves.AGAIN", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            sum(range(1000))
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_request_to_end_is_noted_only_and_a_closed_terminal_is_nothing_under_nohup(number):
    before = signal.getsignal(signal.SIGHUP)
    for of_sighup in (signal.SIG_DFL, signal.SIG_IGN):
        signal.signal(signal.SIGHUP, of_sighup)
        with StopSignals() as signals:
            os.kill(os.getpid(), number)
            sum(range(1000))
            assert signals.received == (0 if (number, of_sighup) == (signal.SIGHUP, signal.SIG_IGN) else number)
        assert signal.signal(signal.SIGHUP, before) is of_sighup


@pytest.mark.parametrize("noted_at_start", [False, True])
def test_after_the_loop_a_caller_has_its_handlers_and_sigusr1_ends_the_process_if_the_start_took_note(noted_at_start):
    def own(*_):
        pass

    before = signal.signal(signal.SIGUSR1, own)
    try:
        with StopSignals([] if noted_at_start else None):
            assert signal.getsignal(signal.SIGUSR1) is not own
        assert signal.getsignal(signal.SIGUSR1) is (signal.SIG_DFL if noted_at_start else own)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_after_the_last_check_has_its_usual_effect_after_the_loop():
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        with StopSignals() as signals:
            pass
        signals.act_on_late()
        with signals:
            os.kill(os.getpid(), signal.SIGTERM)
            sum(range(1000))
        assert came == []
        signals.act_on_late()
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_deepspeed_command_that_ended_during_the_start_ends_the_run_after_its_first_step(monkeypatch):
    """Ranks that look for it when training begins found none, and trained on."""
    monkeypatch.setattr(saves, "deepspeed_launcher", lambda: 123)
    monkeypatch.setattr(saves, "deepspeed_runner", lambda: None)
    for is_lost in (False, True):
        monkeypatch.setattr(saves, "lost_its_parent", lambda _, is_lost=is_lost: is_lost)
        assert bool(StopSignals().received) == is_lost


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="Linux tells of parents in /proc")
def test_a_process_whose_parent_was_interrupted_is_distinguished_from_one_that_has_its_parent():
    """As `deepspeed` and its launcher: in a session of their own, the command the first."""
    command = "sleep 60 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", command], start_new_session=True, stdout=subprocess.PIPE, text=True) as shell:
        launcher = int(shell.stdout.readline())
        try:
            assert not lost_its_parent(launcher) and not lost_its_parent(shell.pid)
            shell.kill(), shell.wait()
            wait_until(lambda: lost_its_parent(launcher), 20, "it seems to have its parent")
        finally:
            os.kill(launcher, signal.SIGKILL)
