"""Energy: declared watts, measured joules, and the choice of a reader."""

import math

import pytest

from fedbudget.budget.budget import Budget
from fedbudget.errors import UserError
from fedbudget.resources.energy import DeclaredEnergy, MeasuredEnergy, energy_reader
from fedbudget.resources.meters import Meters
from fedbudget.resources.rapl import Rapl
from fedbudget.resources.resource import (
    Cost,
    MeterError,
    Metering,
    Reading,
    Usage,
    estimated,
)
from support.usage import usage

TIME = Cost(0.5, 2.0)
UNMETERED = usage()
# 10 updates of 4 J are 40 of the 55 J.
METERED = usage(energy=Reading(4.0, 55.0, nodes=4))
PARTLY_METERED = usage(energy=Reading(4.0, 55.0, nodes=3))
ESTIMATE = usage(energy=Reading(4.0, 55.0, estimated(""), nodes=4))
DECLARED = DeclaredEnergy(watts=3.0, joules_per_byte=1e-6)
NO_BYTES = DeclaredEnergy(watts=3.0, joules_per_byte=0.0)


def test_declared_watts_and_bytes() -> None:
    # 4 nodes of 3 W are 12 W: 6 J for an update of half a second, 24 J for two seconds, and
    # 2 MB at 1 µJ are 2 J.
    cost = DECLARED.read(UNMETERED, TIME)
    assert (cost.step, cost.aggregation) == pytest.approx((6.0, 26.0))


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_negative_declarations_are_refused(value: float) -> None:
    for name in ("watts", "joules_per_byte"):
        with pytest.raises(
            UserError,
            match=f"{name.replace('_', '-')} must be a non-negative number",
        ):
            DeclaredEnergy(**{name: value})


def network(declared: DeclaredEnergy) -> Meters:
    settings = {"watts": declared.watts, "joules_per_byte": declared.joules_per_byte}
    return Meters.of(Budget({"energy": 1e6}), Metering(network=True, declared=settings))


class TestMeasured:
    def test_meters_replace_declared_watts(self) -> None:
        assert MeasuredEnergy(NO_BYTES).read(METERED, TIME) == Cost(4.0, 15.0)

    def test_bytes_use_declared_joules(self) -> None:
        """Meters do not cover the network card."""
        cost = MeasuredEnergy(DECLARED).read(METERED, TIME)
        assert (cost.step, cost.aggregation) == pytest.approx((4.0, 15.0 + 2.0))

    def test_unmetered_node_uses_declared_watts(self) -> None:
        # 3 W for half a second are 1.5 J, and for two seconds 6 J.
        cost = MeasuredEnergy(DECLARED).read(PARTLY_METERED, TIME)
        assert (cost.step, cost.aggregation) == pytest.approx((4.0 + 1.5, 15.0 + 6.0 + 2.0))

    def test_no_meters_use_declared_energy(self) -> None:
        assert MeasuredEnergy(DECLARED).read(UNMETERED, TIME) == DECLARED.read(
            UNMETERED, TIME
        )

    @pytest.mark.parametrize(
        ("declared", "rounds", "source"),
        [
            (NO_BYTES, [], "declared"),
            (NO_BYTES, [UNMETERED, UNMETERED], "declared"),
            (NO_BYTES, [METERED, METERED], "measured"),
            (NO_BYTES, [ESTIMATE], "estimated"),
            (NO_BYTES, [METERED, UNMETERED], "estimated"),
            (NO_BYTES, [UNMETERED, METERED], "estimated"),
            (NO_BYTES, [PARTLY_METERED, METERED], "estimated"),
            (DECLARED, [METERED, METERED], "estimated"),
            (DECLARED, [UNMETERED], "declared"),
        ],
    )
    def test_source_of_all_rounds(
        self, declared: DeclaredEnergy, rounds: list[Usage], source: str
    ) -> None:
        meters = network(declared)
        for each in rounds:
            meters.read(each)
        assert meters.sources == {"energy": source}

    def test_trial_does_not_change_source(self) -> None:
        meters = network(NO_BYTES)
        assert meters.expect(UNMETERED).step.tolist() == [6.0]
        meters.read(METERED)
        assert meters.sources == {"energy": "measured"}

    @pytest.mark.parametrize("unknown", [math.nan, math.inf, -1.0])
    @pytest.mark.parametrize("part", ["step", "whole"])
    def test_unknown_reading_leaves_source(self, part: str, unknown: float) -> None:
        meter = MeasuredEnergy(NO_BYTES)
        values = {"step": 4.0, "whole": 55.0, part: unknown}
        with pytest.raises(MeterError, match="energy of a round is unknown"):
            meter.read(usage(energy=Reading(**values, nodes=3)), TIME)  # type: ignore[arg-type]
        meter.read(METERED, TIME)
        assert meter.source == "measured"


class TestEnergyReader:
    def test_rapl_by_default(self) -> None:
        assert type(energy_reader()) is type(energy_reader("auto")) is type(Rapl.find())
        assert energy_reader("declared") is None

    def test_requested_reader_must_work(self) -> None:
        if Rapl.find() is not None:
            assert isinstance(energy_reader("rapl"), Rapl)
        else:
            with pytest.raises(UserError, match="energy-meter rapl cannot be read here: "):
                energy_reader("rapl")

    def test_unknown_reader_is_refused(self) -> None:
        with pytest.raises(
            UserError,
            match="must be one of auto, rapl, codecarbon, declared, not 'sundial'",
        ):
            energy_reader("sundial")

    def test_codecarbon_is_an_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("fedbudget.resources.carbon.find_spec", lambda module: None)
        with pytest.raises(UserError, match=r"pip install 'fedbudget\[codecarbon\]'"):
            energy_reader("codecarbon")
