"""Test samples, compression and privacy of a task that nodes have agreed on."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedbudget.data.schema import draft_of, read_schema
from fedbudget.data.tables import TableOptions
from fedbudget.engines.remote.node_data import evaluation_table
from fedbudget.engines.remote.task import agree
from fedbudget.errors import UserError, flag
from fedbudget.launch.inputs import dataset_to_test_on, from_dataset, from_file
from fedbudget.launch.method import build_method
from fedbudget.launch.simulate import simulate
from fedbudget.launch.task import agree_on_task, compression_of
from fedbudget.models import Softmax
from fedbudget.protocol.features.node_privacy import NodePrivacy
from fedbudget.settings.settings import Settings
from support.small_tables import ONE, write

TRIAL = Settings(model="svm", nodes=5, partition="case:4", seed=3)
OTHER = [(100.0 + i, 3.0 - i, "green" if i % 3 else "blue") for i in range(15)]


class TestEvaluationTable:
    def test_classes_and_scale_of_all_nodes(self, tmp_path: Path) -> None:
        held = [
            from_file(write(tmp_path / f"{i}.csv", rows))
            for i, rows in enumerate((ONE, OTHER))
        ]
        agreed = agree([each.samples() for each in held])
        assert agreed.classes == ("blue", "green", "red")
        path = write(tmp_path / "test.csv", [(1.0, 2.0, "red"), (3.0, 4.0, "green")])
        table = evaluation_table(
            dataset_to_test_on(str(path), Settings()), agreed, Softmax(2, 3)
        )
        assert table.y.tolist() == [2, 1]
        everything = np.array([[a, b] for a, b, _ in (*ONE, *OTHER)])
        expected = (np.array([[1, 2], [3, 4]]) - everything.mean(axis=0)) / everything.std(
            axis=0
        )
        assert table.x == pytest.approx(expected, rel=1e-6)

    def test_dataset_keeps_its_test_samples(self) -> None:
        whole = simulate(TRIAL)
        agreed = from_dataset(TRIAL, "1/5").samples()
        table = evaluation_table(
            dataset_to_test_on("digits", Settings()), agreed, whole.model
        )
        assert whole.test is not None
        assert np.array_equal(table.x, whole.test.x)
        assert np.array_equal(table.y, whole.test.y)

    def test_unknown_classes_or_features(self, tmp_path: Path) -> None:
        agreed = agree([from_file(write(tmp_path / "one.csv", ONE)).samples()])
        path = write(tmp_path / "test.csv", [(1.0, 2.0, "mauve"), (1.0, 2.0, "red")])
        with pytest.raises(UserError, match="has class 'mauve', which no node has"):
            evaluation_table(
                dataset_to_test_on(str(path), Settings()), agreed, Softmax(2, 2)
            )
        with pytest.raises(UserError, match="has 64 features, and nodes' data 2"):
            evaluation_table(
                dataset_to_test_on("digits", Settings()),
                replace(agreed, classes=()),
                Softmax(2, 2),
            )


@pytest.mark.parametrize(
    ("settings", "compress"),
    [
        (Settings(), "auto"),
        (Settings(compress="16-bit"), "16-bit"),
        (Settings(secure_aggregation=True), "none"),  # masks need all bits
        (Settings(budget=("privacy=4",)), "none"),
        (Settings(method="newton"), "none"),  # steps need exact parameters
    ],
)
def test_compression_by_default(settings: Settings, compress: str) -> None:
    assert compression_of(settings) == compress


def test_private_run_forbids_standardisation(tmp_path: Path) -> None:
    """Means of columns are not private. The error names the option to use instead."""
    settings = Settings(
        model="softmax", nodes=2, budget=("time=5s", "privacy=4"), privacy_delta=1e-5
    )
    method = build_method(settings)
    paths = [write(tmp_path / f"{i}.csv", rows) for i, rows in enumerate((ONE, OTHER))]
    with pytest.raises(UserError) as refused:
        agree_on_task(settings, method, [from_file(path).samples() for path in paths])
    assert "join with a public schema" in refused.value.spelled(flag)
    schema = tmp_path / "schema.toml"
    schema.write_text(draft_of(tmp_path, TableOptions()))
    held = [from_file(path, read_schema(schema).options) for path in paths]
    _, _, task, _ = agree_on_task(settings, method, [each.samples() for each in held])
    assert task.built_features == (NodePrivacy(own_steps=True),)


def test_derivatives_of_too_many_nodes() -> None:
    """Derivatives of svm on digits have 64 + 64 · 65 / 2 numbers for each node."""
    settings = Settings(model="svm", method="newton", combine="mean", partition="case:1")
    many = from_dataset(settings, "1-70/70").samples()
    with pytest.raises(UserError, match=r"2,144 numbers .* at most 65 nodes, not 70"):
        agree_on_task(settings, build_method(settings), [many])
    few = from_dataset(settings, "1-65/65").samples()
    _, method, task, _ = agree_on_task(settings, build_method(settings), [few])
    assert method.newton in task.built_features
