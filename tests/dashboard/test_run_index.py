"""Runs are found by name in one folder, and nothing else is."""

import os
from pathlib import Path

import pytest

from fedbudget.dashboard.run_reader import RunIndex
from fedbudget.errors import UserError
from support.made_runs import make_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    make_run(folder / "first")
    make_run(folder / "second", finished=False)
    (folder / "not a run").mkdir()
    (folder / "file").touch()
    make_run(tmp_path / "outside")
    for number, name in enumerate(("first", "second")):
        os.utime(folder / name / "config.toml", (number, number))
    return folder


def test_all_runs_are_there_the_newest_first(runs: Path) -> None:
    assert list(RunIndex(runs).names()) == ["second", "first"]


def test_a_runs_own_folder_has_one_run(runs: Path) -> None:
    index = RunIndex(runs / "first")
    assert list(index.names()) == ["first"]
    assert index.reader("first") is not None
    assert index.reader("second") is None


@pytest.mark.parametrize(
    "name",
    [
        "..",
        ".",
        "",
        "../outside",
        "first/../../outside",
        "/",
        "first/",
        "FIRST",
        "not a run",
        "file",
        "link",
        "\0",
    ],
)
def test_no_other_name_is_one(runs: Path, name: str) -> None:
    (runs / "link").symlink_to(runs.parent / "outside")
    assert RunIndex(runs).reader(name) is None
    assert RunIndex(runs).reader(str(runs / "first")) is None


@pytest.mark.parametrize(
    "file", ["config.toml", "rounds.jsonl", "summary.json", "nodes.json"]
)
def test_a_run_with_a_file_that_is_elsewhere_is_not_there(runs: Path, file: str) -> None:
    secret = runs.parent / "secret"
    secret.write_text("secret")
    (runs / "first" / file).unlink(missing_ok=True)
    (runs / "first" / file).symlink_to(secret)
    assert RunIndex(runs).reader("first") is None
    assert list(RunIndex(runs).names()) == ["second"]


def test_a_link_that_stays_in_the_folder_is_followed(runs: Path) -> None:
    (runs / "again").symlink_to(runs / "first")
    reader = RunIndex(runs).reader("again")
    assert reader is not None
    assert len(reader.read().run.rounds) == 20


def test_a_run_that_was_read_is_read_on(runs: Path) -> None:
    index = RunIndex(runs)
    assert index.reader("first") is index.reader("first") is not None


def test_an_overview_has_the_last_figures(runs: Path) -> None:
    index = RunIndex(runs)
    second, first = index.overviews()
    assert (first["state"], second["state"]) == ("finished", "broken off")
    assert (first["rounds"], first["accuracy"], first["loss"]) == (
        20,
        0.9,
        pytest.approx(0.24),
    )
    assert [(each["name"], each["text"], each["share"]) for each in first["spent"]] == [
        ("time", "2s", pytest.approx(0.1)),
        ("bytes", "100kB", pytest.approx(0.05)),
    ]
    with (runs / "second" / "rounds.jsonl").open("a") as file:
        file.write(
            (runs / "second" / "rounds.jsonl")
            .read_text()
            .splitlines()[-1]
            .replace('"round":20', '"round":21')
            + "\n"
        )
    assert index.overviews()[0]["rounds"] == 21


def test_a_run_that_cannot_be_read_says_so_and_leaves_the_others(runs: Path) -> None:
    (runs / "first" / "config.toml").write_text("colour = 'blue'")
    by_name = {each["name"]: each for each in RunIndex(runs).overviews()}
    assert by_name["first"]["state"] == "unreadable"
    assert "unknown key 'colour'" in by_name["first"]["title"]
    assert by_name["second"]["state"] == "broken off"


def test_a_folder_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no folder .*runs"):
        RunIndex(tmp_path / "runs")
