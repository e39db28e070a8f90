"""Limits on reported losses: harmed nodes are heard, and false losses are bounded."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbudget.arrays import Float64
from fedbudget.budget.step_size import AutoStep
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.messages import LossReport, TrainReport
from fedbudget.protocol.objections import (
    MOST_KEPT,
    MOST_RETURNS,
    Exclusion,
    LimitedLosses,
    LossWatch,
    limit_losses,
)
from fedbudget.protocol.outliers import PeerGroups
from fedbudget.protocol.state import AggregatorState, Round
from support.hand_made import ONE, as_train, last, make

LEVEL = 0.7
WATCH = LossWatch(level=LEVEL, start=LEVEL)


def losses(
    change: Sequence[float],
    best: Sequence[float] | float = 0.2,
    sizes: Sequence[int] | None = None,
) -> LossReport:
    """A report with these F_i(w(t₀)) - F_i(w^f) and F_i(w^f)."""
    known = np.broadcast_to(np.asarray(best, np.float64), (len(change),))
    numbers = {"losses": known + np.array(change), "best_losses": known}
    return LossReport(
        round=3,
        nodes=np.arange(len(change)),
        sizes=np.array(sizes or [1] * len(change)),
        numbers=numbers,
        vectors={},
    )


def limited(
    report: LossReport,
    *,
    watch: LossWatch = WATCH,
    first_loss: float = LEVEL,
    at_best: bool = False,
    peers: Sequence[int] | None = None,
) -> LimitedLosses:
    index = report.nodes if peers is None else np.array(peers)
    return limit_losses(report, PeerGroups(index), watch, first_loss, at_best=at_best)


def changes(found: LimitedLosses) -> Float64:
    return found.report.losses - found.report.best_losses


def mean_change(found: LimitedLosses) -> float:
    return float(np.average(changes(found), weights=found.report.sizes))


class TestLimits:
    def test_harmed_node_is_heard(self) -> None:
        """Others improve by 1e-6, and one of three gets worse by 240. Its rise counts as
        20 · 0.7 · 3 = 42.
        """
        found = limited(losses([-1e-6, -1e-6, 240]))
        assert changes(found) == pytest.approx(np.array([-1e-6, -1e-6, 42]))
        assert mean_change(found) == pytest.approx(14, rel=1e-5)
        ((outlier,),) = found.outliers.values()
        assert outlier.name == "loss change"
        assert outlier.reported == pytest.approx(240)
        assert (outlier.limit, outlier.counted) == pytest.approx((42, 42))

    def test_harmed_small_node_is_heard(self) -> None:
        """A hundredth of the samples can raise the mean as much."""
        found = limited(losses([-1e-6, -1e-6, 1e6], sizes=[50, 49, 1]))
        assert mean_change(found) == pytest.approx(14, rel=1e-5)

    def test_rise_within_limits_stays(self) -> None:
        """Fifty times the loss at the start, while others change by 1e-9."""
        report = losses([-1e-9, 1e-9, 50 * LEVEL])
        found = limited(report)
        assert found.report is report
        assert found.outliers == {}

    @given(
        st.lists(st.floats(-0.2, 4.0), min_size=3, max_size=9),
        st.floats(0.0, 1.0),
        st.booleans(),
    )
    def test_honest_changes_keep_their_bits(
        self, change: list[float], best: float, first: bool
    ) -> None:
        """No limit is below 3 · 20 · 0.7; a fall is at most the node's loss."""
        report = losses([max(each, -best) for each in change], best)
        median = np.median(report.losses - report.best_losses)
        if median > LEVEL / 10 and np.median(report.losses) > LEVEL:
            return  # falls count as 0
        found = limited(report, first_loss=math.inf if first else LEVEL)
        assert found.report is report

    @pytest.mark.parametrize(
        ("reported", "counts"),
        [(1e14, 42), (math.inf, 42), (math.nan, 42), (-1e14, -1.4), (-math.inf, -1.4)],
    )
    def test_changes_keep_their_sign(self, reported: float, counts: float) -> None:
        found = limited(losses([-0.01, -0.01, reported]))
        assert changes(found)[2] == pytest.approx(counts)
        assert list(found.outliers) == [2]

    def test_nodes_of_one_peer_share(self) -> None:
        """A peer with ten nodes can raise the mean no more than with one."""
        report = losses([0.0, 0.0, *[1e9] * 10], sizes=[10, 10, *[1] * 10])
        found = limited(report, peers=[0, 1, *[2] * 10])
        assert mean_change(found) == pytest.approx(14)

    @pytest.mark.parametrize("sign", [1, -1])
    def test_loss_is_limited(self, sign: int) -> None:
        """1000 times the level in the first round; the change stays."""
        found = limited(losses([-0.1, -0.1, -0.1], [0.2, 0.2, sign * 1e14]))
        assert found.report.best_losses[2] == pytest.approx(sign * 700)
        assert [each.name for each in found.outliers[2]] == ["loss"]

    def test_flattery_needs_a_majority(self) -> None:
        """For two of three nodes, w is worse than at the start."""
        assert mean_change(limited(losses([0.6, 0.6, -1.3]))) == pytest.approx(0.4)
        assert mean_change(limited(losses([0.3, 0.3, -1.3]))) < 0

    def test_level_of_a_late_third_peer(self) -> None:
        """Two nodes reached 0.4 from 2.3; a third joins, and w helps it alone."""
        first = limited(losses([-0.1, -0.1, 2.0]), watch=LossWatch(), first_loss=2.3)
        report = losses([0.3, 0.3, -5.0], [0.2, 0.2, 5.5])
        found = limited(report, watch=first.watch, first_loss=2.3)
        assert found.report is report

    def test_two_peers_stay(self) -> None:
        report = losses([0.0, 1e9])
        assert limited(report).report is report

    @given(st.data())
    def test_influence_is_bounded(self, data: st.DataObject) -> None:
        """Any losses of one of five nodes change the mean change by at most 20 S."""
        lie = data.draw(st.tuples(st.floats(), st.floats()))
        honest = data.draw(st.lists(st.floats(-0.2, 0.2), min_size=4, max_size=4))
        report = losses([*honest, 0.0])
        numbers = {name: values.copy() for name, values in report.numbers.items()}
        numbers["losses"][4], numbers["best_losses"][4] = lie
        found = limited(
            LossReport(
                round=3, nodes=report.nodes, sizes=report.sizes, numbers=numbers, vectors={}
            )
        )
        accepted = 100 * max(abs(each) for each in honest) / 5
        bound = max(20 * LEVEL, accepted) + 0.2 + 1e-6
        assert abs(mean_change(found)) <= bound
        assert abs(found.report.best_losses[4]) <= 1000 * LEVEL


class TestExclusion:
    def test_change_at_best_is_false(self) -> None:
        """w(t₀) is w^f: the change of an honest node is exactly 0."""
        found = limited(losses([0.0, 0.0, 0.5]), at_best=True)
        (objector,) = found.watch.excluded
        assert (objector.node, objector.excluded) == (2, Exclusion.FALSE)
        assert changes(found).tolist() == [0, 0, 0]

    def test_excluded_losses_are_the_mean(self) -> None:
        """The mean of the others counts: 1 and 4 with weights 1 and 2."""
        report = losses([0.0, 0.0, 0.5], [1.0, 4.0, 50.0], sizes=[1, 2, 7])
        found = limited(report, at_best=True)
        assert found.report.losses == pytest.approx(np.array([1, 4, 3]))

    def test_majority_is_not_excluded(self) -> None:
        found = limited(losses([0.0, 0.5, 0.5]), at_best=True)
        assert found.watch.excluded == ()

    def test_minority_objects(self) -> None:
        found = limited(losses([-0.1, -0.3, 0.5]))
        assert found.objection is not None
        assert found.objection.nodes == (2,)
        assert (found.objection.loss, found.objection.best_loss) == pytest.approx((0, 0.2))

    @pytest.mark.parametrize("change", [[-0.1, 0.5, 0.5], [0.05, -0.1, 0.01], [0.5] * 3])
    def test_no_minority_objects(self, change: list[float]) -> None:
        assert limited(losses(change)).objection is None


Lie = Callable[[float, int], float]
"""Change of loss that a liar reports: from w and the number of the round."""


def run(
    losses_at: Sequence[Callable[[float], float]],
    lie: Lie | None = None,
    rounds: int = 200,
    gain: float = 0.3,
) -> tuple[Aggregator, list[Round]]:
    """Descend along the mean gradient of losses of one number, with a node for each.

    Args:
      losses_at: loss of each node at w.
      lie: what the last node adds to its loss unless w is w^f; None if it is honest.
      rounds: number of rounds.
      gain: step of the nodes in terms of η.
    """
    aggregator = make(1e6, step_size=AutoStep(start=1.0))
    broadcast = as_train(aggregator.start())
    records: list[Round] = []
    for number in range(1, rounds + 1):
        w = float(broadcast.w[0])
        best = float(aggregator.state.best[0])
        slopes = [(f(w + 1e-4) - f(w - 1e-4)) / 2e-4 for f in losses_at]
        ends = [w - gain * broadcast.eta * slope for slope in slopes]
        now = [f(w) for f in losses_at]
        if lie is not None and w != best:
            now[-1] = losses_at[-1](best) + lie(w, number)
        numbers: dict[str, Any] = {
            "losses": np.array(now),
            "best_losses": np.array([f(best) for f in losses_at]),
        }
        w_i = np.array([[end, 0.0] for end in ends], np.float32)
        vectors = {"w": w_i, "gradients": np.zeros_like(w_i)}
        optional = {name: np.full(len(now), np.nan) for name in broadcast.report.optional}
        report = TrainReport(
            round=number,
            nodes=np.arange(len(now)),
            sizes=np.ones(len(now), np.int64),
            numbers={**numbers, **optional},
            vectors={name: vectors[name] for name in broadcast.report.vectors},
        )
        answer = aggregator.receive(report, ONE, peers=np.arange(len(now)))
        records.append(last(aggregator))
        broadcast = as_train(answer)
    return aggregator, records


def bowl(minimum: float) -> Callable[[float], float]:
    return lambda w: (w - minimum) ** 2


HONEST = [bowl(1.0), bowl(1.1), bowl(0.9)]


def others_loss(state: AggregatorState[Any, Any]) -> float:
    """Mean loss of the two nodes that do not lie, at w^f."""
    w = float(state.best[0])
    return (HONEST[0](w) + HONEST[1](w)) / 2


def returns(records: Sequence[Round]) -> int:
    return sum(record.reason == "recovery" for record in records)


def test_harmed_node_stops_divergence() -> None:
    """Two nodes gain 1e-3 per round; the loss of the third explodes."""
    flat = [lambda w: 1.0 - 1e-3 * w] * 2
    steep = [lambda w: 0.5 + 1e-3 * w**4]
    aggregator, records = run([*flat, *steep], gain=20.0)
    assert steep[0](float(aggregator.state.best[0])) < 1.0
    assert last(aggregator).best_loss <= records[0].loss
    assert last(aggregator).excluded == ()


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        pytest.param(lambda w, _: 1e9, Exclusion.RETURNS, id="huge"),
        pytest.param(lambda w, _: math.nan, Exclusion.RETURNS, id="not a number"),
        pytest.param(lambda w, _: 3.0, Exclusion.KEPT, id="within limits"),
        pytest.param(lambda w, _: 0.5, Exclusion.KEPT, id="moderate"),
    ],
)
def test_objecting_liar_is_excluded(lie: Lie, reason: Exclusion) -> None:
    """The others' lowest loss is 0.0025, and 1.1 at the start."""
    aggregator, records = run(HONEST, lie)
    assert [each.excluded for each in last(aggregator).excluded] == [reason]
    assert returns(records) <= MOST_RETURNS + 1
    assert others_loss(aggregator.state) < 0.02


@pytest.mark.parametrize(
    "lie",
    [
        pytest.param(lambda w, _: -1e9, id="very low"),
        pytest.param(lambda w, number: 1e9 if number % 2 else -1e9, id="alternating"),
        pytest.param(lambda w, number: 1e9 if number % 7 == 0 else 0.0, id="rare"),
        pytest.param(lambda w, _: 0.05, id="small"),
    ],
)
def test_liar_harms_little(lie: Lie) -> None:
    """The loss at the start is 1; the others' lowest is 0.0025."""
    aggregator, records = run(HONEST, lie)
    assert others_loss(aggregator.state) < 0.1
    assert returns(records) <= MOST_RETURNS + 1


def test_kept_rounds_are_counted_in_a_row() -> None:
    """A node that lets w^f move in between is not excluded for it."""
    watch = WATCH
    objection = limited(losses([-0.1, -0.3, 0.5])).objection
    for _ in range(3):
        for _ in range(MOST_KEPT - 1):
            watch = watch.after(objection, returned=False)
        watch = watch.after(None, returned=False)
    assert watch.excluded == ()
    assert watch.objectors[0].kept == 0


def test_honest_run_has_no_objectors() -> None:
    aggregator, _ = run(HONEST)
    assert aggregator.state.watch.objectors == ()
    assert others_loss(aggregator.state) < 0.02


def test_resumed_run_remembers_objections() -> None:
    """The watch is part of the state, so a new aggregator excludes the same node."""
    aggregator, _ = run(HONEST, lambda w, _: 1e9, rounds=60)
    state = aggregator.state
    again = Aggregator.resume(state, method=aggregator.method, budget=state.ledger.budget)
    assert again.state.watch == state.watch
    assert again.state.watch.objectors[0].node == 2
