"""Whether a program is at a run now, and which: it holds two locks as long as it may write to the run.

That of the run's records says that someone writes to them. That of `.owner`, which says who, keeps any other away: it
is taken before the first file is touched, and never waited for. The system lets go of both when the program ends,
however it does, so that an owner which is gone is known to be. Where the system has no such locks, as Windows, nobody
knows; where a file system does not pass them on from other machines, an owner on another machine is taken for alive.
"""

import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Any, BinaryIO

from fedbudget.errors import UserError

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
        self._file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())

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
    who = f"process {owner.get('pid')} on {owner.get('host')}" if owner else "another program"
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
    known = isinstance(found, dict) and isinstance(found.get("pid"), int) and isinstance(found.get("host"), str)
    return {**found, "host": found["host"][:200].encode("ascii", "replace").decode()} if known else {}
