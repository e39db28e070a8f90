"""Runs in a list: found in folders, with their last figures and their state."""

import json
import os
import time
from pathlib import Path

import pytest

from fedbudget.errors import UserError
from fedbudget.runs import overview as overview_module
from fedbudget.runs.folder import RunWriter
from fedbudget.runs.overview import find_runs, last_record, overview, state_of
from support.made_runs import SETTINGS, make_run, record


@pytest.mark.parametrize("rounds", [0, 1, 2, 300])
def test_the_last_record_is_found_from_the_end(tmp_path: Path, rounds: int) -> None:
    path = make_run(tmp_path / "run", rounds, finished=False)
    assert last_record(path) == (record(rounds) if rounds else None)
    with (path / "rounds.jsonl").open("a") as file:
        file.write(record(rounds + 1).to_json()[:40])
    assert last_record(path) == (record(rounds) if rounds else None)


def test_a_last_record_longer_than_any_guess_is_found(tmp_path: Path) -> None:
    long = record(2, missed=tuple(range(30_000)))
    path = make_run(tmp_path / "run", [record(1), long], finished=False)
    assert (path / "rounds.jsonl").stat().st_size > 100_000
    assert last_record(path) == long


def test_runs_are_found_once_the_newest_first(tmp_path: Path) -> None:
    for number, name in enumerate(("b/old", "a/new", "c/middle")):
        began = (1, 3, 2)[number]
        os.utime(make_run(tmp_path / name, 1) / "config.toml", (began, began))
    (tmp_path / "a" / "no run").mkdir()
    folders = [tmp_path / "a", tmp_path / "b" / "old", tmp_path / "b", tmp_path / "c"]
    assert [path.name for path in find_runs(folders)] == ["new", "middle", "old"]
    with pytest.raises(UserError, match="there is no folder"):
        find_runs([tmp_path / "nothing"])


def test_figures_are_the_summary_s_before_the_last_record_s(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run",
        summary={"loss": 0.125, "stopped_by": "target", "spent": {"time": 5.0, "bytes": 0}},
    )
    found = overview(run)
    assert (found["state"], found["stopped_by"], found["loss"], found["accuracy"]) == (
        "finished",
        "target",
        0.125,
        0.9,
    )
    assert [(each["amount"], each["share"]) for each in found["spent"]] == [
        (5.0, 0.25),
        (0, 0.0),
    ]
    assert json.dumps(found)


class TestState:
    def test_whoever_writes_is_at_it(self, tmp_path: Path) -> None:
        path = tmp_path / "run"
        writer = RunWriter(path, SETTINGS.to_toml())
        assert overview(path)["state"] == "running"
        with pytest.raises(UserError, match="is being written to by process"):
            RunWriter.resume(path, SETTINGS.to_toml(), [])
        writer.close()
        assert overview(path)["state"] == "broken off"
        going_on = RunWriter.resume(path, SETTINGS.to_toml(), [])
        assert overview(path)["state"] == "running"
        going_on.close()

    def test_where_locks_do_not_tell(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A run without a summary goes on until it has been quiet for long."""
        monkeypatch.setattr(overview_module, "is_held", lambda path: None)
        path = make_run(tmp_path / "run", finished=False)
        assert state_of(path, None, 0.5) == "running"
        os.utime(path / "rounds.jsonl", (time.time() - 60, time.time() - 60))
        assert state_of(path, None, 0.5) == "broken off"
        assert (
            state_of(path, None, 10.0) == "running"
        )  # one whose rounds take ten seconds is given more time
        assert state_of(path, "interrupted", 10.0) == "interrupted"
