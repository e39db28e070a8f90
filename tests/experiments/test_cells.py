"""Cells of an experiment: runs on a testbed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedbudget import data
from fedbudget.data.dataset import Dataset
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


def doubled(settings: Settings) -> cells.Columns:
    return {"seed": [settings.seed, 2 * settings.seed]}


def test_own_measure_replaces_the_run(tmp_path: Path) -> None:
    store = CellStore(tmp_path, "run", measure=doubled)
    cell = replace(SHORT, seed=4)
    assert store.make([cell], lambda *_: None, jobs=1) == {}
    assert store.read(cell) == {"seed": [4, 8]}
    assert cell not in CellStore(tmp_path, "run")


def test_testbeds_do_not_share_runs(tmp_path: Path) -> None:
    CellStore(tmp_path, "run", "network", TESTBED).write(SHORT, {"loss": [0.5]})
    assert SHORT in CellStore(tmp_path, "run", "network", TESTBED)
    assert SHORT not in CellStore(tmp_path, "run", "network", replace(TESTBED, delay=0.2))
    assert SHORT not in CellStore(tmp_path, "run", "network")
    assert SHORT not in CellStore(tmp_path, "run")


def test_options_of_tables_are_used(tmp_path: Path) -> None:
    """Without one of two feature columns, the model has one parameter less."""
    table = tmp_path / "homes.csv"
    rows = [f"{number},{number % 7},{2 * number + 1}" for number in range(40)]
    table.write_text("\n".join(["size,age,price", *rows]))
    parameters = []
    for drop in (None, ("age",)):
        settings = replace(SHORT, model="linear", dataset=str(table), drop=drop)
        with cells.made_ready(settings) as run:
            parameters.append(run.model.parameters)
    assert parameters[0] - parameters[1] == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"missing": ("unknown",), "impute": "mean"},
        {"partition": "by:site"},
        {"target": "age"},
        {"categorical": ("rooms",)},
        {"classes": ("1", "0"), "target": "sold"},
    ],
    ids=str,
)
def test_every_option_of_tables_is_used(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comparison reads a table with the same options as a run does."""
    read: list[Settings] = []

    def dataset(settings: Settings) -> Dataset:
        read.append(settings)
        return data.load("digits")

    monkeypatch.setattr(cells, "_dataset", dataset)
    monkeypatch.setattr(cells, "simulate", lambda settings, overrides: overrides)
    settings = replace(SHORT, dataset="homes.csv", **changes)
    with cells.made_ready(settings):
        pass
    assert read[0].table_options() == settings.table_options()
    assert read[0].table_options() != SHORT.table_options()
