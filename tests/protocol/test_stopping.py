"""When a run by the paper's method stops: the rule of Algorithm 2, and several resources."""

import numpy as np
import pytest

from fedbudget.budget.budget import Budget, Costs
from fedbudget.budget.control import FixedTau, Reason
from fedbudget.budget.spending import PaperSpending
from fedbudget.budget.step_size import FixedStep
from fedbudget.errors import UserError
from fedbudget.protocol.aggregator import Aggregator, Outcome
from fedbudget.protocol.messages import Broadcast
from fedbudget.protocol.method import Method
from fedbudget.protocol.state import Phase
from support.hand_made import (
    FIRST,
    ONE,
    ended,
    go_on,
    last,
    make,
    make_started,
    report,
    w_of,
)
from support.problems import costs

METHOD_5 = Method(FixedTau(5), FixedStep(0.1), spending=PaperSpending())


class TestStopRule:
    """With 3 updates a round costs 4s, and the final loss 2s."""

    def test_a_round_that_brings_a_resource_to_its_limit_is_the_last(self) -> None:
        aggregator = make(10)  # 4 + (4 + 2) = 10
        first = aggregator.start()
        assert (first.tau, first.stop) == (3, False)
        second = go_on(aggregator.receive(report(first, 1), ONE))
        assert (second.tau, second.stop) == (3, True)
        final = go_on(aggregator.receive(report(second, 1), ONE))
        assert (final.tau, final.stop, aggregator.state.phase) == (0, True, Phase.FINAL)
        outcome = ended(aggregator.receive(report(final, 1), ONE))
        assert outcome.stopped_by == "time"
        assert outcome.ledger.spent.tolist() == [10]
        assert outcome.ledger.overshoot.tolist() == [0]
        assert aggregator.state.phase is Phase.DONE

    @pytest.mark.parametrize(("seconds", "tau"), [(9.9, 2), (9.0, 2), (8.9, 1), (8.0, 1)])
    def test_tau_falls_to_exactly_what_fits(self, seconds: float, tau: int) -> None:
        aggregator = make(seconds)
        second = go_on(aggregator.receive(report(aggregator.start(), 1), ONE))
        assert (second.tau, second.stop) == (tau, True)
        aggregator.receive(report(second, 1), ONE)
        assert last(aggregator).reason is Reason.BUDGET

    @pytest.mark.parametrize("seconds", [7.9, 6.5])
    def test_when_no_update_fits_the_final_loss_comes_at_once(self, seconds: float) -> None:
        aggregator = make(seconds)
        final = go_on(aggregator.receive(report(aggregator.start(), 1, w=3), ONE))
        assert (final.tau, final.stop, aggregator.state.phase) == (0, True, Phase.FINAL)
        assert final.w.tolist() == w_of(3).tolist()
        outcome = ended(aggregator.receive(report(final, 0.5, best=1), ONE))
        assert outcome.w.tolist() == w_of(3).tolist()
        assert outcome.stopped_by == "time"

    def test_the_final_loss_comes_even_if_it_does_not_fit(self) -> None:
        aggregator = make(7)
        final = go_on(
            aggregator.receive(report(aggregator.start(), 1, w=3), costs([2], [0.5]))
        )
        outcome = ended(aggregator.receive(report(final, 0.5, best=1), ONE))
        assert outcome.w.tolist() == w_of(3).tolist()
        assert outcome.stopped_by == "time"
        assert outcome.ledger.spent.tolist() == [8.5]
        assert aggregator.state.phase is Phase.DONE

    def test_what_was_overspent_is_told(self) -> None:
        aggregator = make_started(7)
        final = go_on(aggregator.receive(report(FIRST, 1), costs([3], [1])))
        outcome = ended(aggregator.receive(report(final, 1), costs([3], [1])))
        assert outcome.ledger.overshoot.tolist() == [7]

    def test_even_the_first_round_may_be_lowered(self) -> None:
        broadcast = make(5).start()
        assert (broadcast.tau, broadcast.stop) == (2, True)

    def test_newest_costs_count(self) -> None:
        aggregator = make(15)
        second = go_on(aggregator.receive(report(aggregator.start(), 1), costs([2], [1])))
        assert (second.tau, second.stop) == (2, True)  # 7 spent, and (15 - 7 - 2 - 2·1) / 2

    def test_a_limit_on_rounds(self) -> None:
        aggregator = make(1000, rounds=2)
        first = aggregator.start()
        second = go_on(aggregator.receive(report(first, 1), ONE))
        assert (first.stop, second.stop) == (False, True)
        final = go_on(aggregator.receive(report(second, 1), ONE))
        assert final.tau == 0
        assert ended(aggregator.receive(report(final, 1), ONE)).stopped_by == "rounds"

    def test_too_small_a_budget_is_refused_before_anything_is_spent(self) -> None:
        with pytest.raises(UserError, match="too small: one round costs about 2s"):
            make(3)


class TestTwoResources:
    def run(self, time: float, data: float, both: Costs) -> Outcome:
        budget = Budget({"time": time, "bytes": data})
        aggregator = Aggregator(
            np.zeros(2, np.float32), method=METHOD_5, budget=budget, expected=both
        )
        broadcast: Broadcast | Outcome = aggregator.start()
        while isinstance(broadcast, Broadcast):
            broadcast = aggregator.receive(report(broadcast, 1), both)
        return broadcast

    def test_the_one_that_binds_is_named(self) -> None:
        both = costs([1, 0], [1, 10])
        assert self.run(30, 1e6, both).stopped_by == "time"
        assert self.run(1000, 45, both).stopped_by == "bytes"

    def test_the_one_that_is_exactly_used_up_is_named(self) -> None:
        outcome = self.run(1000, 40, costs([1, 0], [1, 10]))
        assert outcome.ledger.spent.tolist() == [3 * 6 + 2, 40]
        assert outcome.stopped_by == "bytes"

    def test_each_may_lower_tau(self) -> None:
        # A round of 5 takes 6s and 20 bytes; after three rounds 18s and 60 bytes are spent.
        both = costs([1, 2], [1, 10])
        assert self.run(25, 1e6, both).ledger.spent.tolist() == [
            25,
            60 + 18 + 12,
        ]  # the last round has 4 updates
        assert self.run(1000, 88, both).ledger.spent.tolist() == [
            18 + 4 + 2,
            88,
        ]  # the last round has 3
