"""The state of a run on disk: `checkpoint.safetensors` in its folder.

Arrays are tensors of the safetensors format: `state.0`, `state.1` ... of the aggregator's
state and `engine.0` ... of the engine's. Everything else is JSON in the metadata, in the
form of codec.py, with a checksum of the whole file. The file contains no pickle, so reading
it runs no code.

- A checkpoint is replaced in one step (durable_files.py). The folder always has a complete
  one, of the latest round or of an earlier one.
- Nothing in a file is trusted. A damaged file, another kind of file, another version and
  impossible numbers raise `UserError`. If only w is not finite, the run resumes from w^f.
- Numbers are restored bit for bit. Infinity and NaN are written as in Python's JSON.

`CheckpointWriter` writes checkpoints in its own thread, so rounds do not wait for the disk.

- If rounds are faster than the disk, only the latest checkpoint is written. A run is never
  more than a few rounds ahead of its disk.
- Rounds of a few milliseconds share checkpoints: after each, the next waits for a moment,
  or until the run is as far ahead as allowed.
- A record is appended to rounds.jsonl after a checkpoint that contains it is on disk.
- If rounds can be repeated, checkpoints have an interval that grows with the time to write
  one. They then take a small fraction of a run's time, and records do not wait for them.
- A failed write is repeated for a while (`durable_files.with_retries`). Meanwhile the run
  continues until it is as far ahead as allowed.
"""

import json
import math
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from fedbudget import durable_files
from fedbudget.arrays import require_shape
from fedbudget.codec import Codec, file_codec
from fedbudget.durable_files import SpareSpace, with_retries
from fedbudget.engines.baselines import BaselineState
from fedbudget.errors import UserError
from fedbudget.file_contents import parsed_json, require_tensors
from fedbudget.protocol.features.feature import wire_types
from fedbudget.protocol.method import Method
from fedbudget.protocol.stages import with_finite_w
from fedbudget.protocol.state import AggregatorState, Phase, state_type
from fedbudget.protocol.update import UPDATE_RULES, KMeansSplit
from fedbudget.runs.folder import CHECKPOINT, SPARE
from fedbudget.runs.record import RoundRecord

SHARE = 0.04
"""Largest fraction of a run's time for checkpoints that have an interval."""

T = TypeVar("T")
_State = AggregatorState[Any, Any] | BaselineState
_Parts = list[bytes | memoryview]
Arrays = dict[str, NDArray[Any]]

_KIND = "fedbudget-checkpoint"
_VERSION = 6
_ENGINE = "engine"
_STATE = "state"
_CHECKSUM_LENGTH = 8
_MIN_SPARE = 2**18  # bytes of the disk that are kept in reserve
_PAUSE = 0.02  # seconds between two checkpoints, unless rounds have to wait

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


@dataclass(frozen=True)
class Conditions:
    """Conditions of a run, to compare with those under which it is resumed.

    Args:
      limits: limits of the budget by resource.
      rounds: largest number of rounds, in addition to the budget.
      data: fingerprint of all samples; empty if they are on other machines.
    """

    limits: dict[str, float] = field(default_factory=dict)
    rounds: int | None = None
    data: str = ""

    def extended_by(self, limits: Mapping[str, float], rounds: int | None) -> bool:
        """Return whether other limits and another number of rounds allow more."""
        if any(limit > self.limits.get(name, limit) for name, limit in limits.items()):
            return True
        return self.rounds is not None and (rounds is None or rounds > self.rounds)


@dataclass(frozen=True)
class Checkpoint:
    """A run between two rounds.

    Args:
      state: `AggregatorState` of the run's method, or `BaselineState`.
      records: last records, as lines that rounds.jsonl may not have yet; empty before the
        end of the first round.
      engine: state of the engine (nodes, meters, counters), a dataclass or plain values;
        plain values if it was read from a file.
      arrays: arrays of the engine's state, if it was read from a file.
      conditions: conditions of the run so far.
    """

    state: Any
    records: tuple[str, ...] = ()
    engine: Any = field(default_factory=dict)
    arrays: Sequence[NDArray[Any]] = ()
    conditions: Conditions = Conditions()

    def save(self, folder: Path) -> None:
        """Replace the checkpoint of a run; on an OSError the old one stays."""
        durable_files.replace(folder / CHECKPOINT, self.parts())

    @classmethod
    def load(cls, folder: Path, method: Method | None) -> "Checkpoint":
        """Read the checkpoint of a run with this method; None for a baseline."""
        path = folder / CHECKPOINT
        if not path.is_file():
            raise UserError(f"{folder} has no {CHECKPOINT}: the run cannot be resumed")
        try:
            tensors, plain = _read(path)
            arrays = _arrays_of(_STATE, tensors)
            engine_arrays = _arrays_of(_ENGINE, tensors)
            if len(arrays) + len(engine_arrays) < len(tensors):
                raise ValueError("it has unknown arrays")
            kind = BaselineState if method is None else state_type(method, arrays[0])
            state = _codec(kind).restore(plain[_STATE], arrays)
            if method is not None and state.best.shape == state.w.shape:
                state = with_finite_w(state, method)
            state.require_possible()
            if method is not None:
                _require_feature_states(state)
                _require_update_state(state, method)
            rest = [plain["records"], plain[_ENGINE], plain["conditions"]]
            records, engine, conditions = file_codec(_REST).restore(rest, [])
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
        return cls(state, records, engine, engine_arrays, conditions)

    def engine_state(self, kind: type[T]) -> T:
        """Return the state of the engine as an object of its class."""
        try:
            value: T = _codec(kind).restore(self.engine, self.arrays)
        except ValueError as error:
            raise UserError(
                f"the checkpoint belongs to a run of another kind: {error}"
            ) from None
        return value

    def parts(self) -> _Parts:
        """Return the content of the file in parts."""
        kind: Any = type(self.state)
        if kind is AggregatorState:
            kind = kind[type(self.state.step_size), type(self.state.update)]
        state, state_arrays = _codec(kind).plain(self.state)
        engine, engine_arrays = _codec(type(self.engine)).plain(self.engine)
        conditions, _ = file_codec(Conditions).plain(self.conditions)
        named = {f"{_STATE}.{at}": values for at, values in enumerate(state_arrays)}
        for at, values in enumerate(engine_arrays or self.arrays):
            named[f"{_ENGINE}.{at}"] = values
        # Little-endian and contiguous as in the file, or the checksum would depend on the
        # machine.
        arrays = {
            name: np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
            for name, values in named.items()
        }
        plain = {
            "version": _VERSION,
            _STATE: state,
            "records": self.records,
            "conditions": conditions,
            _ENGINE: engine,
        }
        text = json.dumps(plain, separators=(",", ":"))
        return safetensors_parts(arrays, {_KIND: _checksum(arrays, text) + text})


def _codec(kind: Any) -> Codec[Any]:
    """Return the codec of a state, with the states of all features known by now."""
    return file_codec(kind, tuple(wire_types().items()))


_REST = tuple[tuple[str, ...], dict[str, Any], Conditions]
"""Type of the records, of the engine's plain state and of the conditions."""


@dataclass(eq=False)
class CheckpointWriter:
    """Writes checkpoints and records in a thread, in order.

    Args:
      folder: folder of the run.
      append: adds a record to rounds.jsonl.
      sync: returns when all added records survive a power cut. A later checkpoint without
        them is written only after that.
      ahead: rounds that may wait for the disk while the run continues.
      records: records of the last checkpoint on disk, as lines.
      interval: minimum seconds between two checkpoints.
      spare: whether to keep a reserve of disk space.
      conditions: conditions of the run.
    """

    folder: Path
    append: Callable[[RoundRecord], None]
    _: KW_ONLY
    ahead: int
    sync: Callable[[], None] = lambda: None
    records: tuple[str, ...] = ()
    interval: float = 0.0
    spare: bool = False
    conditions: Conditions = Conditions()

    def __post_init__(self) -> None:
        self._last = self.records[-1:]
        self._spare = SpareSpace(self.folder / SPARE) if self.spare else None
        self._started = time.monotonic()  # of the current checkpoint
        self._next = self._started + self.interval  # when the next one is due
        self._pause_end = 0.0
        self._changed = threading.Condition()
        self._waiting: list[RoundRecord] = []
        self._latest: tuple[_State, object, RoundRecord | None] | None = None
        self._error: Exception | None = None
        self._busy = False
        self._closed = False
        self._flushing = False
        self._thread = threading.Thread(
            target=self._work, name="fedbudget-checkpoints", daemon=True
        )
        self._thread.start()

    def due(self) -> bool:
        """Return whether another checkpoint is due; if so, its time starts now."""
        now = time.monotonic()
        if self._busy or now < self._next:
            return False
        self._started = now
        self._next = math.inf
        return True

    def save(self, state: _State, engine: object, record: RoundRecord | None) -> None:
        """Accept the state of a run, and the record of its last round, for writing.

        Raises the error of an earlier write.
        """
        with self._changed:
            self._raise_error()
            self._latest = (state, engine, record)
            if record is not None and not self.interval:
                self._waiting.append(record)
            if self._urgent or time.monotonic() >= self._pause_end:
                self._changed.notify_all()  # otherwise the thread wakes up by itself
            self._wait_for(lambda: len(self._waiting) <= self.ahead)

    def flush(self) -> None:
        """Wait until everything is on disk."""
        with self._changed:
            self._flushing = True
            self._changed.notify_all()
            try:
                self._wait_for(lambda: self._latest is None and not self._busy)
            finally:
                self._flushing = False

    def close(self) -> None:
        """Write what was accepted and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        if self._spare is not None:
            self._spare.release()

    @property
    def _urgent(self) -> bool:
        """Whether the next checkpoint is written without a pause."""
        return (
            self._closed
            or self._flushing
            or bool(self.interval)
            or len(self._waiting) >= max(1, self.ahead - 1)
        )

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: condition() or self._error is not None)
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while True:
            with self._changed:
                pause = max(0.0, self._pause_end - time.monotonic())
                self._changed.wait_for(lambda: self._urgent, timeout=pause)
                self._changed.wait_for(lambda: self._latest is not None or self._closed)
                if self._latest is None:
                    return
                state, engine, record = self._latest
                records = list(self._waiting)
                if self.interval and record is not None:
                    records = [record]  # earlier ones are on disk
                self._latest = None
                self._busy = True
            error = None
            try:
                self._write(state, engine, records)
            except Exception as failure:
                error = failure
            with self._changed:
                self._error = error
                self._busy = False
                if error is None:
                    del self._waiting[: len(records)]
                    now = time.monotonic()
                    self._next = now + max(self.interval, (now - self._started) / SHARE)
                    self._pause_end = now + _PAUSE
                self._changed.notify_all()
                if error is not None:
                    return

    def _write(self, state: _State, engine: object, records: list[RoundRecord]) -> None:
        lines = tuple(record.to_json() for record in records) or self._last
        checkpoint = Checkpoint(state, lines, engine, conditions=self.conditions)
        self.sync()
        with_retries(lambda: checkpoint.save(self.folder), spare=self._spare)
        if self._spare is not None:
            size = (self.folder / CHECKPOINT).stat().st_size
            self._spare.keep(max(_MIN_SPARE, 2 * size))
        self._last = lines[-1:]
        for record in records:
            self.append(record)


def safetensors_parts(arrays: Arrays, metadata: Mapping[str, str]) -> _Parts:
    """Return the content of a safetensors file in parts, without copying the arrays.

    The format:

        8 bytes      length of the header, little-endian
        header       JSON with the type, shape and position of each tensor, padded with
                     spaces to a multiple of 8 bytes
        tensors      wider types first, so that all numbers are aligned

    Args:
      arrays: little-endian and contiguous.
      metadata: texts for the header.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    widths = sorted((-values.dtype.itemsize, name) for name, values in arrays.items())
    ordered = [(name, arrays[name]) for _, name in widths]
    end = 0
    for name, values in ordered:
        begin = end
        end += values.nbytes
        kind = _TYPES[f"{values.dtype.kind}{values.dtype.itemsize}"]
        header[name] = {"dtype": kind, "shape": values.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    parts: _Parts = [len(text).to_bytes(8, "little"), text]
    return parts + [np.ravel(values).data.cast("B") for _, values in ordered if values.size]


def _arrays_of(part: str, tensors: Arrays) -> list[NDArray[Any]]:
    """Return the arrays of a part of the file, in order."""
    arrays: list[NDArray[Any]] = []
    while (name := f"{part}.{len(arrays)}") in tensors:
        arrays.append(tensors[name])
    return arrays


def _read(path: Path) -> tuple[Arrays, dict[str, Any]]:
    """Read and check the tensors and the plain values of a file."""
    require_tensors(path)
    with safe_open(path, framework="numpy") as file:
        written = (file.metadata() or {}).get(_KIND)
        if written is None:
            raise ValueError("it is not a checkpoint of fedbudget")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    checksum = written[:_CHECKSUM_LENGTH]
    text = written[_CHECKSUM_LENGTH:]
    if checksum != _checksum(tensors, text):
        raise ValueError("it is damaged: its checksum does not match")
    plain = parsed_json(text)
    if not isinstance(plain, dict) or plain.get("version") != _VERSION:
        raise ValueError("it was written by another version of fedbudget; use that version")
    return tensors, plain


def _checksum(tensors: Arrays, text: str) -> str:
    """Return a checksum of the file; it detects damage, not forgery."""
    checksum = zlib.crc32(text.encode())
    for name, values in sorted(tensors.items()):
        kind = f"{name} {values.dtype.str} {values.shape}"
        checksum = zlib.crc32(kind.encode(), checksum)
        checksum = zlib.crc32(values.data, checksum)
    return f"{checksum:08x}"


def _require_feature_states(state: AggregatorState[Any, Any]) -> None:
    """Raise ValueError unless each feature has a state of its class."""
    for settings in state.features:
        feature = settings.build()
        first = feature.first(state.w)
        if first is not None and type(state.states.get(feature.name)) is not type(first):
            raise ValueError(f"the state of {settings.kind} is missing")


def _require_update_state(state: AggregatorState[Any, Any], method: Method) -> None:
    """Raise ValueError unless the state of an update rule has the shapes of a new one.

    A rule of your own may change the shapes of its state.
    """
    new = method.update.first(state.w)
    if new is None or type(method.update) not in (*UPDATE_RULES.values(), KMeansSplit):
        return
    for name, first in vars(new).items():
        if isinstance(first, np.ndarray):
            require_shape(getattr(state.update, name), *first.shape)


def _check_records(state: _State, records: tuple[str, ...]) -> None:
    """Check that the records are those of the rounds before the announced one."""
    numbers = [RoundRecord.from_json(line).round for line in records]
    last = state.round - 1
    if state.phase is Phase.DONE and numbers:
        last = max(numbers)
    consecutive = list(range(last - len(numbers) + 1, last + 1))
    if numbers != consecutive or last not in (state.round - 1, state.round):
        raise ValueError(
            f"its last records are of rounds {numbers}, not of those before round "
            f"{state.round}"
        )
