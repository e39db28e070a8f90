"""What an option is: declared once, as a field of a dataclass, with all that a command line, a file or Python needs.

    nodes: Count | None = option(None, "How many nodes.", "data", shown="5, or one per file")

The field has the name and the type with its range; `option` gives the default, what is said about it, and who has it.
Values are checked by msgspec against the type, wherever they come from; its errors are put into a person's words here.
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

from fedbudget.errors import UserError, flag, key, suggestion

T = TypeVar("T")
_FINITE = sys.float_info.max
Count = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[float, Meta(ge=0, le=_FINITE)]
Positive = Annotated[float, Meta(gt=0, le=_FINITE)]
Impute = Literal["mean", "median", "most-frequent"]
"""What the missing cells of a column of numbers get; of a category it is always the most frequent."""

Group = Literal[
    "most used", "data", "model", "budget", "method", "network", "output", "engine"
]
"""What options belong to, in the order of help."""

REQUIRED: Any = MISSING
"""In place of the default of an option that must be given."""


@dataclass(frozen=True)
class Option:
    """What is said about an option, and who has it.

    Args:
      help: what it means, in a sentence.
      group: what it belongs to; None where a command has few options.
      commands: those of the command line that have it; as its dataclass says when not given.
      shown: the default as help shows it, where the field's own does not say it.
      defaults: of commands where it is not the field's, by their name; Flower's run-config is `flower`.
      helps: what it means in commands where it means something else.
      values: what can be completed by a shell, besides what the type says; or what finds it from how it begins.
      argument: whether it is a place on the command line, without a name.
      commas: whether a text on the command line holds several, with commas between them; quotes keep one together.
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
    """A field of a dataclass, or an argument of a command, that is an option."""
    declared: Any = field(
        default=default, metadata={"option": Option(help, group, commands, **more)}
    )
    return declared  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Declaration:
    """One field of a dataclass of options.

    Args:
      kinds: the classes that its type is made of, without ranges, words and None.
      words: the words that it may be.
      commands: those that have it; all that have its dataclass when None.
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
        """Whether a command has it."""
        return self.commands is None or command in self.commands

    def converted(self, value: object, *, text: bool = False) -> Any:
        """The value as the type has it; what does not fit is refused.

        Args:
          text: whether a text may stand for a number.
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
        """What a command line has for this value."""
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
        """What fits, in words."""
        from msgspec import inspect

        known = inspect.type_info(self.type)
        parts = known.types if isinstance(known, inspect.UnionType) else (known,)
        return in_words([*self.words, *filter(None, map(_in_words, parts))])

    def _plain(self, value: object) -> object:
        """Numbers of other libraries as Python's, and a text with commas as a list."""
        if isinstance(value, str) and self.listed:
            parts = [part.strip() for part in value.split(",")]
            return parts if str not in self.kinds else _numbers(parts) or value
        if isinstance(value, list | tuple):
            return [_number(each) for each in value]
        return _number(value)


@cache
def declarations(cls: type[Any]) -> Mapping[str, Declaration]:
    """The options that a dataclass declares, by name, in its order."""
    hints = get_type_hints(cls, include_extras=True)
    commands = getattr(cls, "COMMANDS", None)
    return {
        each.name: declared(each.name, hints[each.name], each, commands)
        for each in fields(cls)
    }


def declared(
    name: str, hint: Any, of: Field[Any], commands: Sequence[str] | None = None
) -> Declaration:
    """An option of this name and type, from what `option` gave."""
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
    """What a union is made of, without what is annotated."""
    if get_origin(hint) is Annotated:
        return _parts(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return [part for each in get_args(hint) for part in _parts(each)]
    return [hint]


def paths_from(start: str, *endings: str) -> list[str]:
    """Files with such endings, and folders, whose path begins so: what a shell can complete."""
    paths = sorted(glob(f"{escape(start)}*"))  # noqa: PTH207, what is typed may be absolute
    return [path for path in paths if path.endswith(endings) or Path(path).is_dir()]


def _numbers(texts: Sequence[str]) -> list[float] | None:
    """None where one of them is none."""
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


def in_words(choices: Sequence[str]) -> str:
    """
    >>> in_words(["a"]), in_words(["a", "b", "c"])
    ('a', 'a, b or c')
    """
    return " or ".join(
        [", ".join(choices[:-1]), choices[-1]] if len(choices) > 1 else choices
    )


def _in_words(known: Any) -> str:
    """What a type, as msgspec describes it, takes; nothing for words, which are listed, and for None."""
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
            one, _, limits = _in_words(known.item_type).removeprefix("a ").partition(" of ")
            return f"a list of {one}s" + (f" of {limits}" if limits else "")
        case inspect.StrType():
            return "a text"
        case inspect.BoolType():
            return "true or false"
        case inspect.CustomType():
            return f"a {known.cls.__name__.lower()}"
    return ""


def read_toml(path: Path) -> dict[str, Any]:
    """What is in a TOML file, unchecked."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None
