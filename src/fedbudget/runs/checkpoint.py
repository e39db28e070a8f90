"""Where a run has come to, on disk: one file in its folder, replaced as the run goes on (checkpoint_writer.py).

    checkpoint.safetensors   arrays as tensors; the rest as JSON, with a checksum of it all, in the metadata

There is no pickle in it: reading one runs no code. It is replaced in one step (atomic_file.py), so that there is always
a whole one, of this round or of the one before. Nothing in it is trusted: a file that is damaged, of another kind or of
another version is refused in a line, and so is one whose numbers cannot be. A w that is not finite, as a run could once
leave it, is not the end: it goes on from w^f.

Numbers come back bit for bit; infinity and NaN are written as Python's JSON writes them.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from fedbudget import atomic_file
from fedbudget.errors import UserError
from fedbudget.protocol.method import Method
from fedbudget.protocol.state import AggregatorState, Phase
from fedbudget.protocol.structure import Arrays, flatten, restore
from fedbudget.protocol.update import restarted
from fedbudget.runs.record import RoundRecord
from fedbudget.runs.tensor_file import in_parts

CHECKPOINT = "checkpoint.safetensors"
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
        return more or (self.rounds is not None and (rounds is None or rounds > self.rounds))


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
            raise UserError(f"the checkpoint is not of a run like this one: {error}") from None

    def save(self, folder: Path) -> None:
        """Writes it, in place of the one before; an OSError, and the one before, when that cannot be."""
        atomic_file.replace(folder / CHECKPOINT, self.in_parts())

    @classmethod
    def load(cls, folder: Path, method: Method) -> "Checkpoint":
        """Reads what a run by this method has written."""
        path = folder / CHECKPOINT
        if not path.is_file():
            raise UserError(f"{folder} has no {CHECKPOINT}: there is nothing to go on from")
        try:
            tensors, plain = _read(path)
            arrays = {name: tensors.pop(name) for name in list(tensors) if name.startswith(f"{_ENGINE}.")}
            state = restore(method.state_type(tensors["w"]), plain["state"], tensors)
            if state.best.shape == state.w.shape:
                state = state.recovered(restarted(method.update, state.update, state.best))
            state.require_possible()
            rest = [plain["records"], plain[_ENGINE], plain["conditions"]]
            records, engine, conditions = restore(tuple[tuple[str, ...], dict[str, Any], Conditions], rest, {})
            _check_records(state, records)
        except (OSError, SafetensorError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
            raise UserError(f"{path}: the checkpoint cannot be read: {error}") from None
        return cls(state, records, engine, arrays, conditions)

    def in_parts(self) -> "list[bytes | memoryview]":
        """What the file has in it."""
        state, arrays = flatten(self.state)
        engine, more = flatten({_ENGINE: self.engine})
        arrays = {**arrays, **more, **self.arrays}
        # Little-endian and in one piece, as files have them, or the checksum would be another on some machines.
        arrays = {name: np.ascontiguousarray(values, values.dtype.newbyteorder("<")) for name, values in arrays.items()}
        conditions, _ = flatten(self.conditions)
        plain = {"version": _VERSION, "state": state, "records": self.records, "conditions": conditions, **engine}
        text = json.dumps(plain, separators=(",", ":"))
        return in_parts(arrays, {_KIND: _checksum(arrays, text) + text})


def _read(path: Path) -> tuple[Arrays, dict[str, Any]]:
    """What is in the file, if it is one of ours and undamaged."""
    with safe_open(path, framework="numpy") as file:
        written = (file.metadata() or {}).get(_KIND)
        if written is None:
            raise ValueError("it is not one of fedbudget's")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    checksum, text = written[:_CHECKSUM_LENGTH], written[_CHECKSUM_LENGTH:]
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
        checksum = zlib.crc32(f"{name} {values.dtype.str} {values.shape}".encode(), checksum)
        checksum = zlib.crc32(values.data, checksum)
    return f"{checksum:08x}"


def _check_records(state: AggregatorState[Any, Any], records: tuple[str, ...]) -> None:
    """The last records are of the rounds before the one that is announced."""
    numbers = [RoundRecord.from_json(line).round for line in records]
    last = state.round - 1 if state.phase is not Phase.DONE or not numbers else max(numbers)
    if numbers != list(range(last - len(numbers) + 1, last + 1)) or last not in (state.round - 1, state.round):
        raise ValueError(f"the last records are of rounds {numbers}, not of those before round {state.round}")
