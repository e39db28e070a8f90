"""One codec for dataclasses: checkpoints, messages between machines, Flower's memories.

A `Codec` is built once for an annotated type. It turns a value into plain values and a list
of arrays, and back:

    Costs(step=array, aggregation=other)  <->  [0, 1], [array, other]

- Plain values are those of JSON and bytes. An array is replaced by its place in the list.
  An array that appears several times is stored once.
- A dataclass becomes a list of its fields, or a mapping with their names if the codec is
  `named`. In a union with other types, its class name comes first.
- `encode` and `decode` use MessagePack and a separate list of arrays, `pack` and `unpack`
  MessagePack with the arrays inside. `plain` and `restore` convert values for JSON: they
  may contain integers of any size.

msgspec does the work: each dataclass has a struct with the same fields. On the way in, the
struct checks the types and ranges of the annotations. Missing and unknown fields, wrong
types, wrong nesting and unused arrays are errors. Every error is a ValueError.

Infinity and NaN are allowed: serialise plain values with the standard library's json, not
with msgspec's, which supports neither.
"""

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, partial
from types import UnionType
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
T = TypeVar("T")
_Hook = Callable[[Any, Any], Any]
_Members = tuple[tuple[type, tuple[type, ...]], ...]


class Codec(Generic[T]):
    """Converts values of one type.

    Args:
      kind: a dataclass, or another type whose annotations are known.
      members: the classes of each open base class. A field that is annotated with the base
        class may have any of them.
      named: whether fields have names in plain values.
    """

    def __init__(
        self,
        kind: Any,
        members: Mapping[type, Sequence[type]] | None = None,
        *,
        named: bool = False,
    ) -> None:
        self._members = members or {}
        self._named = named
        self._structs: dict[Any, tuple[Any, Any]] = {}
        # by class of a value: the struct to send
        self._outgoing_structs: dict[type, Any] = {}
        # by received struct: the class, and the types of its fields if msgspec cannot
        # create the class by itself
        self._classes: dict[type, tuple[Any, Any]] = {}
        outgoing, incoming, target = self._types(kind)
        self._native = target == kind
        self._to_struct = partial(
            msgspec.convert,
            type=outgoing,
            from_attributes=True,
            dec_hook=self._send_member,
        )
        self._decoder = msgspec.msgpack.Decoder(incoming)
        self._check = partial(msgspec.convert, type=incoming)
        self._from_struct = partial(msgspec.convert, type=target, from_attributes=True)
        # msgspec must not inspect a type for the first time in two threads at once.
        for each in (outgoing, target, *self._outgoing_structs.values()):
            msgspec.msgpack.Decoder(each)

    def encode(self, value: T) -> tuple[bytes, list[Array]]:
        """Return the bytes of a value, and its arrays in order."""
        found = _ArrayList()
        data = msgspec.msgpack.encode(self._to_struct(value), enc_hook=found.add)
        return data, found.arrays

    def decode(self, data: bytes | memoryview, arrays: Sequence[Array]) -> T:
        """Invert `encode`; neither the data nor the arrays are trusted."""
        return self._received(self._decoder.decode, data, arrays)

    def pack(self, value: T) -> bytes:
        """Return the bytes of a value with its arrays."""
        return msgspec.msgpack.encode(self._to_struct(value), enc_hook=_inline)

    def unpack(self, data: bytes | memoryview) -> T:
        """Invert `pack`; the data are not trusted."""
        hook = _from_inline if self._native else self._receive_members(_from_inline)
        try:
            result: T = self._from_struct(self._decoder.decode(data), dec_hook=hook)
        except RecursionError:
            raise ValueError("values are nested too deeply") from None
        return result

    def plain(self, value: T) -> tuple[Any, list[Array]]:
        """Return the plain values of a value, and its arrays in order.

        >>> from fedbudget.budget.budget import Costs
        >>> codec = Codec(Costs, named=True)
        >>> codec.plain(Costs(step=np.ones(1), aggregation=np.zeros(1)))
        ({'step': 0, 'aggregation': 1}, [array([1.]), array([0.])])
        """
        found = _ArrayList()
        values = msgspec.to_builtins(self._to_struct(value), enc_hook=found.add)
        return values, found.arrays

    def restore(self, plain: Any, arrays: Sequence[Array]) -> T:
        """Invert `plain`; neither the values nor the arrays are trusted."""
        return self._received(self._check, plain, arrays)

    def _received(
        self, read: Callable[[Any], Any], data: Any, arrays: Sequence[Array]
    ) -> T:
        used: set[int] = set()

        def array(annotation: Any, place: Any) -> Array:
            if type(place) is not int or not 0 <= place < len(arrays):
                raise ValueError(f"there is no array {place!r}")
            used.add(place)
            values = arrays[place]
            dtype = _dtype(annotation)
            if dtype is not None and values.dtype != dtype:
                raise ValueError(f"an array has type {values.dtype}, not {dtype}")
            return values

        hook = array if self._native else self._receive_members(array)
        try:
            result: T = self._from_struct(read(data), dec_hook=hook)
        except RecursionError:
            raise ValueError("values are nested too deeply") from None
        if len(used) < len(arrays):
            raise ValueError(f"{len(arrays) - len(used)} arrays are not used")
        return result

    def _send_member(self, _: Any, value: Any) -> Any:
        if not is_dataclass(value):
            return value
        struct = self._outgoing_structs.get(type(value))
        if struct is None:
            raise ValueError(f"{type(value).__name__} is not one of the known classes")
        return msgspec.convert(
            value, struct, from_attributes=True, dec_hook=self._send_member
        )

    def _receive_members(self, array: _Hook) -> _Hook:
        """Return a hook that creates the dataclass of a struct, or else an array."""

        def part(annotation: Any, value: Any) -> Any:
            if annotation is not _Member:
                return array(annotation, value)
            if not isinstance(value, msgspec.Struct):
                return value
            kind, types = self._classes[type(value)]
            if types is None:  # it contains no other member
                return msgspec.convert(value, kind, from_attributes=True, dec_hook=array)
            parts = msgspec.convert(
                msgspec.structs.astuple(value), types, from_attributes=True, dec_hook=part
            )
            return kind(**dict(zip(value.__struct_fields__, parts, strict=True)))

        return part

    def _types(self, hint: Any) -> "_Types":
        origin = get_origin(hint)
        parts = get_args(hint)
        if origin is Annotated:
            inner = self._types(parts[0])
            checked: Any = Annotated[(inner.incoming, *hint.__metadata__)]
            native = inner.target == parts[0]
            return _Types(inner.outgoing, checked, hint if native else inner.target)
        classes, others = self._union(hint)
        if classes:
            return self._class_types(hint, classes, others)
        if _is_array(hint):
            return _Types(Any, Any, hint)
        named = _is_named_tuple(hint)
        if named:
            origin = tuple
            parts = tuple(get_type_hints(hint, include_extras=True).values())
        if hint is ... or hint is type(None):
            return _Types(hint, hint, hint)
        if origin is Literal or not parts:
            return _Types(Any, hint, hint)
        if origin is UnionType:
            origin = Union
        each = [self._types(part) for part in parts]
        outgoing, incoming, target = (origin[column] for column in zip(*each, strict=True))
        native = named or target == origin[parts]
        return _Types(outgoing, incoming, hint if native else target)

    def _class_types(self, hint: Any, classes: list[Any], others: list[Any]) -> "_Types":
        """Return the types for a dataclass, or for a union that contains some."""
        optional = type(None) in others
        tagged = len(classes) > 1 or len(others) > optional
        structs = [self._struct(each, tagged) for each in classes]
        received = [struct for _, struct in structs]
        received += [self._types(each).incoming for each in others]
        incoming: Any = Union[tuple(received)]  # noqa: UP007 (of any number)
        member: Any = _Member | None if optional else _Member
        outgoing = member
        if tagged:
            for each, (struct, _) in zip(classes, structs, strict=True):
                self._outgoing_structs[get_origin(each) or each] = struct
        else:
            outgoing = structs[0][0] | None if optional else structs[0][0]
        single = len(classes) == 1 and hint not in self._members
        native = single and self._classes[received[0]][1] is None
        return _Types(outgoing, incoming, hint if native else member)

    def _struct(self, kind: Any, tagged: bool) -> tuple[Any, Any]:
        """Return the structs of a dataclass: to send, and to receive."""
        key = (kind, tagged)
        if key not in self._structs:
            name = (get_origin(kind) or kind).__name__
            hints = _field_types(kind)
            types = {each: self._types(hint) for each, hint in hints.items()}
            targets: Any = tuple(each.target for each in types.values())
            define = partial(
                msgspec.defstruct,
                name,
                tag=name if tagged else None,
                tag_field="class" if tagged else None,  # a keyword: no field has this name
                array_like=not self._named,
                forbid_unknown_fields=True,
            )
            sent = define([(each, types[each].outgoing) for each in hints])
            received = define([(each, types[each].incoming) for each in hints])
            native = targets == tuple(hints.values())
            self._classes[received] = (kind, None if native else tuple[targets])
            self._structs[key] = (sent, received)
        return self._structs[key]

    def _union(self, hint: Any) -> tuple[list[Any], list[Any]]:
        """Split a type into dataclasses and others; no dataclass: nothing to split."""
        parts = [hint]
        if get_origin(hint) in (Union, UnionType):
            parts = list(get_args(hint))
        classes: list[Any] = []
        others: list[Any] = []
        for each in parts:
            if each in self._members:
                classes += self._members[each]
            elif is_dataclass(get_origin(each) or each):
                classes.append(each)
            else:
                others.append(each)
        return classes, others


class _Types(NamedTuple):
    """What an annotation becomes.

    Args:
      outgoing: structs in place of dataclasses; everything else is sent as it is.
      incoming: structs in place of dataclasses; everything else is checked.
      target: `_Member` in place of every class that msgspec cannot create by itself.
    """

    outgoing: Any
    incoming: Any
    target: Any


class _Member(ABC):  # noqa: B024 (only its subclass hook counts)
    """Type of a field whose class is known from the struct; every class is a subclass."""

    @classmethod
    def __subclasshook__(cls, other: type, /) -> bool:
        return True


@dataclass
class _ArrayList:
    """Arrays of a value, each once.

    Args:
      places: by identity.
    """

    arrays: list[Array] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)

    def add(self, part: Any) -> Any:
        if isinstance(part, np.ndarray):
            place = self.places.setdefault(id(part), len(self.arrays))
            if place == len(self.arrays):
                self.arrays.append(part)
            return place
        return _scalar(part)


def _inline(part: Any) -> Any:
    """Return the shape and the bytes of an array."""
    if not isinstance(part, np.ndarray):
        return _scalar(part)
    little = np.ascontiguousarray(part, part.dtype.newbyteorder("<"))
    return part.shape, little.reshape(-1).view(np.uint8).data


def _from_inline(annotation: Any, value: Any) -> Array:
    shape, data = msgspec.convert(value, tuple[tuple[int, ...], bytes])
    dtype = _dtype(annotation)
    if dtype is None:
        raise ValueError("an array inside a message needs a known type")
    flat = np.frombuffer(data, dtype.newbyteorder("<"))
    return flat.astype(dtype).reshape(shape)


def _scalar(part: Any) -> Any:
    if isinstance(part, np.generic):
        return part.item()
    raise ValueError(f"objects of type {type(part).__name__} cannot be encoded")


@cache
def _dtype(annotation: Any) -> np.dtype[Any] | None:
    """Return the type of an annotated array; None if any is allowed."""
    if not _is_array(annotation):
        raise ValueError(f"values of type {annotation} cannot be restored")
    parts = get_args(annotation)
    scalar = get_args(parts[1])[0] if parts else None
    known = isinstance(scalar, type) and issubclass(scalar, np.generic)
    return np.dtype(scalar) if known else None


def _is_array(hint: Any) -> bool:
    return (get_origin(hint) or hint) is np.ndarray


def _is_named_tuple(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields")


def _field_types(kind: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields, with its type variables replaced."""
    origin = get_origin(kind) or kind
    hints = get_type_hints(origin, include_extras=True)
    known = dict(zip(getattr(origin, "__parameters__", ()), get_args(kind), strict=False))

    def replaced(hint: Any) -> Any:
        if isinstance(hint, TypeVar):
            return known.get(hint, Any)
        variables = getattr(hint, "__parameters__", ())
        if not variables:
            return hint
        return hint[tuple(known.get(each, Any) for each in variables)]

    return {each.name: replaced(hints[each.name]) for each in fields(origin)}


@cache
def _file_codec(kind: Any, members: _Members) -> Codec[Any]:
    return Codec(kind, dict(members), named=True)


def file_codec(kind: Any, members: _Members = ()) -> Codec[Any]:
    """Return the codec of a type for files: fields have names.

    Args:
      members: open base classes, each with its classes.
    """
    return _file_codec(kind, members)
