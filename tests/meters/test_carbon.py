"""Energy as codecarbon estimates it: never less than before, without jumps, right in the end. Which meter is taken."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbudget.errors import UserError
from fedbudget.meters.carbon import PACE, STALE, CodeCarbon, _Looks
from fedbudget.meters.declared import Energy
from fedbudget.meters.energy import energy_meter
from fedbudget.meters.host import is_estimate, machine, this_host
from fedbudget.meters.measured import MeasuredEnergy
from fedbudget.meters.meter import Cost, MeterError, RoundTrip
from fedbudget.meters.rapl import Rapl


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class TestLooks:
    def test_power_is_what_it_last_was(self) -> None:
        clock = Clock()
        looks = _Looks(clock)
        looks.look(0.0)
        clock.now += 0.5
        looks.look(10.0)  # 20 W
        assert looks.joules() == 0  # nothing was told yet, and this second makes up for it
        clock.now += PACE
        assert looks.joules() == pytest.approx(30)
        looks.look(30.0)  # as was thought: still 20 W
        for tenths in range(20):
            assert looks.joules() == pytest.approx(30 + 2 * tenths)
            clock.now += 0.1

    def test_what_was_wrong_is_made_up_for_in_a_second_without_a_jump(self) -> None:
        clock = Clock()
        looks = _Looks(clock)
        for seen in (0.0, 20.0, 40.0):  # one behind, hence 20 told at the second look, 40 after the third
            looks.look(seen)
            clock.now += PACE
        before = looks.joules()
        looks.look(100.0)  # 60 W
        assert looks.joules() == before
        clock.now += PACE / 2
        assert before < looks.joules() < 100 + 60 * PACE
        clock.now += PACE / 2
        assert looks.joules() == pytest.approx(100 + 60 * PACE)
        looks.look(105.0)  # 5 W: less than was thought by far
        told = looks.joules()
        clock.now += PACE
        assert looks.joules() == told  # never less

    def test_what_it_says_again_is_no_look(self) -> None:
        clock = Clock()
        looks = _Looks(clock)
        looks.look(0.0)
        clock.now += 1
        looks.look(20.0)
        clock.now += 0.01
        looks.look(20.0)  # not a power of 0 W
        clock.now += PACE
        assert looks.joules() == pytest.approx(40 + 0.2)
        assert looks.count == 2

    @given(st.lists(st.tuples(st.floats(0.1, 3.0), st.floats(0.0, 500.0)), min_size=1, max_size=20))
    def test_is_never_less_than_before_nor_further_off_than_what_passes_between_looks(
        self, spans: list[tuple[float, float]]
    ) -> None:
        clock = Clock()
        looks = _Looks(clock)
        looks.look(0.0)
        told = truly = 0.0
        most = max(watts for _, watts in spans)
        for seconds, watts in spans:
            for _ in range(10):
                clock.now += seconds / 10
                truly += watts * seconds / 10
                assert looks.joules() >= told
                told = looks.joules()
            looks.look(truly)
        for _ in range(10):  # the same power for ten seconds
            clock.now += PACE
            truly += spans[-1][1] * PACE
            looks.look(truly)
        assert abs(looks.joules() - truly) <= (3.0 + PACE) * most + 1e-6


def test_codecarbon_estimates_this_machines_energy() -> None:
    meter = CodeCarbon.start()
    try:
        readings = [meter.joules() for _ in range(1000)]
        assert readings == sorted(readings)
        assert readings[0] >= 0
        meter._tracker.flush()
        assert meter._looks.count >= 2
        assert meter._looks._watts > 0  # a machine that takes no power does not run this
        assert is_estimate(meter.host)
        assert machine(meter.host) == this_host()
    finally:
        meter.close()


def test_one_that_does_not_look_any_more_is_an_error_and_not_zero() -> None:
    class Stuck:
        def flush(self) -> None: ...

    clock = Clock()
    looks = _Looks(clock)
    looks.look(0.0)
    meter = CodeCarbon(Stuck(), looks)
    clock.now += STALE
    assert meter.joules() == 0
    clock.now += 1
    with pytest.raises(MeterError, match=r"codecarbon has not looked at this machine's power for 11 s"):
        meter.joules()


def test_an_estimate_is_never_called_measured() -> None:
    nothing_for_bytes = Energy(watts=5.0, joules_per_byte=0.0)
    trip = RoundTrip(1, 2, 10, 0.1, 0.2, 0.1, 0.2, metered=2, step_joules=1.0, joules=3.0)
    for estimated, source in ((False, "measured"), (True, "estimated")):
        meter = MeasuredEnergy(nothing_for_bytes)
        assert meter.read(replace(trip, estimated=estimated), Cost(0.1, 0.1)) == Cost(1.0, 2.0)
        assert meter.source == source


class TestWhichMeter:
    def test_is_rapl_where_it_can_be_read_or_else_none_unless_said_otherwise(self) -> None:
        assert type(energy_meter()) is type(energy_meter("auto")) is type(Rapl.find())
        assert energy_meter("declared") is None

    def test_one_that_is_asked_for_must_be_there(self) -> None:
        reason = Rapl.why_not()
        if reason is None:
            assert isinstance(energy_meter("rapl"), Rapl)
        else:
            with pytest.raises(UserError, match="energy-meter rapl cannot be read here: "):
                energy_meter("rapl")

    def test_must_be_known(self) -> None:
        with pytest.raises(UserError, match="must be one of auto, rapl, codecarbon, declared, not 'sundial'"):
            energy_meter("sundial")

    def test_codecarbon_is_an_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("fedbudget.meters.carbon.find_spec", lambda module: None)
        with pytest.raises(UserError, match=r"pip install 'fedbudget\[codecarbon\]'"):
            energy_meter("codecarbon")


def test_codecarbon_speaks_with_nobody_and_writes_nothing_whatever_its_configuration_says(tmp_path: Path) -> None:
    (tmp_path / ".codecarbon.config").write_text(
        "[codecarbon]\nsave_to_file = true\nsave_to_api = true\nlog_level = debug\n"
        "emissions_endpoint = http://127.0.0.1:9\n"
    )
    program = (
        "import sys\n"
        "def heard(event, arguments):\n"
        "    if event in ('socket.connect', 'socket.getaddrinfo'): print(event, arguments)\n"
        "sys.addaudithook(heard)\n"
        "from fedbudget.meters.carbon import CodeCarbon\n"
        "meter = CodeCarbon.start()\n"
        "assert meter.joules() >= 0\n"
        "meter.close()\n"
    )
    home = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=home, capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
    assert [path.name for path in tmp_path.iterdir()] == [".codecarbon.config"]
