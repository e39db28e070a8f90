"""Algorithm 2 with hand-made reports and costs: the average, order, ends, and what is
refused.
"""

from dataclasses import replace

import numpy as np
import pytest

from fedbudget.arrays import Float32
from fedbudget.budget.control import Reason
from fedbudget.protocol.messages import LocalError, PeerError, Report
from fedbudget.protocol.state import Phase
from support.hand_made import FIRST, ONE, go_on, last, make, make_started, report, w_of
from support.methods import bits, new_aggregator, nodes, one_round, simulated_time
from support.problems import costs


class TestAverage:
    def test_is_weighted_by_the_sizes_of_shards(self) -> None:
        aggregator = make()
        broadcast = aggregator.start()
        w = np.array([[1, 0], [5, 8]], np.float32)
        answer = go_on(
            aggregator.receive(
                replace(report(broadcast, 1.0), w=w, sizes=np.array([30, 10])), ONE
            )
        )
        assert answer.w.tolist() == [2, 2]
        assert answer.w.dtype == np.float32

    def test_so_is_the_loss(self) -> None:
        aggregator = make()
        broadcast = aggregator.start()
        aggregator.receive(
            replace(
                report(broadcast, 0), losses=np.array([1.0, 5.0]), sizes=np.array([30, 10])
            ),
            ONE,
        )
        assert last(aggregator).loss == 2

    def test_leaves_out_a_w_that_is_not_finite_and_says_whose(self) -> None:
        aggregator = make()
        broadcast = aggregator.start()
        w = np.array([[1, 0], [np.nan, 8], [5, np.inf], [3, 4]], np.float32)
        four = Report(
            1,
            np.array([2, 3, 7, 9]),
            np.array([10, 10, 10, 30]),
            np.ones(4),
            np.ones(4),
            w=w,
        )
        assert go_on(aggregator.receive(four, ONE)).w.tolist() == [2.5, 3]
        assert last(aggregator).left_out == (3, 7)
        assert broadcast.w.tolist() == [0, 0]


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
            (
                {"gradients": np.zeros((2, 1), np.float32)},
                r"gradients has shape \(2, 1\), not \(2, 2\)",
            ),
            ({"losses": np.zeros(1)}, r"losses has shape \(1,\), not \(2,\)"),
            ({"losses": np.zeros(3)}, r"losses has shape \(3,\), not \(2,\)"),
            ({"best_losses": np.zeros(3)}, r"best_losses has shape \(3,\)"),
            ({"rho": np.zeros(1)}, r"rho has shape \(1,\)"),
            ({"beta": np.zeros((2, 2))}, r"beta has shape \(2, 2\)"),
        ],
    )
    def test_what_the_protocol_does_not_allow_is_said(
        self, wrong: dict[str, object], message: str
    ) -> None:
        with pytest.raises(PeerError, match=message):
            make_started().receive(replace(report(FIRST, 1), **wrong), ONE)  # type: ignore[arg-type]

    def test_a_report_of_nobody(self) -> None:
        none = np.empty(0)
        nobody = Report(
            1,
            none.astype(np.int64),
            none.astype(np.int64),
            none,
            none,
            np.empty((0, 2), np.float32),
        )
        with pytest.raises(PeerError, match="a report needs nodes"):
            make_started().receive(nobody, ONE)

    @pytest.mark.parametrize(
        "wrong", [{"round": 9}, {"w": None}, {"corrected": None}, {"plain": np.zeros(3)}]
    )
    def test_a_refused_report_changes_nothing(self, wrong: dict[str, object]) -> None:
        aggregator = make(1000, correct_drift=True)
        right = replace(
            report(aggregator.start(), 1, w=1), plain=np.zeros(2), corrected=np.zeros(2)
        )
        right = replace(
            right, round=go_on(aggregator.receive(right, ONE)).round, losses=np.full(2, 0.5)
        )
        before, record = bits(aggregator.state), aggregator.last
        with pytest.raises(PeerError):
            aggregator.receive(replace(right, **wrong), ONE)  # type: ignore[arg-type]
        assert aggregator.last is record
        assert bits(aggregator.state) == before
        assert go_on(aggregator.receive(right, ONE)).round == 3

    def test_nor_do_costs_that_are_wrong(self) -> None:
        aggregator = make_started()
        before = bits(aggregator.state)
        with pytest.raises(ValueError, match="expected costs of 1 resources"):
            aggregator.receive(report(FIRST, 1), costs([1, 1], [1, 1]))
        assert bits(aggregator.state) == before


class TestOrder:
    def test_no_second_start(self) -> None:
        with pytest.raises(LocalError, match="has started already"):
            make_started().start()

    def test_no_report_before_the_start(self) -> None:
        with pytest.raises(LocalError, match="no report is expected: the run is ready"):
            make(1000).receive(report(FIRST, 1), ONE)

    def test_no_report_after_the_end(self) -> None:
        aggregator = make_started()
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
        assert make_started().interrupt().w.tolist() == [0, 0]

    def test_what_the_unfinished_round_has_cost_can_be_charged(self) -> None:
        aggregator = make(1000)
        aggregator.receive(report(aggregator.start(), 5, w=1), ONE)
        outcome = aggregator.interrupt(costs([7], [2.5]))
        assert outcome.ledger.spent.tolist() == [4 + 2.5]  # no update counts
        assert outcome.ledger.costs is ONE

    def test_not_twice(self) -> None:
        aggregator = make_started()
        aggregator.interrupt()
        with pytest.raises(LocalError, match="has ended already"):
            aggregator.interrupt()


class TestGivingUp:
    def test_charges_the_round_that_never_came_together_and_ends_with_the_best_w(
        self,
    ) -> None:
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
        aggregator = make_started()
        aggregator.interrupt()
        with pytest.raises(LocalError, match="no round to give up: the run is done"):
            aggregator.give_up(ONE, "time")


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
        assert asked == [
            (w_of(1.4).tolist(), [0, 0]),
            (w_of(3.75).tolist(), w_of(1).tolist()),
        ]
        assert third.best
        assert aggregator.interrupt().w.tolist() == w_of(1).tolist()

    def test_going_back_is_settled_too(self) -> None:
        aggregator = make(quantize=lambda new, old: np.asarray((new + old) / 2, np.float32))
        second = go_on(aggregator.receive(report(aggregator.start(), 5, w=8), ONE))
        assert second.w.tolist() == w_of(4).tolist()
        nothing = replace(report(second, 6, best=5), w=np.full((2, 2), np.nan, np.float32))
        third = go_on(aggregator.receive(nothing, ONE))
        assert (
            third.w.tolist() == w_of(2).tolist()
        )  # half the way from (4, -4) to w^f, which is (0, 0)

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
            if (
                catch_up is not None
                and catch_up.mean is not None
                and round_.broadcast.tau > 0
            ):
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
        assert (record.round, record.t, record.tau, record.reason) == (
            2,
            6,
            3,
            Reason.FIXED,
        )
        assert (record.eta, record.loss, record.best_loss, record.nodes) == (0.1, 4, 4, 2)
        assert record.ledger.spent.tolist() == [4 + 7]
