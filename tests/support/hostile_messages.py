"""Messages with hostile values in every field, made from the dataclasses of the messages.

`example` builds a valid value from annotations. `attacks` replaces every value in the bytes
of a message. A new message, or a new field of one, is therefore attacked without a change
here.
"""

import copy
import dataclasses
import types
from collections.abc import Iterator, Mapping
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
import numpy as np

from fedbudget.engines.remote import wire
from fedbudget.resources.resource import Reading, Usage

DEEP: Any = []
for _ in range(500):
    DEEP = [DEEP]

HOSTILE: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 2**31, 2**40, 2**62, 2**63, 2**64 - 1, -(2**63)),
    *(0.5, -0.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), -float("inf")),
    *("", "\x00", "\x1b[2J\u202e", "../../etc/passwd", "evil.py:Net", "x" * 100_000),
    *(b"", b"\xff" * 8, b"\x00" * 100_000),
    *([], [None], [0] * 1000, [[0]], ["x"] * 2000, DEEP, [[2**40], b""], [[-1], b""]),
    *({}, {"": 0}, {"x" * 1000: {}}, {str(name): None for name in range(2000)}),
)
"""Values that replace any other value."""


class Attack(NamedTuple):
    """A message with one hostile value.

    Args:
      place: where the value is.
      value: the value.
      message: the bytes.
    """

    place: str
    value: Any
    message: bytes

    def __str__(self) -> str:
        return f"{self.place} = {str(self.value)[:60]!r}"


def example(hint: Any) -> Any:
    """A valid value of an annotated type, with something in every container."""
    origin = get_origin(hint)
    parts = get_args(hint)
    if origin is Annotated:
        return _within(example(parts[0]), hint.__metadata__[0])
    if origin in (Union, types.UnionType):
        return example(next(part for part in parts if part is not types.NoneType))
    if origin is Literal:
        return parts[0]
    if origin is tuple:
        return tuple(example(part) for part in parts if part is not ...)
    if origin in (dict, Mapping) or str(origin) == "<class 'collections.abc.Mapping'>":
        return {example(parts[0]): example(parts[1])}
    if origin is np.ndarray:
        return np.ones(1, get_args(parts[1])[0])
    if dataclasses.is_dataclass(hint):
        return _example_of(hint)
    simple: dict[Any, Any] = {bool: False, int: 1, float: 0.5, str: "a", bytes: b"a"}
    return simple[hint]


def _example_of(kind: Any) -> Any:
    if kind is Usage:  # the time of a round is required
        return Usage({"time": Reading(0.5, 1.0)}, evaluation={"time": Reading(0.0, 0.5)})
    hints = get_type_hints(kind, include_extras=True)
    values = {}
    for each in dataclasses.fields(kind):
        if each.default in (dataclasses.MISSING, None, ()):
            values[each.name] = example(hints[each.name])
    return kind(**values)


def _within(value: Any, meta: msgspec.Meta) -> Any:
    if isinstance(value, int | float) and meta.ge is not None:
        return max(value, meta.ge)
    if isinstance(value, bytes) and meta.min_length is not None:
        return value * meta.min_length
    return value


def attacks(message: bytes) -> Iterator[Attack]:
    """The message with each hostile value at each place of its header."""
    frame = wire.unpack(message)
    header = msgspec.msgpack.decode(frame.header)
    for changed in _replaced(header):
        packed = _with_header(message, changed.message, bytes(frame.rest))
        yield changed._replace(message=packed)


def attacks_inside(message: bytes, at: int) -> Iterator[Attack]:
    """The same for a message that is packed in field `at` of another one."""
    frame = wire.unpack(message)
    header = msgspec.msgpack.decode(frame.header)
    for changed in _replaced(msgspec.msgpack.decode(header[at])):
        outer = [*header[:at], changed.message, *header[at + 1 :]]
        packed = _with_header(message, msgspec.msgpack.encode(outer), bytes(frame.rest))
        yield changed._replace(message=packed)


def _with_header(message: bytes, header: bytes, rest: bytes) -> bytes:
    return message[:2] + len(header).to_bytes(4, "little") + header + rest


def _replaced(content: Any) -> Iterator[Attack]:
    """The content with each hostile value at each place, encoded."""
    for path in [(), *_paths(content)]:
        place = "/".join(map(str, path)) or "all"
        for value in HOSTILE:
            yield Attack(place, value, _encoded_with(content, path, value))
        if path:
            yield Attack(place, "(absent)", _encoded_without(content, path))


def _paths(content: Any) -> Iterator[tuple[Any, ...]]:
    if isinstance(content, dict | list):
        keys = list(content) if isinstance(content, dict) else range(len(content))
        for key in keys:
            yield (key,)
            for rest in _paths(content[key]):
                yield (key, *rest)


def _encoded_with(content: Any, path: tuple[Any, ...], value: Any) -> bytes:
    if not path:
        return msgspec.msgpack.encode(value)
    changed = copy.deepcopy(content)
    _at(changed, path[:-1])[path[-1]] = value
    return msgspec.msgpack.encode(changed)


def _encoded_without(content: Any, path: tuple[Any, ...]) -> bytes:
    changed = copy.deepcopy(content)
    del _at(changed, path[:-1])[path[-1]]
    return msgspec.msgpack.encode(changed)


def _at(content: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        content = content[key]
    return content
