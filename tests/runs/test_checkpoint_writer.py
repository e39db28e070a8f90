"""Checkpoints in the background: in order, never far behind, complete after a power cut."""

import errno
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbudget import durable_files
from fedbudget.errors import UserError
from fedbudget.protocol.state import AggregatorState
from fedbudget.runs import checkpoint
from fedbudget.runs.checkpoint import Checkpoint, CheckpointWriter
from fedbudget.runs.folder import ROUNDS, Run, RunWriter
from fedbudget.runs.record import RoundRecord
from fedbudget.settings.settings import Settings
from support.hand_made import make


@pytest.fixture(autouse=True)
def _short_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up failed writes after 0.1 s."""
    monkeypatch.setattr(durable_files, "PATIENCE", 0.1)


START = make()
START.start()
STATE = START.state


def record(number: int) -> RoundRecord:
    costs = {"time": 0.1}
    figures = (number, number, 1, "fixed", 0.1, 1.0, 1.0, None, None, None, None, ())
    return RoundRecord(*figures, costs, costs, costs, 2, (), 0)


def state(after: int) -> AggregatorState[Any, Any]:
    return replace(
        STATE, round=after + 1, ledger=STATE.ledger.charge_extra(np.array([float(after)]))
    )


class ControlledDisk:
    """Writes a file when the test allows it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writes = 0
        self.started = threading.Semaphore(0)
        self.allowed = threading.Semaphore(0)
        self._write = durable_files.replace
        monkeypatch.setattr(durable_files, "replace", self.replace)

    def replace(self, path: Path, content: bytes) -> None:
        self.started.release()
        self.allowed.acquire()
        self.writes += 1
        self._write(path, content)


def rounds_of(folder: Path) -> tuple[int, list[int]]:
    """Return the round of the checkpoint on disk, and the rounds of its records."""
    read = Checkpoint.load(folder, START.method)
    return read.state.round - 1, [
        RoundRecord.from_json(line).round for line in read.records
    ]


def test_flush_writes_every_record_once(tmp_path: Path) -> None:
    appended: list[int] = []
    writer = CheckpointWriter(
        tmp_path, lambda record: appended.append(record.round), ahead=3
    )
    writer.save(state(0), {}, None)
    for number in range(1, 40):
        writer.save(state(number), {"number": number}, record(number))
    writer.flush()
    assert appended == list(range(1, 40))
    base_round, records = rounds_of(tmp_path)
    assert base_round == 39
    assert records == list(range(40 - len(records), 40))
    assert Checkpoint.load(tmp_path, START.method).engine == {"number": 39}
    writer.close()


def test_records_follow_their_checkpoint(tmp_path: Path) -> None:
    def append(record: RoundRecord) -> None:
        base_round, records = rounds_of(tmp_path)
        assert record.round <= base_round
        assert record.round in records

    writer = CheckpointWriter(tmp_path, append, ahead=4)
    for number in range(1, 30):
        writer.save(state(number), {}, record(number))
    writer.flush()
    writer.close()


def test_slow_disk_merges_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = ControlledDisk(monkeypatch)
    appended: list[int] = []
    writer = CheckpointWriter(
        tmp_path, lambda record: appended.append(record.round), ahead=4
    )
    writer.save(state(1), {}, record(1))
    disk.started.acquire()
    for number in (2, 3, 4):
        writer.save(state(number), {}, record(number))
    disk.allowed.release()
    disk.started.acquire()
    assert (appended, rounds_of(tmp_path)) == ([1], (1, [1]))
    disk.allowed.release()
    writer.flush()
    assert (appended, rounds_of(tmp_path)) == ([1, 2, 3, 4], (4, [2, 3, 4]))
    assert disk.writes == 2
    writer.close()


def test_quick_rounds_share_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next checkpoint waits, here without limit, until the run is as far ahead as
    allowed.
    """
    monkeypatch.setattr(checkpoint, "_PAUSE", 1e6)
    disk = ControlledDisk(monkeypatch)
    appended: list[int] = []
    writer = CheckpointWriter(
        tmp_path, lambda record: appended.append(record.round), ahead=4
    )
    writer.save(state(1), {}, record(1))
    for _ in range(9):
        disk.allowed.release()
    writer.flush()
    for number in (2, 3, 4):
        writer.save(state(number), {}, record(number))
    disk.started.acquire()
    disk.started.acquire()
    writer.flush()
    assert (appended, rounds_of(tmp_path), disk.writes) == ([1, 2, 3, 4], (4, [2, 3, 4]), 2)
    writer.save(state(5), {}, record(5))
    writer.flush()  # does not wait
    assert (rounds_of(tmp_path), disk.writes) == ((5, [5]), 3)
    writer.close()


def test_run_waits_when_too_far_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = ControlledDisk(monkeypatch)
    writer = CheckpointWriter(tmp_path, lambda record: None, ahead=2)
    for number in (1, 2):
        writer.save(state(number), {}, record(number))
    waiting = threading.Thread(target=writer.save, args=(state(3), {}, record(3)))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    for _ in range(3):
        disk.allowed.release()
    waiting.join()
    writer.flush()
    assert rounds_of(tmp_path)[0] == 3
    writer.close()


def test_later_spending_is_saved(
    tmp_path: Path,
) -> None:
    writer = CheckpointWriter(tmp_path, lambda record: None, ahead=2)
    writer.save(state(1), {}, record(1))
    writer.flush()
    writer.save(
        replace(state(1), ledger=STATE.ledger.charge_extra(np.array([7.5]))), {}, None
    )
    writer.flush()
    assert rounds_of(tmp_path) == (1, [1])
    assert Checkpoint.load(tmp_path, START.method).state.ledger.spent.tolist() == [7.5]
    writer.close()


def test_resumed_run_keeps_its_record(tmp_path: Path) -> None:
    writer = CheckpointWriter(
        tmp_path,
        lambda record: None,
        ahead=2,
        records=(record(1).to_json(), record(2).to_json()),
    )
    writer.save(state(2), {}, None)
    writer.flush()
    assert rounds_of(tmp_path) == (2, [2])
    writer.close()


@pytest.mark.parametrize("where", ["save", "flush"])
def test_error_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    appended: list[int] = []
    writer = CheckpointWriter(
        tmp_path, lambda record: appended.append(record.round), ahead=1
    )
    writer.save(state(1), {}, record(1))
    writer.flush()

    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable_files, "replace", full)
    writer.save(state(2), {}, record(2))
    with pytest.raises(OSError, match="No space left"):
        writer.save(state(3), {}, record(3)) if where == "save" else writer.flush()
    assert (appended, rounds_of(tmp_path)) == ([1], (1, [1]))
    writer.close()


class PowerCuts:
    """Copies the run folder after every write, with records truncated to the bytes that
    were synced. The copy is the folder after a power cut at that moment.
    """

    def __init__(self, run: Path, cuts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run = run
        self.cuts = cuts
        self.count = 0
        self._synced: dict[int, int] = {}  # bytes by inode
        fsync = os.fsync

        def record_size(handle: int) -> None:
            fsync(handle)
            result = os.fstat(handle)
            self._synced[result.st_ino] = result.st_size

        monkeypatch.setattr(os, "fsync", record_size)
        for module, name in (
            (durable_files, "_rename"),
            (RunWriter, "_append"),
            (RunWriter, "sync"),
        ):
            monkeypatch.setattr(module, name, self._then_cut(getattr(module, name)))

    def _then_cut(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call_and_cut(*arguments: Any) -> Any:
            result = function(*arguments)
            self.cut()
            return result

        return call_and_cut

    def cut(self) -> None:
        rounds = self.run / ROUNDS
        if not rounds.exists() or not (self.run / "checkpoint.safetensors").exists():
            return
        self.count += 1
        folder = self.cuts / str(self.count)
        shutil.copytree(self.run, folder, ignore=shutil.ignore_patterns(".*"))
        os.truncate(folder / ROUNDS, self._synced.get(rounds.stat().st_ino, 0))


@pytest.mark.parametrize("interval", [0.0, 1e-9])
def test_power_cut_at_every_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: float
) -> None:
    """Records wait for checkpoints over a network (interval 0), and not in one process."""
    cuts = PowerCuts(tmp_path / "run", tmp_path / "cuts", monkeypatch)
    writer = RunWriter(tmp_path / "run", Settings().to_toml())
    append = writer.append if not interval else lambda record: None
    checkpoints = CheckpointWriter(
        writer.path, append, ahead=3, sync=writer.sync, interval=interval
    )
    checkpoints.save(state(0), {}, None)
    checkpoints.flush()
    for number in range(1, 9):
        if interval:
            writer.append(record(number))
        checkpoints.save(state(number), {}, record(number))
        if number % 2:
            checkpoints.flush()
    checkpoints.flush()
    checkpoints.close()
    writer.close()
    monkeypatch.undo()
    assert cuts.count > 10
    for number in range(1, cuts.count + 1):
        folder = tmp_path / "cuts" / str(number)
        result = Checkpoint.load(folder, START.method)
        RunWriter.resume(folder, Settings().to_toml(), result.records).close()
        rounds = [each.round for each in Run.open(folder).rounds]
        assert rounds == list(range(1, result.state.round)), number


def test_unsynced_records_would_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above fails if records are not synced before a checkpoint drops them."""
    monkeypatch.setattr(RunWriter, "sync", lambda self: None)
    with pytest.raises(UserError, match=r"records of .* are missing"):
        test_power_cut_at_every_write(tmp_path, monkeypatch, 0.0)
