"""Forecasts from the records of a run: amounts computed by hand, reasons, and runs on
disk.
"""

from pathlib import Path
from typing import Any

import pytest

from fedbudget.errors import UserError
from fedbudget.forecasts.forecast import Forecaster, LatestForecast, forecast
from fedbudget.runs.record import RoundRecord
from support.synthetic_runs import make_run, record

LIMITS = {
    "time": 20.0,
    "bytes": 2e6,
}  # a round spends 0.1 s and 5 kB: time ends a run after 200 rounds, bytes after 400


def rounds(count: int, **changes: Any) -> list[RoundRecord]:
    """F(w^f) = 0.2 + 0.8/n after round n."""
    return [record(number, **changes) for number in range(1, count + 1)]


def test_end_of_current_budget() -> None:
    """Half of the time is spent. Time runs out first, with half of the bytes spent."""
    result = Forecaster(rounds(100), LIMITS).at(LIMITS)
    assert result.spent == pytest.approx({"time": 20.0, "bytes": 1e6})
    assert result.loss is not None
    assert result.loss.median == pytest.approx(0.2 + 0.8 / 200, abs=0.002)
    assert result.loss.low <= result.loss.median <= result.loss.high


def test_scarcest_resource_limits_the_run() -> None:
    """More time does not help beyond 400 rounds, when the bytes run out."""
    result = Forecaster(rounds(100), LIMITS).at({"time": 1000.0, "bytes": 2e6})
    assert result.spent == pytest.approx({"time": 40.0, "bytes": 2e6})


def test_cost_of_target() -> None:
    """0.2 + 0.8/n = 0.205 needs 160 rounds, 60 of them still ahead."""
    cost = Forecaster(rounds(100), LIMITS).cost("loss", 0.205)
    assert cost.budget is not None
    assert cost.budget["time"].median == pytest.approx(16.0, rel=0.15)
    assert cost.budget["bytes"].median == pytest.approx(800e3, rel=0.15)
    assert cost.budget["time"].low <= cost.budget["time"].median <= cost.budget["time"].high


def test_accuracy_forecast() -> None:
    """Accuracy is 0.9 - 0.4/n in the rounds that evaluate it."""
    result = Forecaster(rounds(100), LIMITS).at(LIMITS)
    assert result.accuracy is not None
    assert result.accuracy.median == pytest.approx(0.9 - 0.4 / 200, abs=0.003)
    assert Forecaster(rounds(100), LIMITS).cost("accuracy", 0.95).budget is None
    assert Forecaster(rounds(100, accuracy=None), LIMITS).at(LIMITS).accuracy is None


@pytest.mark.parametrize(
    ("records", "limits", "reason"),
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
def test_reasons_without_forecast(
    records: list[RoundRecord], limits: dict[str, float], reason: str
) -> None:
    result = Forecaster(records, LIMITS).at(limits)
    assert result.loss is None
    assert reason in result.reason


def test_unreachable_and_reached_targets() -> None:
    """The loss never falls below 0.2, and 0.3 is already reached."""
    forecaster = Forecaster(rounds(100), LIMITS)
    beyond, passed = forecaster.cost("loss", 0.15), forecaster.cost("loss", 0.3)
    assert beyond.budget is None
    assert "as far as these rounds allow a forecast, loss is 0.2" in beyond.reason
    assert passed.budget is None
    assert "already reached" in passed.reason


def test_lower_step_size_slows_progress() -> None:
    """After η has fallen, 50 % more budget improves the loss less than with a constant
    η.
    """
    steady = rounds(200)
    falling = [
        record(number, eta=0.01 if number < 130 else 0.005) for number in range(1, 201)
    ]
    loss, more = 0.2 + 0.8 / 200, {"time": 30.0, "bytes": 2e6}
    plain, fallen = (
        Forecaster(each, LIMITS, {"loss": loss}).at(more).loss for each in (steady, falling)
    )
    assert plain is not None
    assert fallen is not None
    assert plain.median < fallen.median < loss


class TestValidation:
    """The training loss falls to 0.2. The lowest validation loss is 0.5 + 0.3/n in every
    third round, and constant after round 60 of the second run.
    """

    RESULT = {"loss": 0.204, "accuracy": 0.9, "validation_loss": 0.505}  # noqa: RUF012

    @staticmethod
    def rounds(count: int, last: int = 1000) -> list[RoundRecord]:
        return [
            record(at, validation_best=0.5 + 0.3 / min(at, last) if at % 3 == 0 else None)
            for at in range(1, count + 1)
        ]

    def test_forecast_is_of_validation(self) -> None:
        forecaster = Forecaster(self.rounds(100), LIMITS)
        assert forecaster.now["loss"] == 0.5 + 0.3 / 99
        result = forecaster.at(LIMITS)
        assert result.validated
        assert result.loss is not None
        assert result.loss.median == pytest.approx(0.5 + 0.3 / 200, abs=0.001)
        assert result.loss.high <= 0.5 + 0.3 / 99

    def test_without_validated_result(self) -> None:
        """The model with the best accuracy on test samples has no validation loss."""
        result = {"loss": 0.204, "accuracy": 0.9, "validation_loss": None}
        forecaster = Forecaster(self.rounds(200), LIMITS, result)
        found = forecaster.extended(0.5)
        assert not found.validated
        assert found.loss is not None
        assert 0.2 < found.loss.median < 0.204

    def test_stalled_run_has_no_improvement(self) -> None:
        rounds = self.rounds(200, last=60)
        more = {name: 1.5 * limit for name, limit in LIMITS.items()}
        stalled = self.RESULT | {"stopped_by": "validation"}
        loss = Forecaster(rounds, LIMITS, stalled).at(more).loss
        assert loss is not None
        assert (loss.median, loss.high) == (0.505, 0.505)
        assert 0.49 < loss.low <= 0.505
        cost = Forecaster(rounds, LIMITS, stalled).cost("loss", 0.45)
        assert cost.budget is None
        assert "loss is 0.505" in cost.reason

    def test_few_validations(self) -> None:
        result = Forecaster(self.rounds(21), LIMITS).at(LIMITS)
        assert result.loss is None
        assert result.reason == "validation loss was evaluated in fewer than 8 rounds"


class TestRuns:
    def test_finished_run(self, tmp_path: Path) -> None:
        """10 %, 50 % and 100 % more budget. No forecast is worse than the final loss."""
        path = make_run(tmp_path / "run", 200, summary={"loss": 0.204, "accuracy": 0.898})
        report = forecast(path)
        assert [each.budget["time"] for each in report.budgets] == pytest.approx(
            [22.0, 30.0, 40.0]
        )
        medians = [each.loss.median for each in report.budgets if each.loss]
        assert 0.204 > medians[0] > medians[1] > medians[2] > 0.2
        assert report.to_json()["budgets"][0]["loss"]["median"] == medians[0]

    def test_running_run(self, tmp_path: Path) -> None:
        """By default the end of its budget; otherwise the requested budget and targets."""
        path = make_run(tmp_path / "run", 100, finished=False)
        assert [dict(each.budget) for each in forecast(path).budgets] == [LIMITS]
        requested = forecast(path, budget="time=+10s", until=["loss=0.205", "accuracy=0.5"])
        assert requested.budgets[0].budget == {"time": 30.0, "bytes": 2e6}
        assert [each.figure for each in requested.targets] == ["loss", "accuracy"]

    def test_unknown_metric_is_rejected(self, tmp_path: Path) -> None:
        message = "speed cannot be forecast; use loss or accuracy"
        with pytest.raises(UserError, match=message):
            forecast(make_run(tmp_path / "run", 20), until="speed=3")


def test_latest_forecast_is_cached() -> None:
    """A running run does not recompute the forecast for every round; a finished run
    does.
    """
    latest, records = LatestForecast(), rounds(100)
    first = latest.of(records, LIMITS)
    assert latest.of([*records, record(101)], LIMITS) is first
    assert latest.of(records, LIMITS, {"loss": 0.208}) is not first
