"""Adaptive τ against fixed τ: regret by hand, means of separate runs, and loss bounds."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fedbudget
from fedbudget.errors import UserError
from fedbudget.experiments.compare import CaseComparison, MeanResult, compare
from fedbudget.launch.execute import execute
from fedbudget.launch.simulate import simulate
from fedbudget.settings.settings import Settings
from fedbudget.settings.types import MethodName, Tau

pytestmark = pytest.mark.usefixtures("one_numba_thread")

FIXED = (MeanResult(1, 0.9, 0.5), MeanResult(10, 0.4, 0.8), MeanResult(100, 0.6, 0.7))


class TestRegret:
    @pytest.mark.parametrize(
        ("loss", "regret"),
        [(0.4, 0.0), (0.45, 0.1), (0.9, 1.0), (0.35, -0.1)],
    )
    def test_regret_by_hand(self, loss: float, regret: float) -> None:
        """Best and worst fixed τ differ by 0.5."""
        assert CaseComparison(
            2, MeanResult(33.0, loss, 0.8), FIXED
        ).regret == pytest.approx(regret)

    def test_equal_losses_have_no_regret(self) -> None:
        same = (MeanResult(1, 0.5, None), MeanResult(10, 0.5, None))
        assert CaseComparison(3, MeanResult(33.0, 0.4, None), same).regret is None

    def test_json_form(self) -> None:
        result = CaseComparison(2, MeanResult(33.0, 0.45, 0.75), FIXED).to_json()
        assert json.loads(json.dumps(result)) == {
            "case": 2,
            "adaptive": {"loss": 0.45, "accuracy": 0.75, "average_tau": 33.0},
            "fixed": [
                {"tau": 1, "loss": 0.9, "accuracy": 0.5},
                {"tau": 10, "loss": 0.4, "accuracy": 0.8},
                {"tau": 100, "loss": 0.6, "accuracy": 0.7},
            ],
            "regret": pytest.approx(0.1),
        }


def test_means_equal_separate_runs() -> None:
    budget = ("time=3s",)
    seeds = [3, 4]
    (result,) = compare(
        Settings(model="svm", budget=budget, nodes=4), cases=[2], taus=[1, 10], seeds=seeds
    )
    options: dict[str, Any] = {"model": "svm", "case": 2, "nodes": 4}
    methods: dict[Tau, MethodName] = {"adaptive": "accelerated", 1: "paper", 10: "paper"}
    by_tau: dict[int | str, list[fedbudget.Result]] = {
        tau: [
            fedbudget.train(**options, budget=budget, tau=tau, seed=seed, method=method)
            for seed in seeds
        ]
        for tau, method in methods.items()
    }

    def mean(tau: int | str, name: str) -> float:
        return float(np.mean([getattr(result, name) for result in by_tau[tau]]))

    assert result.adaptive.loss == pytest.approx(mean("adaptive", "loss"))
    assert result.adaptive.accuracy == pytest.approx(mean("adaptive", "accuracy"))
    assert result.adaptive.tau == pytest.approx(mean("adaptive", "average_tau"))
    assert [each.tau for each in result.fixed] == [1, 10]
    assert [each.loss for each in result.fixed] == pytest.approx(
        [mean(1, "loss"), mean(10, "loss")]
    )
    assert [each.accuracy for each in result.fixed] == pytest.approx(
        [mean(1, "accuracy"), mean(10, "accuracy")]
    )


def test_progress_counts_every_run() -> None:
    calls: list[tuple[int, int]] = []
    compare(
        Settings(model="svm", budget=("time=1s",)),
        cases=[1, 2],
        taus=[5],
        seeds=[0],
        progress=lambda done, of: calls.append((done, of)),
    )
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_nothing_to_compare_is_refused() -> None:
    for cases, taus, seeds in (([], [1], [0]), ([1], [], [0]), ([1], [1], [])):
        with pytest.raises(UserError, match="at least one case, one tau and one seed"):
            compare(Settings(), cases=cases, taus=taus, seeds=seeds)


@pytest.mark.slow
def test_adaptive_tau_has_small_regret() -> None:
    """The regret is at most 0.05 in all cases with φ = 0.025, although the best fixed τ
    differs between cases.
    """
    result = compare(
        Settings(
            model="svm",
            dataset="digits",
            nodes=5,
            budget=("time=15s",),
            method="paper",
            phi=0.025,
        ),
        cases=[1, 2, 3, 4],
        taus=[1, 2, 3, 5, 7, 10, 20, 30, 50, 70, 100],
        seeds=range(5),
    )
    regrets = {case.case: case.regret for case in result}
    assert all(regret is not None and regret <= 0.05 for regret in regrets.values()), (
        regrets
    )
    average = {case.case: case.adaptive.tau for case in result}
    assert average[1] > 2 * average[2]  # similar shards need fewer aggregations
    # Values of an independent implementation.
    assert [average[2], average[3], average[4]] == pytest.approx([16, 98, 10], rel=0.25)
    assert len({case.best.tau for case in result}) > 1


def test_frugal_loss_on_different_data() -> None:
    """The loss is at most 0.2455 with uniform data and 0.2475 with different data. Every
    fixed τ ends above 0.25 with different data.
    """
    result = compare(
        Settings(
            model="svm", dataset="digits", nodes=5, budget=("time=15s",), method="frugal"
        ),
        cases=[1, 2, 4],
        taus=[5, 10, 20],
        seeds=range(5),
    )
    losses = {case.case: case.adaptive.loss for case in result}
    assert losses[1] <= 0.2455
    assert max(losses[2], losses[4]) <= 0.2475
    assert all(case.best.loss > 0.25 for case in result if case.case != 1)


def test_frugal_loss_with_absent_nodes() -> None:
    settings = Settings(model="svm", nodes=10, partition="case:2", method="frugal")
    losses = {
        share: np.mean(
            [
                execute(simulate(replace(settings, participation=share, seed=seed))).loss
                for seed in range(3)
            ]
        )
        for share in (1.0, 0.5)
    }
    assert losses[0.5] == pytest.approx(losses[1.0], abs=0.003)
