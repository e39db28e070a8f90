"""Node processes on this machine."""

import csv
from pathlib import Path

import pytest

from fedbudget.errors import UserError
from fedbudget.launch.execute import execute
from fedbudget.launch.local import on_this_machine
from fedbudget.launch.prepared import Overrides
from fedbudget.models import LinearRegression
from fedbudget.runs import nodes
from fedbudget.settings.settings import Settings


def test_nodes_train_on_no_sample_that_is_held_out(tmp_path: Path) -> None:
    """What is held out is a setting, which nodes must know to leave the same samples alone."""
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
    seen = nodes.read(tmp_path / "run")
    assert prepared.train is not None
    assert prepared.test is not None
    assert seen is not None
    assert (len(prepared.train), len(prepared.test), seen["samples"]["total"]) == (
        50,
        50,
        50,
    )


def test_a_delay_is_in_the_time_of_aggregations_both_ways_and_not_in_that_of_updates() -> (
    None
):
    settings = Settings(model="svm", nodes=2, tau=2, rounds=3, costs="measured")
    with on_this_machine(settings, paces=(1, 1), delay=0.15) as prepared:
        rounds = execute(prepared).rounds
    assert len(rounds) >= 3
    assert all(each.b["time"] >= 2 * 0.15 for each in rounds)
    assert min(each.c["time"] for each in rounds) < 0.15 / 2


def test_what_has_no_name_cannot_be_told_to_nodes() -> None:
    with (
        pytest.raises(UserError, match="has none"),
        on_this_machine(Settings(), Overrides(model=LinearRegression(3))),
    ):
        pass
