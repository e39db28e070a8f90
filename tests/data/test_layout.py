"""A layout: columns are found by name, categories and missing cells become numbers, what
does not fit is refused.
"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.data.read_tables import parse_csv
from fedbudget.data.tables import Layout, LayoutColumn, RawTable, TableOptions
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


def test_rows_become_features_with_one_for_each_category() -> None:
    found = PATIENTS.encode(table("age,sex,dose\n30,m,1\n50,f,2\n"))
    assert PATIENTS.feature_names == ("age", "sex=f", "sex=m", "dose")
    assert found.tolist() == [[30, 0, 1, 1], [50, 1, 0, 2]]


def test_columns_in_another_order_and_what_was_dropped_change_nothing() -> None:
    found = PATIENTS.encode(table("dose,ill,name,sex,age\n1,yes,ann,m,30\n2,no,bob,f,50\n"))
    assert found.tolist() == [[30, 0, 1, 1], [50, 1, 0, 2]]


def test_missing_cells_get_the_value_for_them_also_where_all_are() -> None:
    assert PATIENTS.encode(table("age,sex,dose\n,?,1\nNA,f,2\n")).tolist() == [
        [40, 0, 1, 1],
        [40, 1, 0, 2],
    ]
    assert PATIENTS.encode(table("age,sex,dose\n,,1\n,,2\n")).tolist() == [
        [40, 0, 1, 1],
        [40, 0, 1, 2],
    ]


def test_a_missing_cell_without_a_value_for_it_is_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"^new\.csv: dose has 2 missing values, but the model has no replacement",
    ):
        PATIENTS.encode(table("age,sex,dose\n1,m,\n1,f,?\n1,f,3\n"))


def test_a_category_that_nobody_had_is_zero_everywhere_and_counted() -> None:
    found = table("age,sex,dose\n30,x,1\n50,f,2\n50,x,2\n")
    assert PATIENTS.encode(found)[:, 1:3].tolist() == [[0, 0], [1, 0], [0, 0]]
    assert PATIENTS.unseen(found) == {"sex": {"x": 2}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("age,dose\n1,2\n", "has no column sex; the columns are age, sex, dose"),
        ("age,sex,dose,weight\n1,m,2,3\n", "has the unknown column weight \\(drop\\)"),
        ("a,b\n1,2\n", "has no column age, sex, dose and has the unknown columns a, b"),
        (
            "age,sex,dose\nold,m,1\nyoung,m,1\nold,m,1\nold,m,1\nyoung,m,1\n",
            "age has text, such as 'old', but it must be numbers",
        ),
    ],
)
def test_other_columns_are_refused_with_their_names(text: str, message: str) -> None:
    with pytest.raises(UserError, match=f"^new.csv:? {message}"):
        PATIENTS.encode(table(text))


def test_numbers_in_place_of_a_category_are_refused() -> None:
    with pytest.raises(UserError, match="sex has numbers, but it is a category"):
        PATIENTS.encode(table("age,sex,dose,ill\n1,1,2,no\n", TableOptions("ill")))


@settings(deadline=None)
@given(st.data())
def test_features_are_those_of_each_row_alone_in_any_order(data: st.DataObject) -> None:
    """A second way to compute it, row by row."""
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
    found = layout.encode(table(text, layout.options_for(TableOptions("t"))))
    for row in range(3):
        expected: list[float] = []
        for column in columns:
            cell = cells[column.name][row] or str(column.fill)
            if column.categories is None:
                expected.append(float(cell))
            else:
                expected += [float(each == cell) for each in column.categories]
        assert found[row].tolist() == expected


def test_it_is_the_same_after_a_file() -> None:
    assert Layout.from_json(json.loads(json.dumps(PATIENTS.to_json()))) == PATIENTS
    with pytest.raises(ValueError, match="columns"):
        Layout.from_json({"target": "y"})
