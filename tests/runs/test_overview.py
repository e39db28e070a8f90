"""Lists of runs with their last values and state, and the removal of runs."""

import json
import os
import time
from pathlib import Path

import pytest

from fedbudget.errors import UserError
from fedbudget.runs import overview as overview_module
from fedbudget.runs.folder import RunWriter
from fedbudget.runs.overview import (
    FILES,
    find_runs,
    last_record,
    overview,
    remove,
    state_of,
)
from support.synthetic_runs import SETTINGS, make_run, record


@pytest.mark.parametrize("rounds", [0, 1, 2, 300])
def test_last_record(tmp_path: Path, rounds: int) -> None:
    path = make_run(tmp_path / "run", rounds, finished=False)
    assert last_record(path) == (record(rounds) if rounds else None)
    with (path / "rounds.jsonl").open("a") as file:
        file.write(record(rounds + 1).to_json()[:40])
    assert last_record(path) == (record(rounds) if rounds else None)


def test_very_long_last_record(tmp_path: Path) -> None:
    long = record(2, missed=tuple(range(30_000)))
    path = make_run(tmp_path / "run", [record(1), long], finished=False)
    assert (path / "rounds.jsonl").stat().st_size > 100_000
    assert last_record(path) == long


def test_runs_are_listed_newest_first(tmp_path: Path) -> None:
    for number, name in enumerate(("b/old", "a/new", "c/middle")):
        started = (1, 3, 2)[number]
        os.utime(make_run(tmp_path / name, 1) / "config.toml", (started, started))
    (tmp_path / "a" / "no run").mkdir()
    folders = [tmp_path / "a", tmp_path / "b" / "old", tmp_path / "b", tmp_path / "c"]
    assert [path.name for path in find_runs(folders)] == ["new", "middle", "old"]
    with pytest.raises(UserError, match="there is no folder"):
        find_runs([tmp_path / "nothing"])


def test_summary_precedes_the_last_record(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run",
        summary={"loss": 0.125, "stopped_by": "target", "spent": {"time": 5.0, "bytes": 0}},
    )
    figures = overview(run)
    assert figures["state"] == "finished"
    assert figures["stopped_by"] == "target"
    assert (figures["loss"], figures["accuracy"]) == (0.125, 0.9)
    assert [(each["amount"], each["share"]) for each in figures["spent"]] == [
        (5.0, 0.25),
        (0, 0.0),
    ]
    assert json.dumps(figures)


class TestState:
    def test_open_writer_means_running(self, tmp_path: Path) -> None:
        path = tmp_path / "run"
        writer = RunWriter(path, SETTINGS.to_toml())
        assert overview(path)["state"] == "running"
        with pytest.raises(UserError, match="is being written to by process"):
            RunWriter.resume(path, SETTINGS.to_toml(), [])
        writer.close()
        assert overview(path)["state"] == "broken off"
        resumed = RunWriter.resume(path, SETTINGS.to_toml(), [])
        assert overview(path)["state"] == "running"
        resumed.close()

    def test_state_without_locks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without locks, a run counts as running until it was quiet for several rounds."""
        monkeypatch.setattr(overview_module, "is_held", lambda path: None)
        path = make_run(tmp_path / "run", finished=False)
        assert state_of(path, None, 0.5) == "running"
        os.utime(path / "rounds.jsonl", (time.time() - 60, time.time() - 60))
        assert state_of(path, None, 0.5) == "broken off"
        assert state_of(path, None, 10.0) == "running"  # rounds of ten seconds
        assert state_of(path, "interrupted", 10.0) == "interrupted"


def test_remove_deletes_the_folder(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for name in FILES:
        (run / name.replace("*", "1")).touch()
    (run / ".summary.json.12ab.new").touch()
    assert remove(run)
    assert not run.exists()


def test_remove_keeps_other_files(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "notes.txt").write_text("mine")
    (run / "data").mkdir()
    assert not remove(run)
    assert sorted(path.name for path in run.iterdir()) == ["data", "notes.txt"]
    with pytest.raises(UserError, match="is not the folder of a run"):
        remove(run)


def test_remove_refuses_a_running_run(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", SETTINGS.to_toml())
    with pytest.raises(UserError, match="is being written to"):
        remove(tmp_path / "run")
    writer.close()
    assert remove(tmp_path / "run")


def test_remove_refuses_links(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (tmp_path / "link").symlink_to(run)
    with pytest.raises(UserError, match="is a link"):
        remove(tmp_path / "link")
    assert (run / "config.toml").is_file()


@pytest.mark.parametrize("name", ["nothing", "folder", "file"])
def test_remove_refuses_other_folders(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.toml").touch()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is not the folder of a run"):
        remove(tmp_path / name)
    assert (tmp_path / "folder" / "config.toml").exists()
