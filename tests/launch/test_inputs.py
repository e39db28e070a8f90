"""Data of a node."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedbudget.engines.remote.task import agree
from fedbudget.errors import UserError
from fedbudget.launch.inputs import from_dataset, from_file, with_validation
from fedbudget.launch.simulate import simulate
from fedbudget.models.builtin import Softmax
from fedbudget.settings.settings import Settings
from support.small_tables import ONE, write

TRIAL = Settings(model="svm", nodes=5, partition="case:4", seed=3)


class TestFromDataset:
    @pytest.mark.parametrize(
        ("shard", "nodes"), [("1/5", [0]), ("5/5", [4]), ("2-4/5", [1, 2, 3])]
    )
    def test_rows_equal_simulated_shards(self, shard: str, nodes: list[int]) -> None:
        whole = simulate(TRIAL).shards
        held = from_dataset(replace(TRIAL, nodes=None), shard)
        assert [rows.tolist() for rows in held.rows] == [
            whole.rows_of(node).tolist() for node in nodes
        ]

    @pytest.mark.parametrize(
        "shard", ["", "2", "a/5", "0/5", "6/5", "3-2/5", "1-6/5", "1/0", "-1/5"]
    )
    def test_invalid_shard(self, shard: str) -> None:
        with pytest.raises(UserError, match="shard"):
            from_dataset(TRIAL, shard)


class TestFromFile:
    def test_all_samples_unchanged(self, tmp_path: Path) -> None:
        held = from_file(write(tmp_path / "one.csv", ONE))
        assert held.dataset.train.x.tolist() == [[a, b] for a, b, _ in ONE]
        assert held.dataset.classes == ("blue", "red")
        assert held.dataset.test is None
        assert len(held.rows[0]) == 12

    def test_test_share_is_held_out(self, tmp_path: Path) -> None:
        rows = [(float(i), 10.0 * i, "red" if i % 2 else "blue") for i in range(50)]
        held = from_file(write(tmp_path / "one.csv", rows), test_share=0.25)
        assert held.test is not None
        trained, tested = (
            [int(x[0]) for x in each.train.x.tolist()] for each in (held.dataset, held.test)
        )
        assert sorted(trained + tested) == list(range(50))
        assert (len(tested), len(held.rows[0]), held.samples().test_samples) == (12, 38, 12)
        assert held.test.classes == held.dataset.classes == ("blue", "red")

    def test_separate_test_file(self, tmp_path: Path) -> None:
        """Test samples use the class numbers and the standardisation of all nodes."""
        blue = [(float(i), 0.5, "blue") for i in range(10, 30)]
        other = write(tmp_path / "other.csv", [(a, b, "red") for a, b, _ in ONE])
        held = from_file(write(tmp_path / "one.csv", blue), test=str(other))
        agreed = agree([held.samples(), from_file(other).samples()])
        table = held.test_table(agreed, Softmax(2, 2))
        assert table is not None
        assert table.y.tolist() == [1.0] * 12
        features = np.array([row[:2] for row in (*blue, *ONE)])
        expected = (
            np.array([row[:2] for row in ONE]) - features.mean(axis=0)
        ) / features.std(axis=0)
        np.testing.assert_allclose(table.x, expected, rtol=1e-6)

    def test_wrong_test_options(self, tmp_path: Path) -> None:
        path = write(tmp_path / "one.csv", ONE)
        with pytest.raises(
            UserError, match=r"3 samples of one\.csv are too few to test on"
        ):
            from_file(path, test_share=0.3)
        with pytest.raises(UserError, match="give test or test_share, not both"):
            from_file(path, test_share=0.3, test=path)

    def test_folder_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="is a folder; give the file of this node"):
            from_file(tmp_path)

    def test_error_of_data_function(self, tmp_path: Path) -> None:
        (tmp_path / "broken_ward.py").write_text(
            "def samples():\n    raise OSError('no disk')\n"
        )
        with pytest.raises(
            UserError, match=r"broken_ward\.py:samples returns no samples: OSError: no disk"
        ):
            from_file(tmp_path / "broken_ward.py:samples")


def test_model_that_does_not_fit_data(tmp_path: Path) -> None:
    (tmp_path / "net_of_five.py").write_text(
        "from torch import nn\ndef net(): return nn.Linear(5, 2)\n"
    )
    for method in ("frugal", "centralized"):
        with pytest.raises(
            UserError,
            match=r"^linear cannot train on digits: .* RuntimeError: mat1 and mat2 shapes",
        ):
            simulate(replace(TRIAL, model=f"{tmp_path}/net_of_five.py:net", method=method))


def test_masked_losses_need_three_nodes() -> None:
    """With 15 % of their rows, two of four nodes would hold some out. A masked sum over two
    nodes is not wanted.
    """
    plain = Settings(model="softmax", nodes=4)
    masked = replace(plain, secure_aggregation=True)
    for sizes, share in (([5000, 5000, 60, 60], 0.0), ([5000, 5000, 90, 60], 0.15)):
        assert with_validation(plain, sizes).validation == 0.15
        assert with_validation(masked, sizes).validation == share
    assert with_validation(replace(masked, validation=0.2), [5000, 60]).validation == 0.2
