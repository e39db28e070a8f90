"""A run is read on from where it was, whatever its writer is at."""

from pathlib import Path

import pytest

from fedbudget.dashboard.run_reader import RunReader
from fedbudget.errors import UserError
from fedbudget.runs.folder import Run, RunWriter
from support.made_runs import SETTINGS, make_run, record


def test_what_is_read_is_what_the_run_has(tmp_path: Path) -> None:
    snapshot, run = RunReader(make_run(tmp_path / "run")).read(), Run.open(tmp_path / "run")
    assert (snapshot.run.rounds, snapshot.run.settings, snapshot.run.summary) == (
        run.rounds,
        run.settings,
        run.summary,
    )
    assert (snapshot.name, snapshot.state, len(snapshot.run.rounds)) == (
        "run",
        "finished",
        20,
    )


def test_records_that_were_added_are_read_and_those_before_are_not_read_again(
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
    assert first == [record(1)]  # what was given out does not change
    writer.close()


def test_half_a_record_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", 1, finished=False)
    reader, line = RunReader(path), record(2).to_json() + "\n"
    for at in (1, 100, len(line) - 1):
        with (path / "rounds.jsonl").open("r+") as file:
            file.truncate(len(record(1).to_json()) + 1)
            file.seek(0, 2)
            file.write(line[:at])
        assert reader.read().run.rounds == [record(1)]
    with (path / "rounds.jsonl").open("a") as file:
        file.write(line[-1])
    assert reader.read().run.rounds == [record(1), record(2)]


def test_records_that_are_taken_back_are_noticed(tmp_path: Path) -> None:
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


def test_a_broken_line_is_an_error_that_names_the_run(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", 2)
    (path / "rounds.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="run: the run's records cannot be read"):
        RunReader(path).read()


def test_a_run_without_a_summary_goes_on_as_long_as_somebody_is_at_it(
    tmp_path: Path,
) -> None:
    writer = RunWriter(tmp_path / "run", SETTINGS.to_toml())
    assert RunReader(tmp_path / "run").read().state == "running"
    writer.close()
    assert RunReader(tmp_path / "run").read().state == "broken off"
