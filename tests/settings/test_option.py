"""Options: conversion of values by declared type, and error messages."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from fedbudget.errors import UserError, argument, flag, key
from fedbudget.settings.option import (
    REQUIRED,
    Count,
    NotNegative,
    Positive,
    declarations,
    option,
)


@dataclass(frozen=True)
class Example:
    path: str = option(REQUIRED, "Path.", "data")
    count: Count = option(1, "A count.", "data")
    rate: Positive | Literal["auto"] | None = option(None, "A rate.", "data", ("run",))
    shares: tuple[NotNegative, ...] = option((), "Shares.", "data")
    names: tuple[str, ...] = option(("a", "b"), "Names.", "data")
    sure: bool | None = option(None, "Sure?", "data")
    kind_of: Literal["plain", "momentum"] = option("plain", "Which.", "data")


DECLARED = declarations(Example)


def test_declarations_follow_the_fields() -> None:
    assert list(DECLARED) == ["path", "count", "rate", "shares", "names", "sure", "kind_of"]
    assert [name for name, declared in DECLARED.items() if declared.required] == ["path"]
    assert DECLARED["rate"].words == ("auto",)
    assert (DECLARED["rate"].kinds, DECLARED["shares"].kinds[0]) == (
        (float,),
        tuple[NotNegative, ...],
    )
    assert DECLARED["rate"].within("run")
    assert not DECLARED["rate"].within("join")
    assert DECLARED["count"].within("join")
    assert Example(path="here").names == ("a", "b")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("count", 7, 7),
        ("rate", 2, 2.0),
        ("rate", None, None),
        ("rate", "auto", "auto"),
        ("shares", [1, 0.5], (1.0, 0.5)),
        ("names", "x, y", ("x", "y")),
        ("names", ["x"], ("x",)),
    ],
)
def test_values_are_converted(name: str, value: object, expected: object) -> None:
    converted_value = DECLARED[name].converted(value)
    assert (converted_value, type(converted_value)) == (expected, type(expected))


def test_text_is_converted_on_request() -> None:
    assert DECLARED["count"].converted("7", text=True) == 7
    assert DECLARED["shares"].converted("1,0.5", text=True) == (1.0, 0.5)
    with pytest.raises(
        UserError, match="count must be a whole number of at least 1, not '7'"
    ):
        DECLARED["count"].converted("7")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", 0, "count must be a whole number of at least 1, not 0"),
        ("rate", -1.5, "rate must be auto or a positive number, not -1.5"),
        ("rate", float("nan"), "rate must be auto or a positive number, not nan"),
        ("shares", [1, -1], "shares must be a list of numbers of at least 0, not [1, -1]"),
        ("names", 5, "names must be a text or a list of texts, not 5"),
        ("sure", "yes", "sure must be true or false, not 'yes'"),
        (
            "kind_of",
            "momentun",
            "kind_of must be plain or momentum, not 'momentun'; did you mean momentum?",
        ),
        ("path", None, "path must be a text, not None"),
    ],
)
def test_wrong_values_are_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(UserError) as refused:
        DECLARED[name].converted(value)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("spell", "name"), [(argument, "kind_of"), (key, "kind-of"), (flag, "--kind-of")]
)
def test_errors_spell_the_option_name(spell: Callable[[str], str], name: str) -> None:
    """Errors use the spelling of Python, of files, or of the command line."""
    with pytest.raises(UserError) as refused:
        DECLARED["kind_of"].converted(1)
    assert refused.value.spelled(spell) == f"{name} must be plain or momentum, not 1"
