"""What all agree on: the same for everyone, of the data of all, and refused where data do
not go together.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.data.agreement import Moments, TableDescription
from fedbudget.data.tables import RawTable, TextColumn
from fedbudget.engines.remote.task import SamplesDescription, Task, agree
from fedbudget.errors import UserError
from fedbudget.protocol.messages import PeerError, Request
from support.methods import bits

PLAIN = SamplesDescription((10,), (4,), classes=("a", "b"))


def standardised(rows: Any) -> SamplesDescription:
    return SamplesDescription((len(rows),), (rows.shape[1],), features=Moments.of(rows))


# Moments.


@settings(deadline=None)
@given(
    st.integers(0, 1000),
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    st.floats(-1e3, 1e3),
)
def test_moments_of_parts_together_are_those_of_all_rows(
    seed: int, sizes: list[int], apart: float
) -> None:
    rng = np.random.default_rng(seed)
    parts = [
        rng.normal(number * apart, 1 + number, (size, 3))
        for number, size in enumerate(sizes)
    ]
    together = Moments.combine([Moments.of(part) for part in parts], sizes)
    rows = np.concatenate(parts)
    tolerance = 1e-9 * (1 + np.abs(rows).max())
    np.testing.assert_allclose(together.mean, rows.mean(axis=0), atol=tolerance)
    np.testing.assert_allclose(together.deviation, rows.std(axis=0), atol=tolerance)


def test_a_column_that_never_changes_is_left_as_wide_as_it_is() -> None:
    rows = np.array([[5.0, 1.0], [5.0, 3.0]])
    how = standardised(rows).standardization
    assert how is not None
    assert (how.mean.tolist(), how.deviation.tolist()) == ([5.0, 2.0], [1.0, 1.0])


def test_all_are_standardised_by_the_rows_of_all() -> None:
    found = agree(
        [
            standardised(np.array([[0.0], [2.0]])),
            standardised(np.array([[4.0], [6.0], [8.0], [10.0]])),
        ]
    )
    assert found.features is not None
    np.testing.assert_allclose(found.features.mean, [5.0])  # (0 + 2 + 4 + 6 + 8 + 10) / 6
    np.testing.assert_allclose(
        found.features.deviation, [np.sqrt(35 / 3)]
    )  # of 25, 9, 1, 1, 9, 25
    assert found.sizes == ()


def test_a_target_is_standardised_with_its_features() -> None:
    features, target = (
        Moments(np.zeros(1), np.ones(1)),
        Moments(np.array([3.0]), np.array([2.0])),
    )
    one = SamplesDescription((10,), (1,), values=True, features=features, target=target)
    how = agree([one, one]).standardization
    assert how is not None
    assert (how.target_mean, how.target_deviation) == (3.0, 2.0)
    constant = replace(one, target=Moments(np.array([3.0]), np.zeros(1))).standardization
    assert constant is not None
    assert constant.target_deviation == 1.0


# Classes.


@pytest.mark.parametrize(
    ("given_by_nodes", "agreed"),
    [
        ([("a", "b"), ("c",), ("b", "a")], ("a", "b", "c")),
        ([("10", "2"), ("1",)], ("1", "2", "10")),
        ([("yes", "3"), ("-1", "no")], ("-1", "3", "no", "yes")),
        ([("a",), ()], ()),
        ([("x",)], ("x",)),
    ],
)
def test_classes_are_those_of_all(
    given_by_nodes: list[tuple[str, ...]], agreed: tuple[str, ...]
) -> None:
    assert (
        agree([replace(PLAIN, classes=classes) for classes in given_by_nodes]).classes
        == agreed
    )


@settings(deadline=None)
@given(st.permutations([("a", "c"), ("b",), ("10", "9"), ("c", "b")]))
def test_classes_do_not_depend_on_who_came_first(order: list[tuple[str, ...]]) -> None:
    assert agree([replace(PLAIN, classes=each) for each in order]).classes == (
        "9",
        "10",
        "a",
        "b",
        "c",
    )


# What does not go together.


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"shape": (5,)}, r"features of shape \(5,\) here, \(4,\) elsewhere"),
        ({"shape": (2, 2)}, "features of shape"),
        ({"stored": "uint8"}, "features stored as uint8 here, float32 elsewhere"),
        ({"scale": 0.5}, "features scaled by 0.5 here"),
        ({"values": True}, "targets that are numbers: True here"),
        ({"parity": True}, "classes that are even or odd: True here"),
        ({"features": Moments(np.zeros(4), np.ones(4))}, "features are standardised"),
    ],
)
def test_data_that_do_not_go_together(other: dict[str, Any], reason: str) -> None:
    with pytest.raises(
        UserError, match=reason.replace("elsewhere", "at another").replace("here", "at one")
    ):
        agree([PLAIN, replace(PLAIN, **other)])
    with pytest.raises(PeerError, match=reason):
        TASK.admit(replace(PLAIN, **other))


TASK = Task("svm", 4, 5, 0, {}, "none", 10, replace(PLAIN, sizes=()), Request())


def test_a_node_that_fits_is_admitted() -> None:
    TASK.admit(PLAIN)
    TASK.admit(
        replace(PLAIN, classes=("b",), sizes=(5, 4))
    )  # the last of which are no whole mini-batch
    replace(TASK, batch=None).admit(replace(PLAIN, sizes=(1,)))


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"classes": ("b", "c")}, "its class 'c' is not one of a, b"),
    ],
)
def test_a_node_that_does_not_fit_is_not(other: dict[str, Any], reason: str) -> None:
    with pytest.raises(PeerError, match=reason):
        TASK.admit(replace(PLAIN, **other))


# A dataset without samples.


def test_a_model_can_be_built_from_what_is_agreed_on() -> None:
    samples = SamplesDescription(
        (), (1, 2, 2), "uint8", 1 / 255, ("a", "b", "c"), parity=True
    )
    empty = samples.empty()
    assert (empty.features, empty.shape, empty.classes, len(empty.train)) == (
        4,
        (1, 2, 2),
        ("a", "b", "c"),
        0,
    )
    assert (str(empty.train.x.dtype), empty.scale, empty.parity) == ("uint8", 1 / 255, True)
    assert bits(SamplesDescription((), (4,)).empty().shape) == bits(())


# Tables.


def named(
    columns: dict[str, list[Any]], impute: Any = None, **other: Any
) -> SamplesDescription:
    """What a node with this table tells."""
    size = len(next(iter(columns.values())))
    values = {
        name: TextColumn.of(cells)
        if isinstance(cells[0], str)
        else np.array(cells, np.float64)
        for name, cells in columns.items()
    }
    table = RawTable("t", values, "y", np.zeros(size), np.arange(size))
    told = TableDescription.of(table, impute)
    return SamplesDescription(
        (size,), (len(columns),), "float64", classes=("a", "b"), table=told, **other
    )


NORTH = named({"age": [20.0, 40.0], "sex": ["f", "m"]})


def told_otherwise(**other: Any) -> SamplesDescription:
    assert NORTH.table is not None
    return replace(NORTH, table=replace(NORTH.table, **other))


def test_all_make_the_same_features_of_their_columns() -> None:
    found = agree([NORTH, named({"sex": ["f", "x"], "age": [60.0, 80.0]})])
    assert found.layout is not None
    assert found.layout.feature_names == ("age", "sex=f", "sex=m", "sex=x")
    assert (found.shape, found.table) == ((4,), None)
    assert found.features is not None
    np.testing.assert_allclose(found.features.mean, [50, 0.5, 0.25, 0.25])
    assert found.empty().layout == found.layout
    assert found.empty().features == 4


def test_errors_have_the_names_of_nodes() -> None:
    with pytest.raises(UserError, match=r"do not match: .* ward-2 has no column sex"):
        agree([NORTH, named({"age": [1.0, 2.0]})], ["ward-1", "ward-2"])


def test_classes_that_are_given_are_all_in_their_order() -> None:
    assert agree([PLAIN, PLAIN], classes=("c", "b", "a")).classes == ("c", "b", "a")


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (
            PLAIN,
            r"arrays here, and columns with names \(of a .csv or a DataFrame\) elsewhere",
        ),
        (named({"age": [1.0]}), "it has no column sex; the columns are age, sex"),
        (
            named({"age": [1.0], "sex": ["f"], "bmi": [2.0]}),
            r"it has the unknown column bmi \(--drop\)",
        ),
        (
            named({"age": ["old"], "sex": ["f"]}),
            "its column age is a category, but elsewhere it has numbers",
        ),
        (
            named({"age": [1.0], "sex": [2.0]}),
            "its column sex is a number, but elsewhere it has categories",
        ),
        (
            named({"age": [1.0, np.nan], "sex": ["f", "m"]}, "mean"),
            "its column age has missing values, but the first nodes",
        ),
        (told_otherwise(target="z"), "its target is z, but the others' is y"),
        (told_otherwise(standardise=False), "features are standardised elsewhere"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_later_on(
    other: SamplesDescription, reason: str
) -> None:
    late = replace(TASK, samples=agree([NORTH, NORTH]), batch=None)
    late.admit(
        named({"sex": ["m", "x"], "age": [5.0, 6.0]})
    )  # a new category is 0 in all features
    with pytest.raises(PeerError, match=reason):
        late.admit(other)
