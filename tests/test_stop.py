"""Signals become notes; Ctrl-C is not lost."""

import os
import signal

import pytest

from infcl.train.stop import StopSignals


class Swallows:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(1000))  # the handler runs here, and Python drops what it raises


@pytest.fixture(autouse=True)
def python_handles_interrupts():
    """A suite that a script started in the background inherits ignored interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_python_drops_is_raised_after_the_step():
    before = signal.getsignal(signal.SIGINT)
    with StopSignals() as signals:
        signals.raise_if_interrupted()
        victim = Swallows()
        del victim
        with pytest.raises(KeyboardInterrupt):
            signals.raise_if_interrupted()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            sum(range(1000))
    assert signal.getsignal(signal.SIGINT) is before


def test_a_request_to_end_is_noted_only():
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        sum(range(1000))
        assert signals.received == signal.SIGTERM and not signals.interrupted
