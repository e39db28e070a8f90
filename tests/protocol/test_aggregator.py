"""The aggregator with hand-made reports: averages, stop rules, and refused reports."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedbudget.arrays import Float32
from fedbudget.budget.budget import Budget, Costs
from fedbudget.budget.control import FixedTau, Reason
from fedbudget.budget.spending import PaperSpending
from fedbudget.budget.step_size import FixedStep
from fedbudget.errors import UserError
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.features.drift import (
    Correction,
    DriftCatchUp,
    DriftPart,
    DriftState,
)
from fedbudget.protocol.messages import (
    Broadcast,
    LocalError,
    PeerError,
    TrainRound,
)
from fedbudget.protocol.method import Method
from fedbudget.protocol.state import Outcome, Phase
from support.hand_made import (
    FIRST,
    ONE,
    as_broadcast,
    as_final,
    as_outcome,
    as_train,
    last,
    make,
    make_started,
    report,
    train_report,
    w_of,
    with_values,
    without,
)
from support.methods import (
    METHODS,
    bits,
    new_aggregator,
    nodes,
    one_round,
    simulated_time,
)
from support.problems import costs


class TestAverage:
    def test_weighted_by_shard_sizes(self) -> None:
        aggregator = make()
        broadcast = aggregator.start()
        given = with_values(
            report(broadcast, 0),
            w=np.array([[1, 0], [5, 8]], np.float32),
            losses=np.array([1.0, 5.0]),
        )
        answer = aggregator.receive(replace(given, sizes=np.array([30, 10])), ONE)
        w = as_broadcast(answer).w
        assert w.tolist() == [2, 2]
        assert w.dtype == np.float32
        assert last(aggregator).loss == 2

    def test_drops_nodes_with_nonfinite_w(self) -> None:
        aggregator = make()
        broadcast = aggregator.start()
        w = np.array([[1, 0], [np.nan, 8], [5, np.inf], [3, 4]], np.float32)
        four = train_report(
            w, nodes=np.array([2, 3, 7, 9]), sizes=np.array([10, 10, 10, 30])
        )
        assert as_broadcast(aggregator.receive(four, ONE)).w.tolist() == [2.5, 3]
        assert last(aggregator).left_out == (3, 7)
        assert broadcast.w.tolist() == [0, 0]


class TestRefusedReports:
    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"round": 2}, "a report of round 2 in round 1"),
            ({"nodes": np.array([1, 1])}, "a node reported twice"),
            ({"nodes": np.array([1, 0])}, "not in node order"),
            ({"sizes": np.array([1, 0])}, "nodes with samples"),
            ({"sizes": np.array([1, 1, 1])}, r"sizes has shape \(3,\), not \(2,\)"),
        ],
    )
    def test_error_names_the_violation(self, wrong: dict[str, Any], message: str) -> None:
        with pytest.raises(PeerError, match=message):
            make_started().receive(replace(report(FIRST, 1), **wrong), ONE)

    @pytest.mark.parametrize(
        ("name", "values", "message"),
        [
            ("w", np.zeros((2, 3), np.float32), r"w has shape \(2, 3\), not \(2, 2\)"),
            ("w", np.zeros((1, 2), np.float32), r"w has shape \(1, 2\), not \(2, 2\)"),
            ("losses", np.zeros(1), r"losses has shape \(1,\), not \(2,\)"),
            ("losses", np.zeros(3), r"losses has shape \(3,\), not \(2,\)"),
            ("best_losses", np.zeros((2, 2)), r"best_losses has shape \(2, 2\)"),
            ("rho", np.zeros(2), "a report with rho"),
        ],
    )
    def test_error_names_the_array(
        self, name: str, values: NDArray[Any], message: str
    ) -> None:
        given = with_values(report(FIRST, 1), **{name: values})
        with pytest.raises(PeerError, match=message):
            make_started().receive(given, ONE)

    def test_report_without_nodes(self) -> None:
        empty = train_report(np.empty((0, 2), np.float32))
        with pytest.raises(PeerError, match="a report needs nodes"):
            make_started().receive(empty, ONE)

    @pytest.mark.parametrize("wrong", ["round", "w", "corrected", "plain"])
    def test_refused_report_changes_nothing(self, wrong: str) -> None:
        aggregator = make(1000, correct_drift=True)
        second = aggregator.receive(report(aggregator.start(), 1, w=1), ONE)
        right = report(as_broadcast(second), 0.5, w=1)
        refused = {
            "round": replace(right, round=9),
            "w": without(right, "w"),
            "corrected": without(right, "corrected"),
            "plain": with_values(right, plain=np.zeros(3)),
        }
        before = bits(aggregator.state)
        record = aggregator.last
        with pytest.raises(PeerError):
            aggregator.receive(refused[wrong], ONE)
        assert aggregator.last is record
        assert bits(aggregator.state) == before
        assert as_broadcast(aggregator.receive(right, ONE)).round == 3

    def test_wrong_costs_change_nothing(self) -> None:
        aggregator = make_started()
        before = bits(aggregator.state)
        with pytest.raises(ValueError, match="expected costs of 1 resources"):
            aggregator.receive(report(FIRST, 1), costs([1, 1], [1, 1]))
        assert bits(aggregator.state) == before


class TestCallOrder:
    def test_second_start_is_refused(self) -> None:
        with pytest.raises(LocalError, match="has started already"):
            make_started().start()

    def test_report_before_start_is_refused(self) -> None:
        with pytest.raises(LocalError, match="no report is expected: the run is ready"):
            make(1000).receive(report(FIRST, 1), ONE)

    def test_report_after_end_is_refused(self) -> None:
        aggregator = make_started()
        aggregator.interrupt()
        with pytest.raises(LocalError, match="no report is expected: the run is done"):
            aggregator.receive(report(FIRST, 1), ONE)


class TestInterrupt:
    def test_returns_best_w_and_cost(self) -> None:
        aggregator = make(1000)
        broadcast = as_broadcast(
            aggregator.receive(report(aggregator.start(), 5, w=1), ONE)
        )
        aggregator.receive(report(broadcast, 4, w=2, best=5), ONE)
        outcome = aggregator.interrupt()
        assert outcome.w.tolist() == w_of(1).tolist()
        assert outcome.stopped_by == "interrupted"
        assert outcome.ledger.spent.tolist() == [8]
        assert aggregator.state.phase is Phase.DONE

    def test_initial_w_before_first_report(self) -> None:
        assert make_started().interrupt().w.tolist() == [0, 0]

    def test_charges_the_unfinished_round(self) -> None:
        aggregator = make(1000)
        aggregator.receive(report(aggregator.start(), 5, w=1), ONE)
        outcome = aggregator.interrupt(costs([7], [2.5]))
        assert outcome.ledger.spent.tolist() == [4 + 2.5]  # no update counts
        assert outcome.ledger.costs is ONE

    def test_second_interrupt_is_refused(self) -> None:
        aggregator = make_started()
        aggregator.interrupt()
        with pytest.raises(LocalError, match="has ended already"):
            aggregator.interrupt()


class TestGiveUp:
    def test_charges_round_and_returns_best(self) -> None:
        aggregator = make(20)
        broadcast = as_broadcast(
            aggregator.receive(report(aggregator.start(), 5, w=1), ONE)
        )
        aggregator.receive(report(broadcast, 4, w=2, best=5), ONE)
        outcome = aggregator.give_up(costs([0], [13]), "time")
        assert outcome.w.tolist() == w_of(1).tolist()
        assert outcome.stopped_by == "time"
        assert outcome.ledger.spent.tolist() == [8 + 13]
        assert outcome.ledger.overshoot.tolist() == [1]
        assert last(aggregator).round == 2
        assert aggregator.state.phase is Phase.DONE

    def test_during_the_final_loss(self) -> None:
        aggregator = make(7.9)
        as_final(aggregator.receive(report(aggregator.start(), 1, w=3), ONE))
        assert aggregator.give_up(costs([0], [1]), "time").w.tolist() == [0, 0]

    def test_needs_a_running_round(self) -> None:
        with pytest.raises(LocalError, match="no round to give up: the run is ready"):
            make().give_up(ONE, "time")
        aggregator = make_started()
        aggregator.interrupt()
        with pytest.raises(LocalError, match="no round to give up: the run is done"):
            aggregator.give_up(ONE, "time")


class TestForget:
    """Three nodes with sizes 1, 1 and 2 take part in a corrected round."""

    def after_one_round(self, **method: Any) -> Aggregator:
        aggregator = make(correct_drift=True, **method)
        broadcast = aggregator.start()
        numbers: dict[str, Any] = {name: np.zeros(3) for name in broadcast.report.numbers}
        w = np.array([[1, 0], [0, 1], [2, 2]], np.float32)
        given = train_report(w, sizes=np.array([1, 1, 2]), **numbers)
        aggregator.receive(given, ONE)
        return aggregator

    def test_next_round_is_not_corrected(self) -> None:
        """The c_i of a node that left is lost, and c is no longer the mean of the rest."""
        aggregator = self.after_one_round()
        before = aggregator.pending
        assert before is not None
        assert before.part(DriftPart) == DriftPart(correct=True, share=1.0)
        sent = aggregator.forget([2])
        assert sent.part(DriftPart) == DriftPart(correct=False, share=1.0)
        assert bits(replace(sent, parts=before.parts)) == bits(before)
        assert aggregator.pending is sent
        drift = aggregator.state.states["drift"]
        assert isinstance(drift, DriftState)
        assert (drift.nodes.tolist(), drift.data) == ([0, 1], 2)

    def test_unknown_node_changes_nothing(self) -> None:
        aggregator = self.after_one_round()
        before = aggregator.state
        sent = aggregator.pending
        assert aggregator.forget([7]) is sent
        assert aggregator.state is before

    def test_without_features(self) -> None:
        aggregator = make_started()
        assert aggregator.forget([0]) is aggregator.pending

    def test_needs_a_running_round(self) -> None:
        with pytest.raises(LocalError, match="forget nodes between rounds"):
            make().forget([0])


class TestQuantizedBroadcast:
    """Nodes hold a quantized w, and the aggregator computes with the same w."""

    def test_next_w_is_quantized(self) -> None:
        calls = []

        def quantize(new: Float32, old: Float32) -> Float32:
            calls.append((new.tolist(), old.tolist()))
            return np.asarray(old + np.rint(new - old), np.float32)

        aggregator = make(quantize=quantize)
        second = as_broadcast(aggregator.receive(report(aggregator.start(), 5, w=1.4), ONE))
        third = as_broadcast(aggregator.receive(report(second, 4, w=3.75, best=5), ONE))
        assert (second.w.tolist(), third.w.tolist()) == (w_of(1).tolist(), w_of(4).tolist())
        assert calls == [
            (w_of(1.4).tolist(), [0, 0]),
            (w_of(3.75).tolist(), w_of(1).tolist()),
        ]
        assert third.best
        assert aggregator.interrupt().w.tolist() == w_of(1).tolist()

    def test_recovered_w_is_quantized(self) -> None:
        aggregator = make(quantize=lambda new, old: np.asarray((new + old) / 2, np.float32))
        second = as_broadcast(aggregator.receive(report(aggregator.start(), 5, w=8), ONE))
        assert second.w.tolist() == w_of(4).tolist()
        nothing = with_values(
            report(second, 6, best=5), w=np.full((2, 2), np.nan, np.float32)
        )
        third = as_broadcast(aggregator.receive(nothing, ONE))
        assert third.w.tolist() == w_of(2).tolist()  # halfway from (4, -4) to w^f = (0, 0)

    def test_mean_gradient_matches_nodes(self) -> None:
        def quantize(new: Float32, old: Float32) -> Float32:
            return np.asarray(old + (new - old).astype(np.float16), np.float32)

        fleets = nodes("svm", 5, METHODS["frugal"].features)
        time = simulated_time()
        aggregator = new_aggregator("svm", "frugal", quantize=quantize)
        aggregator.start()
        compared = 0
        while aggregator.pending is not None:
            broadcast = one_round(aggregator, fleets, time).broadcast
            state = fleets[1].state
            assert state is not None
            correction = state.memories["drift"]
            assert isinstance(correction, Correction)
            if broadcast.catch_up is not None and isinstance(broadcast, TrainRound):
                sent = broadcast.catch_up.part(DriftCatchUp)
                assert sent is not None
                assert correction.mean.tobytes() == sent.mean.tobytes()
                compared += 1
        assert compared > 5


class TestRecord:
    def test_values_of_a_round(self) -> None:
        aggregator = make(1000)
        broadcast = as_broadcast(
            aggregator.receive(report(aggregator.start(), 5, w=1), ONE)
        )
        aggregator.receive(report(broadcast, 4, w=2), costs([2], [1]))
        record = last(aggregator)
        assert (record.round, record.t, record.tau) == (2, 6, 3)
        assert record.reason is Reason.FIXED
        assert (record.eta, record.loss, record.best_loss, record.nodes) == (0.1, 4, 4, 2)
        assert record.ledger.spent.tolist() == [4 + 7]


METHOD_5 = Method(FixedTau(5), FixedStep(0.1), spending=PaperSpending())


class TestStopRule:
    """A round with 3 updates costs 4 s, and the final loss 2 s."""

    def test_last_round_meets_the_limit(self) -> None:
        aggregator = make(10)  # 4 + (4 + 2) = 10
        first = as_train(aggregator.start())
        assert (first.tau, first.stop) == (3, False)
        second = as_train(aggregator.receive(report(first, 1), ONE))
        assert (second.tau, second.stop) == (3, True)
        final = as_final(aggregator.receive(report(second, 1), ONE))
        outcome = as_outcome(aggregator.receive(report(final, 1), ONE))
        assert outcome.stopped_by == "time"
        assert outcome.ledger.spent.tolist() == [10]
        assert outcome.ledger.overshoot.tolist() == [0]
        assert aggregator.state.phase is Phase.DONE

    @pytest.mark.parametrize(("seconds", "tau"), [(9.9, 2), (9.0, 2), (8.9, 1), (8.0, 1)])
    def test_tau_shrinks_to_the_budget(self, seconds: float, tau: int) -> None:
        aggregator = make(seconds)
        second = as_train(aggregator.receive(report(aggregator.start(), 1), ONE))
        assert (second.tau, second.stop) == (tau, True)
        aggregator.receive(report(second, 1), ONE)
        assert last(aggregator).reason is Reason.BUDGET

    @pytest.mark.parametrize("seconds", [7.9, 6.5])
    def test_final_loss_if_no_update_fits(self, seconds: float) -> None:
        aggregator = make(seconds)
        final = as_final(aggregator.receive(report(aggregator.start(), 1, w=3), ONE))
        assert aggregator.state.phase is Phase.FINAL
        assert final.w.tolist() == w_of(3).tolist()
        outcome = as_outcome(aggregator.receive(report(final, 0.5, best=1), ONE))
        assert outcome.w.tolist() == w_of(3).tolist()
        assert outcome.stopped_by == "time"

    def test_final_loss_beyond_the_budget(self) -> None:
        aggregator = make(7)
        final = as_final(
            aggregator.receive(report(aggregator.start(), 1, w=3), costs([2], [0.5]))
        )
        outcome = as_outcome(aggregator.receive(report(final, 0.5, best=1), ONE))
        assert outcome.w.tolist() == w_of(3).tolist()
        assert outcome.stopped_by == "time"
        assert outcome.ledger.spent.tolist() == [8.5]
        assert aggregator.state.phase is Phase.DONE

    def test_outcome_reports_overspending(self) -> None:
        aggregator = make_started(7)
        final = as_final(aggregator.receive(report(FIRST, 1), costs([3], [1])))
        outcome = as_outcome(aggregator.receive(report(final, 1), costs([3], [1])))
        assert outcome.ledger.overshoot.tolist() == [7]

    def test_first_round_can_shrink(self) -> None:
        broadcast = as_train(make(5).start())
        assert (broadcast.tau, broadcast.stop) == (2, True)

    def test_newest_costs_decide(self) -> None:
        aggregator = make(15)
        second = as_train(
            aggregator.receive(report(aggregator.start(), 1), costs([2], [1]))
        )
        assert (second.tau, second.stop) == (2, True)  # 7 spent, and (15 - 7 - 2 - 2·1) / 2

    def test_round_limit(self) -> None:
        aggregator = make(1000, rounds=2)
        first = as_train(aggregator.start())
        second = as_train(aggregator.receive(report(first, 1), ONE))
        assert (first.stop, second.stop) == (False, True)
        final = as_final(aggregator.receive(report(second, 1), ONE))
        assert as_outcome(aggregator.receive(report(final, 1), ONE)).stopped_by == "rounds"

    def test_too_small_budget_is_refused(self) -> None:
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

    def test_outcome_names_binding_resource(self) -> None:
        both = costs([1, 0], [1, 10])
        assert self.run(30, 1e6, both).stopped_by == "time"
        assert self.run(1000, 45, both).stopped_by == "bytes"

    def test_outcome_names_exhausted_resource(self) -> None:
        outcome = self.run(1000, 40, costs([1, 0], [1, 10]))
        assert outcome.ledger.spent.tolist() == [3 * 6 + 2, 40]
        assert outcome.stopped_by == "bytes"

    def test_each_resource_can_lower_tau(self) -> None:
        # A round of 5 updates costs 6 s and 20 bytes; three rounds cost 18 s and 60 bytes.
        both = costs([1, 2], [1, 10])
        assert self.run(25, 1e6, both).ledger.spent.tolist() == [
            25,
            60 + 18 + 12,
        ]  # the last round has 4 updates
        assert self.run(1000, 88, both).ledger.spent.tolist() == [
            18 + 4 + 2,
            88,
        ]  # the last round has 3
