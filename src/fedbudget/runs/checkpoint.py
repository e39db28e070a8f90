"""Where a run has come to, on disk: one file in its folder, written after every round.

    checkpoint.safetensors   arrays as tensors; the rest as JSON, with a checksum of it all, in the metadata

There is no pickle in it: reading one runs no code. It is replaced in one step (atomic_file.py), so that there is always
a whole one, of this round or of the one before. Nothing in it is trusted: a file that is damaged, of another kind or of
another version is refused in a line, and so is one whose numbers cannot be.

Numbers come back bit for bit; infinity and NaN are written as Python's JSON writes them.
"""

import json
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedbudget import atomic_file
from fedbudget.arrays import Float64
from fedbudget.budget import Costs
from fedbudget.control import Decision, Estimates, Reason
from fedbudget.errors import UserError
from fedbudget.protocol.drift import Divergence
from fedbudget.protocol.memory import Memory
from fedbudget.protocol.messages import Drift
from fedbudget.runs.record import RoundRecord
from fedbudget.step_size import StepSizeState

CHECKPOINT = "checkpoint.safetensors"

_KIND = "fedbudget-checkpoint"
_VERSION = 1

_FLOAT32, _FLOAT64, _INT64 = np.dtype("<f4"), np.dtype("<f8"), np.dtype("<i8")
_VECTORS = {"w": _FLOAT32, "best": _FLOAT32, "mean": _FLOAT32}  # [parameters]
_PER_NODE = {"nodes": _INT64, "sizes": _INT64}  # [n]
_PER_RESOURCE = {"spent": _FLOAT64, "step": _FLOAT64, "aggregation": _FLOAT64}  # [M]
_DTYPES = _VECTORS | _PER_NODE | _PER_RESOURCE
_OPTIONAL = {"mean"}

Tensors = dict[str, np.ndarray[Any, np.dtype[Any]]]
T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """A run between two rounds.

    Args:
      memory: the aggregator's.
      records: of the last rounds, as lines of rounds.jsonl that may not be there yet; none when no round is over.
      engine: whatever the engine must know to go on, as plain JSON: who is who, meters, counters.
    """

    memory: Memory
    records: tuple[str, ...] = ()
    engine: Mapping[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Writes it, in place of the one before; an OSError, and the one before, when that cannot be."""
        atomic_file.replace(folder / CHECKPOINT, self.to_bytes())

    @classmethod
    def load(cls, folder: Path) -> "Checkpoint":
        path = folder / CHECKPOINT
        if not path.is_file():
            raise UserError(f"{folder} has no {CHECKPOINT}: there is nothing to go on from")
        try:
            return _decode(*_read(path))
        except (OSError, SafetensorError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
            raise UserError(f"{path}: the checkpoint cannot be read: {error}") from None

    def to_bytes(self) -> bytes:
        memory = self.memory
        tensors: Tensors = {
            "w": memory.w,
            "best": memory.best,
            **({} if memory.mean is None else {"mean": memory.mean}),
            "nodes": memory.nodes,
            "sizes": memory.sizes,
            "spent": memory.spent,
            "step": memory.costs.step,
            "aggregation": memory.costs.aggregation,
        }
        tensors = {name: np.ascontiguousarray(values, _DTYPES[name]) for name, values in tensors.items()}
        rest = {name: value for name, value in vars(memory).items() if name not in {*tensors, "mean", "costs"}}
        rest |= {name: None if rest[name] is None else asdict(rest[name]) for name in _PARTS}
        text = json.dumps(
            {"version": _VERSION, "memory": rest, "records": list(self.records), "engine": dict(self.engine)},
            separators=(",", ":"),
        )
        return save(tensors, {_KIND: _checksum(tensors, text) + text})  # one key: several are written in any order


def _checksum(tensors: Tensors, text: str) -> str:
    """Of all that is in the file, so that nothing in it is damaged unnoticed; it is no proof against forgery."""
    found = zlib.crc32(text.encode())
    for name, values in sorted(tensors.items()):
        found = zlib.crc32(f"{name} {values.dtype.str} {values.shape}".encode(), found)
        found = zlib.crc32(values.data, found)
    return f"{found:08x}"


_CHECKSUM_LENGTH = 8


def _read(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """What is in the file, if it is one of ours and undamaged."""
    with safe_open(path, framework="numpy") as file:
        written = (file.metadata() or {}).get(_KIND)
        if written is None:
            raise ValueError("it is not one of fedbudget's")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    checksum, text = written[:_CHECKSUM_LENGTH], written[_CHECKSUM_LENGTH:]
    if checksum != _checksum(tensors, text):
        raise ValueError("it is damaged: its checksum is another")
    found = json.loads(text)
    if not isinstance(found, dict) or found.get("version") != _VERSION:
        raise ValueError("it is of another version of fedbudget")
    return tensors, found


def _decode(tensors: Tensors, found: dict[str, Any]) -> Checkpoint:
    _check_tensors(tensors)
    given = _mapping(found["memory"])
    known = {name: read(given[name]) for name, read in _FIELDS.items()}
    if set(given) != set(known):
        raise ValueError(f"unknown: {', '.join(sorted(set(given) - set(known)))}")
    memory = Memory(
        **known,
        w=tensors["w"],
        best=tensors["best"],
        mean=tensors.get("mean"),
        nodes=tensors["nodes"],
        sizes=tensors["sizes"],
        spent=tensors["spent"],
        costs=Costs(tensors["step"], tensors["aggregation"]),
    )
    if (memory.drift is None) != (memory.mean is None):
        raise ValueError("drift is corrected with c, or it is not")
    if (memory.tau == 0) != (memory.state == "final") and memory.state != "done":
        raise ValueError(f"tau is {memory.tau} in a {memory.state} round")
    records = tuple(_text(line) for line in _list(found["records"]))
    numbers = [RoundRecord.from_json(line).round for line in records]
    last = memory.round - 1 if memory.state != "done" or not numbers else max(numbers)
    if numbers != list(range(last - len(numbers) + 1, last + 1)) or last not in (memory.round - 1, memory.round):
        raise ValueError(f"the last records are of rounds {numbers}, not of those before round {memory.round}")
    return Checkpoint(memory, records, _mapping(found["engine"]))


def _check_tensors(tensors: Tensors) -> None:
    if not set(_DTYPES) - _OPTIONAL <= set(tensors) <= set(_DTYPES):
        raise ValueError(f"it has {', '.join(sorted(tensors))}")
    for kinds in (_VECTORS, _PER_NODE, _PER_RESOURCE):
        shapes = {values.shape for name, values in tensors.items() if name in kinds}
        if len(shapes) != 1 or any(len(shape) != 1 for shape in shapes):
            raise ValueError(f"{', '.join(kinds)} have shapes {sorted(shapes)}")
    for name, values in tensors.items():
        if values.dtype != _DTYPES[name]:
            raise ValueError(f"{name} is of {values.dtype}, not {_DTYPES[name]}")
    if not tensors["w"].size or not tensors["spent"].size:
        raise ValueError("w or spent is empty")
    if not all(np.isfinite(tensors[name]).all() for name in ("w", "best")):
        raise ValueError("w is not finite")
    _check_amounts(tensors["spent"])
    if (np.diff(tensors["nodes"]) <= 0).any() or (tensors["nodes"] < 0).any() or (tensors["sizes"] < 1).any():
        raise ValueError("nodes are not in order, or have no samples")


def _check_amounts(values: Float64) -> None:
    if not (np.isfinite(values) & (values >= 0)).all():
        raise ValueError(f"what was spent is {values.tolist()}")


# How each number of a memory is read.


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"a whole number is wanted, not {value!r}")
    return value


def _number(value: Any) -> float:
    """Any number, also infinite or NaN."""
    if type(value) not in (int, float):
        raise ValueError(f"a number is wanted, not {value!r}")
    return float(value)


def _not_negative(value: Any) -> float:
    if not (0 <= _number(value) < math.inf):
        raise ValueError(f"a number of 0 or more is wanted, not {value!r}")
    return float(value)


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"true or false is wanted, not {value!r}")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"a text is wanted, not {value!r}")
    return value


def _mapping(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise ValueError(f"a mapping is wanted, not {value!r}")
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"a list is wanted, not {value!r}")
    return value


def _state(value: Any) -> str:
    if value not in ("round", "final", "done"):
        raise ValueError(f"a state is wanted, not {value!r}")
    return str(value)


def _optional(read: Callable[[Any], T]) -> Callable[[Any], T | None]:
    return lambda value: None if value is None else read(value)


def _made(kind: Callable[..., T], **fields: Callable[[Any], Any]) -> Callable[[Any], T]:
    """A small dataclass of such numbers."""

    def read(value: Any) -> T:
        given = _mapping(value)
        if set(given) != set(fields):
            raise ValueError(f"{', '.join(fields)} are wanted, not {', '.join(given)}")
        return kind(**{name: own(given[name]) for name, own in fields.items()})

    return read


_PARTS: dict[str, Callable[[Any], Any]] = {
    "decision": _made(Decision, tau=_whole, reason=lambda value: Reason(_text(value))),
    "pace": _made(
        StepSizeState,
        eta=_not_negative,
        steady=_not_negative,
        settled=_flag,
        kappa=_not_negative,
        level=_optional(_number),
        deviation=_number,
    ),
    "estimates": _optional(_made(Estimates, rho=_not_negative, beta=_not_negative, delta=_number)),
    "drift": _optional(_made(Drift, correct=_flag, share=_not_negative)),
    "divergence": _optional(_made(Divergence, plain=_number, corrected=_number)),
}

_FIELDS: dict[str, Callable[[Any], Any]] = {
    "state": _state,
    "round": _whole,
    "tau": _whole,
    "became_best": _flag,
    "stop": _flag,
    "loss": _number,
    "best_loss": _number,
    "first_loss": _number,
    "worse": _flag,
    "t": _whole,
    "uncorrected": _whole,
    "stopped_by": _optional(_text),
    **_PARTS,
}
