"""Trackers run in the background: one that fails or hangs neither ends nor delays a run,
and the others receive every round.
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


class RecordingTracker:
    """A tracker that records its calls."""

    name = "recording"

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


class FailingTracker(RecordingTracker):
    """Fails in the named call."""

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


class HangingTracker(RecordingTracker):
    """Blocks in the named call until the test releases it."""

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
        raise RuntimeError("too late to be reported")


def run_tracked(
    tmp_path: Path, *trackers: RecordingTracker, settings: Settings = SETTINGS
) -> Result:
    return execute(simulate(settings), out=tmp_path / "run", plot=False, trackers=trackers)


def test_receives_rounds_in_order(tmp_path: Path) -> None:
    settings = Settings(
        model="svm",
        budget=("time=10000s",),
        tau=1,
        rounds=500,
        evaluations=1,
        spend_all=True,
    )
    recording = RecordingTracker()
    other = RecordingTracker()
    result = run_tracked(tmp_path, recording, other, settings=settings)
    assert recording.records == other.records == list(result.rounds)
    assert len(result.rounds) > 500  # and the final evaluation
    times = [timed.time for batch in recording.batches for timed in batch]
    assert times == sorted(times)
    assert max(map(len, recording.batches)) > 1
    assert [run.name for run in recording.started] == ["run"]
    (summary,) = recording.ended
    assert summary is not None
    assert (summary["status"], summary["loss"]) == ("finished", result.loss)


@pytest.mark.parametrize(
    ("where", "receives_rounds"), [("start", False), ("rounds", True), ("finish", True)]
)
def test_failing_tracker_is_dropped(
    where: str, receives_rounds: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing = FailingTracker(where)
    recording = RecordingTracker()
    result = run_tracked(tmp_path, failing, recording)
    assert result.stopped_by == "rounds"
    assert recording.records == list(result.rounds)
    assert bool(failing.batches) is receives_rounds
    assert [line.getMessage() for line in caplog.records] == [
        "failing failed; the run continues without it: no space left"
    ]


@pytest.mark.parametrize("where", ["start", "rounds"])
def test_hanging_tracker_is_abandoned(
    where: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracker, "START_TIMEOUT", 0.1)
    monkeypatch.setattr(tracker, "STALL_TIMEOUT", 0.5)
    hanging = HangingTracker(where)
    recording = RecordingTracker()
    result = run_tracked(tmp_path, hanging, recording)
    assert recording.records == list(result.rounds)
    assert [line.getMessage() for line in caplog.records] == [
        "hanging is not responding; the run ends without it"
    ]
    hanging.may.set()
    assert hanging.over.wait(10)
    assert len(caplog.records) == 1


def test_slow_tracker_may_finish(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SlowTracker(RecordingTracker):
        def rounds(self, records: Sequence[TimedRecord]) -> None:
            threading.Event().wait(0.2)
            super().rounds(records)

    monkeypatch.setattr(tracker, "STALL_TIMEOUT", 0.5)
    monkeypatch.setattr(tracker, "_BATCH", 3)
    slow = SlowTracker()
    result = run_tracked(tmp_path, slow)  # 1.4 s, almost three times the timeout
    assert slow.records == list(result.rounds)
    assert len(slow.batches) == 7
    assert not caplog.records


def test_failed_run_has_no_summary(tmp_path: Path) -> None:
    def fail(record: RoundRecord) -> None:
        if record.round == 5:
            raise OSError("the disk is full")

    recording = RecordingTracker()
    with pytest.raises(OSError, match="the disk is full"):
        execute(
            simulate(SETTINGS),
            out=tmp_path / "run",
            callbacks=[fail],
            trackers=[recording],
        )
    assert [record.round for record in recording.records] == [1, 2, 3, 4, 5]
    assert recording.ended == [None]


def test_resumed_run_repeats_earlier_rounds(
    tmp_path: Path,
) -> None:
    earlier = run_tracked(tmp_path).rounds
    recording = RecordingTracker()
    with tracker.tracking(
        [recording], RunInfo(tmp_path / "run", "", SETTINGS, 1000.0), earlier
    ) as followed:
        followed.observe(earlier[0])
    assert recording.records == [*earlier, earlier[0]]
    times = [timed.time for batch in recording.batches for timed in batch]
    assert times[:-1] == [1000.0 + record.wall for record in earlier]


def test_tracked_run_needs_a_folder() -> None:
    with pytest.raises(UserError, match="a tracked run needs a folder; set it with out"):
        fedbudget.train(track="tensorboard", budget="time=1s")
