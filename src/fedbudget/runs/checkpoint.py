"""Arrays as a file of the safetensors format, in parts that are not copied: a checkpoint of a large model is many.

8 bytes      the length of the header, little-endian
header       JSON: of each tensor its type, shape and place; padded with spaces to a multiple of 8 bytes
tensors      one after the other, those of wider numbers first, and so each where its numbers are aligned

Where a run has come to, on disk: one file in its folder, replaced as the run goes on (checkpoint_writer.py).

    checkpoint.safetensors   arrays as tensors; the rest as JSON, with a checksum of it all, in the metadata

There is no pickle in it: reading one runs no code. It is replaced in one step (atomic_file.py), so that there is always
a whole one, of this round or of the one before. Nothing in it is trusted: a file that is damaged, of another kind or of
another version is refused in a line, and so is one whose numbers cannot be. A w that is not finite, as a run could once
leave it, is not the end: it goes on from w^f.

Numbers come back bit for bit; infinity and NaN are written as Python's JSON writes them.

Checkpoints are written in a thread of their own, so that rounds need not wait for the disk.

When rounds are quicker than the disk, the latest checkpoint is written and those before it are passed over; a run is
never more than some rounds ahead of its disk. Rounds of a few milliseconds share checkpoints: after one, the next waits
for a moment, or until as many rounds wait for it as may. Records of rounds are added to rounds.jsonl when a checkpoint
that holds them is on disk, and not before.

Where rounds can be made again, checkpoints are some time apart, the longer the longer it takes to make one, so that
they take a small share of a run's time; records do not wait for them.

A checkpoint that cannot be written is tried again for a while (persistence.py), and the run goes on as far as it may be
ahead.
"""

import json
import math
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from fedbudget import durable_files
from fedbudget.codec import Arrays, flatten, restore
from fedbudget.durable_files import SpareSpace, with_retries
from fedbudget.errors import UserError
from fedbudget.protocol.method import Method
from fedbudget.protocol.state import AggregatorState, Phase
from fedbudget.protocol.update import restarted
from fedbudget.runs.folder import CHECKPOINT, SPARE
from fedbudget.runs.record import RoundRecord

_TYPES = {
    "f8": "F64",
    "f4": "F32",
    "i8": "I64",
    "i4": "I32",
    "u8": "U64",
    "u4": "U32",
    "u1": "U8",
    "i1": "I8",
    "b1": "BOOL",
}


def in_parts(arrays: Arrays, metadata: Mapping[str, str]) -> list[bytes | memoryview]:
    """What a file of these has in it, one part after the other.

    Args:
      arrays: little-endian, and contiguous.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    end = 0
    for name, values in ordered:
        begin, end = end, end + values.nbytes
        kind = _TYPES[f"{values.dtype.kind}{values.dtype.itemsize}"]
        header[name] = {"dtype": kind, "shape": values.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    parts: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text]
    return parts + [np.ravel(values).data.cast("B") for _, values in ordered if values.size]


T = TypeVar("T")

_KIND = "fedbudget-checkpoint"
_VERSION = 5
_ENGINE = "engine"  # what its arrays' names begin with
_CHECKSUM_LENGTH = 8


@dataclass(frozen=True)
class Conditions:
    """What a run was made under and may be another when it goes on, or must not be.

    Args:
      limits: of the budget, by resource.
      rounds: the most to make, besides the budget.
      data: a fingerprint of all samples; nothing where they are on other machines.
    """

    limits: dict[str, float] = field(default_factory=dict)
    rounds: int | None = None
    data: str = ""

    def extended_by(self, limits: Mapping[str, float], rounds: int | None) -> bool:
        """Whether these limits, and this number of rounds, allow more."""
        more = any(limit > self.limits.get(name, limit) for name, limit in limits.items())
        return more or (
            self.rounds is not None and (rounds is None or rounds > self.rounds)
        )


@dataclass(frozen=True)
class Checkpoint:
    """A run between two rounds.

    Args:
      state: the aggregator's.
      records: of the last rounds, as lines of rounds.jsonl that may not be there yet; none when no round is over.
      engine: whatever the engine must know to go on, as structure.py has it: who is who, meters, counters; plain JSON
        when it was read from a file.
      arrays: that belong to it then, by their names in it.
      conditions: under which the run has come here.
    """

    state: AggregatorState[Any, Any]
    records: tuple[str, ...] = ()
    engine: Any = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)
    conditions: Conditions = Conditions()

    def engine_state(self, kind: type[T]) -> T:
        """What the engine must know, as it was before it was written."""
        try:
            return restore(kind, self.engine, self.arrays)
        except (ValueError, msgspec.ValidationError) as error:
            raise UserError(
                f"the checkpoint is not of a run like this one: {error}"
            ) from None

    def save(self, folder: Path) -> None:
        """Writes it, in place of the one before; an OSError, and the one before, when that cannot be."""
        durable_files.replace(folder / CHECKPOINT, self.in_parts())

    @classmethod
    def load(cls, folder: Path, method: Method) -> "Checkpoint":
        """Reads what a run by this method has written."""
        path = folder / CHECKPOINT
        if not path.is_file():
            raise UserError(f"{folder} has no {CHECKPOINT}: there is nothing to go on from")
        try:
            tensors, plain = _read(path)
            arrays = {
                name: tensors.pop(name)
                for name in list(tensors)
                if name.startswith(f"{_ENGINE}.")
            }
            state = restore(method.state_type(tensors["w"]), plain["state"], tensors)
            if state.best.shape == state.w.shape:
                state = state.recovered(restarted(method.update, state.update, state.best))
            state.require_possible()
            rest = [plain["records"], plain[_ENGINE], plain["conditions"]]
            records, engine, conditions = restore(
                tuple[tuple[str, ...], dict[str, Any], Conditions], rest, {}
            )
            _check_records(state, records)
        except (
            OSError,
            SafetensorError,
            ValueError,
            LookupError,
            TypeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise UserError(f"{path}: the checkpoint cannot be read: {error}") from None
        return cls(state, records, engine, arrays, conditions)

    def in_parts(self) -> "list[bytes | memoryview]":
        """What the file has in it."""
        state, arrays = flatten(self.state)
        engine, more = flatten({_ENGINE: self.engine})
        arrays = {**arrays, **more, **self.arrays}
        # Little-endian and in one piece, as files have them, or the checksum would be another on some machines.
        arrays = {
            name: np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
            for name, values in arrays.items()
        }
        conditions, _ = flatten(self.conditions)
        plain = {
            "version": _VERSION,
            "state": state,
            "records": self.records,
            "conditions": conditions,
            **engine,
        }
        text = json.dumps(plain, separators=(",", ":"))
        return in_parts(arrays, {_KIND: _checksum(arrays, text) + text})


def _read(path: Path) -> tuple[Arrays, dict[str, Any]]:
    """What is in the file, if it is one of ours and undamaged."""
    with safe_open(path, framework="numpy") as file:
        written = (file.metadata() or {}).get(_KIND)
        if written is None:
            raise ValueError("it is not one of fedbudget's")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    checksum = written[:_CHECKSUM_LENGTH]
    text = written[_CHECKSUM_LENGTH:]
    if checksum != _checksum(tensors, text):
        raise ValueError("it is damaged: its checksum is another")
    plain = json.loads(text)
    if not isinstance(plain, dict) or plain.get("version") != _VERSION:
        raise ValueError("it is of another version of fedbudget")
    return tensors, plain


def _checksum(tensors: Arrays, text: str) -> str:
    """Of all that is in the file, so that nothing in it is damaged unnoticed; it is no proof against forgery."""
    checksum = zlib.crc32(text.encode())
    for name, values in sorted(tensors.items()):
        checksum = zlib.crc32(
            f"{name} {values.dtype.str} {values.shape}".encode(), checksum
        )
        checksum = zlib.crc32(values.data, checksum)
    return f"{checksum:08x}"


def _check_records(state: AggregatorState[Any, Any], records: tuple[str, ...]) -> None:
    """The last records are of the rounds before the one that is announced."""
    numbers = [RoundRecord.from_json(line).round for line in records]
    last = state.round - 1 if state.phase is not Phase.DONE or not numbers else max(numbers)
    if numbers != list(range(last - len(numbers) + 1, last + 1)) or last not in (
        state.round - 1,
        state.round,
    ):
        raise ValueError(
            f"the last records are of rounds {numbers}, not of those before round {state.round}"
        )


Append = Callable[[RoundRecord], None]

"""Space on the disk that is kept back, and let go when there is no other."""
_LEAST_SPARE = 2**18  # bytes

_REST = 0.02  # seconds after a checkpoint in which no other is begun, unless rounds would have to wait for it

SHARE = 0.04
"""Of a run's time, that checkpoints take at most where they are some time apart."""


class CheckpointWriter:
    """Writes what it is given, in order, and as soon as the disk has time for it.

    Args:
      folder: of the run.
      append: adds a record to rounds.jsonl.
      sync: returns when the records that were added are safe from a power cut. So they are before there is a checkpoint
        that does not hold them any more.
      ahead: the most rounds that may wait for the disk while the run goes on.
      records: that the last checkpoint on disk holds, as lines.
      interval: seconds between two checkpoints, at least.
      spare: whether space on the disk is kept back.
      conditions: that the run is made under.
    """

    def __init__(
        self,
        folder: Path,
        append: Append,
        *,
        ahead: int,
        sync: Callable[[], None] = lambda: None,
        records: tuple[str, ...] = (),
        interval: float = 0.0,
        spare: bool = False,
        conditions: Conditions = Conditions(),
    ) -> None:
        self._interval = interval
        self._conditions = conditions
        self._asked = time.monotonic()
        self._next = self._asked + interval
        self._folder = folder
        self._spare = SpareSpace(folder / SPARE) if spare else None
        self._append = append
        self._sync = sync
        self._ahead = ahead
        self._last = records[-1:]
        self._changed = threading.Condition()
        self._waiting: list[RoundRecord] = []
        self._latest: (
            tuple[AggregatorState[Any, Any], object, RoundRecord | None] | None
        ) = None
        self._error: Exception | None = None
        self._busy = self._over = self._flushed = False
        self._rested = 0.0  # when the next checkpoint may be begun
        self._thread = threading.Thread(
            target=self._work, name="fedbudget-checkpoints", daemon=True
        )
        self._thread.start()

    def due(self) -> bool:
        """Whether it is time for another checkpoint; to be asked before one is made, which is timed from here."""
        now = time.monotonic()
        if self._busy or now < self._next:
            return False
        self._asked = now
        self._next = math.inf
        return True

    def save(
        self, state: AggregatorState[Any, Any], engine: object, record: RoundRecord | None
    ) -> None:
        """Takes where a run has come to, and the record of the round that was the last, to be on disk before long.

        Raises what went wrong with an earlier one.
        """
        with self._changed:
            self._raise_error()
            self._latest = state, engine, record
            if record is not None and not self._interval:
                self._waiting.append(record)
            if (
                self._urgent or time.monotonic() >= self._rested
            ):  # or the thread wakes up by itself
                self._changed.notify_all()
            self._changed.wait_for(
                lambda: len(self._waiting) <= self._ahead or self._error is not None
            )
            self._raise_error()

    def flush(self) -> None:
        """Waits until all is on disk."""
        with self._changed:
            self._flushed = True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: (self._latest is None and not self._busy) or self._error is not None
            )
            self._flushed = False
            self._raise_error()

    def close(self) -> None:
        """Ends the thread, when it has written what it was given."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._thread.join()
        if self._spare is not None:
            self._spare.release()

    @property
    def _urgent(self) -> bool:
        """Whether the next checkpoint is not put off."""
        return (
            self._over
            or self._flushed
            or bool(self._interval)
            or len(self._waiting) >= max(1, self._ahead - 1)
        )

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._urgent, timeout=max(0.0, self._rested - time.monotonic())
                )
                self._changed.wait_for(lambda: self._latest is not None or self._over)
                if self._latest is None:
                    return
                (state, engine, record), records = self._latest, list(self._waiting)
                if self._interval and record is not None:
                    records = [record]  # the others are on disk already
                self._latest = None
                self._busy = True
            try:
                self._write(state, engine, records)
            except Exception as error:
                with self._changed:
                    self._error = error
                    self._busy = False
                    self._changed.notify_all()
                return
            with self._changed:
                del self._waiting[: len(records)]
                self._busy = False
                now = time.monotonic()
                self._next = now + max(self._interval, (now - self._asked) / SHARE)
                self._rested = now + _REST
                self._changed.notify_all()

    def _write(
        self, state: AggregatorState[Any, Any], engine: object, records: list[RoundRecord]
    ) -> None:
        lines = tuple(record.to_json() for record in records) or self._last
        content = Checkpoint(state, lines, engine, conditions=self._conditions)
        self._sync()
        with_retries(lambda: content.save(self._folder), spare=self._spare)
        if self._spare is not None:
            self._spare.keep(
                max(_LEAST_SPARE, 2 * (self._folder / CHECKPOINT).stat().st_size)
            )
        self._last = lines[-1:]
        for record in records:
            self._append(record)
