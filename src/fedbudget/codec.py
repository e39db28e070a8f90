"""Frozen dataclasses as plain values and named arrays, and back: what messages and saved states are made from.

    Costs(step=array, aggregation=array)  <->  {"step": "step", "aggregation": "aggregation"}, {"step": array, ...}

Plain values are what JSON has (numbers, texts, flags, lists and mappings with texts as keys) and bytes. An array is put
under the path of its field, `costs.step` or `left.0`, and that name stands in its place; one that is in several places
is put under the first. The annotations of the fields
say how to get back, so a new field needs no change here; msgspec checks values against them, and arrays must be of the
annotated type. Nothing may be missing or unknown. Whatever is wrong is a ValueError that says where.

Infinity and NaN pass: carry the plain values by the standard library's json, not by msgspec's, which has none of them.
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
    """The plain values of a dataclass, and its arrays by name.

    >>> from fedbudget.budget.budget import Costs
    >>> flatten(Costs(step=np.ones(1), aggregation=np.zeros(1)))
    ({'step': 'step', 'aggregation': 'aggregation'}, {'step': array([1.]), 'aggregation': array([0.])})
    """
    arrays: Arrays = {}
    names: dict[int, str] = {}  # of arrays, by what they are

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
            return {name: plain(getattr(part, name), inside + name) for name in _names(own)}
        if kind is Mapping:
            return {
                str(name): plain(each, f"{inside}{name}") for name, each in part.items()
            }
        if kind is list:
            return [plain(each, f"{inside}{index}") for index, each in enumerate(part)]
        try:
            return msgspec.to_builtins(
                part.item() if isinstance(part, np.generic) else part
            )
        except TypeError as error:
            raise ValueError(f"{path}: {error}") from None

    return plain(value, ""), arrays


def restore(kind: type[T], plain: Any, arrays: Mapping[str, NDArray[Any]]) -> T:
    """What `flatten` was given.

    Args:
      kind: its class; nothing in `plain` or `arrays` is trusted to be of it.
    """
    used = set()

    def array(annotation: Any, name: Any) -> NDArray[Any]:
        if get_origin(annotation) is not np.ndarray:
            raise ValueError(f"{annotation} is not known here")
        if not isinstance(name, str) or name not in arrays:
            raise ValueError(f"there is no array {name!r}")
        values = arrays[name]
        dtype = _dtype(annotation)
        if dtype is not None and values.dtype != dtype:
            raise ValueError(f"{name} is of {values.dtype}, not {dtype}")
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
    """What values of a class are taken as: arrays, dataclasses (`object`), mappings, lists, or None of these."""
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
    """Of an annotated array; None where any will do."""
    scalar = get_args(get_args(annotation)[1])[0]
    return (
        np.dtype(scalar)
        if isinstance(scalar, type) and issubclass(scalar, np.generic)
        else None
    )


def _require_all_fields(value: Any, plain: Any, path: str) -> None:
    """Refuses what was passed over in silence: fields that are unknown, or missing and have a default."""
    inside = f"{path}." if path else ""
    if is_dataclass(value) and not isinstance(value, type):
        names = _names(type(value))
        if not isinstance(plain, dict) or plain.keys() != set(names):
            raise ValueError(
                f"{path or type(value).__name__} needs {', '.join(names)}, not {', '.join(map(str, plain))}"
            )
        for name in names:
            _require_all_fields(getattr(value, name), plain[name], inside + name)
    elif isinstance(value, list | tuple):
        for index, (each, own) in enumerate(zip(value, plain, strict=True)):
            _require_all_fields(each, own, f"{inside}{index}")
    elif isinstance(value, dict):
        for name, each in value.items():
            _require_all_fields(each, plain[name], f"{inside}{name}")
