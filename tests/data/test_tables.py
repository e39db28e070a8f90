"""Table layouts: columns by name, categories and missing cells as numbers, errors for other
columns.
"""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.data.read_tables import parse_csv
from fedbudget.data.tables import (
    Layout,
    LayoutColumn,
    RawTable,
    TableOptions,
    require_usable,
)
from fedbudget.errors import UserError

PATIENTS = Layout(
    (
        LayoutColumn("age", fill=40.0),
        LayoutColumn("sex", ("f", "m"), "m"),
        LayoutColumn("dose"),
    ),
    "ill",
    ("name",),
)


OPTIONS = PATIENTS.options_for(TableOptions())


def table(text: str, options: TableOptions = OPTIONS) -> RawTable:
    return parse_csv(text.splitlines(keepends=True), "new.csv", options, labelled=False)


def test_one_hot_encoding() -> None:
    result = PATIENTS.encode(table("age,sex,dose\n30,m,1\n50,f,2\n"))
    assert PATIENTS.feature_names == ("age", "sex=f", "sex=m", "dose")
    assert result.tolist() == [[30, 0, 1, 1], [50, 1, 0, 2]]


def test_column_order_does_not_matter() -> None:
    """Dropped columns and the target may be present."""
    result = PATIENTS.encode(
        table("dose,ill,name,sex,age\n1,yes,ann,m,30\n2,no,bob,f,50\n")
    )
    assert result.tolist() == [[30, 0, 1, 1], [50, 1, 0, 2]]


def test_missing_cells_are_filled() -> None:
    """Also if a whole column is missing."""
    expected = [[40, 0, 1, 1], [40, 1, 0, 2]]
    assert PATIENTS.encode(table("age,sex,dose\n,?,1\nNA,f,2\n")).tolist() == expected
    assert PATIENTS.encode(table("age,sex,dose\n,,1\n,,2\n")).tolist() == [
        [40, 0, 1, 1],
        [40, 0, 1, 2],
    ]


def test_unseen_category_is_all_zero() -> None:
    """It is counted in `unseen`."""
    result = table("age,sex,dose\n30,x,1\n50,f,2\n50,x,2\n")
    assert PATIENTS.encode(result)[:, 1:3].tolist() == [[0, 0], [1, 0], [0, 0]]
    assert PATIENTS.unseen(result) == {"sex": {"x": 2}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("age,dose\n1,2\n", "has no column sex; the columns are age, sex, dose"),
        ("age,sex,dose,weight\n1,m,2,3\n", "has the unknown column weight \\(drop\\)"),
        ("a,b\n1,2\n", "has no column age, sex, dose and has the unknown columns a, b"),
        (
            "age,sex,dose\n1,m,\n1,f,?\n1,f,3\n",
            "dose has 2 missing values, but the model has no replacement",
        ),
    ],
)
def test_unusable_columns_are_named(text: str, message: str) -> None:
    with pytest.raises(UserError, match=f"^new.csv:? {message}"):
        PATIENTS.encode(table(text))


def test_bad_cell_of_number_is_named() -> None:
    """A column of numbers stays one, even in a table with a single row."""
    with pytest.raises(UserError, match=r"age must be a number, .* leave them empty$"):
        require_usable([table("age,sex,dose\nold,m,1\n")])


def test_numbers_for_a_category() -> None:
    with pytest.raises(UserError, match="sex has numbers, but it is a category"):
        PATIENTS.encode(table("age,sex,dose,ill\n1,1,2,no\n", TableOptions("ill")))


@settings(deadline=None)
@given(st.data())
def test_encoding_matches_row_by_row(data: st.DataObject) -> None:
    """Compared with a second implementation that encodes row by row."""
    names = data.draw(
        st.lists(
            st.text("abcxyz", min_size=1, max_size=4), min_size=1, max_size=5, unique=True
        )
    )
    columns = []
    for name in names:
        categories = tuple(data.draw(st.lists(st.sampled_from("pqrs"), unique=True)))
        fill = (
            data.draw(st.sampled_from(categories))
            if categories
            else data.draw(st.floats(-9, 9))
        )
        columns.append(LayoutColumn(name, categories or None, fill))
    layout = Layout(tuple(columns))
    cells = {}
    for column in columns:
        texts = st.sampled_from([*(column.categories or ("1", "-2.5")), ""])
        cells[column.name] = data.draw(st.lists(texts, min_size=3, max_size=3))
    order = data.draw(st.permutations(names))
    text = "\n".join(
        [
            ",".join([*order, "t"]),
            *(",".join([*(cells[n][r] for n in order), "0"]) for r in range(3)),
        ]
    )
    result = layout.encode(table(text, layout.options_for(TableOptions("t"))))
    for row in range(3):
        expected: list[float] = []
        for column in columns:
            cell = cells[column.name][row] or str(column.fill)
            if column.categories is None:
                expected.append(float(cell))
            else:
                expected += [float(each == cell) for each in column.categories]
        assert result[row].tolist() == expected


def test_json_round_trip() -> None:
    plain = json.loads(json.dumps(msgspec.to_builtins(PATIENTS)))
    assert msgspec.convert(plain, Layout) == PATIENTS
    with pytest.raises(ValueError, match="columns"):
        msgspec.convert({"target": "y"}, Layout)
