"""`interruptible`: the first signal sets a flag, the second one stops the program."""

import os
import signal
import threading

import pytest

from fedbudget.engines.engine import interruptible

SIGNALS = [signal.SIGINT, signal.SIGTERM]


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in SIGNALS]


@pytest.mark.parametrize("number", SIGNALS)
def test_first_signal_sets_flag(number: signal.Signals) -> None:
    with interruptible() as interrupted:
        assert not interrupted()
        os.kill(os.getpid(), number)
        assert interrupted()


@pytest.mark.parametrize("number", SIGNALS)
def test_second_signal_raises_keyboard_interrupt(number: signal.Signals) -> None:
    with interruptible() as interrupted:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)


def test_handlers_are_restored() -> None:
    before = handlers()
    with interruptible():
        assert handlers() != before
    assert handlers() == before
    with pytest.raises(ZeroDivisionError), interruptible():
        raise ZeroDivisionError
    assert handlers() == before


def test_other_threads_keep_signal_handlers() -> None:
    before, seen = handlers(), []

    def in_thread() -> None:
        with interruptible() as interrupted:
            seen.append((interrupted(), handlers() == before))

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert seen == [(False, True)]
