"""The title of a run."""

from dataclasses import replace
from pathlib import Path

import pytest

from fedbudget import data
from fedbudget.dashboard import series
from fedbudget.dashboard.run_reader import RunIndex, RunReader
from fedbudget.launch.prepared import Overrides
from fedbudget.launch.simulate import simulate
from fedbudget.runs.text import run_title
from fedbudget.settings.settings import Settings
from support.synthetic_runs import SETTINGS, make_run


@pytest.mark.parametrize(
    ("settings", "title"),
    [
        (SETTINGS, "svm on digits, 4 nodes, case:2, adaptive τ, frugal"),
        (
            replace(SETTINGS, dataset="/data/homes.csv"),
            "svm on homes.csv, 4 nodes, case:2, adaptive τ, frugal",
        ),
        (
            replace(SETTINGS, method="paper", tau=7),
            "svm on digits, 4 nodes, case:2, τ = 7, paper",
        ),
        (
            replace(SETTINGS, method="asynchronous", tau=1),
            "svm on digits, 4 nodes, case:2, asynchronous",
        ),
        (Settings(model="svm"), "svm on digits, adaptive τ, accelerated"),
        (Settings(model="svm", method="centralized"), "svm on digits, centralized"),
    ],
)
def test_title_of_settings(settings: Settings, title: str) -> None:
    assert run_title(settings) == title


def test_title_is_the_same_everywhere(tmp_path: Path) -> None:
    prepared = simulate(SETTINGS, Overrides(dataset=data.load("digits")))
    path = make_run(tmp_path / "run", settings=prepared.settings)
    assert prepared.title == run_title(prepared.settings)
    assert series.view(RunReader(path).read())["title"] == prepared.title
    assert RunIndex(tmp_path).overviews()[0]["title"] == prepared.title


def test_title_notes_incomplete_data() -> None:
    prepared = simulate(
        SETTINGS, Overrides(dataset=replace(data.load("digits"), note="2 of 5 files"))
    )
    assert (
        prepared.title
        == "svm on digits (2 of 5 files), 4 nodes, case:2, adaptive τ, frugal"
    )
