"""Signals as a question: the first one is noted, the second one ends things, and afterwards
all is as before.
"""

import os
import signal
import threading

import pytest

from fedbudget.engines.engine import interruptible

SIGNALS = [signal.SIGINT, signal.SIGTERM]


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in SIGNALS]


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_only_noted(number: signal.Signals) -> None:
    with interruptible() as interrupted:
        assert not interrupted()
        os.kill(os.getpid(), number)
        assert interrupted()


@pytest.mark.parametrize("number", SIGNALS)
def test_the_second_signal_ends_the_program_at_once(number: signal.Signals) -> None:
    with interruptible() as interrupted:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)


def test_handlers_are_put_back_whatever_happens() -> None:
    before = handlers()
    with interruptible():
        assert handlers() != before
    assert handlers() == before
    with pytest.raises(ZeroDivisionError), interruptible():
        raise ZeroDivisionError
    assert handlers() == before


def test_outside_the_main_thread_signals_stay_what_they_are() -> None:
    before, seen = handlers(), []

    def elsewhere() -> None:
        with interruptible() as interrupted:
            seen.append((interrupted(), handlers() == before))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [(False, True)]
