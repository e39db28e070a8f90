"""How long runs will take, with a local update and an evaluation that take a second each."""

from typing import Any

import pytest

from fedbudget.experiments import cells
from fedbudget.experiments.cells import expected_seconds
from fedbudget.settings.settings import Settings

STEP, AGGREGATION, CENTRALIZED = (
    0.013015156,
    0.131604348,
    0.009974248,
)  # the paper's, with mini-batches
SAMPLES = 1437  # of digits to train on; 200 of them are evaluated in a second


@pytest.fixture(autouse=True)
def _seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "_quickest", lambda work: (work(), 1.0)[1])


def run(**settings: Any) -> Settings:
    usual = {"dataset": "digits", "model": "svm", "budget": ("time=15s",), "batch_size": 10}
    return Settings(**{**usual, **settings})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"tau": 1}, 15 / (STEP + AGGREGATION) * (1 + 1 / 3)),
        ({"tau": 100}, 15 / (100 * STEP + AGGREGATION) * (100 + 1 / 3)),
        (
            {"tau": "adaptive"},
            15 / (10 * STEP + AGGREGATION) * (10 + 1 + 1 / 3),
        ),  # as if τ were 10
        ({"method": "centralized", "tau": 1}, 15 / CENTRALIZED * (1 + 1 / 3)),
    ],
)
def test_a_run_takes_the_updates_that_its_budget_pays_for(
    settings: dict[str, object], expected: float
) -> None:
    assert expected_seconds([run(**settings)]) == pytest.approx(expected + SAMPLES / 200)


def test_runs_are_added_up() -> None:
    cells = [run(tau=tau, partition=f"case:{case}") for tau in (1, 10) for case in (1, 3)]
    assert expected_seconds(cells) == pytest.approx(
        sum(expected_seconds([cell]) for cell in cells)
    )


def test_measured_ones_take_their_budget() -> None:
    assert (
        expected_seconds(
            [run(costs="measured", budget=("time=7s",), tau=tau) for tau in (1, 10)]
        )
        == 14
    )
