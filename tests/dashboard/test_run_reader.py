"""Reading a run while it is written, and finding runs by name in one folder."""

import os
from pathlib import Path

import pytest

from fedbudget.dashboard.run_reader import RunIndex, RunReader
from fedbudget.errors import UserError
from fedbudget.runs.folder import Run, RunWriter
from support.synthetic_runs import SETTINGS, make_run, record


def test_snapshot_equals_the_run(tmp_path: Path) -> None:
    snapshot = RunReader(make_run(tmp_path / "run")).read()
    run = Run.open(tmp_path / "run")
    assert snapshot.run.rounds == run.rounds
    assert snapshot.run.settings == run.settings
    assert snapshot.run.summary == run.summary
    assert (snapshot.name, snapshot.state) == ("run", "finished")
    assert len(snapshot.run.rounds) == 20


def test_only_new_records_are_read(
    tmp_path: Path,
) -> None:
    writer = RunWriter(tmp_path / "run", SETTINGS.to_toml())
    reader = RunReader(tmp_path / "run")
    assert reader.read().run.rounds == []
    writer.append(record(1))
    first = reader.read().run.rounds
    writer.append(record(2))
    both = reader.read().run.rounds
    assert both == [record(1), record(2)]
    assert both[0] is first[0]
    assert first == [record(1)]  # returned lists do not change
    writer.close()


def test_incomplete_record_waits(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", 1, finished=False)
    reader = RunReader(path)
    line = record(2).to_json() + "\n"
    for at in (1, 100, len(line) - 1):
        with (path / "rounds.jsonl").open("r+") as file:
            file.truncate(len(record(1).to_json()) + 1)
            file.seek(0, 2)
            file.write(line[:at])
        assert reader.read().run.rounds == [record(1)]
    with (path / "rounds.jsonl").open("a") as file:
        file.write(line[-1])
    assert reader.read().run.rounds == [record(1), record(2)]


def test_removed_records_are_noticed(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", 9, finished=False)
    reader = RunReader(path)
    before = reader.read()
    RunWriter.resume(
        path, (path / "config.toml").read_text(), [record(4, loss=7.0).to_json()]
    ).close()
    after = reader.read()
    assert [each.loss for each in after.run.rounds][-1] == 7.0
    assert (len(before.run.rounds), len(after.run.rounds)) == (9, 4)
    assert before.generation != after.generation == reader.read().generation


def test_broken_line_names_the_run(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", 2)
    (path / "rounds.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="run: the run's records cannot be read"):
        RunReader(path).read()


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


def test_index_lists_newest_first(runs: Path) -> None:
    assert list(RunIndex(runs).names()) == ["second", "first"]


def test_index_of_a_run_folder(runs: Path) -> None:
    index = RunIndex(runs / "first")
    assert list(index.names()) == ["first"]
    assert index.reader("first") is not None
    assert index.reader("second") is None


@pytest.mark.parametrize(
    "name",
    [
        *("..", ".", "", "../outside", "first/../../outside", "/", "first/"),
        *("FIRST", "not a run", "file", "link", "\0"),
    ],
)
def test_index_refuses_other_names(runs: Path, name: str) -> None:
    (runs / "link").symlink_to(runs.parent / "outside")
    assert RunIndex(runs).reader(name) is None
    assert RunIndex(runs).reader(str(runs / "first")) is None


@pytest.mark.parametrize(
    "file", ["config.toml", "rounds.jsonl", "summary.json", "nodes.json"]
)
def test_index_skips_files_linked_outside(runs: Path, file: str) -> None:
    secret = runs.parent / "secret"
    secret.write_text("secret")
    (runs / "first" / file).unlink(missing_ok=True)
    (runs / "first" / file).symlink_to(secret)
    assert RunIndex(runs).reader("first") is None
    assert list(RunIndex(runs).names()) == ["second"]


def test_index_follows_inner_links(runs: Path) -> None:
    (runs / "again").symlink_to(runs / "first")
    reader = RunIndex(runs).reader("again")
    assert reader is not None
    assert len(reader.read().run.rounds) == 20


def test_index_reuses_readers(runs: Path) -> None:
    index = RunIndex(runs)
    assert index.reader("first") is index.reader("first") is not None


def test_overview_has_the_last_values(runs: Path) -> None:
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
        file.write(record(21).to_json() + "\n")
    assert index.overviews()[0]["rounds"] == 21


def test_overview_of_an_unreadable_run(runs: Path) -> None:
    (runs / "first" / "config.toml").write_text("colour = 'blue'")
    by_name = {each["name"]: each for each in RunIndex(runs).overviews()}
    assert by_name["first"]["state"] == "unreadable"
    assert "unknown key 'colour'" in by_name["first"]["title"]
    assert by_name["second"]["state"] == "broken off"


def test_index_of_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no folder .*runs"):
        RunIndex(tmp_path / "runs")
