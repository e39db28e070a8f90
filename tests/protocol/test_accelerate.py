"""Parts of the accelerated method: gains and momentum, the first step, and how much of a
shift lasts.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbudget.arrays import Float32
from fedbudget.data.sampling import BatchIndices
from fedbudget.data.shards import Shards, Table
from fedbudget.models import FunctionModel
from fedbudget.protocol.drift import Correction, Divergence, DriftState
from fedbudget.protocol.estimates import first_steepness
from fedbudget.protocol.messages import Broadcast, Drift, Report, Request
from fedbudget.protocol.state import (
    apply_update,
    damp_velocity,
    rescale_velocity,
    updated,
    with_losses,
)
from fedbudget.protocol.sums import ReportsHere
from fedbudget.protocol.update import Accelerate, Average, Motion
from support.hand_made import make


def vector(*values: float) -> Float32:
    return np.array(values, np.float32)


class TestAccelerate:
    def test_by_hand(self) -> None:
        """Parameters that go on, turn back, and rest: v = 0.95 v' + g Δ."""
        state = Motion(vector(1, 1, 1, 0), vector(2, 2, 1, 5))
        after, w = Accelerate().next(state, vector(0, 0, 0, 0), vector(1, -1, 0, 1))
        assert after.gains == pytest.approx([2.8, 1, 1, 5])
        assert after.velocity == pytest.approx([0.95 + 2.8, 0.475 - 1, 0.95, 5])
        assert w == pytest.approx(after.velocity)

    def test_gains_stay_between_1_and_100(self) -> None:
        rule, state, w = Accelerate(), Motion(vector(1, 1), vector(90, 1.2)), vector(0, 0)
        after, _ = rule.next(state, w, vector(1, -1))
        assert after.gains.tolist() == [100, 1]

    @given(
        steps=st.lists(st.floats(-1, 1, width=16), min_size=1, max_size=12),
        factor=st.sampled_from([0.125, 8, 64]),
    )
    def test_nothing_depends_on_how_large_parameters_are(
        self, steps: list[float], factor: float
    ) -> None:
        def path(scale: float) -> list[float]:
            rule, w = Accelerate(), vector(0)
            state, found = rule.first(w), []
            for step in steps:
                state, w = rule.next(state, w, w + np.float32(scale * step))
                found.append(float(w[0]) / scale)
            return found

        assert path(factor) == path(1)  # to the bit, for powers of two

    def test_it_is_faster_than_averaging_where_the_loss_is_flat_in_one_direction(
        self,
    ) -> None:
        """½(x² + y²/1000) by rounds that go along the gradient with η = 1."""
        curvature = vector(1, 1e-3)
        plain = w = vector(1, 1)
        rule = Accelerate()
        state = rule.first(w)
        for _ in range(60):
            plain = plain - curvature * plain
            state, w = rule.next(state, w, w - curvature * w)
        assert abs(plain[1]) > 0.9
        assert np.abs(w).max() < 0.1

    @given(etas=st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0]), min_size=1, max_size=8))
    def test_where_steps_become_shorter_it_is_momentum_of_gradients(
        self, etas: list[float]
    ) -> None:
        """u ← 0.95 u + gradient and w ← w - ηu, where rounds agree: what is remembered has
        no η in it.
        """
        etas = sorted(etas, reverse=True)
        rule, state, w = Accelerate(rise=1.0), Motion(vector(0), vector(1)), vector(0)
        u, expected = 0.0, 0.0
        for eta, coming in zip(etas, [*etas[1:], 0.125], strict=True):
            state, w = rule.next(state, w, w - np.float32(eta))  # a gradient of 1
            u = 0.95 * u + 1
            expected -= eta * u
            assert float(w[0]) == pytest.approx(expected, rel=1e-5)
            state = rule.paced(state, coming / eta)

    def test_where_they_become_longer_it_stays(self) -> None:
        assert Accelerate().paced(Motion(vector(4), vector(1)), 3.0).velocity.tolist() == [
            4
        ]

    def test_its_pace_is_that_of_the_coming_steps(self) -> None:
        """η falls to a quarter, and with it v, and what nodes make of the way that w came;
        it does not rise with η.
        """
        moving = Motion(vector(4, -2), vector(1, 9))
        state, said = (
            updated(make().state, update=moving),
            Broadcast.first(vector(1, 1), 0.1, Request()),
        )
        eta, rule = state.step_size.eta, Accelerate(momentum=0.8, carry=0.5)
        after = rescale_velocity(state, rule, said, 4 * eta, recover=False)
        assert (after.update.velocity.tolist(), after.update.gains.tolist()) == (
            [1, -0.5],
            [1, 9],
        )
        assert after.before is said.w
        assert after.momentum == pytest.approx(0.1)
        for slower in (eta, eta / 4):
            after = rescale_velocity(state, rule, said, slower, recover=False)
            assert after.update is moving
            assert after.momentum == pytest.approx(0.4)

    def test_nodes_make_none_of_it_by_another_rule_and_after_going_back(self) -> None:
        state, said = make().state, Broadcast.first(vector(1, 1), 0.1, Request())
        for rule, recover in ((Average(), False), (Accelerate(), True)):
            after = rescale_velocity(
                state, rule, said, state.step_size.eta, recover=recover
            )
            assert (after.before, after.momentum) == (None, 0)


class TestTrust:
    """A mean update is shortened where gradients have become long all of a sudden."""

    def test_by_hand(self) -> None:
        """Three halves of the longest are believed, of which nine tenths are remembered."""
        rule, state, shares, rates = Accelerate(), Accelerate().first(vector(0)), [], []
        for rate in (2.0, 1.0, 8.0, 8.0):
            state, share = rule.trust(state, rate)
            shares.append(share)
            rates.append(state.rate)
        assert shares == pytest.approx([1, 1, 2.7 / 8, 4.05 / 8])
        assert rates == pytest.approx([2, 1.8, 2.7, 4.05])

    def test_a_round_leads_no_further_than_it_is_trusted(self) -> None:
        """Of updates of 1 and then of 10, with η τ = 0.5 each, the second is taken as one
        of 1.5.
        """
        rule = Accelerate()
        state = updated(make().state, update=rule.first(vector(0, 0)))
        state, _, _ = apply_update(state, rule, vector(0.6, 0.8), None, span=0.5)
        state, before = (
            apply_update(state, rule, state.w + vector(6, 8), None, span=0.5)[0],
            state.w,
        )
        assert state.w - before == pytest.approx(
            0.95 * before + 1.4 * 1.5 * vector(0.6, 0.8), rel=1e-5
        )


class TestRetreat:
    """Four nodes of one sample each, whose losses at w(t₀) and at w^f are given."""

    def retreats(self, losses: list[float], best: list[float]) -> bool:
        w, ones = np.zeros((4, 2), np.float32), np.ones(4, int)
        report = Report(
            2, np.arange(4), ones, np.array(losses), np.array(best), w, None, None, None
        )
        sums = ReportsHere(report).sums
        moving = Motion(vector(4, -2), vector(1, 9))
        state, _ = with_losses(updated(make().state, t=1, round=2, update=moving), sums)
        assert damp_velocity(state, Average(), sums) is state
        after = damp_velocity(state, Accelerate(), sums).update
        if after is moving:
            return False
        assert (after.velocity.tolist(), after.gains.tolist()) == ([2, -1], [1, 5])
        return True

    def test_where_the_loss_is_worse_by_more_than_chance(self) -> None:
        assert self.retreats([1.3, 1.2, 1.3, 1.2], [1, 1, 1, 1])

    def test_not_where_it_is_better_or_hardly_worse(self) -> None:
        assert not self.retreats([0.9, 0.9, 0.9, 0.9], [1, 1, 1, 1])
        assert not self.retreats([1.04, 1.04, 1.04, 1.04], [1, 1, 1, 1])

    def test_not_where_one_node_says_so_alone(self) -> None:
        """Its mean is 0.25 above, as in no other node, and the standard error as much."""
        assert not self.retreats([2, 1, 1, 1], [1, 1, 1, 1])

    @given(st.lists(st.floats(0, 10), min_size=2, max_size=9))
    def test_the_error_is_that_of_a_mean(self, gaps: list[float]) -> None:
        nodes, w, best = (
            np.arange(len(gaps)),
            np.zeros((len(gaps), 1), np.float32),
            np.ones(len(gaps)),
        )
        report = Report(
            1, nodes, np.ones(len(gaps), int), best + gaps, best, w, None, None, None
        )
        expected = np.std(gaps, ddof=1) / np.sqrt(len(gaps))
        assert ReportsHere(report).sums.loss_gap_error == pytest.approx(expected, abs=1e-6)


def quadratic(curvature: Float32) -> tuple[FunctionModel, Shards]:
    """½ Σ a_j w_j² at every node, whatever its samples are."""

    def loss(w: Float32, x: object, y: object) -> tuple[float, Float32]:
        return float(0.5 * (curvature * w * w).sum()), curvature * w

    model = FunctionModel(loss, initial=np.zeros(len(curvature)))
    return model, Shards.whole(Table(np.zeros((2, 1), np.float32), np.zeros(2, np.float32)))


class TestFirstSteepness:
    @pytest.mark.parametrize("beta", [0.02, 0.3, 3.0, 2000.0])
    def test_of_a_quadratic_it_is_what_it_is(self, beta: float) -> None:
        model, shards = quadratic(vector(beta, beta))
        w = vector(1, 2)
        found = first_steepness(
            model, shards, BatchIndices.whole(1), w, np.float32(beta) * w[None]
        )
        assert found == pytest.approx(
            [max(beta, 1 / 30)], rel=1e-3
        )  # a first step is at most 30

    def test_where_the_loss_becomes_ever_steeper_it_is_that_of_where_many_updates_lead(
        self,
    ) -> None:
        """F = w⁴/4 at w = 1: s β(s) = (s - 1)³ + 1 is 300 at s = 7.69, where β̂ at w itself
        is 3.
        """

        def loss(w: Float32, x: object, y: object) -> tuple[float, Float32]:
            return float((w**4).sum() / 4), w**3

        model, (_, shards) = FunctionModel(loss, initial=np.ones(1)), quadratic(vector(1))
        found = first_steepness(
            model, shards, BatchIndices.whole(1), vector(1), np.ones((1, 1), np.float32)
        )
        assert found == pytest.approx([300 / 7.69], rel=0.1)  # between steps of 1 and 10

    def test_where_there_is_no_gradient_nothing_is_known(self) -> None:
        model, shards = quadratic(vector(1, 1))
        assert np.isnan(
            first_steepness(
                model,
                shards,
                BatchIndices.whole(1),
                vector(0, 0),
                np.zeros((1, 2), np.float32),
            )
        )


class TestStrength:
    def test_is_the_share_of_a_shift_that_stays(self) -> None:
        """What nodes tell when they report is the projection of the new shifts on the old,
        which they learn later.
        """
        rng = np.random.default_rng(3)
        sizes, drift = np.array([3, 5, 2]), Drift(correct=True, share=1.0, strength=0.7)
        known, gradients = (
            Correction.first(3, np.zeros(9, np.float32)),
            rng.normal(size=(2, 3, 9)).astype(np.float32),
        )
        gradients[1] += gradients[0]
        first = known.learn(gradients[0].copy(), drift)
        first = first.with_mean(
            np.average(first.own, axis=0, weights=sizes).astype(np.float32)
        )
        shift = first.used(drift)
        assert shift is not None
        second = first.learn(gradients[1] + shift, drift)
        report = Report(
            2, np.arange(3), sizes, np.ones(3), np.ones(3), np.zeros((3, 9), np.float32)
        )
        lasting, shifted = second.persistence
        sums = ReportsHere(replace(report, lasting=lasting, shifted=shifted)).sums
        later = second.with_mean(
            np.average(second.own, axis=0, weights=sizes).astype(np.float32)
        )
        stayed = (
            sizes
            @ np.einsum("ij,ij->i", later.shift, first.shift)
            / (sizes @ np.square(first.shift).sum(axis=1))
        )
        assert sums.persistent_share == pytest.approx(float(stayed), rel=1e-4)
        assert 0.2 < stayed < 1.8

    @pytest.mark.parametrize(
        ("lasted", "strength"),
        [
            ([0.6], 0.6),
            ([0.6, 0.2], 0.4),
            ([-3.0], 0),
            ([7.0], 1),
            ([0.5, np.nan], 0.5),
            ([], 1),
        ],
    )
    def test_is_half_old_and_half_new_between_none_and_all(
        self, lasted: list[float], strength: float
    ) -> None:
        state = DriftState.first(vector(0))
        said = Broadcast.first(vector(0), 0.1, Request(drift=True, partly=True))
        ratios: list[float | None] = [*lasted] or [None]
        for ratio in ratios:
            state = state.after(
                said, vector(0), 1.0, Divergence(1.0, 1.0), recover=False, lasted=ratio
            )
        assert state.coming.strength == pytest.approx(strength)

    @given(strength=st.floats(0, 1), seed=st.integers(0, 1000))
    def test_shifts_cancel_whatever_it_is(self, strength: float, seed: int) -> None:
        """Σ D_i c_i = D c is kept, for any α: the mean of what nodes went along is that of
        their gradients.
        """
        rng = np.random.default_rng(seed)
        sizes, drift = (
            np.array([3.0, 5.0, 2.0]),
            Drift(correct=True, share=1.0, strength=strength),
        )
        known = Correction.first(3, np.zeros(4, np.float32))
        for _ in range(4):
            gradients = rng.normal(size=(3, 4)).astype(np.float32)
            shift = known.used(drift)
            assert shift is not None
            went = gradients + shift
            mean = np.average(went, axis=0, weights=sizes).astype(np.float32)
            known = known.learn(went, drift).with_mean(mean)
            assert np.allclose(known.own, gradients, atol=1e-5)
            assert np.allclose(
                np.average(known.own, axis=0, weights=sizes), known.mean, atol=1e-5
            )
