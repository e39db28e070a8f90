"""Options: what a declaration makes of a value, and how it says what it wants."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from fedbudget.errors import UserError, flag, key
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
    where: str = option(REQUIRED, "Where.", "data")
    count: Count = option(1, "A count.", "data")
    rate: Positive | Literal["auto"] | None = option(None, "A rate.", "data", ("run",))
    shares: tuple[NotNegative, ...] = option((), "Shares.", "data")
    names: tuple[str, ...] = option(("a", "b"), "Names.", "data")
    sure: bool | None = option(None, "Sure?", "data")
    kind_of: Literal["plain", "momentum"] = option("plain", "Which.", "data")


KNOWN = declarations(Example)


def test_declarations_are_of_the_fields_in_their_order() -> None:
    assert list(KNOWN) == ["where", "count", "rate", "shares", "names", "sure", "kind_of"]
    assert [name for name, declared in KNOWN.items() if declared.required] == ["where"]
    assert KNOWN["rate"].words == ("auto",)
    assert (KNOWN["rate"].kinds, KNOWN["shares"].kinds[0]) == (
        (float,),
        tuple[NotNegative, ...],
    )
    assert KNOWN["rate"].within("run")
    assert not KNOWN["rate"].within("join")
    assert KNOWN["count"].within("join")
    assert Example(where="here").names == ("a", "b")


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
def test_a_value_becomes_what_the_type_has(
    name: str, value: object, expected: object
) -> None:
    found = KNOWN[name].converted(value)
    assert (found, type(found)) == (expected, type(expected))


def test_a_text_is_a_number_only_where_it_may_be() -> None:
    assert KNOWN["count"].converted("7", text=True) == 7
    assert KNOWN["shares"].converted("1,0.5", text=True) == (1.0, 0.5)
    with pytest.raises(
        UserError, match="count must be a whole number of at least 1, not '7'"
    ):
        KNOWN["count"].converted("7")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", 0, "count must be a whole number of at least 1, not 0"),
        ("rate", -1.5, "rate must be auto or a positive number, not -1.5"),
        ("rate", float("nan"), "rate must be auto or a positive number, not nan"),
        ("shares", [1, -1], "shares must be a list of numbers of at least 0, not [1, -1]"),
        ("names", 5, "names must be a list of texts, not 5"),
        ("sure", "yes", "sure must be true or false, not 'yes'"),
        (
            "kind_of",
            "momentun",
            "kind_of must be plain or momentum, not 'momentun'; did you mean momentum?",
        ),
        ("where", None, "where must be a text, not None"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(
    name: str, value: Any, message: str
) -> None:
    with pytest.raises(UserError) as refused:
        KNOWN[name].converted(value)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("spell", "name"), [(str, "kind_of"), (key, "kind-of"), (flag, "--kind-of")]
)
def test_errors_name_the_option_as_the_reader_does(
    spell: Callable[[str], str], name: str
) -> None:
    with pytest.raises(UserError) as refused:
        KNOWN["kind_of"].converted(1)
    assert refused.value.spelled(spell) == f"{name} must be plain or momentum, not 1"
