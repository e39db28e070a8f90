"""Whether a program is at a run now, and which: it holds two locks as long as it may write to the run.

That of the run's records says that someone writes to them. That of `.owner`, which says who, keeps any other away: it
is taken before the first file is touched, and never waited for. The system lets go of both when the program ends,
however it does, so that an owner which is gone is known to be. Where the system has no such locks, as Windows, nobody
knows; where a file system does not pass them on from other machines, an owner on another machine is taken for alive.

A run on disk: one folder.

    config.toml         the settings, enough to repeat the run
    rounds.jsonl        one record per round, written as it goes
    summary.json        how it ended
    model.safetensors   w^f by names, and what is needed to apply it (saved_model.py)
    plot.png            the picture of the run
    nodes.json          who takes part, for pages to show (nodes.py)
    kept.safetensors    the w that is best on test samples so far, where that is to be kept (kept.py)
    events.out.tfevents.*    what TensorBoard reads, where that was asked for (trackers/tensorboard.py)
    checkpoint.safetensors   where the run has come to, to go on from (checkpoint.py)
    .owner, .spare      while it is made: which program is at it (lock.py), and space that is kept back (persistence.py)

`RunWriter` writes one, `Run` reads one. A folder appears only when a run really starts, and whole files are written
beside their place and then moved there, so that nobody ever reads half of one. A record is one line, added to the end;
half a line there is one that is being written, or was when the program died, and is not read. Whoever writes holds the
locks (lock.py). A folder that a run makes is for its owner alone, because w tells of the data; who wants to share it
makes it before, or changes its mode. A folder may come from elsewhere: what is read of it to be shown has no control
characters.

Over a network a round's record is added only when a checkpoint that holds it is on disk (checkpoint_writer.py), so that
nobody ever reads of a round, and of what was spent in it, that is taken back. When a run goes on, its model stays until
there is another, and so does its summary, of which the status says that it is not the last.
"""

import contextlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from fedbudget import durable_files
from fedbudget.durable_files import with_retries
from fedbudget.errors import UserError, printable_texts
from fedbudget.runs.record import RoundRecord
from fedbudget.settings.settings import Settings

OWNER = ".owner"


def hold(file: BinaryIO) -> None:
    """Until the file is closed."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)


def is_held(path: Path) -> bool | None:
    """Whether a program holds a file's lock; None where that cannot be known."""
    try:
        import fcntl

        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):
        return None
    return False


class Ownership:
    """This program is the one that may write to a run, until it is released; a `UserError` where another is.

    Args:
      folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / OWNER
        self._file = self._take(folder)
        self._file.seek(0)
        self._file.truncate()
        self._file.write(
            json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
        )

    def _take(self, folder: Path) -> Any:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        while True:
            file = os.fdopen(os.open(self._path, flags, 0o600), "rb+", buffering=0)
            try:
                _require_free(folder, file)
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
                        return file
            except BaseException:
                file.close()
                raise
            file.close()  # of an owner that has just left, and taken it along

    def release(self) -> None:
        if not self._file.closed:
            with contextlib.suppress(OSError):
                self._path.unlink()
            self._file.close()


def require_free(folder: Path) -> None:
    """Refuses a run that another program is at."""
    with contextlib.suppress(FileNotFoundError), (folder / OWNER).open("rb") as file:
        _require_free(folder, file)


def _require_free(folder: Path, file: Any) -> None:
    owner = _read(file)
    who = (
        f"process {owner.get('pid')} on {owner.get('host')}" if owner else "another program"
    )
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{folder} is being written to by {who}; end that first") from None
    except (ImportError, OSError):
        return
    if owner and owner.get("host") != socket.gethostname():
        raise UserError(
            f"{folder} belongs to {who}, which has not said that it has ended; if it has, remove {folder / OWNER}"
        )


def _read(file: Any) -> dict[str, Any]:
    try:
        found = json.loads(file.read(1000))
    except (OSError, ValueError):
        return {}
    known = (
        isinstance(found, dict)
        and isinstance(found.get("pid"), int)
        and isinstance(found.get("host"), str)
    )
    return (
        {**found, "host": found["host"][:200].encode("ascii", "replace").decode()}
        if known
        else {}
    )


if TYPE_CHECKING:
    from fedbudget.runs.saved_model import SavedModel

CONFIG = "config.toml"
ROUNDS = "rounds.jsonl"
SUMMARY = "summary.json"
MODEL = "model.safetensors"
PLOT = "plot.png"
CHECKPOINT = "checkpoint.safetensors"
SPARE = ".spare"
RUNNING = "running"
"""The status of a summary that is of an end which was not the last."""


class RunWriter:
    """Makes the folder and fills it as the run goes on."""

    def __init__(self, path: Path, config: str) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise UserError(f"{path} is not empty; a run needs a folder of its own")
            self._owner = Ownership(path)
            self.replace(CONFIG, config.encode())
            self._rounds = (path / ROUNDS).open("wb", buffering=0)
            hold(self._rounds)
        except OSError as error:
            raise UserError(f"{path} cannot be written to: {error.strerror}") from None

    @classmethod
    def resume(cls, path: Path, config: str, records: Sequence[str]) -> "RunWriter":
        """Opens the folder of a run, to go on from its checkpoint.

        Records after the checkpoint's are cut off, and its own are added if they are missing.

        Args:
          config: in place of the one that is there.
          records: the checkpoint's, as their JSON lines; none when no round was over.
        """
        self = cls.__new__(cls)
        self.path = path
        require_run(path)
        self._owner = Ownership(path)
        try:
            self._open_again(config, records)
        except BaseException:
            self._owner.release()
            raise
        return self

    def _open_again(self, config: str, records: Sequence[str]) -> None:
        path = self.path
        run = Run.open(path)
        summary = _read_summary(path)
        last = [_from_json(path, line) for line in records]
        kept = [*(own for own in run.rounds if last and own.round < last[0].round), *last]
        missing = (
            sorted({*range(1, kept[-1].round + 1)} - {own.round for own in kept})
            if kept
            else []
        )
        if missing or len({own.round for own in kept}) < len(kept):
            what = (
                f"records of {_spans(missing)} are missing"
                if missing
                else "records of rounds are there twice"
            )
            raise UserError(f"{path}: {what} in {ROUNDS}; the run cannot go on from there")
        try:
            if summary is not None:
                self.replace(SUMMARY, _json(summary | {"status": RUNNING}))
            self.replace(CONFIG, config.encode())
            self.replace(ROUNDS, b"".join(_line(own) for own in kept))
            self._rounds = (path / ROUNDS).open("ab", buffering=0)
            hold(self._rounds)
        except OSError as error:
            raise UserError(f"{path} cannot be written to: {error.strerror}") from None

    def append(self, record: RoundRecord) -> None:
        """Adds a round's record, or raises an OSError and leaves no half of it, when the disk stays full say."""
        with_retries(lambda: self._append(record))

    def sync(self) -> None:
        """Returns when all records are safe from a power cut."""
        if not self._rounds.closed:
            os.fsync(self._rounds.fileno())

    def _append(self, record: RoundRecord) -> None:
        end = (self.path / ROUNDS).stat().st_size
        line = memoryview(_line(record))
        try:
            while line:  # without a buffer, which would try again later; then a write may be a part of one
                line = line[self._rounds.write(line) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._rounds.truncate(end)
                self._rounds.seek(end)
            raise

    def close(self) -> None:
        """Leaves the run as it is, to go on with another time."""
        self._rounds.close()
        self._owner.release()

    def finish(self, summary: Mapping[str, Any], model: bytes) -> None:
        self.sync()
        self.replace(MODEL, model)
        self.replace(SUMMARY, _json(summary))
        self.close()  # now, when the summary says how the run ended, others may know that nobody is at it any more

    def replace(self, name: str, content: bytes) -> None:
        """Writes a whole file in one step."""
        with_retries(lambda: durable_files.replace(self.path / name, content))


def is_run(path: Path) -> bool:
    """Whether a run was begun in a folder."""
    return (path / CONFIG).is_file() and (path / ROUNDS).is_file()


def require_run(path: Path) -> None:
    if not is_run(path):
        raise UserError(
            f"{path} is not the folder of a run: {CONFIG} or {ROUNDS} is missing"
        )


@dataclass(frozen=True)
class Run:
    """A run that was made, or is being made."""

    path: Path
    settings: Settings
    rounds: list[RoundRecord]
    summary: dict[str, Any] | None

    @classmethod
    def open(cls, path: Path) -> "Run":
        require_run(path)
        try:
            rounds = _records((path / ROUNDS).read_text(encoding="utf-8"))
            summary = read_summary(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: the run's records cannot be read: {error}") from None
        return cls(path, read_settings(path), rounds, summary)

    def model(self) -> "SavedModel":
        from fedbudget.runs.saved_model import (
            SavedModel,  # with models, which a list of runs need not wait for
        )

        return SavedModel.load(self.path / MODEL)


def read_settings(path: Path) -> Settings:
    """A run's settings, from its folder; what may be shown of them has no control characters."""
    return Settings(**printable_texts(Settings.from_toml(path / CONFIG)))


def read_summary(path: Path) -> dict[str, Any] | None:
    """How a run ended, or None where it has not, or goes on; from its folder."""
    summary = _read_summary(path)
    return None if summary is None or summary.get("status") == RUNNING else summary


def _read_summary(path: Path) -> dict[str, Any] | None:
    try:
        summary: dict[str, Any] = printable_texts(
            json.loads((path / SUMMARY).read_text(encoding="utf-8"))
        )
    except FileNotFoundError:
        return None
    for name in ("metrics", "to_beat", "spread"):
        figures = summary.get(name) or {}
        if not isinstance(figures, dict) or not all(
            isinstance(value, int | float) for value in figures.values()
        ):
            raise ValueError(f"in {SUMMARY}, {name} are not numbers by name")
    return summary


def _spans(numbers: Sequence[int]) -> str:
    """
    >>> _spans([3]), _spans([3, 4, 5, 9])
    ('round 3', 'rounds 3 to 9')
    """
    return (
        f"round {numbers[0]}"
        if len(numbers) == 1
        else f"rounds {numbers[0]} to {numbers[-1]}"
    )


def _json(summary: Mapping[str, Any]) -> bytes:
    return (json.dumps(summary, indent=2) + "\n").encode()


def _line(record: RoundRecord) -> bytes:
    return (record.to_json() + "\n").encode()


def _records(text: str) -> list[RoundRecord]:
    """All records, without a last line that is half written."""
    *whole, half = text.split("\n")
    records = [RoundRecord.from_json(line) for line in whole]
    with contextlib.suppress(ValueError, KeyError, TypeError):
        records.append(RoundRecord.from_json(half))
    return records


def _from_json(path: Path, line: str) -> RoundRecord:
    try:
        return RoundRecord.from_json(line)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: the checkpoint's last record cannot be read: {error}"
        ) from None
