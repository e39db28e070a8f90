"""Whether a program is at a run now: it holds the lock of the run's records as long as it may write to them.

The system lets go of the lock when the program ends, however it does. Where the system has no such locks, as Windows,
or a file system does not pass them on, nobody knows.
"""

import contextlib
from pathlib import Path
from typing import BinaryIO


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
