"""What a run's records say of what comes: amounts worked out by hand, reasons in words,
runs on disk.
"""

from pathlib import Path
from typing import Any

import pytest

from fedbudget.errors import UserError
from fedbudget.forecasts.forecast import Forecaster, LatestForecast, forecast
from fedbudget.runs.record import RoundRecord
from support.made_runs import make_run, record

LIMITS = {
    "time": 20.0,
    "bytes": 2e6,
}  # a round spends 0.1 s and 5 kB: time ends a run after 200 rounds, bytes after 400


def rounds(count: int, **changes: Any) -> list[RoundRecord]:
    """F(w^f) = 0.2 + 0.8/n after round n."""
    return [record(number, **changes) for number in range(1, count + 1)]


def test_the_end_of_the_own_budget() -> None:
    """Half of the time is spent: time runs out first, and bytes are half spent by then."""
    found = Forecaster(rounds(100), LIMITS).at(LIMITS)
    assert found.spent == pytest.approx({"time": 20.0, "bytes": 1e6})
    assert found.loss is not None
    assert found.loss.median == pytest.approx(0.2 + 0.8 / 200, abs=0.002)
    assert found.loss.low <= found.loss.median <= found.loss.high


def test_the_resource_that_ends_first() -> None:
    """More time buys nothing beyond what there are bytes for: 400 rounds."""
    found = Forecaster(rounds(100), LIMITS).at({"time": 1000.0, "bytes": 2e6})
    assert found.spent == pytest.approx({"time": 40.0, "bytes": 2e6})


def test_the_cost_of_a_target() -> None:
    """0.2 + 0.8/n = 0.205 needs 160 rounds, 60 of them still to come."""
    cost = Forecaster(rounds(100), LIMITS).cost("loss", 0.205)
    assert cost.budget is not None
    assert cost.budget["time"].median == pytest.approx(16.0, rel=0.15)
    assert cost.budget["bytes"].median == pytest.approx(800e3, rel=0.15)
    assert cost.budget["time"].low <= cost.budget["time"].median <= cost.budget["time"].high


def test_accuracy_rises() -> None:
    """Accuracy is 0.9 - 0.4/n in the rounds where it is looked at."""
    found = Forecaster(rounds(100), LIMITS).at(LIMITS)
    assert found.accuracy is not None
    assert found.accuracy.median == pytest.approx(0.9 - 0.4 / 200, abs=0.003)
    assert Forecaster(rounds(100), LIMITS).cost("accuracy", 0.95).budget is None
    assert Forecaster(rounds(100, accuracy=None), LIMITS).at(LIMITS).accuracy is None


@pytest.mark.parametrize(
    ("records", "limits", "words"),
    [
        ([], LIMITS, "0 rounds are complete; 8 are needed"),
        (rounds(7), LIMITS, "7 rounds are complete; 8 are needed"),
        (rounds(50, best_loss=0.5), LIMITS, "loss has not improved so far"),
        (rounds(50, best_loss=float("nan")), LIMITS, "0 rounds are complete"),
        (
            rounds(50, best_loss=float("nan"), private={"rho": 0.1}),
            LIMITS,
            "a private run publishes no loss",
        ),
        (
            rounds(10),
            LIMITS,
            "20 times the present spending; these rounds allow a forecast up to 2.5 times",
        ),
        (rounds(20), {"time": 1.0, "bytes": 2e6}, "this budget is already spent"),
    ],
)
def test_what_cannot_be_known(
    records: list[RoundRecord], limits: dict[str, float], words: str
) -> None:
    found = Forecaster(records, LIMITS).at(limits)
    assert found.loss is None
    assert words in found.reason


def test_targets_that_cannot_be_reached() -> None:
    """The loss is above 0.2 for ever; and 0.3 was passed long ago."""
    forecaster = Forecaster(rounds(100), LIMITS)
    beyond, passed = forecaster.cost("loss", 0.15), forecaster.cost("loss", 0.3)
    assert beyond.budget is None
    assert "as far as these rounds allow a forecast, loss is 0.2" in beyond.reason
    assert passed.budget is None
    assert "already reached" in passed.reason


def test_a_second_fall_of_eta() -> None:
    """Where η has fallen, half as much again buys less than where it is the same all the
    time.
    """
    steady = rounds(200)
    falling = rounds(200)
    falling = [
        record(each.round, eta=0.01 if each.round < 130 else 0.005) for each in falling
    ]
    loss, more = 0.2 + 0.8 / 200, {"time": 30.0, "bytes": 2e6}
    plain, fallen = (
        Forecaster(each, LIMITS, {"loss": loss}).at(more).loss for each in (steady, falling)
    )
    assert plain is not None
    assert fallen is not None
    assert plain.median < fallen.median < loss


class TestRuns:
    def test_a_finished_one(self, tmp_path: Path) -> None:
        """A tenth, half and as much again; none of it makes what is known worse."""
        path = make_run(tmp_path / "run", 200, summary={"loss": 0.204, "accuracy": 0.898})
        report = forecast(path)
        assert [each.budget["time"] for each in report.budgets] == pytest.approx(
            [22.0, 30.0, 40.0]
        )
        medians = [each.loss.median for each in report.budgets if each.loss]
        assert 0.204 > medians[0] > medians[1] > medians[2] > 0.2
        assert report.to_json()["budgets"][0]["loss"]["median"] == medians[0]

    def test_one_that_goes_on(self, tmp_path: Path) -> None:
        """The end of its own budget, until something else is asked."""
        path = make_run(tmp_path / "run", 100, finished=False)
        assert [dict(each.budget) for each in forecast(path).budgets] == [LIMITS]
        asked = forecast(path, budget="time=+10s", until=["loss=0.205", "accuracy=0.5"])
        assert asked.budgets[0].budget == {"time": 30.0, "bytes": 2e6}
        assert [each.figure for each in asked.targets] == ["loss", "accuracy"]

    def test_a_metric_that_has_no_curve(self, tmp_path: Path) -> None:
        with pytest.raises(
            UserError, match="speed cannot be forecast; use loss or accuracy"
        ):
            forecast(make_run(tmp_path / "run", 20), until="speed=3")


def test_the_latest_is_kept() -> None:
    """While a run goes on it is not made anew for every round; when it has ended it is."""
    latest, records = LatestForecast(), rounds(100)
    first = latest.of(records, LIMITS)
    assert latest.of([*records, record(101)], LIMITS) is first
    assert latest.of(records, LIMITS, {"loss": 0.208}) is not first
