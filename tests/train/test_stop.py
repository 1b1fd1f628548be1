"""Signals become notes, Ctrl-C too."""

import os
import signal

import pytest

from infcl.train.saves import StopSignals


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
