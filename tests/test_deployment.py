"""What a node holds, what is tested on, and what a run that goes on must not change."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedbudget.agreement import table_to_test_on
from fedbudget.deployment import Listening, from_dataset, from_file, same_settings, samples_to_test_on, serving
from fedbudget.engines.network.task import agree
from fedbudget.errors import UserError
from fedbudget.models import Softmax
from fedbudget.plan import prepare
from fedbudget.runs.settings import Settings

TRIAL = Settings(nodes=5, partition="case:4", seed=3)


def write(path: Path, rows: list[tuple[float, float, str]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("a", "b", "kind"), *rows])
    return path


ONE = [(float(i), 10.0 * i, "red" if i % 2 else "blue") for i in range(12)]
OTHER = [(100.0 + i, 3.0 - i, "green" if i % 3 else "blue") for i in range(15)]


class TestHeldOfADataset:
    @pytest.mark.parametrize(("shard", "nodes"), [("1/5", [0]), ("5/5", [4]), ("2-4/5", [1, 2, 3])])
    def test_are_the_rows_that_nodes_of_one_process_would_have(self, shard: str, nodes: list[int]) -> None:
        whole, held = prepare(TRIAL).fleet.shards, from_dataset(replace(TRIAL, nodes=None), shard)
        assert [rows.tolist() for rows in held.rows] == [whole.rows_of(node).tolist() for node in nodes]

    @pytest.mark.parametrize("shard", ["", "2", "a/5", "0/5", "6/5", "3-2/5", "1-6/5", "1/0", "-1/5"])
    def test_a_shard_that_is_none_is_refused(self, shard: str) -> None:
        with pytest.raises(UserError, match="shard"):
            from_dataset(TRIAL, shard)


class TestHeldOfAFile:
    def test_are_all_samples_as_they_are(self, tmp_path: Path) -> None:
        held = from_file(write(tmp_path / "one.csv", ONE))
        assert held.dataset.train.x.tolist() == [[a, b] for a, b, _ in ONE]
        assert (held.dataset.classes, held.dataset.test, len(held.rows[0])) == (("blue", "red"), None, 12)

    def test_a_folder_is_of_several_nodes(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="is a folder; a node has a file of its own"):
            from_file(tmp_path)


class TestTestedOn:
    def test_has_everyones_class_numbers_and_is_standardised_as_everyones(self, tmp_path: Path) -> None:
        held = [from_file(write(tmp_path / f"{i}.csv", rows)) for i, rows in enumerate((ONE, OTHER))]
        agreed = agree([each.samples() for each in held])
        assert agreed.classes == ("blue", "green", "red")
        path = write(tmp_path / "test.csv", [(1.0, 2.0, "red"), (3.0, 4.0, "green")])
        table = table_to_test_on(samples_to_test_on(str(path), Settings()), agreed, Softmax(2, 3))
        assert table.y.tolist() == [2, 1]
        everything = np.array([[a, b] for a, b, _ in (*ONE, *OTHER)])
        expected = (np.array([[1, 2], [3, 4]]) - everything.mean(axis=0)) / everything.std(axis=0)
        assert table.x == pytest.approx(expected, rel=1e-6)

    def test_the_test_samples_of_a_dataset_are_its_own(self) -> None:
        whole = prepare(TRIAL)
        agreed = from_dataset(TRIAL, "1/5").samples()
        table = table_to_test_on(samples_to_test_on("digits", Settings()), agreed, whole.model)
        assert whole.test is not None
        assert np.array_equal(table.x, whole.test.x)
        assert np.array_equal(table.y, whole.test.y)

    def test_what_nodes_do_not_have_is_refused(self, tmp_path: Path) -> None:
        agreed = agree([from_file(write(tmp_path / "one.csv", ONE)).samples()])
        path = write(tmp_path / "test.csv", [(1.0, 2.0, "mauve"), (1.0, 2.0, "red")])
        with pytest.raises(UserError, match="has class 'mauve', which no node has"):
            table_to_test_on(samples_to_test_on(str(path), Settings()), agreed, Softmax(2, 2))
        with pytest.raises(UserError, match="has 64 features, and nodes' data 2"):
            table_to_test_on(samples_to_test_on("digits", Settings()), replace(agreed, classes=()), Softmax(2, 2))


def test_a_run_goes_on_by_its_own_settings_only() -> None:
    same_settings(Path("run"), TRIAL, replace(TRIAL))
    with pytest.raises(UserError, match="run goes on as it began: tau is adaptive there, and cannot be 5 now"):
        same_settings(Path("run"), TRIAL, replace(TRIAL, tau=5))


@pytest.mark.parametrize(
    ("settings", "listening", "said"),
    [
        (Settings(method="asynchronous"), Listening("127.0.0.1:0"), "asynchronous descent is not made over a network"),
        (Settings(), Listening("0.0.0.0:0"), "insecure"),
        (Settings(), Listening("127.0.0.1:0", cert=Path("nowhere.pem")), "key"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_listens(
    settings: Settings, listening: Listening, said: str
) -> None:
    with pytest.raises(UserError, match=said), serving(settings, listening, interrupted=lambda: False):
        pass
