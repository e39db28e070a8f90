"""Options for command line, files and Python, each declared once as a field of a dataclass.

    nodes: Count | None = option(None, "Number of nodes.", "data", shown="one per file")

The field has the name, and the type with its range. `option` adds the default, the help
text and the commands that have it. msgspec checks values against the type; error messages
are written here.
"""

import csv
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from glob import escape, glob
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from fedbudget.errors import UserError, flag, key, printable, suggestion
from fedbudget.file_contents import Damaged, read_regular

T = TypeVar("T")
_FINITE = sys.float_info.max
_MAX_TOML = 2**20  # bytes
Count = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[float, Meta(ge=0, le=_FINITE)]
Positive = Annotated[float, Meta(gt=0, le=_FINITE)]
Impute = Literal["mean", "median", "most-frequent"]
"""Value for missing numbers; missing categories become the most frequent one."""

Group = Literal[
    "most used", "data", "model", "budget", "method", "network", "output", "engine"
]
"""Groups of options, in the order of the help."""

REQUIRED: Any = MISSING
"""Default of an option that must be given."""


@dataclass(frozen=True)
class Option:
    """Help text and placement of an option.

    Args:
      help: one sentence.
      group: group in the help; None for a command with few options.
      commands: commands that have the option; `COMMANDS` of its dataclass by default.
      shown: default as the help shows it, if the default of the field is not informative.
      defaults: different defaults of some commands; Flower's run-config is `flower`.
      helps: different help texts of some commands.
      values: values for shell completion, or a function from a prefix to values; by default
        the words of the type.
      argument: whether it is a positional argument of the command line.
      commas: whether one text on the command line holds several values, separated by
        commas; quotes protect a comma.
    """

    help: str
    group: Group | None = None
    commands: Sequence[str] | None = None
    shown: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    helps: Mapping[str, str] = field(default_factory=dict)
    values: Sequence[str] | Callable[[str], Sequence[str]] = ()
    argument: bool = False
    commas: bool = False


def option(
    default: T,
    help: str,
    group: Group | None = None,
    commands: Sequence[str] | None = None,
    **more: Any,
) -> T:
    """Declare a field of a dataclass, or an argument of a command, as an option."""
    declared: Any = field(
        default=default, metadata={"option": Option(help, group, commands, **more)}
    )
    return declared  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Declaration:
    """A declared option.

    Args:
      kinds: classes in the union of its type, without ranges, words and None.
      words: words that it accepts.
      commands: commands that have it; None for all that have its dataclass.
    """

    name: str
    type: Any
    option: Option
    default: Any
    kinds: tuple[Any, ...]
    words: tuple[str, ...]
    commands: Sequence[str] | None

    @property
    def required(self) -> bool:
        return self.default is MISSING

    def within(self, command: str) -> bool:
        return self.commands is None or command in self.commands

    def converted(self, value: object, *, text: bool = False) -> Any:
        """Convert a value to the type of the option, or refuse it.

        Args:
          text: whether to parse numbers from texts.
        """
        if text and self.option.commas and isinstance(value, list | tuple):
            value = [
                part
                for each in value
                for part in next(csv.reader([each], skipinitialspace=True), [])
            ]
        try:
            return msgspec.convert(
                self._plain(value), self.type, strict=not (text and isinstance(value, str))
            )
        except msgspec.ValidationError:
            hint = suggestion(value, self.words) if isinstance(value, str) else None
            wrong = f"`{self.name}` must be {self.expected}, not {value!r}"
            raise UserError(f"{wrong}; {hint}" if hint else wrong) from None

    def arguments(self, value: Any) -> list[str]:
        """Return the command line arguments for a value."""
        if isinstance(value, bool):
            return [flag(self.name) if value else f"--no-{key(self.name)}"]
        values = list(value) if isinstance(value, tuple) else [value]
        if self.option.commas:
            values = ['"' + str(each).replace('"', '""') + '"' for each in values]
        return [text for each in values for text in (flag(self.name), str(each))]

    @property
    def listed(self) -> bool:
        return any(get_origin(kind) is tuple for kind in self.kinds)

    @property
    def expected(self) -> str:
        """Description of accepted values."""
        from msgspec import inspect

        known = inspect.type_info(self.type)
        parts = known.types if isinstance(known, inspect.UnionType) else (known,)
        return choices_text([*self.words, *filter(None, map(_type_text, parts))])

    def _plain(self, value: object) -> object:
        """Convert numbers of other libraries to Python's, and a comma list to a list."""
        if isinstance(value, str) and self.listed and value not in self.words:
            parts = [part.strip() for part in value.split(",")]
            return parts if str not in self.kinds else _numbers(parts) or value
        if isinstance(value, list | tuple):
            return [_number(each) for each in value]
        return _number(value)


@cache
def declarations(cls: type[Any]) -> Mapping[str, Declaration]:
    """Return the options of a dataclass by name, in the order of its fields."""
    hints = get_type_hints(cls, include_extras=True)
    commands = getattr(cls, "COMMANDS", None)
    return {
        each.name: declared(each.name, hints[each.name], each, commands)
        for each in fields(cls)
    }


def declared(
    name: str, hint: Any, of: Field[Any], commands: Sequence[str] | None = None
) -> Declaration:
    """Build the declaration of an option.

    Args:
      hint: its type.
      of: the field that `option` returned.
    """
    parts = _parts(hint)
    about = of.metadata["option"]
    words = tuple(
        word for part in parts if get_origin(part) is Literal for word in get_args(part)
    )
    kinds = tuple(
        part for part in parts if get_origin(part) is not Literal and part is not NoneType
    )
    return Declaration(
        name, hint, about, of.default, kinds, words, about.commands or commands
    )


def _parts(hint: Any) -> list[Any]:
    """Return the members of a union, without annotations."""
    if get_origin(hint) is Annotated:
        return _parts(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return [part for each in get_args(hint) for part in _parts(each)]
    return [hint]


def paths_from(start: str, *endings: str) -> list[str]:
    """Return the files with these endings and the folders that complete a path."""
    paths = sorted(glob(f"{escape(start)}*"))  # noqa: PTH207, the path may be absolute
    return [path for path in paths if path.endswith(endings) or Path(path).is_dir()]


def _numbers(texts: Sequence[str]) -> list[float] | None:
    """Return None if one of the texts is not a number."""
    try:
        return [float(text) for text in texts]
    except ValueError:
        return None


def _number(value: object) -> object:
    if type(value) in (bool, int, float):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def choices_text(choices: Sequence[str]) -> str:
    """Join alternatives.

    >>> choices_text(["a"]), choices_text(["a", "b", "c"])
    ('a', 'a, b or c')
    """
    *first, last = choices
    return f"{', '.join(first)} or {last}" if first else last


def _type_text(known: Any) -> str:
    """Describe a type of msgspec; empty for words and for None."""
    from msgspec import inspect

    match known:
        case inspect.FloatType(gt=0, le=le) if le == _FINITE:
            return "a positive number"
        case inspect.IntType() | inspect.FloatType():
            bounds = {
                "more than": known.gt,
                "at least": known.ge,
                "below": known.lt,
                "at most": known.le,
            }
            limits = " and ".join(
                f"{how} {bound:g}"
                for how, bound in bounds.items()
                if bound not in (None, _FINITE)
            )
            number = "a whole number" if isinstance(known, inspect.IntType) else "a number"
            return f"{number} of {limits}" if limits else number
        case inspect.VarTupleType():
            item = _type_text(known.item_type).removeprefix("a ")
            one, _, limits = item.partition(" of ")
            kinds = "a text or a list of texts" if one == "text" else f"a list of {one}s"
            return kinds + (f" of {limits}" if limits else "")
        case inspect.StrType():
            return "a text"
        case inspect.BoolType():
            return "true or false"
        case inspect.CustomType():
            return f"a {known.cls.__name__.lower()}"
    return ""


def read_toml(path: Path) -> dict[str, Any]:
    """Return the unchecked content of a TOML file."""
    try:
        return tomllib.loads(read_regular(path, _MAX_TOML).decode())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except Damaged:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML: {printable(str(error))}") from None
