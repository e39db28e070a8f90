"""A run on disk: one folder.

    config.toml         the settings, which suffice to repeat the run
    rounds.jsonl        one record per round, appended during the run
    summary.json        the result
    model.safetensors   w^f by tensor names, and how to apply it (saved_model.py)
    plot.png            the plot of the run
    nodes.json          the nodes, for display (nodes.py)
    personal/           the personal model of each simulated node, like model.safetensors
    kept.safetensors    the w that is best on test samples so far (evaluation/kept.py)
    events.out.tfevents.*    for TensorBoard, if requested (trackers/tensorboard.py)
    checkpoint.safetensors   the state of the run, to resume from (checkpoint.py)
    .owner, .spare      during the run: the program that writes, and reserved disk space

`RunWriter` writes a run, `Run` reads one.

- The folder is created when the run really starts. Its mode is private, because w contains
  information about the data. To share it, create it in advance or change its mode.
- Whole files are replaced in one step (durable_files.py). A record is one line at the end
  of its file. Readers ignore an incomplete last line.
- Over a network, a record is appended after a checkpoint that contains it is on disk. So a
  record, and its spending, is never withdrawn.
- A resumed run keeps its old model until there is a new one. Its old summary stays as well,
  with the status `running`.
- A folder may come from elsewhere. Only regular files of limited size are read, their
  types are checked, and texts for display lose their control characters.

A program that writes to a run holds two locks. The lock on rounds.jsonl shows that the run
is active. The lock on `.owner`, which names the program, excludes other programs; it is
taken before the first file is written, and never waited for. The system releases both when
the program ends, even after a crash. Without such locks (Windows), activity is unknown. If
a file system does not share locks between machines, an owner on another machine counts as
active.
"""

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from fedbudget import durable_files
from fedbudget.durable_files import with_retries
from fedbudget.errors import UserError, printable_texts
from fedbudget.file_contents import open_regular, read_regular, require_regular
from fedbudget.resources import RESOURCES
from fedbudget.runs.record import RoundRecord
from fedbudget.runs.summary import SUMMARY, read_any_summary
from fedbudget.settings.settings import Settings

if TYPE_CHECKING:
    from fedbudget.runs.saved_model import SavedModel

CONFIG = "config.toml"
ROUNDS = "rounds.jsonl"
MODEL = "model.safetensors"
PLOT = "plot.png"
PERSONAL = "personal"
CHECKPOINT = "checkpoint.safetensors"
OWNER = ".owner"
SPARE = ".spare"
MAX_RECORDS = 2**31
"""Largest size of rounds.jsonl in bytes."""

RUNNING = "running"
"""Status of the old summary of a resumed run."""


@dataclass(frozen=True)
class Run:
    """A finished or active run, read from its folder."""

    path: Path
    settings: Settings
    rounds: list[RoundRecord]
    summary: dict[str, Any] | None

    @classmethod
    def open(cls, path: Path) -> "Run":
        """Read a run; raise `UserError` if the folder has none or is damaged."""
        require_run(path)
        try:
            settings = read_settings(path)
            rounds = _records(read_regular(path / ROUNDS, MAX_RECORDS).decode())
            require_resources(settings, rounds)
            summary = read_summary(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, UserError) and str(path) in str(error):
                raise
            raise UserError(f"{path}: the run's records cannot be read: {error}") from None
        return cls(path, settings, rounds, summary)

    def model(self) -> "SavedModel":
        # Imported here, because a list of runs does not need models.
        from fedbudget.runs.saved_model import SavedModel

        return SavedModel.load(self.path / MODEL)


class RunWriter:
    """Creates the folder of a run and writes to it."""

    def __init__(self, path: Path, config: str) -> None:
        self.path = path
        with _writing(path):
            durable_files.make_folder(path, 0o700)
            if any(path.iterdir()):
                raise UserError(f"{path} is not empty; a run needs an empty folder")
            self._owner = Ownership(path)
            self._open(config, b"")

    @classmethod
    def resume(cls, path: Path, config: str, records: Sequence[str]) -> "RunWriter":
        """Open the folder of a run to resume it from its checkpoint.

        Records after those of the checkpoint are removed. Missing ones are added.

        Args:
          path: folder of the run.
          config: new content of config.toml.
          records: the checkpoint's records as JSON lines; empty before the end of round 1.
        """
        self = cls.__new__(cls)
        self.path = path
        require_run(path)
        self._owner = Ownership(path)
        try:
            self._reopen(config, records)
        except BaseException:
            self._owner.release()
            raise
        return self

    def append(self, record: RoundRecord) -> None:
        """Add a record; on an OSError, such as a full disk, nothing of it remains."""
        with_retries(partial(self._append, record))

    def sync(self) -> None:
        """Return when all records survive a power cut."""
        if not self._rounds.closed:
            os.fsync(self._rounds.fileno())

    def replace(self, name: str, content: bytes) -> None:
        """Write a whole file in one step."""
        with_retries(lambda: durable_files.replace(self.path / name, content))

    def finish(self, summary: Mapping[str, Any], model: bytes) -> None:
        """Write the result and release the run."""
        self.sync()
        self.replace(MODEL, model)
        self.replace(SUMMARY, _json(summary))
        # Last: a run without a lock and without a summary counts as broken off.
        self.close()

    def close(self) -> None:
        """Release the run as it is, so that it can be resumed."""
        self._rounds.close()
        self._owner.release()

    def _reopen(self, config: str, records: Sequence[str]) -> None:
        path = self.path
        run = Run.open(path)
        summary = read_any_summary(path)
        last = [RoundRecord.from_json(line) for line in records]
        kept: list[RoundRecord] = []
        if last:
            kept = [own for own in run.rounds if own.round < last[0].round] + last
        _require_complete(path, [own.round for own in kept])
        with _writing(path):
            if summary is not None:
                self.replace(SUMMARY, _json(summary | {"status": RUNNING}))
            self._open(config, b"".join(map(_line, kept)))

    def _open(self, config: str, records: bytes) -> None:
        self.replace(CONFIG, config.encode())
        self.replace(ROUNDS, records)
        self._rounds = (self.path / ROUNDS).open("ab", buffering=0)
        hold(self._rounds)

    def _append(self, record: RoundRecord) -> None:
        end = self._rounds.tell()
        line = memoryview(_line(record))
        try:
            # An unbuffered write may be partial. A buffer would retry a failed one later.
            while line:
                line = line[self._rounds.write(line) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._rounds.truncate(end)
                self._rounds.seek(end)
            raise


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written to: {error.strerror}") from None


def is_run(path: Path) -> bool:
    """Return whether the folder contains a run."""
    return (path / CONFIG).is_file() and (path / ROUNDS).is_file()


def require_run(path: Path) -> None:
    """Raise `UserError` unless the folder contains a run."""
    if not is_run(path):
        raise UserError(
            f"{path} is not the folder of a run: {CONFIG} or {ROUNDS} is missing"
        )


def read_settings(path: Path) -> Settings:
    """Return the settings of a run, without control characters in texts."""
    return Settings(**printable_texts(Settings.from_toml(path / CONFIG)))


def require_resources(settings: Settings, rounds: Sequence[RoundRecord]) -> None:
    """Raise ValueError unless rounds have the same known resources, and the budget's."""
    names = {*rounds[0].spent} if rounds else {*settings.limits().limits}
    if not {*settings.limits().limits} <= names <= {*RESOURCES}:
        raise ValueError("costs of rounds are not of the budget's resources")
    for record in rounds:
        record.require_resources(names)


def read_summary(path: Path) -> dict[str, Any] | None:
    """Return the summary of a run; None before its end and after it was resumed."""
    summary = read_any_summary(path)
    return None if summary is None or summary.get("status") == RUNNING else summary


class Ownership:
    """The right of this program to write to a run, until it is released.

    Raises `UserError` if another program has it.

    Args:
      folder: folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / OWNER
        self._file = self._take(folder)
        self._file.seek(0)
        self._file.truncate()
        owner = {"pid": os.getpid(), "host": socket.gethostname()}
        self._file.write(json.dumps(owner).encode())

    def release(self) -> None:
        if not self._file.closed:
            with contextlib.suppress(OSError):
                self._path.unlink()
            self._file.close()

    def _take(self, folder: Path) -> Any:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        flags |= getattr(os, "O_NONBLOCK", 0)
        while True:
            file = os.fdopen(os.open(self._path, flags, 0o600), "rb+", buffering=0)
            try:
                require_regular(file, self._path)
                _require_free(folder, file)
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
                        return file
            except BaseException:
                file.close()
                raise
            file.close()  # its owner has just ended and removed it


def require_free(folder: Path) -> None:
    """Raise `UserError` if another program writes to the run."""
    with contextlib.suppress(FileNotFoundError), open_regular(folder / OWNER) as file:
        _require_free(folder, file)


def hold(file: BinaryIO) -> None:
    """Lock a file until it is closed."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)


def is_held(path: Path) -> bool | None:
    """Return whether a program holds the lock of a file; None if unknown."""
    try:
        import fcntl

        with open_regular(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError, UserError):
        return None
    return False


def _require_free(folder: Path, file: Any) -> None:
    owner = _read_owner(file)
    who = "another program"
    if owner is not None:
        who = f"process {owner['pid']} on {owner['host']}"
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{folder} is being written to by {who}; stop it first") from None
    except (ImportError, OSError):
        return
    if owner is not None and owner["host"] != socket.gethostname():
        raise UserError(
            f"{folder} belongs to {who}, which may still be running; if it has ended, "
            f"remove {folder / OWNER}"
        )


def _read_owner(file: Any) -> dict[str, Any] | None:
    try:
        owner = json.loads(file.read(1000))
        host = owner["host"][:200].encode("ascii", "replace").decode()
        return {"pid": int(owner["pid"]), "host": host}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError):
        return None


def _require_complete(path: Path, rounds: Sequence[int]) -> None:
    """Raise `UserError` unless every round up to the last has one record."""
    missing = sorted({*range(1, rounds[-1] + 1)} - {*rounds}) if rounds else []
    if missing:
        problem = f"records of rounds {missing[0]} to {missing[-1]} are missing"
    elif len({*rounds}) < len(rounds):
        problem = "some rounds have two records"
    else:
        return
    raise UserError(f"{path}: {problem} in {ROUNDS}; the run cannot be resumed")


def _records(text: str) -> list[RoundRecord]:
    """Return all records, without an incomplete last line."""
    *whole, rest = text.split("\n")
    records = [RoundRecord.from_json(line) for line in whole]
    with contextlib.suppress(ValueError, KeyError, TypeError):
        records.append(RoundRecord.from_json(rest))
    return records


def _json(summary: Mapping[str, Any]) -> bytes:
    return (json.dumps(summary, indent=2) + "\n").encode()


def _line(record: RoundRecord) -> bytes:
    return (record.to_json() + "\n").encode()
