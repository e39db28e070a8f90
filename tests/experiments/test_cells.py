"""Cells of an experiment: runs on a testbed, and the expected duration of runs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedbudget.experiments import cells
from fedbudget.experiments.cells import CellStore, Failure, attempt, expected_seconds
from fedbudget.launch import local
from fedbudget.launch.prepared import PreparedRun
from fedbudget.launch.simulate import simulate
from fedbudget.settings.settings import Settings

SHORT = Settings(model="svm", nodes=2, budget=("time=1s",))
TESTBED = cells.Testbed(paces=(1.0, 4.0), delay=0.1)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Sequence[float] | None, float]]:
    """Paces and delays of requested process fleets, which are simulated instead."""
    requested: list[tuple[Sequence[float] | None, float]] = []

    @contextmanager
    def simulated(
        settings: Settings, *, paces: Sequence[float] | None = None, delay: float = 0.0
    ) -> Iterator[PreparedRun]:
        requested.append((paces, delay))
        yield simulate(replace(settings, costs="simulated"))

    monkeypatch.setattr(local, "on_this_machine", simulated)
    return requested


def test_measured_costs_use_the_testbed(started: list[object]) -> None:
    made = attempt(
        replace(SHORT, costs="measured"), each="run", engine="network", testbed=TESTBED
    )
    assert not isinstance(made, Failure)
    assert started == [((1.0, 4.0), 0.1)]


def test_simulated_costs_need_no_testbed(started: list[object]) -> None:
    columns = attempt(SHORT, each="run", engine="network", testbed=TESTBED)
    assert started == []
    assert columns == attempt(SHORT, each="run")


def test_no_testbed_means_full_speed(
    started: list[object],
) -> None:
    attempt(SHORT, each="run", engine="network")
    assert started == [(None, 0.0)]


def test_testbeds_do_not_share_runs(tmp_path: Path) -> None:
    CellStore(tmp_path, "run", "network", TESTBED).write(SHORT, {"loss": [0.5]})
    assert SHORT in CellStore(tmp_path, "run", "network", TESTBED)
    assert SHORT not in CellStore(tmp_path, "run", "network", replace(TESTBED, delay=0.2))
    assert SHORT not in CellStore(tmp_path, "run", "network")
    assert SHORT not in CellStore(tmp_path, "run")


# Seconds of the paper's testbed, with mini-batches.
STEP = 0.013015156
AGGREGATION = 0.131604348
CENTRALIZED = 0.009974248
SAMPLES = 1437  # training samples of digits; 200 are evaluated per second


@pytest.fixture
def one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every local update and every evaluation takes a second."""
    monkeypatch.setattr(cells, "_quickest", lambda work: (work(), 1.0)[1])


def settings_of(**settings: Any) -> Settings:
    usual = {"dataset": "digits", "model": "svm", "budget": ("time=15s",), "batch_size": 10}
    return Settings(**{**usual, **settings})


@pytest.mark.usefixtures("one_second")
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"tau": 1}, 15 / (STEP + AGGREGATION) * (1 + 1 / 3)),
        ({"tau": 100}, 15 / (100 * STEP + AGGREGATION) * (100 + 1 / 3)),
        # An adaptive τ is estimated as 10.
        ({"tau": "adaptive"}, 15 / (10 * STEP + AGGREGATION) * (10 + 1 + 1 / 3)),
        ({"method": "centralized", "tau": 1}, 15 / CENTRALIZED * (1 + 1 / 3)),
    ],
)
def test_duration_follows_affordable_updates(
    settings: dict[str, object], expected: float
) -> None:
    assert expected_seconds([settings_of(**settings)]) == pytest.approx(
        expected + SAMPLES / 200
    )


@pytest.mark.usefixtures("one_second")
def test_durations_add_up() -> None:
    runs = [
        settings_of(tau=tau, partition=f"case:{case}") for tau in (1, 10) for case in (1, 3)
    ]
    assert expected_seconds(runs) == pytest.approx(
        sum(expected_seconds([each]) for each in runs)
    )


@pytest.mark.usefixtures("one_second")
def test_measured_runs_take_their_budget() -> None:
    assert (
        expected_seconds(
            [settings_of(costs="measured", budget=("time=7s",), tau=tau) for tau in (1, 10)]
        )
        == 14
    )
