"""Trackers that fail or hang do not end a run and do not hold it up; those that do their
work miss nothing.
"""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import fedbudget
from fedbudget.errors import UserError
from fedbudget.launch.execute import execute
from fedbudget.launch.simulate import simulate
from fedbudget.result import Result
from fedbudget.runs.record import RoundRecord
from fedbudget.settings.settings import Settings
from fedbudget.trackers import tracker
from fedbudget.trackers.tracker import RunInfo, TimedRecord

SETTINGS = Settings(model="svm", budget=("time=1000s",), tau=1, rounds=20, evaluations=1)


class Notes:
    """A tracker that writes down what it is told."""

    name = "notes"

    def __init__(self) -> None:
        self.started: list[RunInfo] = []
        self.batches: list[Sequence[TimedRecord]] = []
        self.ended: list[Mapping[str, Any] | None] = []

    def start(self, run: RunInfo) -> None:
        self.started.append(run)

    def rounds(self, records: Sequence[TimedRecord]) -> None:
        self.batches.append(records)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        self.ended.append(summary)

    @property
    def records(self) -> list[RoundRecord]:
        return [timed.record for batch in self.batches for timed in batch]


class Failing(Notes):
    """Fails where it is told to."""

    name = "failing"

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def start(self, run: RunInfo) -> None:
        super().start(run)
        self._fail("start")

    def rounds(self, records: Sequence[TimedRecord]) -> None:
        super().rounds(records)
        self._fail("rounds")

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        super().finish(summary)
        self._fail("finish")

    def _fail(self, where: str) -> None:
        if where == self._where:
            raise RuntimeError("no space\n  left\n")


class Hanging(Notes):
    """Does not come back from one call, until the test is over."""

    name = "hanging"

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where
        self.may = threading.Event()
        self.over = threading.Event()

    def start(self, run: RunInfo) -> None:
        if self._where == "start":
            self._hang()

    def rounds(self, records: Sequence[TimedRecord]) -> None:
        if self._where == "rounds":
            self._hang()

    def _hang(self) -> None:
        self.may.wait()
        self.over.set()
        raise RuntimeError("too late to be heard")


def made(tmp_path: Path, *trackers: Notes, settings: Settings = SETTINGS) -> Result:
    return execute(simulate(settings), out=tmp_path / "run", plot=False, trackers=trackers)


def test_is_told_of_every_round_once_and_in_order_and_of_the_end(tmp_path: Path) -> None:
    settings = Settings(
        model="svm", budget=("time=10000s",), tau=1, rounds=500, evaluations=1
    )
    notes, other = Notes(), Notes()
    result = made(tmp_path, notes, other, settings=settings)
    assert notes.records == other.records == list(result.rounds)
    assert len(result.rounds) > 500  # with the last loss
    times = [timed.time for batch in notes.batches for timed in batch]
    assert times == sorted(times)
    assert max(map(len, notes.batches)) > 1
    assert [run.name for run in notes.started] == ["run"]
    (summary,) = notes.ended
    assert summary is not None
    assert (summary["status"], summary["loss"]) == ("finished", result.loss)


@pytest.mark.parametrize(
    ("where", "told"), [("start", False), ("rounds", True), ("finish", True)]
)
def test_one_that_fails_is_one_line_and_the_run_goes_on_with_the_others(
    where: str, told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing, notes = Failing(where), Notes()
    result = made(tmp_path, failing, notes)
    assert result.stopped_by == "rounds"
    assert notes.records == list(result.rounds)
    assert bool(failing.batches) is told
    assert [line.getMessage() for line in caplog.records] == [
        "failing failed; the run continues without it: no space left"
    ]


@pytest.mark.parametrize("where", ["start", "rounds"])
def test_one_that_hangs_is_left_behind(
    where: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracker, "START_TIMEOUT", 0.1)
    monkeypatch.setattr(tracker, "STALL_TIMEOUT", 0.5)
    hanging, notes = Hanging(where), Notes()
    result = made(tmp_path, hanging, notes)
    assert notes.records == list(result.rounds)
    assert [line.getMessage() for line in caplog.records] == [
        "hanging is not responding; the run ends without it"
    ]
    hanging.may.set()
    assert hanging.over.wait(10)
    assert len(caplog.records) == 1


def test_one_that_is_slow_to_end_is_waited_for_as_long_as_it_gets_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Notes):
        def rounds(self, records: Sequence[TimedRecord]) -> None:
            threading.Event().wait(0.2)
            super().rounds(records)

    monkeypatch.setattr(tracker, "STALL_TIMEOUT", 0.5)
    monkeypatch.setattr(tracker, "_BATCH", 3)
    slow = Slow()
    result = made(tmp_path, slow)  # in 1.4 s, three times as long as the patience
    assert slow.records == list(result.rounds)
    assert len(slow.batches) == 7
    assert not caplog.records


def test_a_run_that_fails_is_told_to_have_failed(tmp_path: Path) -> None:
    def break_off(record: RoundRecord) -> None:
        if record.round == 5:
            raise OSError("the disk is full")

    notes = Notes()
    with pytest.raises(OSError, match="the disk is full"):
        execute(
            simulate(SETTINGS),
            out=tmp_path / "run",
            callbacks=[break_off],
            trackers=[notes],
        )
    assert [record.round for record in notes.records] == [1, 2, 3, 4, 5]
    assert notes.ended == [None]


def test_rounds_of_a_run_that_goes_on_come_first_at_the_times_they_had(
    tmp_path: Path,
) -> None:
    earlier = made(tmp_path).rounds
    notes = Notes()
    with tracker.tracking(
        [notes], RunInfo(tmp_path / "run", "", SETTINGS, 1000.0), earlier
    ) as followed:
        followed.observe(earlier[0])
    assert notes.records == [*earlier, earlier[0]]
    times = [timed.time for batch in notes.batches for timed in batch]
    assert times[:-1] == [1000.0 + record.wall for record in earlier]


def test_a_run_without_a_folder_cannot_be_tracked() -> None:
    with pytest.raises(UserError, match="a tracked run needs a folder; set it with out"):
        fedbudget.train(track="tensorboard", budget="time=1s")
