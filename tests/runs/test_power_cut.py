"""A cut of power at every write: what was forced to the disk is there, and a run goes on
from it without a hole.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedbudget import durable_files
from fedbudget.errors import UserError
from fedbudget.runs.checkpoint import Checkpoint, CheckpointWriter
from fedbudget.runs.folder import ROUNDS, Run, RunWriter
from fedbudget.settings.settings import Settings
from runs.test_checkpoint_writer import START, record, state


class Cuts:
    """After every write, what would be there had the power been cut then: records only as
    far as they were forced.
    """

    def __init__(self, run: Path, cuts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.cuts, self.count = run, cuts, 0
        self._safe: dict[
            int, int
        ] = {}  # bytes that were forced to the disk, by the file's number
        fsync = os.fsync

        def forced(handle: int) -> None:
            fsync(handle)
            found = os.fstat(handle)
            self._safe[found.st_ino] = found.st_size

        monkeypatch.setattr(os, "fsync", forced)
        for module, name in (
            (durable_files, "_rename"),
            (RunWriter, "_append"),
            (RunWriter, "sync"),
        ):
            monkeypatch.setattr(module, name, self._then_cut(getattr(module, name)))

    def _then_cut(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            found = function(*arguments)
            self.cut()
            return found

        return called

    def cut(self) -> None:
        rounds = self.run / ROUNDS
        if not rounds.exists() or not (self.run / "checkpoint.safetensors").exists():
            return
        self.count += 1
        there = self.cuts / str(self.count)
        shutil.copytree(self.run, there, ignore=shutil.ignore_patterns(".*"))
        os.truncate(there / ROUNDS, self._safe.get(rounds.stat().st_ino, 0))


@pytest.mark.parametrize("interval", [0.0, 1e-9])
def test_at_every_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: float
) -> None:
    """Over a network, where records wait for checkpoints, and in one process, where they do
    not.
    """
    cuts = Cuts(tmp_path / "run", tmp_path / "cuts", monkeypatch)
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
        there = tmp_path / "cuts" / str(number)
        found = Checkpoint.load(there, START.method)
        RunWriter.resume(there, Settings().to_toml(), found.records).close()
        rounds = [each.round for each in Run.open(there).rounds]
        assert rounds == list(range(1, found.state.round)), number


def test_it_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without forcing records to the disk before a checkpoint lets go of them, there is a
    hole.
    """
    monkeypatch.setattr(RunWriter, "sync", lambda self: None)
    with pytest.raises(UserError, match=r"records of .* are missing"):
        test_at_every_write(tmp_path, monkeypatch, 0.0)
