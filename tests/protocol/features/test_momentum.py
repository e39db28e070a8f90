"""Momentum at nodes: local updates from the extrapolated w, and its share."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from fedbudget.arrays import Float32, Float64
from fedbudget.budget.step_size import FixedStep, StepSizeInputs, StepSizeState
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.features.feature import Feature, report_layout
from fedbudget.protocol.features.momentum import (
    Momentum,
    MomentumCatchUp,
    MomentumPart,
    MomentumState,
    extrapolated,
)
from fedbudget.protocol.features.workload import SpeedWorkload, Work
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import (
    Broadcast,
    CatchUp,
    FinalRound,
    PeerError,
    TrainRound,
)
from fedbudget.protocol.update import Accelerate, Average
from support.fleets import one_fleet, sorted_parts
from support.hand_made import ONE, as_broadcast, as_train, make, report
from support.methods import bits
from support.problems import problem

SHARE = 0.6
ETA = 0.1
TAU = 4
CASE = problem("svm", 3)
PARTS = sorted_parts(CASE, 2)
W = [CASE.start(seed) for seed in range(4)]


def make_round(number: int, *, share: float | None = SHARE) -> TrainRound:
    return TrainRound(
        round=number,
        w=W[number - 1],
        report=report_layout((), number == 1),
        tau=TAU,
        eta=ETA,
        effective=TAU,
        parts=() if share is None else (MomentumPart(share),),
    )


def new_fleet(*more: Feature) -> Fleet:
    return one_fleet(CASE, PARTS, features=[Momentum(SHARE), *more])


def after_first(*more: Feature) -> Fleet:
    fleet = new_fleet(*more)
    fleet.answer(make_round(1, share=None))
    return fleet


def start_of_second() -> Float64:
    """w(t₀) extrapolated along its last step."""
    w = W[1].astype(np.float64)
    return w + SHARE * (w - W[0])


def descended(node: int, updates: int = TAU) -> Float64:
    """The second round of a node: every update also makes its part of the momentum."""
    way = start_of_second() - W[1]
    own = W[1].astype(np.float64)
    gradient = CASE.local(PARTS)[node]
    for _ in range(updates):
        own = own - ETA * gradient(own) + way / updates
    return own


def test_updates_include_momentum() -> None:
    report = after_first().answer(make_round(2))
    for node, w in enumerate(report.vectors["w"]):
        np.testing.assert_allclose(w, descended(node), atol=1e-5)


def test_nodes_with_different_updates() -> None:
    """All nodes go the whole way; only what their gradients add is rescaled to τ_eff."""
    fleet = after_first(SpeedWorkload(100))
    work = Work(5.0, 8, (TAU, 8), TAU)
    second = replace(
        make_round(2), effective=work.effective, parts=(MomentumPart(SHARE), work)
    )
    start = start_of_second()
    for w, node, updates in zip(
        fleet.answer(second).vectors["w"], range(2), work.updates, strict=True
    ):
        added = descended(node, updates) - start
        np.testing.assert_allclose(w, start + 5.0 / updates * added, atol=1e-5)


def test_catch_up_replaces_previous_w() -> None:
    """A node that missed the first round reports what one that was there reports."""
    caught_up = CatchUp(W[0], (MomentumCatchUp(W[0]),))
    new = new_fleet().answer(replace(make_round(2), catch_up=caught_up))
    known = after_first().answer(make_round(2))
    assert bits(new.vectors) == bits(known.vectors)


@pytest.mark.parametrize("catch_up", [None, CatchUp(W[0])])
def test_missing_previous_w_is_refused(catch_up: CatchUp | None) -> None:
    with pytest.raises(PeerError, match="round 2 has momentum, and this node lacks"):
        new_fleet().receive(replace(make_round(2), catch_up=catch_up))


def test_compact_fleet_continues_same_bits() -> None:
    fleet = after_first()
    fleet.answer(make_round(2))
    twin = fleet.fork()
    fleet.compact()
    assert fleet.state is not None
    assert fleet.state.start is None
    assert bits(fleet.answer(make_round(3))) == bits(twin.answer(make_round(3)))


def test_extended_run_keeps_its_start() -> None:
    """After a final round of the same w, the step before it is repeated, not itself."""
    fleet = after_first()
    direct = fleet.fork().answer(make_round(2))
    fleet.answer(FinalRound(round=2, w=W[1], parts=(MomentumPart(SHARE),)))
    again = fleet.answer(replace(make_round(2), round=3))
    assert bits(again.vectors) == bits(direct.vectors)


def test_statistics_are_not_extrapolated() -> None:
    w: Float32 = np.array([1.0, 2.0, 5.0], np.float32)
    before: Float32 = np.array([0.0, 4.0, 1.0], np.float32)
    assert extrapolated(w, before, 0.5, statistics=1).tolist() == [1.5, 1.0, 5.0]


@dataclass(frozen=True)
class Falling(FixedStep):
    """A step size that is divided by 4 in every round."""

    def next(self, state: StepSizeState, inputs: StepSizeInputs) -> StepSizeState:
        return replace(state, eta=state.eta / 4)


class TestShare:
    """The share m of momentum that nodes apply in the coming round."""

    def after_one_round(self, w: float = 1.0, **method: Any) -> Aggregator:
        aggregator = make(**method)
        aggregator.receive(report(aggregator.start(), 1.0, w=w), ONE)
        return aggregator

    @pytest.mark.parametrize(("step_size", "share"), [(FixedStep, 0.4), (Falling, 0.1)])
    def test_share_scales_with_falling_eta(
        self, step_size: type[FixedStep], share: float
    ) -> None:
        rule = Accelerate(momentum=0.8, carry=0.5)
        aggregator = self.after_one_round(update=rule, step_size=step_size(0.1))
        second = as_train(pending(aggregator))
        part = second.part(MomentumPart)
        assert part is not None
        assert part.share == pytest.approx(share)
        state = aggregator.state.states["momentum"]
        assert isinstance(state, MomentumState)
        assert state.before.tolist() == [0, 0]

    def test_none_with_other_rules(self) -> None:
        aggregator = self.after_one_round(update=Average())
        assert pending(aggregator).parts == ()

    def test_none_after_recovery(self) -> None:
        aggregator = self.after_one_round(np.nan, update=Accelerate())
        again = as_train(pending(aggregator))
        assert (again.tau, again.parts) == (1, ())
        assert "momentum" not in aggregator.state.states

    def test_none_before_the_final_loss(self) -> None:
        """A round that uses up the budget ends at the mean of the nodes."""
        aggregator = make(5, update=Accelerate())
        first = as_train(aggregator.start())
        assert first.stop
        final = as_broadcast(aggregator.receive(report(first, 1.0, w=3.0), ONE))
        assert final.w.tolist() == [3, -3]
        assert final.parts == ()


def pending(aggregator: Aggregator) -> Broadcast:
    assert aggregator.pending is not None
    return aggregator.pending
