"""What a node holds."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from fedbudget.errors import UserError
from fedbudget.launch.node_data import from_dataset, from_file
from fedbudget.launch.simulate import simulate
from fedbudget.settings import Settings

TRIAL = Settings(nodes=5, partition="case:4", seed=3)


def write(path: Path, rows: list[tuple[float, float, str]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("a", "b", "kind"), *rows])
    return path


ONE = [(float(i), 10.0 * i, "red" if i % 2 else "blue") for i in range(12)]


class TestHeldOfADataset:
    @pytest.mark.parametrize(("shard", "nodes"), [("1/5", [0]), ("5/5", [4]), ("2-4/5", [1, 2, 3])])
    def test_are_the_rows_that_nodes_of_one_process_would_have(self, shard: str, nodes: list[int]) -> None:
        whole, held = simulate(TRIAL).shards, from_dataset(replace(TRIAL, nodes=None), shard)
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

    def test_what_its_function_raises_is_said(self, tmp_path: Path) -> None:
        (tmp_path / "broken_ward.py").write_text("def samples():\n    raise OSError('no disk')\n")
        with pytest.raises(UserError, match=r"broken_ward\.py:samples gives no samples: OSError: no disk"):
            from_file(tmp_path / "broken_ward.py:samples")


def test_a_model_in_a_file_that_data_do_not_fit_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "net_of_five.py").write_text("from torch import nn\ndef net(): return nn.Linear(5, 2)\n")
    for method in ("frugal", "centralized"):
        with pytest.raises(UserError, match=r"^linear cannot train on digits: RuntimeError: mat1 and mat2 shapes"):
            simulate(replace(TRIAL, model=f"{tmp_path}/net_of_five.py:net", method=method))
