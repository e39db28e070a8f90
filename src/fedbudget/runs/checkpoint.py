"""Where a run has come to, on disk: one file in its folder, written after every round.

    checkpoint.safetensors   arrays as tensors; the rest as JSON, with a checksum of it all, in the metadata

There is no pickle in it: reading one runs no code. It is replaced in one step (atomic_file.py), so that there is always
a whole one, of this round or of the one before. Nothing in it is trusted: a file that is damaged, of another kind or of
another version is refused in a line, and so is one whose numbers cannot be.

Numbers come back bit for bit; infinity and NaN are written as Python's JSON writes them.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedbudget import atomic_file
from fedbudget.errors import UserError
from fedbudget.protocol.method import Method
from fedbudget.protocol.state import AggregatorState, Phase
from fedbudget.protocol.structure import Arrays, flatten, restore
from fedbudget.runs.record import RoundRecord

CHECKPOINT = "checkpoint.safetensors"

_KIND = "fedbudget-checkpoint"
_VERSION = 2
_CHECKSUM_LENGTH = 8


@dataclass(frozen=True)
class Checkpoint:
    """A run between two rounds.

    Args:
      state: the aggregator's.
      records: of the last rounds, as lines of rounds.jsonl that may not be there yet; none when no round is over.
      engine: whatever the engine must know to go on, as plain JSON: who is who, meters, counters.
    """

    state: AggregatorState[Any, Any]
    records: tuple[str, ...] = ()
    engine: Mapping[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Writes it, in place of the one before; an OSError, and the one before, when that cannot be."""
        atomic_file.replace(folder / CHECKPOINT, self.to_bytes())

    @classmethod
    def load(cls, folder: Path, method: Method) -> "Checkpoint":
        """Reads what a run by this method has written."""
        path = folder / CHECKPOINT
        if not path.is_file():
            raise UserError(f"{folder} has no {CHECKPOINT}: there is nothing to go on from")
        try:
            tensors, plain = _read(path)
            state = restore(method.state_type(tensors["w"]), plain["state"], tensors)
            state.require_possible()
            records, engine = restore(tuple[tuple[str, ...], dict[str, Any]], [plain["records"], plain["engine"]], {})
            _check_records(state, records)
        except (OSError, SafetensorError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
            raise UserError(f"{path}: the checkpoint cannot be read: {error}") from None
        return cls(state, records, engine)

    def to_bytes(self) -> bytes:
        state, arrays = flatten(self.state)
        # Little-endian and in one piece, as files have them, or the checksum would be another on some machines.
        arrays = {name: np.ascontiguousarray(values, values.dtype.newbyteorder("<")) for name, values in arrays.items()}
        plain = {"version": _VERSION, "state": state, "records": self.records, "engine": dict(self.engine)}
        text = json.dumps(plain, separators=(",", ":"))
        return save(arrays, {_KIND: _checksum(arrays, text) + text})  # one key: several are written in any order


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
