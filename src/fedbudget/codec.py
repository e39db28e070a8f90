"""Conversion of frozen dataclasses to plain values and named arrays, and back.

Messages and saved states use it:

    Costs(step=array, aggregation=array)
      <->  {"step": "step", "aggregation": "aggregation"}, {"step": array, ...}

Plain values are those of JSON (numbers, strings, booleans, lists, mappings with string
keys) and bytes. An array is stored under the path of its field, such as `costs.step` or
`left.0`, and the plain values contain that name. An array that appears several times is
stored once, under its first path.

`restore` follows the annotations of the fields, so a new field needs no change here.
msgspec checks the values, and arrays must have the annotated type. Missing and unknown
fields are errors. Every error is a ValueError that names the field.

Infinity and NaN are allowed: serialise the plain values with the standard library's json,
not with msgspec's, which supports neither.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_origin

import msgspec
import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]
T = TypeVar("T")

_PLAIN = frozenset({bool, int, float, str, bytes, type(None)})


def flatten(value: object) -> tuple[Any, Arrays]:
    """Return the plain values of a dataclass, and its arrays by name.

    >>> from fedbudget.budget.budget import Costs
    >>> plain, arrays = flatten(Costs(step=np.ones(1), aggregation=np.zeros(1)))
    >>> plain
    {'step': 'step', 'aggregation': 'aggregation'}
    >>> arrays
    {'step': array([1.]), 'aggregation': array([0.])}
    """
    arrays: Arrays = {}
    names: dict[int, str] = {}  # by identity of the array

    def plain(part: Any, path: str) -> Any:
        own: Any = type(part)
        if own in _PLAIN:
            return part
        kind = _kind(own)
        if kind is np.ndarray:
            if id(part) in names:
                return names[id(part)]
            if path in arrays:
                raise ValueError(f"two arrays are called {path}")
            arrays[path] = part
            names[id(part)] = path
            return path
        inside = f"{path}." if path else ""
        if kind is object:
            values = {}
            for name in _names(own):
                value = getattr(part, name)
                # Most fields are plain: a call for each would take most of the time.
                is_plain = type(value) in _PLAIN
                values[name] = value if is_plain else plain(value, inside + name)
            return values
        if kind is Mapping:
            return {
                str(name): plain(each, f"{inside}{name}") for name, each in part.items()
            }
        if kind is list:
            return [plain(each, f"{inside}{index}") for index, each in enumerate(part)]
        scalar = part.item() if isinstance(part, np.generic) else part
        try:
            return msgspec.to_builtins(scalar)
        except TypeError as error:
            raise ValueError(f"{path}: {error}") from None

    return plain(value, ""), arrays


def restore(kind: type[T], plain: Any, arrays: Mapping[str, NDArray[Any]]) -> T:
    """Invert `flatten`.

    Args:
      kind: class of the result.
      plain: plain values, not trusted.
      arrays: arrays by name, not trusted.
    """
    used = set()

    def array(annotation: Any, name: Any) -> NDArray[Any]:
        if get_origin(annotation) is not np.ndarray:
            raise ValueError(f"values of type {annotation} cannot be restored")
        if not isinstance(name, str) or name not in arrays:
            raise ValueError(f"there is no array {name!r}")
        values = arrays[name]
        dtype = _dtype(annotation)
        if dtype is not None and values.dtype != dtype:
            raise ValueError(f"{name} has type {values.dtype}, not {dtype}")
        used.add(name)
        return values

    try:
        value = msgspec.convert(plain, kind, dec_hook=array)
    except RecursionError:
        raise ValueError("values are nested too deeply") from None
    if used != arrays.keys():
        raise ValueError(f"unknown arrays: {', '.join(sorted(arrays.keys() - used))}")
    _require_all_fields(value, plain, "")
    return value


@cache
def _kind(kind: type) -> type | None:
    """Classify a class: array, dataclass (`object`), mapping, list, or None for others."""
    if issubclass(kind, np.ndarray):
        return np.ndarray
    if is_dataclass(kind):
        return object
    if issubclass(kind, Mapping):
        return Mapping
    return list if issubclass(kind, list | tuple) else None


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


@cache
def _dtype(annotation: Any) -> np.dtype[Any] | None:
    """Return the type of an annotated array; None if any is allowed."""
    scalar = get_args(get_args(annotation)[1])[0]
    known = isinstance(scalar, type) and issubclass(scalar, np.generic)
    return np.dtype(scalar) if known else None


def _require_all_fields(value: Any, plain: Any, path: str) -> None:
    """Refuse what msgspec accepts silently: unknown fields, and missing default fields."""
    inside = f"{path}." if path else ""
    if is_dataclass(value) and not isinstance(value, type):
        names = _names(type(value))
        if not isinstance(plain, dict) or plain.keys() != set(names):
            raise ValueError(
                f"{path or type(value).__name__} needs {', '.join(names)}, "
                f"not {', '.join(map(str, plain))}"
            )
        for name in names:
            _require_all_fields(getattr(value, name), plain[name], inside + name)
    elif isinstance(value, list | tuple):
        for index, (each, own) in enumerate(zip(value, plain, strict=True)):
            _require_all_fields(each, own, f"{inside}{index}")
    elif isinstance(value, dict):
        for name, each in value.items():
            _require_all_fields(each, plain[name], f"{inside}{name}")
