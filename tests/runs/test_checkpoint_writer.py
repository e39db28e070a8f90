"""Checkpoints by a thread of their own: in order, never taken back, never far behind, never
silent about trouble.
"""

import errno
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbudget import durable_files
from fedbudget.protocol.state import AggregatorState
from fedbudget.runs import checkpoint
from fedbudget.runs.checkpoint import Checkpoint, CheckpointWriter
from fedbudget.runs.record import RoundRecord
from support.hand_made import make


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not pass is told after a moment."""
    monkeypatch.setattr(durable_files, "PATIENCE", 0.1)


START = make()
START.start()
STATE = START.state


def record(number: int) -> RoundRecord:
    costs = {"time": 0.1}
    return RoundRecord(
        number,
        number,
        1,
        "fixed",
        0.1,
        1.0,
        1.0,
        None,
        None,
        None,
        None,
        (),
        costs,
        costs,
        costs,
        2,
        (),
        0,
    )


def state(after: int) -> AggregatorState[Any, Any]:
    return replace(
        STATE, round=after + 1, ledger=STATE.ledger.charge_extra(np.array([float(after)]))
    )


class Disk:
    """Files are written when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writes = 0
        self.begun, self.may = threading.Semaphore(0), threading.Semaphore(0)
        self._write = durable_files.replace
        monkeypatch.setattr(durable_files, "replace", self.replace)

    def replace(self, path: Path, content: bytes) -> None:
        self.begun.release()
        self.may.acquire()
        self.writes += 1
        self._write(path, content)


def rounds_of(folder: Path) -> tuple[int, list[int]]:
    """After which round the checkpoint on disk stands, and of which it has records."""
    read = Checkpoint.load(folder, START.method)
    return read.state.round - 1, [
        RoundRecord.from_json(line).round for line in read.records
    ]


def test_all_is_on_disk_after_a_flush_each_record_once_and_in_order(tmp_path: Path) -> None:
    appended: list[int] = []
    saver = CheckpointWriter(
        tmp_path, lambda record: appended.append(record.round), ahead=3
    )
    saver.save(state(0), {}, None)
    for number in range(1, 40):
        saver.save(state(number), {"number": number}, record(number))
    saver.flush()
    assert appended == list(range(1, 40))
    base_round, records = rounds_of(tmp_path)
    assert base_round == 39
    assert records == list(range(40 - len(records), 40))
    assert Checkpoint.load(tmp_path, START.method).engine == {"number": 39}
    saver.close()


def test_no_record_is_added_before_a_checkpoint_that_holds_it(tmp_path: Path) -> None:
    def append(record: RoundRecord) -> None:
        base_round, records = rounds_of(tmp_path)
        assert record.round <= base_round
        assert record.round in records

    saver = CheckpointWriter(tmp_path, append, ahead=4)
    for number in range(1, 30):
        saver.save(state(number), {}, record(number))
    saver.flush()
    saver.close()


def test_what_a_slow_disk_has_no_time_for_is_written_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, appended = Disk(monkeypatch), list[int]()
    saver = CheckpointWriter(
        tmp_path, lambda record: appended.append(record.round), ahead=4
    )
    saver.save(state(1), {}, record(1))
    disk.begun.acquire()
    for number in (2, 3, 4):
        saver.save(state(number), {}, record(number))
    disk.may.release()
    disk.begun.acquire()
    assert (appended, rounds_of(tmp_path)) == ([1], (1, [1]))
    disk.may.release()
    saver.flush()
    assert (appended, rounds_of(tmp_path)) == ([1, 2, 3, 4], (4, [2, 3, 4]))
    assert disk.writes == 2
    saver.close()


def test_quick_rounds_share_a_checkpoint_before_any_of_them_has_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a checkpoint the next is put off, here for ever, but not until a run is as far
    ahead as it may be.
    """
    monkeypatch.setattr(checkpoint, "_PAUSE", 1e6)
    disk, appended = Disk(monkeypatch), list[int]()
    saver = CheckpointWriter(
        tmp_path, lambda record: appended.append(record.round), ahead=4
    )
    saver.save(state(1), {}, record(1))
    for _ in range(9):
        disk.may.release()
    saver.flush()
    for number in (2, 3, 4):
        saver.save(state(number), {}, record(number))
    disk.begun.acquire()
    disk.begun.acquire()
    saver.flush()
    assert (appended, rounds_of(tmp_path), disk.writes) == ([1, 2, 3, 4], (4, [2, 3, 4]), 2)
    saver.save(state(5), {}, record(5))
    saver.flush()  # which is not put off
    assert (rounds_of(tmp_path), disk.writes) == ((5, [5]), 3)
    saver.close()


def test_a_run_waits_when_it_is_too_far_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    saver = CheckpointWriter(tmp_path, lambda record: None, ahead=2)
    for number in (1, 2):
        saver.save(state(number), {}, record(number))
    waiting = threading.Thread(target=saver.save, args=(state(3), {}, record(3)))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    for _ in range(3):
        disk.may.release()
    waiting.join()
    saver.flush()
    assert rounds_of(tmp_path)[0] == 3
    saver.close()


def test_what_was_spent_since_the_last_round_is_saved_with_its_record(
    tmp_path: Path,
) -> None:
    saver = CheckpointWriter(tmp_path, lambda record: None, ahead=2)
    saver.save(state(1), {}, record(1))
    saver.flush()
    saver.save(
        replace(state(1), ledger=STATE.ledger.charge_extra(np.array([7.5]))), {}, None
    )
    saver.flush()
    assert rounds_of(tmp_path) == (1, [1])
    assert Checkpoint.load(tmp_path, START.method).state.ledger.spent.tolist() == [7.5]
    saver.close()


def test_a_run_that_goes_on_keeps_the_record_that_it_went_on_from(tmp_path: Path) -> None:
    saver = CheckpointWriter(
        tmp_path,
        lambda record: None,
        ahead=2,
        records=(record(1).to_json(), record(2).to_json()),
    )
    saver.save(state(2), {}, None)
    saver.flush()
    assert rounds_of(tmp_path) == (2, [2])
    saver.close()


@pytest.mark.parametrize("where", ["save", "flush"])
def test_trouble_is_told_and_the_last_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    appended: list[int] = []
    saver = CheckpointWriter(
        tmp_path, lambda record: appended.append(record.round), ahead=1
    )
    saver.save(state(1), {}, record(1))
    saver.flush()

    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable_files, "replace", full)
    saver.save(state(2), {}, record(2))
    with pytest.raises(OSError, match="No space left"):
        saver.save(state(3), {}, record(3)) if where == "save" else saver.flush()
    assert (appended, rounds_of(tmp_path)) == ([1], (1, [1]))
    saver.close()
