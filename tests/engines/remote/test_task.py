"""Agreement on a task: one description for all nodes, and refusal of data that do not
match.
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
from fedbudget.protocol.messages import PeerError
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
def test_combined_moments_equal_all_rows(seed: int, sizes: list[int], apart: float) -> None:
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


def test_constant_columns_are_not_scaled() -> None:
    rows = np.array([[5.0, 1.0], [5.0, 3.0]])
    how = standardised(rows).standardization
    assert how is not None
    assert (how.mean.tolist(), how.deviation.tolist()) == ([5.0, 2.0], [1.0, 1.0])


def test_standardisation_covers_all_rows() -> None:
    result = agree(
        [
            standardised(np.array([[0.0], [2.0]])),
            standardised(np.array([[4.0], [6.0], [8.0], [10.0]])),
        ]
    )
    assert result.features is not None
    np.testing.assert_allclose(result.features.mean, [5.0])  # (0 + 2 + 4 + 6 + 8 + 10) / 6
    # The mean of 25, 9, 1, 1, 9, 25 is 35/3.
    np.testing.assert_allclose(result.features.deviation, [np.sqrt(35 / 3)])
    assert result.sizes == ()


def test_target_is_standardised_too() -> None:
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
def test_classes_are_the_union(
    given_by_nodes: list[tuple[str, ...]], agreed: tuple[str, ...]
) -> None:
    assert (
        agree([replace(PLAIN, classes=classes) for classes in given_by_nodes]).classes
        == agreed
    )


@settings(deadline=None)
@given(st.permutations([("a", "c"), ("b",), ("10", "9"), ("c", "b")]))
def test_class_order_ignores_joining_order(order: list[tuple[str, ...]]) -> None:
    assert agree([replace(PLAIN, classes=each) for each in order]).classes == (
        "9",
        "10",
        "a",
        "b",
        "c",
    )


# Data that do not match.


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
def test_mismatched_data_are_refused(other: dict[str, Any], reason: str) -> None:
    with pytest.raises(
        UserError, match=reason.replace("elsewhere", "at another").replace("here", "at one")
    ):
        agree([PLAIN, replace(PLAIN, **other)])
    with pytest.raises(PeerError, match=reason):
        TASK.admit(replace(PLAIN, **other))


TASK = Task("svm", 4, 5, 0, {}, "none", 10, replace(PLAIN, sizes=()), ())


def test_matching_node_is_admitted() -> None:
    TASK.admit(PLAIN)
    # 4 samples are less than a mini-batch.
    TASK.admit(replace(PLAIN, classes=("b",), sizes=(5, 4)))
    replace(TASK, batch=None).admit(replace(PLAIN, sizes=(1,)))


def test_unknown_class_is_refused() -> None:
    with pytest.raises(PeerError, match="its class 'c' is not one of a, b"):
        TASK.admit(replace(PLAIN, classes=("b", "c")))


# Empty datasets.


def test_agreement_yields_empty_dataset() -> None:
    """It suffices to build a model."""
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


def table_samples(
    columns: dict[str, list[Any]], impute: Any = None, **other: Any
) -> SamplesDescription:
    """The description that a node with this table sends."""
    size = len(next(iter(columns.values())))
    values = {
        name: TextColumn.of(cells)
        if isinstance(cells[0], str)
        else np.array(cells, np.float64)
        for name, cells in columns.items()
    }
    table = RawTable("t", values, "y", np.zeros(size), np.arange(size))
    description = TableDescription.of(table, impute)
    return SamplesDescription(
        (size,), (len(columns),), "float64", classes=("a", "b"), table=description, **other
    )


NORTH = table_samples({"age": [20.0, 40.0], "sex": ["f", "m"]})


def changed_table(**other: Any) -> SamplesDescription:
    assert NORTH.table is not None
    return replace(NORTH, table=replace(NORTH.table, **other))


def test_tables_share_one_layout() -> None:
    result = agree([NORTH, table_samples({"sex": ["f", "x"], "age": [60.0, 80.0]})])
    assert result.layout is not None
    assert result.layout.feature_names == ("age", "sex=f", "sex=m", "sex=x")
    assert (result.shape, result.table) == ((4,), None)
    assert result.features is not None
    np.testing.assert_allclose(result.features.mean, [50, 0.5, 0.25, 0.25])
    assert result.empty().layout == result.layout
    assert result.empty().features == 4


def test_errors_name_the_nodes() -> None:
    with pytest.raises(UserError, match=r"do not match: .* ward-2 has no column sex"):
        agree([NORTH, table_samples({"age": [1.0, 2.0]})], ["ward-1", "ward-2"])


def test_given_classes_keep_their_order() -> None:
    assert agree([PLAIN, PLAIN], classes=("c", "b", "a")).classes == ("c", "b", "a")


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (
            PLAIN,
            r"arrays here, and columns with names \(of a .csv or a DataFrame\) elsewhere",
        ),
        (table_samples({"age": [1.0]}), "it has no column sex; the columns are age, sex"),
        (
            table_samples({"age": [1.0], "sex": ["f"], "bmi": [2.0]}),
            r"it has the unknown column bmi \(--drop\)",
        ),
        (
            table_samples({"age": ["old"], "sex": ["f"]}),
            "its column age is a category, but elsewhere it has numbers",
        ),
        (
            table_samples({"age": [1.0], "sex": [2.0]}),
            "its column sex is a number, but elsewhere it has categories",
        ),
        (
            table_samples({"age": [1.0, np.nan], "sex": ["f", "m"]}, "mean"),
            "its column age has missing values, but the first nodes",
        ),
        (changed_table(target="z"), "its target is z, but the others' is y"),
        (changed_table(standardise=False), "features are standardised elsewhere"),
    ],
)
def test_mismatched_late_tables_are_refused(other: SamplesDescription, reason: str) -> None:
    late = replace(TASK, samples=agree([NORTH, NORTH]), batch=None)
    # A new category is 0 in all features.
    late.admit(table_samples({"sex": ["m", "x"], "age": [5.0, 6.0]}))
    with pytest.raises(PeerError, match=reason):
        late.admit(other)
