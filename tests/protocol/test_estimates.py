"""ρ̂, β̂ and δ̂ of a round, by hand, and from parameters instead of gradients."""

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from fedbudget.budget.control import AdaptiveTau, Estimates, FixedTau
from fedbudget.protocol.aggregator import Aggregator, Round
from fedbudget.protocol.messages import Report
from support.fleets import sorted_parts, together
from support.hand_made import FIRST, ONE, go_on, last, make, report
from support.problems import converse, problem


class TestEstimates:
    def second(self, estimates: tuple[float, float, float]) -> Aggregator:
        """After two rounds, the second with estimates."""
        aggregator = make(1000, controller=AdaptiveTau())
        broadcast = go_on(aggregator.receive(report(aggregator.start(), 1), ONE))
        aggregator.receive(report(broadcast, 1, estimates=estimates), ONE)
        return aggregator

    def third(self, aggregator: Aggregator, reported: Report) -> Round:
        aggregator.receive(replace(reported, round=3), ONE)
        return last(aggregator)

    def test_the_first_round_has_none(self) -> None:
        aggregator = make(1000, controller=AdaptiveTau())
        broadcast = go_on(aggregator.receive(report(aggregator.start(), 1), ONE))
        assert last(aggregator).estimates is None
        assert (broadcast.tau, broadcast.request.estimate) == (1, True)

    def test_are_weighted_by_the_sizes_of_shards(self) -> None:
        aggregator = make(1000, controller=AdaptiveTau())
        broadcast = go_on(aggregator.receive(report(aggregator.start(), 1), ONE))
        uneven = replace(
            report(broadcast, 1),
            sizes=np.array([30, 10]),
            rho=np.array([1.0, 5.0]),
            beta=np.array([2.0, 6.0]),
            gradients=np.array([[0, 4], [0, 0]], np.float32),
        )
        aggregator.receive(uneven, ONE)
        # The mean gradient is (0, 3), from which the nodes are 1 and 3 away: (30·1 +
        # 10·3)/40.
        assert last(aggregator).estimates == Estimates(2.0, 3.0, 1.5)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, 1e13, -1.0])
    @pytest.mark.parametrize("name", ["rho", "beta"])
    def test_that_are_no_sane_numbers_stay_what_they_were(
        self, name: str, bad: float
    ) -> None:
        aggregator = self.second((1.0, 2.0, 3.0))
        fresh = report(replace(FIRST, round=3), 1, estimates=(4.0, 5.0, 6.0))
        record = self.third(aggregator, replace(fresh, **{name: np.array([bad, bad])}))  # type: ignore[arg-type]
        assert record.kept == (name,)
        assert record.estimates == replace(
            Estimates(4.0, 5.0, 6.0), **{name: {"rho": 1.0, "beta": 2.0}[name]}
        )

    def test_of_gradients_that_are_not_finite_stay_what_they_were_without_a_warning(
        self,
    ) -> None:
        aggregator = self.second((1.0, 2.0, 3.0))
        record = self.third(
            aggregator, report(replace(FIRST, round=3), 1, estimates=(4.0, 5.0, np.inf))
        )
        assert record.kept == ("delta",)
        assert record.estimates == Estimates(4.0, 5.0, 3.0)

    def test_of_gradients_that_are_far_too_large_stay_what_they_were(self) -> None:
        aggregator = self.second((1.0, 2.0, 3.0))
        record = self.third(
            aggregator, report(replace(FIRST, round=3), 1, estimates=(4.0, 5.0, 3e38))
        )
        assert record.kept == ("delta",)

    def test_wait_for_the_first_round_that_gives_all_three(self) -> None:
        aggregator = self.second((np.nan, 2.0, 3.0))
        assert last(aggregator).estimates is None
        assert last(aggregator).kept == ("rho",)
        record = self.third(
            aggregator, report(replace(FIRST, round=3), 1, estimates=(4.0, 5.0, 6.0))
        )
        assert record.estimates == Estimates(4.0, 5.0, 6.0)

    def test_leave_out_the_nodes_that_are_left_out_of_the_average(self) -> None:
        aggregator = self.second((1.0, 2.0, 3.0))
        fresh = report(replace(FIRST, round=3), 1, estimates=(4.0, 5.0, 6.0))
        w = np.array([[1, 1], [np.nan, 1]], np.float32)
        record = self.third(aggregator, replace(fresh, w=w, rho=np.array([7.0, np.nan])))
        assert record.estimates == Estimates(7.0, 5.0, 0.0)
        assert record.kept == ()

    def test_that_are_not_asked_for_are_not_looked_at(self) -> None:
        aggregator = make(1000)
        broadcast = aggregator.start()
        assert broadcast.request.estimate is False
        aggregator.receive(report(broadcast, 1, estimates=(1.0, 2.0, 3.0)), ONE)
        assert last(aggregator).estimates is None


@pytest.mark.parametrize("batch", [None, 5])
def test_with_one_update_delta_from_parameters_is_the_papers(batch: int | None) -> None:
    case = problem("svm", 8)
    parts = sorted_parts(case, 4)
    found = {}
    for delta in ("gradient", "parameters"):
        rounds = converse(
            [together(case, parts, batch)],
            FixedTau1(),
            eta=0.1,
            rounds=6,
            w=case.start(1),
            delta=delta,
        )
        found[delta] = [
            aggregator.last.estimates
            for _, _, aggregator in rounds
            if aggregator.last is not None
        ]
    for paper, ours in zip(found["gradient"][1:], found["parameters"][1:], strict=True):
        assert paper is not None
        assert ours is not None
        assert (ours.rho, ours.beta) == (paper.rho, paper.beta)
        assert ours.delta == pytest.approx(paper.delta, rel=1e-4)


class FixedTau1(FixedTau):
    """τ=1, with estimates."""

    estimates: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__(1)


def test_no_gradient_is_sent_when_delta_comes_from_parameters() -> None:
    case = problem("svm", 8)
    sizes = {}
    for delta in ("gradient", "parameters"):
        request = converse(
            [together(case, sorted_parts(case, 4))],
            AdaptiveTau(),
            eta=0.1,
            rounds=3,
            w=case.start(1),
            delta=delta,
        )
        sizes[delta] = [report.wire_bytes for _, report, _ in request]
    assert [a - b for a, b in zip(sizes["gradient"], sizes["parameters"], strict=True)] == [
        0,  # there is nothing to estimate from
        4 * 4 * 5,  # four nodes, five float32
        4 * 4 * 5,
        0,  # the final loss
    ]
