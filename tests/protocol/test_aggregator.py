"""Algorithm 2 with hand-made reports and costs: w^f, the stop rule, estimates, and what is refused."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from fedbudget.arrays import Float32
from fedbudget.budget import Budget, Costs
from fedbudget.control import AdaptiveTau, Estimates, FixedTau, Reason
from fedbudget.errors import UserError
from fedbudget.protocol.aggregator import Aggregator, Outcome, Round
from fedbudget.protocol.messages import Broadcast, LocalError, PeerError, Report, Request
from fedbudget.protocol.method import Method
from fedbudget.protocol.state import Phase
from fedbudget.step_size import FixedStep
from support.hand_made import ONE, ended, go_on, last, make, report, w_of
from support.methods import bits, new_aggregator, nodes, one_round, simulated_time
from support.problems import costs

FIRST = Broadcast(1, np.zeros(2, np.float32), 3, 0.1, Request(), False, False)


def make_and_first(seconds: float) -> Aggregator:
    aggregator = make(seconds)
    aggregator.start()
    return aggregator


class TestAverage:
    def test_is_weighted_by_the_sizes_of_shards(self) -> None:
        aggregator = make()
        broadcast = aggregator.start()
        w = np.array([[1, 0], [5, 8]], np.float32)
        answer = go_on(aggregator.receive(replace(report(broadcast, 1.0), w=w, sizes=np.array([30, 10])), ONE))
        assert answer.w.tolist() == [2, 2]
        assert answer.w.dtype == np.float32

    def test_so_is_the_loss(self) -> None:
        aggregator = make()
        broadcast = aggregator.start()
        aggregator.receive(replace(report(broadcast, 0), losses=np.array([1.0, 5.0]), sizes=np.array([30, 10])), ONE)
        assert last(aggregator).loss == 2

    def test_leaves_out_a_w_that_is_not_finite_and_says_whose(self) -> None:
        aggregator = make()
        broadcast = aggregator.start()
        w = np.array([[1, 0], [np.nan, 8], [5, np.inf], [3, 4]], np.float32)
        four = Report(1, np.array([2, 3, 7, 9]), np.array([10, 10, 10, 30]), np.ones(4), np.ones(4), w=w)
        assert go_on(aggregator.receive(four, ONE)).w.tolist() == [2.5, 3]
        assert last(aggregator).left_out == (3, 7)
        assert broadcast.w.tolist() == [0, 0]


class TestBestW:
    def play(self, losses: Sequence[float], bests: Sequence[float] | None = None) -> tuple[list[bool], Outcome]:
        """The w of round k+1 is (k, -k); returns what broadcasts say of the one before them, and the outcome.

        Without `bests`, F(w^f) is the lowest loss so far, as with whole shards.
        """
        bests = bests or [float(np.nanmin(losses[: max(1, k)])) for k in range(len(losses))]
        aggregator = make(controller=FixedTau(1), rounds=len(losses) - 1)
        broadcast: Broadcast | Outcome = aggregator.start()
        flags = []
        for k, (loss, best) in enumerate(zip(losses, bests, strict=True)):
            broadcast = go_on(broadcast)
            flags.append(broadcast.best)
            assert broadcast.w.tolist() == w_of(k).tolist()
            broadcast = aggregator.receive(report(broadcast, loss, w=k + 1, best=best), ONE)
        return flags, ended(broadcast)

    def test_is_the_w_of_the_lowest_loss_and_nodes_are_told_one_broadcast_later(self) -> None:
        flags, outcome = self.play([5, 3, 4, 2, 6])
        assert flags == [False, False, True, False, True]
        assert outcome.w.tolist() == w_of(3).tolist()

    def test_is_the_last_w_when_the_final_loss_is_the_lowest(self) -> None:
        assert self.play([5, 3, 4, 1])[1].w.tolist() == w_of(3).tolist()

    def test_is_the_first_w_when_no_other_is_better(self) -> None:
        flags, outcome = self.play([5, 5, 6, 7])
        assert not any(flags)
        assert outcome.w.tolist() == [0, 0]

    def test_is_compared_on_the_same_mini_batches(self) -> None:
        # On the third round's samples w^f has loss 9, so that w(2) with 4 is better, although w(1) had 3.
        flags, outcome = self.play([5, 3, 4, 6], [5, 5, 9, 4])
        assert flags == [False, False, True, True]
        assert outcome.w.tolist() == w_of(2).tolist()

    def test_a_loss_that_is_no_number_is_never_the_best(self) -> None:
        assert self.play([5, 3, np.nan, np.inf])[1].w.tolist() == w_of(1).tolist()

    def test_the_record_has_both_losses_after_the_comparison(self) -> None:
        aggregator = make(controller=FixedTau(1))
        broadcast = aggregator.start()
        found = []
        for k, (loss, best) in enumerate([(5.0, 5.0), (3.0, 5.0), (4.0, 3.0)]):
            broadcast = go_on(aggregator.receive(report(broadcast, loss, w=k, best=best), ONE))
            found.append((last(aggregator).loss, last(aggregator).best_loss))
        assert found == [(5, 5), (3, 3), (4, 3)]


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

    def test_when_nothing_fits_the_run_ends_with_what_it_knows(self) -> None:
        aggregator = make(7)
        outcome = ended(aggregator.receive(report(aggregator.start(), 1, w=3), costs([2], [0.5])))
        assert outcome.w.tolist() == [0, 0]
        assert outcome.stopped_by == "time"
        assert outcome.ledger.spent.tolist() == [6.5]
        assert aggregator.state.phase is Phase.DONE

    def test_what_was_overspent_is_told(self) -> None:
        outcome = ended(make_and_first(7).receive(report(FIRST, 1), costs([3], [1])))
        assert outcome.ledger.overshoot.tolist() == [3]

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
            np.zeros(2, np.float32), method=Method(FixedTau(5), FixedStep(0.1)), budget=budget, expected=both
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
        assert self.run(25, 1e6, both).ledger.spent.tolist() == [25, 60 + 18 + 12]  # the last round has 4 updates
        assert self.run(1000, 88, both).ledger.spent.tolist() == [18 + 4 + 2, 88]  # the last round has 3


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
        # The mean gradient is (0, 3), from which the nodes are 1 and 3 away: (30·1 + 10·3)/40.
        assert last(aggregator).estimates == Estimates(2.0, 3.0, 1.5)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, 1e13, -1.0])
    @pytest.mark.parametrize("name", ["rho", "beta"])
    def test_that_are_no_sane_numbers_stay_what_they_were(self, name: str, bad: float) -> None:
        aggregator = self.second((1.0, 2.0, 3.0))
        fresh = report(replace(FIRST, round=3), 1, estimates=(4.0, 5.0, 6.0))
        record = self.third(aggregator, replace(fresh, **{name: np.array([bad, bad])}))  # type: ignore[arg-type]
        assert record.kept == (name,)
        assert record.estimates == replace(Estimates(4.0, 5.0, 6.0), **{name: {"rho": 1.0, "beta": 2.0}[name]})

    def test_of_gradients_that_are_not_finite_stay_what_they_were_without_a_warning(self) -> None:
        aggregator = self.second((1.0, 2.0, 3.0))
        record = self.third(aggregator, report(replace(FIRST, round=3), 1, estimates=(4.0, 5.0, np.inf)))
        assert record.kept == ("delta",)
        assert record.estimates == Estimates(4.0, 5.0, 3.0)

    def test_of_gradients_that_are_far_too_large_stay_what_they_were(self) -> None:
        aggregator = self.second((1.0, 2.0, 3.0))
        record = self.third(aggregator, report(replace(FIRST, round=3), 1, estimates=(4.0, 5.0, 3e38)))
        assert record.kept == ("delta",)

    def test_wait_for_the_first_round_that_gives_all_three(self) -> None:
        aggregator = self.second((np.nan, 2.0, 3.0))
        assert last(aggregator).estimates is None
        assert last(aggregator).kept == ("rho",)
        record = self.third(aggregator, report(replace(FIRST, round=3), 1, estimates=(4.0, 5.0, 6.0)))
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


class TestPeerErrors:
    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"round": 2}, "a report of round 2 in round 1"),
            ({"nodes": np.array([1, 1])}, "a node reported twice"),
            ({"nodes": np.array([1, 0])}, "not in node order"),
            ({"sizes": np.array([1, 0])}, "nodes with samples"),
            ({"w": None}, "a report without w"),
            ({"w": np.zeros((2, 3), np.float32)}, r"w has shape \(2, 3\), not \(2, 2\)"),
            ({"w": np.zeros((1, 2), np.float32)}, r"w has shape \(1, 2\), not \(2, 2\)"),
            ({"gradients": np.zeros((2, 1), np.float32)}, r"gradients has shape \(2, 1\), not \(2, 2\)"),
            ({"losses": np.zeros(1)}, r"losses has shape \(1,\), not \(2,\)"),
            ({"losses": np.zeros(3)}, r"losses has shape \(3,\), not \(2,\)"),
            ({"best_losses": np.zeros(3)}, r"best_losses has shape \(3,\)"),
            ({"rho": np.zeros(1)}, r"rho has shape \(1,\)"),
            ({"beta": np.zeros((2, 2))}, r"beta has shape \(2, 2\)"),
        ],
    )
    def test_what_the_protocol_does_not_allow_is_said(self, wrong: dict[str, object], message: str) -> None:
        with pytest.raises(PeerError, match=message):
            make_and_first(1000).receive(replace(report(FIRST, 1), **wrong), ONE)  # type: ignore[arg-type]

    def test_a_report_of_nobody(self) -> None:
        none = np.empty(0)
        nobody = Report(1, none.astype(np.int64), none.astype(np.int64), none, none, np.empty((0, 2), np.float32))
        with pytest.raises(PeerError, match="a report needs nodes"):
            make_and_first(1000).receive(nobody, ONE)

    @pytest.mark.parametrize("wrong", [{"round": 9}, {"w": None}, {"corrected": None}, {"plain": np.zeros(3)}])
    def test_a_refused_report_changes_nothing(self, wrong: dict[str, object]) -> None:
        aggregator = make(1000, correct_drift=True)
        right = replace(report(aggregator.start(), 1, w=1), plain=np.zeros(2), corrected=np.zeros(2))
        right = replace(right, round=go_on(aggregator.receive(right, ONE)).round, losses=np.full(2, 0.5))
        before, record = bits(aggregator.state), aggregator.last
        with pytest.raises(PeerError):
            aggregator.receive(replace(right, **wrong), ONE)  # type: ignore[arg-type]
        assert aggregator.last is record
        assert bits(aggregator.state) == before
        assert go_on(aggregator.receive(right, ONE)).round == 3

    def test_nor_do_costs_that_are_wrong(self) -> None:
        aggregator = make_and_first(1000)
        before = bits(aggregator.state)
        with pytest.raises(ValueError, match="costs of 1 resources are wanted"):
            aggregator.receive(report(FIRST, 1), costs([1, 1], [1, 1]))
        assert bits(aggregator.state) == before


class TestOrder:
    def test_no_second_start(self) -> None:
        with pytest.raises(LocalError, match="has started already"):
            make_and_first(1000).start()

    def test_no_report_before_the_start(self) -> None:
        with pytest.raises(LocalError, match="no report is expected: the run is ready"):
            make(1000).receive(report(FIRST, 1), ONE)

    def test_no_report_after_the_end(self) -> None:
        aggregator = make_and_first(1000)
        aggregator.interrupt()
        with pytest.raises(LocalError, match="no report is expected: the run is done"):
            aggregator.receive(report(FIRST, 1), ONE)


class TestInterrupt:
    def test_gives_the_best_w_so_far_and_what_was_spent(self) -> None:
        aggregator = make(1000)
        broadcast = go_on(aggregator.receive(report(aggregator.start(), 5, w=1), ONE))
        aggregator.receive(report(broadcast, 4, w=2, best=5), ONE)
        outcome = aggregator.interrupt()
        assert outcome.w.tolist() == w_of(1).tolist()
        assert outcome.stopped_by == "interrupted"
        assert outcome.ledger.spent.tolist() == [8]
        assert aggregator.state.phase is Phase.DONE

    def test_before_the_first_report_it_is_the_first_w(self) -> None:
        assert make_and_first(1000).interrupt().w.tolist() == [0, 0]

    def test_what_the_unfinished_round_has_cost_can_be_charged(self) -> None:
        aggregator = make(1000)
        aggregator.receive(report(aggregator.start(), 5, w=1), ONE)
        outcome = aggregator.interrupt(costs([7], [2.5]))
        assert outcome.ledger.spent.tolist() == [4 + 2.5]  # no update counts
        assert outcome.ledger.costs is ONE

    def test_not_twice(self) -> None:
        aggregator = make_and_first(1000)
        aggregator.interrupt()
        with pytest.raises(LocalError, match="has ended already"):
            aggregator.interrupt()


class TestGivingUp:
    def test_charges_the_round_that_never_came_together_and_ends_with_the_best_w(self) -> None:
        aggregator = make(20)
        broadcast = go_on(aggregator.receive(report(aggregator.start(), 5, w=1), ONE))
        aggregator.receive(report(broadcast, 4, w=2, best=5), ONE)
        outcome = aggregator.give_up(costs([0], [13]), "time")
        assert outcome.w.tolist() == w_of(1).tolist()
        assert outcome.stopped_by == "time"
        assert outcome.ledger.spent.tolist() == [8 + 13]
        assert outcome.ledger.overshoot.tolist() == [1]
        assert last(aggregator).round == 2
        assert aggregator.state.phase is Phase.DONE

    def test_also_of_the_final_loss(self) -> None:
        aggregator = make(7.9)
        final = go_on(aggregator.receive(report(aggregator.start(), 1, w=3), ONE))
        assert final.tau == 0
        assert aggregator.give_up(costs([0], [1]), "time").w.tolist() == [0, 0]

    def test_there_must_be_a_round(self) -> None:
        with pytest.raises(LocalError, match="no round to give up: the run is ready"):
            make().give_up(ONE, "time")
        aggregator = make_and_first(1000)
        aggregator.interrupt()
        with pytest.raises(LocalError, match="no round to give up: the run is done"):
            aggregator.give_up(ONE, "time")


class TestExpectedCosts:
    def test_what_is_expected_decides_and_what_was_is_charged(self) -> None:
        # The round cost 3 + 9, of which 8 were a wait that does not come again: 12 spent, (24 - 12 - 1 - 2) fit.
        aggregator = make(24, controller=FixedTau(10), expected=costs([0.1], [0.1]))
        broadcast = aggregator.start()
        answer = report(broadcast, 1)
        second = go_on(aggregator.receive(answer, costs([0.3], [9]), expected=costs([1], [1])))
        assert last(aggregator).ledger.spent.tolist() == [12]
        assert last(aggregator).ledger.costs.aggregation.tolist() == [1]
        assert (second.tau, second.stop) == (9, True)


class TestSettling:
    """Where nodes hold something else than the average, everything goes by what they hold."""

    def test_the_next_w_is_what_nodes_will_hold(self) -> None:
        asked = []

        def quantize(new: Float32, old: Float32) -> Float32:
            asked.append((new.tolist(), old.tolist()))
            return np.asarray(old + np.rint(new - old), np.float32)

        aggregator = make(quantize=quantize)
        second = go_on(aggregator.receive(report(aggregator.start(), 5, w=1.4), ONE))
        third = go_on(aggregator.receive(report(second, 4, w=3.75, best=5), ONE))
        assert (second.w.tolist(), third.w.tolist()) == (w_of(1).tolist(), w_of(4).tolist())
        assert asked == [(w_of(1.4).tolist(), [0, 0]), (w_of(3.75).tolist(), w_of(1).tolist())]
        assert third.best
        assert aggregator.interrupt().w.tolist() == w_of(1).tolist()

    def test_going_back_is_settled_too(self) -> None:
        aggregator = make(quantize=lambda new, old: np.asarray((new + old) / 2, np.float32))
        second = go_on(aggregator.receive(report(aggregator.start(), 5, w=8), ONE))
        assert second.w.tolist() == w_of(4).tolist()
        nothing = replace(report(second, 6, best=5), w=np.full((2, 2), np.nan, np.float32))
        third = go_on(aggregator.receive(nothing, ONE))
        assert third.w.tolist() == w_of(2).tolist()  # half the way from (4, -4) to w^f, which is (0, 0)

    def test_nodes_and_aggregator_know_the_same_mean_gradient(self) -> None:
        def quantize(new: Float32, old: Float32) -> Float32:
            return np.asarray(old + (new - old).astype(np.float16), np.float32)

        fleets, time = nodes("svm", 5), simulated_time()
        aggregator = new_aggregator("svm", "frugal", quantize=quantize)
        aggregator.start()
        compared = 0
        while aggregator.pending is not None:
            round_ = one_round(aggregator, fleets, time)
            catch_up, known = round_.broadcast.catch_up, fleets[1]._correction
            if catch_up is not None and catch_up.mean is not None and round_.broadcast.tau > 0:
                assert known is not None
                assert known.mean.tobytes() == catch_up.mean.tobytes()
                compared += 1
        assert compared > 5


class TestRecord:
    def test_says_what_happened(self) -> None:
        aggregator = make(1000)
        broadcast = go_on(aggregator.receive(report(aggregator.start(), 5, w=1), ONE))
        aggregator.receive(report(broadcast, 4, w=2), costs([2], [1]))
        record = last(aggregator)
        assert (record.round, record.t, record.tau, record.reason) == (2, 6, 3, Reason.FIXED)
        assert (record.eta, record.loss, record.best_loss, record.nodes) == (0.1, 4, 4, 2)
        assert record.ledger.spent.tolist() == [4 + 7]


# Over any budget and any costs.
