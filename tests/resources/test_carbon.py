"""Energy as codecarbon estimates it: never less than before, without jumps, right in the
end.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbudget.resources.carbon import INTERVAL, STALE, CodeCarbon, _PowerSamples
from fedbudget.resources.resource import MeterError, is_estimate, machine, this_host


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class TestSamples:
    def test_power_is_what_it_last_was(self) -> None:
        clock = Clock()
        samples = _PowerSamples(clock)
        samples.add(0.0)
        clock.now += 0.5
        samples.add(10.0)  # 20 W
        assert (
            samples.joules() == 0
        )  # nothing was told yet, and this second makes up for it
        clock.now += INTERVAL
        assert samples.joules() == pytest.approx(30)
        samples.add(30.0)  # as was thought: still 20 W
        for tenths in range(20):
            assert samples.joules() == pytest.approx(30 + 2 * tenths)
            clock.now += 0.1

    def test_what_was_wrong_is_made_up_for_in_a_second_without_a_jump(self) -> None:
        clock = Clock()
        samples = _PowerSamples(clock)
        for seen in (
            0.0,
            20.0,
            40.0,
        ):  # one behind, hence 20 told at the second look, 40 after the third
            samples.add(seen)
            clock.now += INTERVAL
        before = samples.joules()
        samples.add(100.0)  # 60 W
        assert samples.joules() == before
        clock.now += INTERVAL / 2
        assert before < samples.joules() < 100 + 60 * INTERVAL
        clock.now += INTERVAL / 2
        assert samples.joules() == pytest.approx(100 + 60 * INTERVAL)
        samples.add(105.0)  # 5 W: less than was thought by far
        told = samples.joules()
        clock.now += INTERVAL
        assert samples.joules() == told  # never less

    def test_what_it_says_again_is_no_look(self) -> None:
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
    def test_is_never_less_than_before_nor_further_off_than_what_passes_between_looks(
        self, spans: list[tuple[float, float]]
    ) -> None:
        clock = Clock()
        samples = _PowerSamples(clock)
        samples.add(0.0)
        told = truly = 0.0
        most = max(watts for _, watts in spans)
        for seconds, watts in spans:
            for _ in range(10):
                clock.now += seconds / 10
                truly += watts * seconds / 10
                assert samples.joules() >= told
                told = samples.joules()
            samples.add(truly)
        for _ in range(10):  # the same power for ten seconds
            clock.now += INTERVAL
            truly += spans[-1][1] * INTERVAL
            samples.add(truly)
        assert abs(samples.joules() - truly) <= (3.0 + INTERVAL) * most + 1e-6


def test_codecarbon_estimates_this_machines_energy() -> None:
    meter = CodeCarbon.start()
    try:
        readings = [meter.read() for _ in range(1000)]
        assert readings == sorted(readings)
        assert readings[0] >= 0
        meter._tracker.flush()
        assert meter._samples.count >= 2
        assert meter._samples._watts > 0  # a machine that takes no power does not run this
        assert is_estimate(meter.host)
        assert machine(meter.host) == this_host()
    finally:
        meter.close()


def test_one_that_does_not_look_any_more_is_an_error_and_not_zero() -> None:
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


def test_codecarbon_speaks_with_nobody_and_writes_nothing_whatever_its_configuration_says(
    tmp_path: Path,
) -> None:
    (tmp_path / ".codecarbon.config").write_text(
        "[codecarbon]\nsave_to_file = true\nsave_to_api = true\nlog_level = debug\n"
        "emissions_endpoint = http://127.0.0.1:9\n"
    )
    program = (
        "import sys\n"
        "def heard(event, arguments):\n"
        "    if event in ('socket.connect', 'socket.getaddrinfo'): print(event, arguments)\n"
        "sys.addaudithook(heard)\n"
        "from fedbudget.resources.carbon import CodeCarbon\n"
        "meter = CodeCarbon.start()\n"
        "assert meter.read() >= 0\n"
        "meter.close()\n"
    )
    home = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=home,
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
    assert [path.name for path in tmp_path.iterdir()] == [".codecarbon.config"]
