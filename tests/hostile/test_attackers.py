"""Two attackers of ten who know the honest updates, against the default of `serve`.

    python -m hostile.test_attackers CASE RULE SEEDS

prints the accuracy of each attack: the figures of docs/research/robustness.md.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist, fmean
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from fedbudget import train
from fedbudget.arrays import Float64
from fedbudget.engines.in_process import Attack
from fedbudget.protocol.messages import Broadcast, Report

NODES = 10
ATTACKERS = 2
LOSS = 0.03  # of accuracy

Lie = Callable[[Float64], Float64]
"""Return the update of the attackers from the updates of the honest nodes."""


def alie(honest: Float64) -> Float64:
    """A little is enough (Baruch et al., NeurIPS 2019)."""
    supporters = NODES // 2 + 1 - ATTACKERS
    share = (len(honest) - supporters) / len(honest)
    away = NormalDist().inv_cdf(share)
    return np.asarray(honest.mean(axis=0) - away * honest.std(axis=0))


def min_max(honest: Float64) -> Float64:
    """As far as no honest update is from another (Shejwalkar and Houmansadr, NDSS 2021)."""
    between = np.square(honest[:, None] - honest[None]).sum(axis=2).max()
    low, high = 0.0, 50.0
    for _ in range(30):
        scale = (low + high) / 2
        update = honest.mean(axis=0) - scale * honest.std(axis=0)
        if np.square(update - honest).sum(axis=1).max() <= between:
            low = scale
        else:
            high = scale
    return np.asarray(honest.mean(axis=0) - low * honest.std(axis=0))


def inner_product(factor: float) -> Lie:
    """The opposite of the honest mean (Xie et al., UAI 2019)."""
    return lambda honest: np.asarray(-factor * honest.mean(axis=0))


LIES = {
    "ALIE": alie,
    "min-max": min_max,
    "inner product, half as long": inner_product(0.5),
    "inner product, twice as long": inner_product(2.0),
}


def attacked(lie: Lie, attack: Attack, report: Report, broadcast: Broadcast) -> Report:
    """Return the report with the w_i of attackers replaced."""
    lying = report.nodes >= attack.first
    if "w" not in report.vectors or not lying.any():
        return report
    changed = report.vectors["w"].copy()
    update = lie((changed[~lying] - broadcast.w).astype(np.float64))
    changed[lying] = broadcast.w + update
    return replace(report, vectors={**report.vectors, "w": changed})


def accuracy(lie: Lie | None, *, case: int, rule: Any, seed: int) -> float:
    settings: dict[str, Any] = {
        "model": "softmax",
        "nodes": NODES,
        "case": case,
        "budget": "time=30s",
        "combine": rule,
        "seed": seed,
    }
    if lie is None:
        found = train(**settings)
    else:
        known = lie
        with patch.object(Attack, "on", lambda *given: attacked(known, *given)):
            found = train(attack="scale", attackers=ATTACKERS, **settings)
    assert found.accuracy is not None
    return found.accuracy


def mean_accuracy(lie: Lie | None, case: int, rule: str, seeds: int) -> float:
    return fmean(accuracy(lie, case=case, rule=rule, seed=each) for each in range(seeds))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ALIE", "min-max"])
def test_default_withstands_similar_updates(name: str) -> None:
    """Case 1. An inner product attack costs more than `LOSS`, see docs/research."""
    before = mean_accuracy(None, 1, "clipped", 3)
    assert mean_accuracy(LIES[name], 1, "clipped", 3) > before - LOSS


if __name__ == "__main__":
    of_case, of_rule, count = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    for text, own in (("no attack", None), *LIES.items()):
        print(text, f"{mean_accuracy(own, of_case, of_rule, count):.3f}", flush=True)
