"""Runs on a testbed: which are made over the network, with which nodes, and that they are
kept apart.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from fedbudget.experiments import cells
from fedbudget.experiments.cells import CellStore, Failure, attempt
from fedbudget.launch import local
from fedbudget.launch.prepared import PreparedRun
from fedbudget.launch.simulate import simulate
from fedbudget.settings.settings import Settings

SHORT = Settings(model="svm", nodes=2, budget=("time=1s",))
TESTBED = cells.Testbed(paces=(1.0, 4.0), delay=0.1)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Sequence[float] | None, float]]:
    """The paces and the delay of every fleet of processes that was asked for; it is
    simulated in place of started.
    """
    asked: list[tuple[Sequence[float] | None, float]] = []

    @contextmanager
    def simulated(
        settings: Settings, *, paces: Sequence[float] | None = None, delay: float = 0.0
    ) -> Iterator[PreparedRun]:
        asked.append((paces, delay))
        yield simulate(replace(settings, costs="simulated"))

    monkeypatch.setattr(local, "on_this_machine", simulated)
    return asked


def test_measured_costs_are_measured_on_the_testbed(started: list[object]) -> None:
    made = attempt(
        replace(SHORT, costs="measured"), each="run", engine="network", testbed=TESTBED
    )
    assert not isinstance(made, Failure)
    assert started == [((1.0, 4.0), 0.1)]


def test_simulated_costs_need_no_testbed_and_no_network(started: list[object]) -> None:
    beside = attempt(SHORT, each="run", engine="network", testbed=TESTBED)
    assert started == []
    assert beside == attempt(SHORT, each="run")


def test_without_a_testbed_nodes_and_network_are_as_fast_as_they_are(
    started: list[object],
) -> None:
    attempt(SHORT, each="run", engine="network")
    assert started == [(None, 0.0)]


def test_runs_of_one_testbed_are_none_of_another(tmp_path: Path) -> None:
    CellStore(tmp_path, "run", "network", TESTBED).write(SHORT, {"loss": [0.5]})
    assert SHORT in CellStore(tmp_path, "run", "network", TESTBED)
    assert SHORT not in CellStore(tmp_path, "run", "network", replace(TESTBED, delay=0.2))
    assert SHORT not in CellStore(tmp_path, "run", "network")
    assert SHORT not in CellStore(tmp_path, "run")
