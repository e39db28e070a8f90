"""Attackers in a simulation do what they are said to, and rules survive what they are said
to.
"""

from typing import Any

import numpy as np
import pytest

from fedbudget import train
from fedbudget.data.dataset import Dataset
from fedbudget.data.shards import Shards, Table
from fedbudget.engines.in_process import Attack, with_flipped_labels
from fedbudget.errors import UserError
from fedbudget.launch import simulate
from fedbudget.launch.inputs import distribute
from fedbudget.protocol.messages import Broadcast, Report, Request
from fedbudget.settings.settings import Settings

W = np.array([1.0, 2.0], np.float32)
UPDATES = np.array([[1, 0], [0, 1], [1, 1]], np.float32)


def attacked(name: str, number: int = 1) -> Any:
    report = Report(
        number, np.arange(3), np.full(3, 5), np.ones(3), np.ones(3), w=W + UPDATES
    )
    broadcast = Broadcast(number, W, 2, 0.1, Request(), best=False, stop=False)
    found = Attack(name, 2, seed=1).on(report, broadcast)
    assert found.w is not None
    assert (found.w[:2] - W).tolist() == UPDATES[:2].tolist()
    return found.w[2] - W


def test_what_attackers_say() -> None:
    assert attacked("sign-flip").tolist() == [-1, -1]
    assert attacked("scale").tolist() == [10, 10]
    assert attacked("label-flip").tolist() == [1, 1]
    assert np.linalg.norm(attacked("noise")) == pytest.approx(10 * 2**0.5, rel=1e-5)
    assert (
        attacked("noise").tolist()
        == attacked("noise").tolist()
        != attacked("noise", 2).tolist()
    )


def test_labels_are_flipped_for_attackers_only() -> None:
    """Two nodes that share samples, of which the second attacks."""
    table = Table(np.arange(3, dtype=np.float32)[:, None], np.array([0, 1, 2], np.float32))
    shared = np.array([0, 1, 2])
    shards = with_flipped_labels(Shards.of(table, [shared, shared]), 1)
    assert shards.table.y[shards.rows_of(0)].tolist() == [0, 1, 2]
    assert shards.table.y[shards.rows_of(1)].tolist() == [2, 1, 0]
    assert shards.table.x[shards.rows_of(1), 0].tolist() == [0, 1, 2]


HOW: Any = {"model": "softmax", "nodes": 10, "case": 1, "budget": "time=15s"}


@pytest.fixture(scope="module")
def honest() -> float:
    found = train(**HOW).accuracy
    assert found is not None
    return found


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("scale", "noise")]


@pytest.mark.parametrize("rule", ["trimmed", "median"])
@pytest.mark.parametrize("attack", ["sign-flip", "label-flip", *SLOW])
def test_two_of_ten_attack(attack: Any, rule: str, honest: float) -> None:
    """With samples spread by chance, trimming holds what the mean does not."""
    found = train(**HOW, attack=attack, attackers=2, combine=rule).accuracy
    assert found is not None
    assert found >= honest - 0.03


@pytest.mark.slow
@pytest.mark.parametrize("attack", ["sign-flip", "scale", "noise"])
def test_two_of_ten_attack_where_each_has_a_digit(
    attack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only the attackers know is lost: as good as without them, when the eight others
    are averaged.
    """
    how = {**HOW, "case": 2}
    found = train(**how, attack=attack, attackers=2, combine="trimmed").accuracy

    def without_attackers(settings: Settings, dataset: Dataset) -> Any:
        settings, rows = distribute(settings, dataset)
        return settings, rows[:-2]

    monkeypatch.setattr(simulate, "distribute", without_attackers)
    eight = train(**how).accuracy
    assert found is not None
    assert eight is not None
    assert found >= eight - 0.03


def test_what_cannot_be_attacked_is_refused() -> None:
    with pytest.raises(UserError, match="no honest node is left"):
        train(budget="time=1s", nodes=3, attack="noise", attackers=3)
    with pytest.raises(UserError, match="two or more targets"):
        train(model="kmeans", dataset="digits", budget="time=1s", attack="label-flip")
    with pytest.raises(UserError, match="attack needs engine in-process"):
        train(budget="time=1s", attack="noise", engine="network")
