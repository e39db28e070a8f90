"""Adaptive τ against fixed τ: the regret by hand, the means by separate runs, and what the
method promises.
"""

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
        [
            (0.4, 0.0),
            (0.45, 0.1),
            (0.9, 1.0),
            (0.35, -0.1),
        ],  # of a spread of 0.5 between best and worst
    )
    def test_is_the_share_of_what_the_worst_fixed_tau_would_lose(
        self, loss: float, regret: float
    ) -> None:
        assert CaseComparison(
            2, MeanResult(33.0, loss, 0.8), FIXED
        ).regret == pytest.approx(regret)

    def test_has_no_meaning_where_all_fixed_taus_are_equally_good(self) -> None:
        same = (MeanResult(1, 0.5, None), MeanResult(10, 0.5, None))
        assert CaseComparison(3, MeanResult(33.0, 0.4, None), same).regret is None

    def test_as_json_has_the_keys_that_were_promised(self) -> None:
        found = CaseComparison(2, MeanResult(33.0, 0.45, 0.75), FIXED).to_json()
        assert json.loads(json.dumps(found)) == {
            "case": 2,
            "adaptive": {"loss": 0.45, "accuracy": 0.75, "average_tau": 33.0},
            "fixed": [
                {"tau": 1, "loss": 0.9, "accuracy": 0.5},
                {"tau": 10, "loss": 0.4, "accuracy": 0.8},
                {"tau": 100, "loss": 0.6, "accuracy": 0.7},
            ],
            "regret": pytest.approx(0.1),
        }


def test_figures_are_the_means_of_separate_runs() -> None:
    budget, seeds = ("time=3s",), [3, 4]
    (found,) = compare(
        Settings(model="svm", budget=budget, nodes=4), cases=[2], taus=[1, 10], seeds=seeds
    )
    asked: dict[str, Any] = {"model": "svm", "case": 2, "nodes": 4}
    methods: dict[Tau, MethodName] = {"adaptive": "accelerated", 1: "paper", 10: "paper"}
    by_tau: dict[int | str, list[fedbudget.Result]] = {
        tau: [
            fedbudget.train(**asked, budget=budget, tau=tau, seed=seed, method=method)
            for seed in seeds
        ]
        for tau, method in methods.items()
    }

    def mean(tau: int | str, name: str) -> float:
        return float(np.mean([getattr(result, name) for result in by_tau[tau]]))

    assert found.adaptive.loss == pytest.approx(mean("adaptive", "loss"))
    assert found.adaptive.accuracy == pytest.approx(mean("adaptive", "accuracy"))
    assert found.adaptive.tau == pytest.approx(mean("adaptive", "average_tau"))
    assert [each.tau for each in found.fixed] == [1, 10]
    assert [each.loss for each in found.fixed] == pytest.approx(
        [mean(1, "loss"), mean(10, "loss")]
    )
    assert [each.accuracy for each in found.fixed] == pytest.approx(
        [mean(1, "accuracy"), mean(10, "accuracy")]
    )


def test_progress_counts_every_run() -> None:
    seen: list[tuple[int, int]] = []
    compare(
        Settings(model="svm", budget=("time=1s",)),
        cases=[1, 2],
        taus=[5],
        seeds=[0],
        progress=lambda done, of: seen.append((done, of)),
    )
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_nothing_to_compare_is_refused() -> None:
    for cases, taus, seeds in (([], [1], [0]), ([1], [], [0]), ([1], [1], [])):
        with pytest.raises(UserError, match="at least one case, one tau and one seed"):
            compare(Settings(), cases=cases, taus=taus, seeds=seeds)


@pytest.mark.slow
def test_with_one_phi_adaptive_tau_is_as_good_as_the_best_fixed_tau_in_every_case() -> None:
    """A regret of at most 0.05, with φ = 0.025 in all cases; the best fixed τ itself is
    another one in each.
    """
    found = compare(
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
    regrets = {case.case: case.regret for case in found}
    assert all(regret is not None and regret <= 0.05 for regret in regrets.values()), (
        regrets
    )
    average = {case.case: case.adaptive.tau for case in found}
    assert (
        average[1] > 2 * average[2]
    )  # the more alike the shards, the fewer aggregations are needed
    assert [average[2], average[3], average[4]] == pytest.approx(
        [16, 98, 10], rel=0.25
    )  # of a plain implementation
    assert len({case.best.tau for case in found}) > 1


def test_past_the_paper_other_kinds_of_data_cost_next_to_nothing() -> None:
    """Loss of at most 0.2455 with uniform data and 0.2475 with data of different kinds; no
    fixed τ comes near.
    """
    found = compare(
        Settings(
            model="svm", dataset="digits", nodes=5, budget=("time=15s",), method="frugal"
        ),
        cases=[1, 2, 4],
        taus=[5, 10, 20],
        seeds=range(5),
    )
    losses = {case.case: case.adaptive.loss for case in found}
    assert losses[1] <= 0.2455
    assert max(losses[2], losses[4]) <= 0.2475
    assert all(case.best.loss > 0.25 for case in found if case.case != 1)


def test_nodes_that_miss_half_of_the_rounds_cost_next_to_nothing_either() -> None:
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
