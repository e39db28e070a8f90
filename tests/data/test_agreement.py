"""Table descriptions of the nodes, and the layout and moments that all agree on: as if all
rows were in one table.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.data.agreement import (
    ColumnDescription,
    Moments,
    TableDescription,
    agree_on_layout,
)
from fedbudget.data.read_tables import parse_csv
from fedbudget.data.tables import Layout, LayoutColumn, RawTable, TableOptions
from fedbudget.errors import UserError
from fedbudget.settings.option import Impute

NAN = float("nan")


def table(columns: dict[str, list[Any]], name: str = "t.csv", **options: Any) -> RawTable:
    rows = zip(*columns.values(), strict=True)
    lines = [
        ",".join([*columns, "y"]),
        *(
            ",".join([*("" if cell is None else str(cell) for cell in row), "1"])
            for row in rows
        ),
    ]
    return parse_csv(
        [line + "\n" for line in lines], name, TableOptions("y", impute="mean", **options)
    )


def agreed(
    tables: list[RawTable], impute: Impute | None = None, fewest: int = 1
) -> tuple[Layout, Moments]:
    descriptions = [TableDescription.of(each, impute, fewest=fewest) for each in tables]
    return agree_on_layout(descriptions, [each.name for each in tables])


CELLS = st.none() | st.integers(-5, 5).map(float)
WORDS = st.none() | st.sampled_from(["a", "b", "c"])


@settings(deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(CELLS, WORDS), min_size=1, max_size=12), min_size=1, max_size=5
    ),
    st.sampled_from(["mean", "median", "most-frequent"]),
)
def test_moments_match_pooled_rows(
    parts: list[list[tuple[float | None, str | None]]], impute: Impute
) -> None:
    parts[0] += [(1.0, "a"), (2.0, "b")]
    tables = [
        table(
            {"n": [row[0] for row in part], "w": [row[1] for row in part]},
            categorical=("w",),
        )
        for part in parts
    ]
    layout, moments = agreed(tables, impute)
    rows = np.concatenate([layout.encode(each) for each in tables])
    np.testing.assert_allclose(moments.mean, rows.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(moments.deviation, rows.std(axis=0), atol=1e-12)
    numbers = [row[0] for part in parts for row in part if row[0] is not None]
    if impute == "mean":
        assert layout.columns[0].fill == pytest.approx(np.mean(numbers))
    words = [row[1] for part in parts for row in part if row[1] is not None]
    assert layout.columns[1].categories == tuple(sorted(set(words)))
    assert words.count(str(layout.columns[1].fill)) == max(
        words.count(each) for each in words
    )


@pytest.mark.parametrize(
    ("impute", "parts", "fill"),
    [
        # medians 1, 10 and 40 of 3, 1 and 5 rows
        ("median", [[1, 1, 2], [10], [20, 30, 40, 50, 60]], 40),
        ("median", [[1, 5, None, 9]], 5),
        # 7 four times, 8 three times
        ("most-frequent", [[7, 7, 1, 2, 3, 4], [8, 8, 8], [7, 7]], 7),
    ],
)
def test_fill_is_weighted_by_rows(
    impute: Impute, parts: list[list[Any]], fill: int
) -> None:
    layout, _ = agreed([table({"n": part}) for part in parts], impute)
    assert layout.columns[0].fill == fill


def test_categories_are_sorted() -> None:
    tables = [
        table({"w": words}, categorical=("w",)) for words in (["10", "b"], ["9", "a"])
    ]
    for order in (tables, tables[::-1]):
        layout, _ = agreed(order)
        assert layout.columns == (LayoutColumn("w", ("9", "10", "a", "b")),)


def test_empty_column_uses_other_tables() -> None:
    tables = [
        table({"n": [None, None], "w": [None, None]}),
        table({"n": [1.0, 3.0], "w": ["a", "b"]}, categorical=("w",)),
    ]
    layout, moments = agreed(tables, "mean")
    expected = (LayoutColumn("n", fill=2.0), LayoutColumn("w", ("a", "b"), "a"))
    assert layout.columns == expected
    assert moments.mean.tolist() == [2.0, 0.75, 0.25]


def test_columns_with_few_values_are_withheld() -> None:
    few, many = table({"n": [100.0, None, None, None]}), table({"n": [1.0, 2.0, 3.0, 2.0]})
    description = TableDescription.of(few, "median", fewest=2)
    (column,) = description.columns.values()
    assert column == ColumnDescription("number")
    assert agreed([few, many], "median", fewest=2)[0].columns[0].fill == 2
    with pytest.raises(UserError, match="n has too few values in every table: drop it"):
        agreed([few, few], "mean", fewest=2)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"n": [1.0]},
            "all tables need the same columns, in any order: south.csv has no column w; "
            "drop leaves",
        ),
        ({"n": [1.0], "w": ["a"], "z": [3]}, "in any order: north.csv has no column z"),
        (
            {"n": [1.0], "v": ["a"]},
            "south.csv has no column w, and north.csv has no column v",
        ),
        (
            {"n": ["x"], "w": ["a"]},
            "n has numbers in north.csv and text in south.csv: if it is a category, pass "
            "categorical n",
        ),
    ],
)
def test_incompatible_tables_are_rejected(
    other: dict[str, list[Any]], message: str
) -> None:
    words = tuple(name for name, cells in other.items() if isinstance(cells[0], str))
    north = table({"n": [1.0], "w": ["a"]}, "north.csv", categorical=("w",))
    with pytest.raises(UserError, match=message):
        agreed([north, table(other, "south.csv", categorical=words)])


def test_impute_must_agree() -> None:
    one = table({"n": [1.0, 2.0]}, "north.csv")
    descriptions = [TableDescription.of(one, impute) for impute in ("mean", None, "median")]
    with pytest.raises(UserError, match="impute is mean at north and median at west"):
        agree_on_layout(descriptions, ["north", "east", "west"])
    layout, _ = agree_on_layout(descriptions[:2], ["north", "east"])
    assert layout.columns[0].fill == 1.5


def test_target_name_must_agree() -> None:
    one, other = (
        parse_csv(["a,b\n", "1,2\n"], "t.csv", TableOptions(name)) for name in ("a", "b")
    )
    message = r"the target is a in t.csv and b in t.csv: name it with target"
    with pytest.raises(UserError, match=message):
        agreed([one, other])
