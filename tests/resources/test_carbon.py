"""Energy from codecarbon: monotonic, without jumps, and correct in the end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbudget.resources.carbon import INTERVAL, STALE, CodeCarbon, _PowerSamples
from fedbudget.resources.resource import MeterError, Reading, estimated, this_host


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class TestPowerSamples:
    def test_last_power_is_extrapolated(self) -> None:
        clock = Clock()
        samples = _PowerSamples(clock)
        samples.add(0.0)
        clock.now += 0.5
        samples.add(10.0)  # 20 W
        assert samples.joules() == 0  # the next second adds these 10 J
        clock.now += INTERVAL
        assert samples.joules() == pytest.approx(30)
        samples.add(30.0)  # as extrapolated: still 20 W
        for tenths in range(20):
            assert samples.joules() == pytest.approx(30 + 2 * tenths)
            clock.now += 0.1

    def test_corrections_are_smooth(self) -> None:
        clock = Clock()
        samples = _PowerSamples(clock)
        # Reports are one sample behind: 20 J at the second sample, 40 J after the third.
        for joules in (0.0, 20.0, 40.0):
            samples.add(joules)
            clock.now += INTERVAL
        before = samples.joules()
        samples.add(100.0)  # 60 W
        assert samples.joules() == before
        clock.now += INTERVAL / 2
        assert before < samples.joules() < 100 + 60 * INTERVAL
        clock.now += INTERVAL / 2
        assert samples.joules() == pytest.approx(100 + 60 * INTERVAL)
        samples.add(105.0)  # 5 W, far less than extrapolated
        reported = samples.joules()
        clock.now += INTERVAL
        assert samples.joules() == reported  # never less

    def test_repeated_value_is_no_sample(self) -> None:
        clock = Clock()
        samples = _PowerSamples(clock)
        samples.add(0.0)
        clock.now += 1
        samples.add(20.0)
        clock.now += 0.01
        samples.add(20.0)  # not a power of 0 W
        clock.now += INTERVAL
        assert samples.joules() == pytest.approx(40 + 0.2)
        assert samples.count == 2

    @given(
        st.lists(
            st.tuples(st.floats(0.1, 3.0), st.floats(0.0, 500.0)), min_size=1, max_size=20
        )
    )
    def test_random_powers_stay_close(self, spans: list[tuple[float, float]]) -> None:
        clock = Clock()
        samples = _PowerSamples(clock)
        samples.add(0.0)
        reported = actual = 0.0
        largest_power = max(watts for _, watts in spans)
        for seconds, watts in spans:
            for _ in range(10):
                clock.now += seconds / 10
                actual += watts * seconds / 10
                assert samples.joules() >= reported
                reported = samples.joules()
            samples.add(actual)
        for _ in range(10):  # the same power for ten seconds
            clock.now += INTERVAL
            actual += spans[-1][1] * INTERVAL
            samples.add(actual)
        assert abs(samples.joules() - actual) <= (3.0 + INTERVAL) * largest_power + 1e-6


def test_codecarbon_estimates_energy() -> None:
    meter = CodeCarbon.start()
    try:
        readings = [meter.read() for _ in range(1000)]
        assert readings == sorted(readings)
        assert readings[0] >= 0
        meter._tracker.flush()
        assert meter._samples.count >= 2
        assert meter._samples._watts > 0
        assert meter.host == estimated(this_host())
        assert Reading(1.0, 2.0, meter.host).estimated
    finally:
        meter.close()


def test_stale_samples_are_an_error() -> None:
    class Stuck:
        def flush(self) -> None: ...

    clock = Clock()
    samples = _PowerSamples(clock)
    samples.add(0.0)
    meter = CodeCarbon(Stuck(), samples)
    clock.now += STALE
    assert meter.read() == 0
    clock.now += 1
    with pytest.raises(
        MeterError, match=r"codecarbon has not sampled this machine's power for 11 s"
    ):
        meter.read()


def test_codecarbon_is_silent_and_offline(
    tmp_path: Path,
) -> None:
    """codecarbon opens no connection and writes no file, even if its configuration asks."""
    (tmp_path / ".codecarbon.config").write_text(
        "[codecarbon]\nsave_to_file = true\nsave_to_api = true\nlog_level = debug\n"
        "emissions_endpoint = http://127.0.0.1:9\n"
    )
    program = (
        "import sys\n"
        "def report(event, arguments):\n"
        "    if event in ('socket.connect', 'socket.getaddrinfo'):\n"
        "        print(event, arguments)\n"
        "sys.addaudithook(report)\n"
        "from fedbudget.resources.carbon import CodeCarbon\n"
        "meter = CodeCarbon.start()\n"
        "assert meter.read() >= 0\n"
        "meter.close()\n"
    )
    environment = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
    assert [path.name for path in tmp_path.iterdir()] == [".codecarbon.config"]
