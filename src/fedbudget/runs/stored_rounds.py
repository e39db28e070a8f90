"""The records of an active run, without keeping them in memory.

A run of 100,000 rounds has 200 MB of records. `StoredRounds` keeps the latest of them, and
for each of the others only where its line ends in `rounds.jsonl`. Rules:

- The file is the program's own. Complete lines are never changed, only added. A resumed run
  gets a new file; a reader of the old one keeps it.
- Records may reach the file later than this object, because a checkpoint comes first. They
  stay in memory until then.
- Rounds are numbered from 1 without gaps, so the line of a round follows from its number.
"""

import os
import threading
import weakref
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import msgspec

from fedbudget.file_contents import open_regular
from fedbudget.runs.record import RoundRecord

_RECENT = 100
"""Number of records in memory from which those that are in the file are dropped."""

_DECODER = msgspec.json.Decoder(RoundRecord)
"""Reads lines that this program has written, 10 times faster than with all checks."""


class StoredRounds(Sequence[RoundRecord]):
    """All records of a run so far.

    Args:
      path: of its `rounds.jsonl`, which is opened when it is needed.
      rounds: number of records of an earlier process, which are in the file.
    """

    def __init__(self, path: Path, rounds: int = 0) -> None:
        self._path = path
        self._file: int | None = None
        self._lock = threading.Lock()  # of the position in the file
        self._ends = array("q")  # end of the line of each record that is not in memory
        self._recent: list[RoundRecord] = []
        if rounds:
            self._find_lines(rounds)

    def append(self, record: RoundRecord) -> None:
        """Add the next record; its line is in the file now or later."""
        if not self and record.round > 1:
            self._find_lines(record.round - 1)
        self._recent.append(record)
        if len(self._recent) >= _RECENT:
            before = len(self._ends)
            self._find_lines(len(self) - 1)
            del self._recent[: len(self._ends) - before]

    def __len__(self) -> int:
        return len(self._ends) + len(self._recent)

    @overload
    def __getitem__(self, at: int) -> RoundRecord: ...

    @overload
    def __getitem__(self, at: slice) -> list[RoundRecord]: ...

    def __getitem__(self, at: int | slice) -> RoundRecord | list[RoundRecord]:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        index = at + len(self) if at < 0 else at
        if not 0 <= index < len(self):
            raise IndexError(f"there are {len(self)} rounds")
        stored = len(self._ends)
        return self._recent[index - stored] if index >= stored else self._read(index)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} rounds in {self._path}>"

    def __reduce__(self) -> Any:
        return list, (list(self),)  # the open file cannot be sent to another process

    def _read(self, index: int) -> RoundRecord:
        start = self._ends[index - 1] if index else 0
        line = self._bytes(start, self._ends[index] - start)
        try:
            return _DECODER.decode(line)
        except msgspec.ValidationError:  # a loss that is not finite
            return RoundRecord.from_json(line.decode())

    def _find_lines(self, most: int) -> None:
        """Find the ends of further complete lines, up to `most` lines in all."""
        start = self._ends[-1] if self._ends else 0
        rest = self._bytes(start, None)
        at = 0
        while len(self._ends) < most and (at := rest.find(b"\n", at) + 1):
            self._ends.append(start + at)

    def _bytes(self, start: int, size: int | None) -> bytes:
        """Return bytes of the file, all up to its end if there is no size.

        There is no buffer, because it could keep half of a line that is written again.
        """
        with self._lock:
            if self._file is None:
                with open_regular(self._path) as opened:
                    self._file = os.dup(opened.fileno())
                weakref.finalize(self, os.close, self._file)
            if size is None:
                size = os.fstat(self._file).st_size - start
            os.lseek(self._file, start, os.SEEK_SET)
            return os.read(self._file, size)
