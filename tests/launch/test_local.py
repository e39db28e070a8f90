"""Node processes on this machine."""

import csv
from pathlib import Path

import pytest

from fedbudget.errors import UserError
from fedbudget.experiments.evaluate import evaluate
from fedbudget.launch.execute import execute
from fedbudget.launch.local import on_this_machine
from fedbudget.launch.prepared import Overrides
from fedbudget.models import LinearRegression
from fedbudget.runs import nodes
from fedbudget.runs.folder import Run
from fedbudget.settings.settings import Settings


def test_nodes_skip_test_samples(tmp_path: Path) -> None:
    """Node processes receive `test_share` and leave the same samples out."""
    with (tmp_path / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [("a", "b", "y"), *((i, i % 7, 2 * i) for i in range(100))]
        )
    settings = Settings(
        dataset=str(tmp_path / "table.csv"),
        model="linear",
        test_share=0.5,
        nodes=2,
        tau=1,
        rounds=1,
        batch_size="full",
    )
    with on_this_machine(settings) as prepared:
        execute(prepared, out=tmp_path / "run")
    listed = nodes.read(tmp_path / "run")
    assert prepared.train is not None
    assert prepared.test is not None
    assert listed is not None
    assert len(prepared.train) == 50
    assert len(prepared.test) == 50
    assert listed["samples"]["total"] == 50


def test_delay_counts_as_aggregation_time() -> None:
    """A delay of 0.15 s each way adds 0.3 s to an aggregation and nothing to an update."""
    settings = Settings(model="svm", nodes=2, tau=2, rounds=3, costs="measured")
    with on_this_machine(settings, paces=(1, 1), delay=0.15) as prepared:
        rounds = execute(prepared).rounds
    assert len(rounds) >= 3
    assert all(each.b["time"] >= 2 * 0.15 for each in rounds)
    assert min(each.c["time"] for each in rounds) < 0.15 / 2


def test_model_object_is_refused() -> None:
    """Node processes receive models by name."""
    with (
        pytest.raises(UserError, match="cannot receive a dataset or model object"),
        on_this_machine(Settings(), Overrides(model=LinearRegression(3))),
    ):
        pass


def test_result_has_the_agreed_class_numbers(tmp_path: Path) -> None:
    """Nodes number classes by name; this dataset numbers `malignant` before `benign`."""
    settings = Settings(
        dataset="breast-cancer", model="softmax", nodes=2, rounds=5, costs="measured"
    )
    with on_this_machine(settings) as prepared:
        result = execute(prepared, out=tmp_path / "run")
    assert prepared.dataset.classes == ("benign", "malignant")
    assert result.accuracy is not None
    assert result.accuracy > 0.9
    evaluated = evaluate(Run.open(tmp_path / "run"), "breast-cancer")
    assert evaluated.accuracy == pytest.approx(result.accuracy)
