"""Data of a node: a description without samples, and training with the classes and scale of
all nodes.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedbudget.data.dataset import Dataset, Part
from fedbudget.data.files import load
from fedbudget.data.tables import TableOptions
from fedbudget.engines.remote.node_data import NodeData
from fedbudget.engines.remote.task import FEWEST, Task, agree
from fedbudget.errors import UserError
from fedbudget.launch.inputs import from_file

RNG = np.random.default_rng(0)
X = RNG.normal(5, 3, (40, 3))


def classified(rows: slice, classes: tuple[str, ...], labels: list[int]) -> NodeData:
    part = Part(X[rows].astype(np.float32), np.array(labels))
    return NodeData(Dataset("some data", part, classes=classes), [np.arange(len(labels))])


def task(node_data: list[NodeData], model: str = "softmax", parameters: int = 12) -> Task:
    samples = agree([each.samples() for each in node_data])
    return Task(model, parameters, None, 0, {}, "none", 10, samples, ())


def test_samples_description() -> None:
    part = Part(np.zeros((6, 4), np.uint8), np.zeros(6, np.int64))
    data = Dataset("d", part, classes=("x",), scale=0.5, parity=True, shape=(2, 2))
    result = NodeData(data, [np.arange(2), np.arange(2, 6)]).samples()
    assert (result.sizes, result.shape, result.stored, result.scale) == (
        (2, 4),
        (2, 2),
        "uint8",
        0.5,
    )
    assert (result.classes, result.values, result.parity) == (("x",), False, True)
    assert (result.features, result.target) == (None, None)


def test_class_numbers_are_shared() -> None:
    one, two = (
        classified(slice(0, 3), ("cat", "dog"), [0, 1, 1]),
        classified(slice(3, 6), ("ant", "cat"), [0, 1, 0]),
    )
    agreed = task([one, two])
    assert agreed.samples.classes == ("ant", "cat", "dog")
    fleets = [one.fleet(agreed, [0]), two.fleet(agreed, [1])]
    assert fleets[0].shards.table.y.tolist() == [1, 2, 2]
    assert fleets[1].shards.table.y.tolist() == [0, 1, 0]
    assert one.dataset.train.labels is not None
    # The node's own data are unchanged.
    assert one.dataset.train.labels.tolist() == [0, 1, 1]


def test_standardisation_uses_all_nodes() -> None:
    values = X @ [1.0, 2.0, 3.0] + 7
    parts = [slice(0, 15), slice(15, 40)]
    node_data = [
        NodeData(
            Dataset("d", Part(X[part], None, values[part])),
            [np.arange(len(X[part]))],
            standardise=True,
        )
        for part in parts
    ]
    agreed = task(node_data, "linear", 3)
    tables = [
        each.fleet(agreed, [number]).shards.table for number, each in enumerate(node_data)
    ]
    together = np.concatenate([table.x for table in tables])
    np.testing.assert_allclose(together, (X - X.mean(axis=0)) / X.std(axis=0), atol=1e-5)
    np.testing.assert_allclose(
        np.concatenate([table.y for table in tables]),
        (values - values.mean()) / values.std(),
        atol=1e-5,
    )


def test_moments_use_only_held_rows() -> None:
    rows = [np.arange(5), np.arange(10, 20)]
    result = NodeData(Dataset("d", Part(X)), rows, standardise=True).samples()
    held = X[[*range(5), *range(10, 20)]]
    assert result.features is not None
    np.testing.assert_allclose(result.features.mean, held.mean(axis=0))
    np.testing.assert_allclose(result.features.deviation, held.std(axis=0))


def test_moments_need_ten_samples() -> None:
    """The mean of fewer samples would reveal too much."""
    data = Dataset("d", Part(X))
    NodeData(data, [np.arange(FEWEST)], standardise=True).samples()
    with pytest.raises(UserError, match="d has 9 samples; standardisation needs 10"):
        NodeData(data, [np.arange(FEWEST - 1)], standardise=True).samples()
    assert NodeData(data, [np.arange(FEWEST - 1)]).samples().features is None


def test_parameter_count_must_match() -> None:
    one = classified(slice(0, 3), ("a", "b"), [0, 1, 1])
    with pytest.raises(
        UserError, match="has 8 parameters with some data, and 9 at the aggregator"
    ):
        one.fleet(replace(task([one]), parameters=9), [0])


def test_data_must_suit_the_task() -> None:
    one = classified(slice(0, 3), ("a", "b"), [0, 1, 1])
    with pytest.raises(UserError, match="no real-valued target"):
        one.fleet(task([one], "linear", 3), [0])


def test_gateway_holds_several_nodes() -> None:
    one = classified(slice(0, 6), ("a", "b"), [0, 1, 1, 0, 1, 0])
    gateway = replace(one, rows=[np.arange(2), np.arange(2, 6)])
    fleet = gateway.fleet(task([gateway], parameters=8), [4, 7])
    assert (fleet.numbers.tolist(), fleet.shards.size.tolist()) == ([4, 7], [2, 4])


def test_tables_match_central_encoding(tmp_path: Path) -> None:
    """The nodes differ in column order, categories and missing cells. All rows determine
    the encoding, the imputed values and the scale.
    """
    rows = [
        (RNG.normal(50, 9), RNG.choice(["f", "m"]), RNG.integers(0, 2)) for _ in range(40)
    ]
    cells = [
        ("" if n % 7 == 3 else repr(float(age)), "?" if n % 9 == 4 else sex, y)
        for n, (age, sex, y) in enumerate(rows)
    ]
    one, other = tmp_path / "one.csv", tmp_path / "other.csv"
    one.write_text("age,sex,y\n" + "".join(f"{a},{s},{y}\n" for a, s, y in cells[:15]))
    other.write_text("y,sex,age\n" + "".join(f"{y},{s},{a}\n" for a, s, y in cells[15:]))
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "1.csv").write_text(one.read_text())
    (tmp_path / "all" / "2.csv").write_text(other.read_text())
    options = TableOptions("y", impute="mean")
    nodes = [from_file(path, options) for path in (one, other)]
    agreed = task(nodes, "softmax", 8)
    tables = [
        each.fleet(agreed, [number]).shards.table for number, each in enumerate(nodes)
    ]
    whole = load(tmp_path / "all", options, test_share=0.0)
    np.testing.assert_allclose(
        np.concatenate([table.x for table in tables]), whole.train.x, atol=1e-6
    )
    assert whole.layout == agreed.samples.layout
    assert np.concatenate([table.y for table in tables]).tolist() == [
        y for _, _, y in cells
    ]


def test_unseen_categories_are_reported(tmp_path: Path) -> None:
    one, late = tmp_path / "one.csv", tmp_path / "late.csv"
    one.write_text("sex,y\n" + "f,1\nm,0\n" * 6)
    late.write_text("sex,y\n" + "f,1\nx,0\n" * 6)
    nodes = [from_file(path, TableOptions("y")) for path in (one, late)]
    agreed = task(nodes[:1], "softmax", 6).samples
    assert [each.unseen(agreed) for each in nodes] == ["", "sex x (6 rows)"]
    assert nodes[1].aligned(agreed).layout == agreed.layout
