"""Members that keep all others waiting are asked in fewer rounds."""

import logging

import pytest

from fedbudget.engines.remote.slow_nodes import SlowNodes

QUICK = {0: 0.03, 1: 0.04, 2: 0.05}


def asked(slow: SlowNodes, rounds: int, seconds: float | None) -> list[int]:
    """Rounds in which node 3 is asked; it answers after so long, or never."""
    result = []
    for number in range(1, rounds + 1):
        if 3 in slow.resting(number):
            slow.add(number, QUICK, ())
            continue
        result.append(number)
        if seconds is None:
            slow.add(number, QUICK, (3,))
        else:
            slow.add(number, {**QUICK, 3: seconds}, ())
    return result


@pytest.mark.parametrize("seconds", [2.9, None])
def test_slow_node_rests_longer_each_time(seconds: float | None) -> None:
    """After 5 rounds it rests for 10, 20, 40, 80 and then 160 rounds."""
    found = asked(SlowNodes(), 700, seconds)
    assert found == [1, 2, 3, 4, 5, 16, 37, 78, 159, 320, 481, 642]


@pytest.mark.parametrize("seconds", [0.3, 0.9])
def test_short_waits_are_accepted(seconds: float) -> None:
    """Ten times the median is no reason to leave a node out below a second."""
    assert asked(SlowNodes(), 50, seconds) == list(range(1, 51))


def test_quick_answer_ends_the_rests(caplog: pytest.LogCaptureFixture) -> None:
    slow = SlowNodes()
    with caplog.at_level(logging.WARNING):
        assert asked(slow, 15, 2.9) == [1, 2, 3, 4, 5]
    assert caplog.text.count("node 3 kept the others waiting") == 1
    slow.add(16, {**QUICK, 3: 0.05}, ())
    for number in range(17, 21):
        assert not slow.resting(number)
        slow.add(number, {**QUICK, 3: 2.9}, ())
    assert not slow.resting(21)


@pytest.mark.parametrize("waited", [{0: 3.0, 1: 0.1}, {0: 3.0, 1: 3.0, 2: 3.0, 3: 0.1}])
def test_majority_decides(waited: dict[int, float]) -> None:
    """Two nodes cannot be compared, and a slow majority is the usual time."""
    slow = SlowNodes()
    for number in range(1, 20):
        slow.add(number, waited, ())
        assert not slow.resting(number + 1)
