"""A dataclass as values one after the other, without names, and back: what both sides know is not sent in every round.

    Broadcast(round=5, w=array, tau=3, drift=Drift(True, 0.5), ...)  <->  [5, "w", 3, [True, 0.5], ...], {"w": array}

The annotations of the fields say what may be there, and msgspec checks it while it reads: a new field needs no change
here. In the place of an array is its name, which is the path of its field.
"""

from collections.abc import Collection
from dataclasses import fields, is_dataclass
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from fedbudget.protocol.messages import PeerError

Arrays = dict[str, NDArray[Any]]
T = TypeVar("T")


class MessageLayout(Generic[T]):
    """How a dataclass is sent.

    Args:
      kind: the class.
      without: fields that are not sent, because both sides know them.
    """

    def __init__(self, kind: type[T], without: Collection[str] = (), path: str = "") -> None:
        self._kind = kind
        self._fields: list[
            tuple[str, str, MessageLayout[Any] | None]
        ] = []  # name, path of an array, layout of a dataclass
        types = []
        for name, hint in get_type_hints(kind).items():
            if name in without or name not in {field.name for field in fields(kind)}:  # type: ignore[arg-type]
                continue
            inside = f"{path}.{name}" if path else name
            optional = type(None) in get_args(hint)
            (one,) = [part for part in get_args(hint) if part is not type(None)] if optional else [hint]
            layout = MessageLayout(one, path=inside) if isinstance(one, type) and is_dataclass(one) else None
            is_array = get_origin(one) is np.ndarray
            self._fields.append((name, inside if is_array else "", layout))
            sent = str if is_array else one if layout is None else layout.type
            types.append(sent | None if optional else sent)
        self._index = {name: at for at, (name, *_) in enumerate(self._fields)}
        self.type: Any = tuple[tuple(types)]  # type: ignore[misc]
        self._decoder = msgspec.msgpack.Decoder(self.type)

    def encode(self, value: T) -> tuple[bytes, Arrays]:
        """The values as MessagePack, and the arrays, in the order of the fields."""
        arrays: Arrays = {}
        return msgspec.msgpack.encode(self._values(value, arrays)), arrays

    def decode(self, data: bytes) -> tuple[tuple[Any, ...], list[str]]:
        """The values, for `build`, and the names of the arrays that they need; refuses any others with `PeerError`."""
        names: list[str] = []
        try:
            values = self._decoder.decode(data)
            self._find_arrays(values, names)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise self._unreadable(error) from None
        return values, names

    def build(self, values: tuple[Any, ...], arrays: Arrays, **known: Any) -> T:
        """The dataclass again.

        Args:
          known: the fields that were not sent.
        """
        for (name, path, layout), value in zip(self._fields, values, strict=True):
            if value is not None and path:
                value = arrays[path]
            elif value is not None and layout is not None:
                value = layout.build(value, arrays)
            known[name] = value
        try:
            return self._kind(**known)
        except ValueError as error:
            raise self._unreadable(error) from None

    def value(self, values: tuple[Any, ...], field: str) -> Any:
        """One of the values that `decode` gave, by the name of its field."""
        return values[self._index[field]]

    def _unreadable(self, error: Exception) -> PeerError:
        return PeerError(f"a {self._kind.__name__.lower()} that cannot be read: {error}")

    def _values(self, value: Any, arrays: Arrays) -> list[Any]:
        values = []
        for name, path, layout in self._fields:
            part = getattr(value, name)
            if part is not None and path:
                arrays[path], part = part, path
            elif part is not None and layout is not None:
                part = layout._values(part, arrays)
            values.append(part)
        return values

    def _find_arrays(self, values: tuple[Any, ...], names: list[str]) -> None:
        for (_, path, layout), value in zip(self._fields, values, strict=True):
            if value is not None and path:
                if value != path:
                    raise ValueError(f"{path} has another name")
                names.append(path)
            elif value is not None and layout is not None:
                layout._find_arrays(value, names)
