"""Samples that Flower's nodes hold back: what the model is worth on them, through both of
the real apps.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from fedbudget.errors import UserError
from fedbudget.flower import aggregate, client_app, summary
from support.flower_grid import LocalGrid, asked
from support.processes import made

SHARDS = made(2)
HOW: dict[str, Any] = {
    "seed": 3,
    "tau": 4,
    "rounds": 4,
    "budget": "time=1000s",
    "batch_size": 8,
    "model": "softmax",
}


def samples(context: Context) -> Any:
    return SHARDS[int(context.node_config["which"])]


def test_metrics_are_those_of_all_that_is_held_back(tmp_path: Path) -> None:
    config: Any = asked(**HOW, nodes=2, out=str(tmp_path / "run"))
    nodes: list[Any] = [{"which": 0, "test-share": 0.4}, {"which": 1, "test-share": 0.4}]
    result = aggregate(
        LocalGrid(config, nodes, client_app(samples)),
        Context(7, 1, {}, RecordDict(), config),
        plot=False,
    )
    right = []
    for x, y in SHARDS:
        held = np.random.default_rng(0).permutation(len(y))[: int(0.4 * len(y))]
        weights = result.w.reshape(3, -1)
        right.append(
            (x[held] @ weights[:, :-1].T + weights[:, -1]).argmax(axis=1) == y[held]
        )
    assert result.accuracy == np.mean(np.concatenate(right))
    assert result.spread["worst"] == min(map(np.mean, right))
    assert any("over 2 nodes: worst" in line for line in summary(result))


def test_a_share_that_is_none_is_refused(tmp_path: Path) -> None:
    config: Any = asked(**HOW, nodes=1, out=str(tmp_path / "run"))
    grid = LocalGrid(config, [{"which": 0, "test-share": 1.5}], client_app(samples))
    with pytest.raises(
        UserError, match=r"test-share = 1\.5 must be a number of at least 0 and below 1"
    ):
        aggregate(grid, Context(7, 1, {}, RecordDict(), config), plot=False)
