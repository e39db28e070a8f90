"""State transitions of a run: the best w, recovery, damped momentum, and resuming."""

import pickle
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbudget.arrays import Float32
from fedbudget.budget.budget import Budget
from fedbudget.budget.control import AdaptiveTau, Estimates, FixedTau, Reason
from fedbudget.budget.spending import PaperSpending
from fedbudget.budget.step_size import AutoStep, FixedStep
from fedbudget.errors import UserError
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.features.drift import DriftPart, DriftState
from fedbudget.protocol.features.estimates import EstimatesState
from fedbudget.protocol.features.feature import Quantize
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import LOSSES, Broadcast, LocalError, TrainRound
from fedbudget.protocol.method import Method
from fedbudget.protocol.stages import with_finite_w
from fedbudget.protocol.state import Outcome, Phase
from fedbudget.protocol.sums import Sums
from fedbudget.protocol.update import Accelerate
from support.hand_made import (
    ONE,
    as_broadcast,
    as_final,
    as_outcome,
    as_train,
    last,
    make,
    report,
    train_report,
    w_of,
    with_values,
)
from support.methods import (
    METHODS,
    bits,
    new_aggregator,
    nodes,
    one_round,
    resume,
    simulated_time,
)
from support.problems import MODELS


class TestBestW:
    def play(
        self, losses: Sequence[float], bests: Sequence[float] | None = None
    ) -> tuple[list[bool], Outcome]:
        """Run with these losses; w is (k, -k) in round k + 1.

        Returns the `best` flag of each broadcast, and the outcome. Without `bests`, F(w^f)
        is the lowest loss so far, as with whole shards.
        """
        bests = bests or [float(np.nanmin(losses[: max(1, k)])) for k in range(len(losses))]
        aggregator = make(controller=FixedTau(1), rounds=len(losses) - 1)
        broadcast: Broadcast | Outcome = aggregator.start()
        flags = []
        for k, (loss, best) in enumerate(zip(losses, bests, strict=True)):
            broadcast = as_broadcast(broadcast)
            flags.append(broadcast.best)
            assert broadcast.w.tolist() == w_of(k).tolist()
            broadcast = aggregator.receive(report(broadcast, loss, w=k + 1, best=best), ONE)
        return flags, as_outcome(broadcast)

    def test_lowest_loss_wins(self) -> None:
        """Nodes receive the flag one broadcast later."""
        flags, outcome = self.play([5, 3, 4, 2, 6])
        assert flags == [False, False, True, False, True]
        assert outcome.w.tolist() == w_of(3).tolist()

    def test_final_w_can_win(self) -> None:
        assert self.play([5, 3, 4, 1])[1].w.tolist() == w_of(3).tolist()

    def test_initial_w_stays_if_best(self) -> None:
        flags, outcome = self.play([5, 5, 6, 7])
        assert not any(flags)
        assert outcome.w.tolist() == [0, 0]

    def test_compared_on_same_mini_batches(self) -> None:
        # On the samples of round 3, w^f has loss 9 and w(2) has 4, although w(1) had 3.
        flags, outcome = self.play([5, 3, 4, 6], [5, 5, 9, 4])
        assert flags == [False, False, True, True]
        assert outcome.w.tolist() == w_of(2).tolist()

    def test_nonfinite_loss_never_wins(self) -> None:
        assert self.play([5, 3, np.nan, np.inf])[1].w.tolist() == w_of(1).tolist()

    def test_record_has_both_losses(self) -> None:
        aggregator = make(controller=FixedTau(1))
        broadcast = aggregator.start()
        found = []
        for k, (loss, best) in enumerate([(5.0, 5.0), (3.0, 5.0), (4.0, 3.0)]):
            broadcast = as_broadcast(
                aggregator.receive(report(broadcast, loss, w=k, best=best), ONE)
            )
            found.append((last(aggregator).loss, last(aggregator).best_loss))
        assert found == [(5, 5), (3, 3), (4, 3)]


NOTHING = np.full((2, 2), np.nan, np.float32)
"""w_i of two nodes that diverged."""


class TestRecovery:
    def lost(
        self, aggregator: Aggregator, broadcast: Broadcast, loss: float
    ) -> Broadcast | Outcome:
        """Answer a round with a report in which no w_i is finite."""
        given = report(broadcast, loss, best=5)
        return aggregator.receive(with_values(given, w=NOTHING), ONE)

    def test_repeats_round_with_one_update(self) -> None:
        aggregator = make(1000)
        broadcast = aggregator.receive(report(aggregator.start(), 5, w=1), ONE)
        again = as_train(self.lost(aggregator, as_broadcast(broadcast), loss=4))
        assert again.w.tolist() == w_of(1).tolist()
        assert (again.tau, last(aggregator).left_out) == (1, (0, 1))
        aggregator.receive(report(again, 4), ONE)
        assert last(aggregator).reason is Reason.RECOVERY

    def test_returns_to_best_after_infinite_loss(self) -> None:
        aggregator = make(1000)
        broadcast = as_broadcast(
            aggregator.receive(report(aggregator.start(), 5, w=1), ONE)
        )
        broadcast = as_broadcast(aggregator.receive(report(broadcast, 4, w=2, best=5), ONE))
        again = as_train(self.lost(aggregator, broadcast, loss=np.inf))
        assert again.w.tolist() == w_of(1).tolist()

    def test_controller_decides_afterwards(self) -> None:
        aggregator = make(1000)
        again = as_train(self.lost(aggregator, aggregator.start(), loss=4))
        assert as_train(aggregator.receive(report(again, 4), ONE)).tau == 3

    def test_keeps_all_estimates(self) -> None:
        aggregator = make(1000, controller=AdaptiveTau())
        broadcast = as_broadcast(aggregator.receive(report(aggregator.start(), 1), ONE))
        broadcast = as_broadcast(
            aggregator.receive(report(broadcast, 1, estimates=(1.0, 2.0, 3.0)), ONE)
        )
        given = report(broadcast, 1, estimates=(4.0, 5.0, 6.0))
        aggregator.receive(with_values(given, w=NOTHING), ONE)
        assert last(aggregator).kept == ("rho", "beta", "delta")
        assert last(aggregator).estimates == Estimates(1.0, 2.0, 3.0)

    def test_respects_the_budget(self) -> None:
        aggregator = make(7.5)
        as_final(self.lost(aggregator, aggregator.start(), loss=4))


class TestDamagedState:
    """A state whose w is damaged restarts from w^f, as after loading a checkpoint."""

    def run(self) -> Aggregator:
        """An aggregator after three corrected rounds with estimates and momentum."""
        aggregator = make(
            controller=AdaptiveTau(),
            step_size=AutoStep(),
            update=Accelerate(),
            correct_drift=True,
            delta="parameters",
        )
        broadcast: Broadcast | Outcome = aggregator.start()
        for w in (1.0, 2.0, 3.0):
            given = report(as_broadcast(broadcast), 1.0, w=w, estimates=(1.0, 2.0, 3.0))
            broadcast = aggregator.receive(with_values(given, plain=np.ones(2)), ONE)
        return aggregator

    def test_finite_w_stays(self) -> None:
        run = self.run()
        assert with_finite_w(run.state, run.method) is run.state

    def test_damaged_best_stays(self) -> None:
        run = self.run()
        damaged = np.full(2, np.nan, np.float32)
        state = replace(run.state, w=damaged, best=damaged)
        assert with_finite_w(state, run.method) is state

    def test_features_restart(self) -> None:
        """Drift correction, estimates and momentum forget what they learned."""
        run = self.run()
        before = run.state
        drift = before.states["drift"]
        assert isinstance(drift, DriftState)
        assert drift.mean.any()
        assert "momentum" in before.states
        damaged = np.array([1.0, np.inf], np.float32)
        after = with_finite_w(replace(before, w=damaged, worse=True), run.method)
        assert after.w is before.best
        assert bits(after.update) == bits(Accelerate().first(before.best))
        assert not after.worse
        assert after.states.keys() == {"drift", "estimates"}
        assert after.states["estimates"] == EstimatesState()
        restarted = after.states["drift"]
        assert isinstance(restarted, DriftState)
        assert not restarted.mean.any()
        assert restarted.coming == DriftPart(correct=False, share=1.0)
        assert restarted.divergence is None
        assert restarted.nodes.tolist() == [0, 1]
        after.require_possible()


class TestDivergence:
    """With an adaptive step size, a run returns to w^f if losses are far above the best."""

    def after(self, *losses: float, best: float = 1.0) -> tuple[Aggregator, TrainRound]:
        """Run rounds with these losses at w; w^f has loss `best` on the same samples."""
        aggregator = make(
            1000, step_size=AutoStep(), correct_drift=True, delta="parameters"
        )
        broadcast = aggregator.start()
        for k, loss in enumerate((1.0, *losses)):
            given = report(broadcast, loss, w=k + 1, best=best)
            broadcast = as_train(
                aggregator.receive(with_values(given, plain=np.ones(2)), ONE)
            )
        return aggregator, as_train(broadcast)

    def test_after_one_loss_tenfold(self) -> None:
        aggregator, broadcast = self.after(1.2, 16.0)
        assert broadcast.w.tolist() == [0, 0]
        assert (broadcast.tau, broadcast.eta) == (1, 0.001 / 4)
        assert broadcast.part(DriftPart) == DriftPart(correct=False, share=0.0)
        aggregator.receive(with_values(report(broadcast, 1.0), plain=np.ones(2)), ONE)
        assert last(aggregator).reason is Reason.RECOVERY

    def test_after_two_losses_half_above(self) -> None:
        assert self.after(1.6)[1].w.tolist() == w_of(2).tolist()
        assert self.after(1.6, 1.2, 1.6)[1].w.tolist() == w_of(4).tolist()
        assert self.after(1.6, 1.6)[1].w.tolist() == [0, 0]

    def test_not_for_tiny_losses(self) -> None:
        assert self.after(0.09, 0.09, best=0.001)[1].w.tolist() == w_of(3).tolist()
        assert self.after(0.11, 0.11, best=0.001)[1].w.tolist() == [0, 0]

    def test_after_a_nan_loss(self) -> None:
        assert self.after(np.nan)[1].w.tolist() == [0, 0]

    def test_not_with_fixed_step_size(self) -> None:
        aggregator = make(1000)
        broadcast = aggregator.start()
        for k, loss in enumerate((1.0, 100.0, 100.0)):
            broadcast = as_broadcast(
                aggregator.receive(report(broadcast, loss, w=k + 1, best=1.0), ONE)
            )
        assert broadcast.w.tolist() == w_of(3).tolist()


def test_step_size_follows_steepest_finite_beta() -> None:
    aggregator = make(1000, step_size=AutoStep(kappa=1.0, start=0.01))
    broadcast = as_broadcast(aggregator.receive(report(aggregator.start(), 1.0), ONE))
    given = report(broadcast, 1.0, estimates=(1.0, 1.0, 1.0))
    answer = aggregator.receive(with_values(given, beta=np.array([np.inf, 40.0])), ONE)
    assert as_train(answer).eta == pytest.approx(1 / 40)


def vector(*values: float) -> Float32:
    return np.array(values, np.float32)


@given(st.lists(st.floats(0, 10), min_size=2, max_size=9))
def test_standard_error_of_the_gap(gaps: list[float]) -> None:
    w = np.zeros((len(gaps), 1), np.float32)
    sums = Sums.of(train_report(w, losses=1 + np.array(gaps)), LOSSES)
    expected = np.std(gaps, ddof=1) / np.sqrt(len(gaps))
    assert sums.loss_gap_error == pytest.approx(expected, abs=1e-6)


METHOD = Method(FixedTau(3), FixedStep(0.1), spending=PaperSpending())
"""The method of `make`."""


def float16_steps(new: Float32, old: Float32) -> Float32:
    """A quantizer: differences in 16 bits."""
    return np.asarray(old + (new - old).astype(np.float16), np.float32)


def _restarted(old: Fleet, new: Fleet) -> Fleet:
    """`new` with the memory of `old`, as after a restart of the process."""
    with suppress(LocalError):
        new.recall(pickle.loads(pickle.dumps(old.memory())))
    return new


@pytest.mark.parametrize("batch", [None, 5])
@pytest.mark.parametrize("quantize", [None, float16_steps])
@pytest.mark.parametrize(
    ("name", "method"),
    [*((name, "frugal") for name in MODELS), *(("svm", how) for how in METHODS)],
)
def test_resumed_runs_have_same_bits(
    name: str, method: str, batch: int | None, quantize: Quantize | None
) -> None:
    def run(*, resumed: bool) -> list[object]:
        features = METHODS[method].features
        aggregator = new_aggregator(name, method, quantize=quantize)
        fleets = nodes(name, batch, features)
        time = simulated_time()
        aggregator.start()
        rounds: list[object] = []
        while aggregator.pending is not None:
            if resumed:
                before = aggregator.pending
                aggregator = resume(aggregator.state, method, quantize=quantize)
                assert bits(aggregator.pending) == bits(before)
                new_fleets = nodes(name, batch, features)
                fleets = [
                    _restarted(fleet, new)
                    for fleet, new in zip(fleets, new_fleets, strict=True)
                ]
            round_ = one_round(aggregator, fleets, time)
            rounds.append(bits(round_))
            if method == "astray" and round_.record is not None:
                reasons.add(round_.record.reason)
        assert isinstance(round_.answer, Outcome)
        ended = resume(aggregator.state, method, quantize=quantize)
        assert ended.state.phase is Phase.DONE
        assert bits(ended.outcome) == bits(round_.answer)
        return rounds

    reasons: set[str] = set()
    undisturbed = run(resumed=False)
    assert len(undisturbed) > 5
    assert (method != "astray") or Reason.RECOVERY in reasons
    assert run(resumed=True) == undisturbed


def test_later_rounds_keep_old_states() -> None:
    """A state is immutable: later rounds do not change it."""
    aggregator = new_aggregator("svm", "frugal")
    fleets = nodes("svm", 5, METHODS["frugal"].features)
    time = simulated_time()
    aggregator.start()
    for _ in range(3):
        one_round(aggregator, fleets, time)
    state = aggregator.state
    before = bits(state)
    for _ in range(3):
        one_round(aggregator, fleets, time)
    assert bits(state) == before
    assert bits(aggregator.state) != before


def test_pending_is_the_last_broadcast() -> None:
    aggregator = make()
    pending = [aggregator.pending]
    broadcast = aggregator.start()
    pending.append(aggregator.pending)
    again = as_broadcast(aggregator.receive(report(broadcast, 1), ONE))
    pending.append(aggregator.pending)
    assert aggregator.outcome is None
    outcome = aggregator.interrupt()
    pending.append(aggregator.pending)
    assert [bits(each) for each in pending] == [None, bits(broadcast), bits(again), None]
    assert bits(aggregator.outcome) == bits(outcome)


class TestResumeWithOtherSettings:
    def test_other_budget_is_refused(self) -> None:
        aggregator = make()
        aggregator.start()
        with pytest.raises(
            UserError, match=r"a budget of time=16\.67min, not of time=10s, bytes=10B"
        ):
            Aggregator.resume(
                aggregator.state, method=METHOD, budget=Budget({"time": 10, "bytes": 10})
            )

    @pytest.mark.parametrize("correct", [False, True])
    def test_other_drift_setting_is_refused(self, correct: bool) -> None:
        aggregator = make(correct_drift=not correct)
        aggregator.start()
        with pytest.raises(UserError, match=r"and must resume with(out)? it"):
            Aggregator.resume(
                aggregator.state,
                method=replace(METHOD, correct_drift=correct),
                budget=Budget({"time": 10}),
            )

    @pytest.mark.parametrize(
        "other", [{"partly": True}, {"step_size": AutoStep()}, {"delta": "parameters"}]
    )
    def test_other_feature_settings_are_refused(self, other: dict[str, Any]) -> None:
        """Also a step size that needs other measurements of the same feature."""
        method = replace(METHOD, controller=AdaptiveTau(), correct_drift=True)
        aggregator = make(controller=AdaptiveTau(), correct_drift=True)
        aggregator.start()
        with pytest.raises(UserError, match="began with other options of its features"):
            Aggregator.resume(
                aggregator.state,
                method=replace(method, **other),
                budget=Budget({"time": 10}),
            )


def test_resumed_run_pays_interrupted_round() -> None:
    """The cost of an interrupted round is charged, and the round is repeated."""
    aggregator = make(20)
    as_broadcast(aggregator.receive(report(aggregator.start(), 1), ONE))
    state = replace(
        aggregator.state, ledger=aggregator.ledger.charge_extra(np.array([7.0]))
    )
    again = Aggregator.resume(state, method=METHOD, budget=Budget({"time": 20}))
    assert again.pending is not None
    third = as_train(again.receive(report(again.pending, 1), ONE))
    assert again.ledger.spent.tolist() == [15]
    assert (third.tau, third.stop) == (2, True)  # (20 - 15 - 1 - 2) / 1


def test_fleet_recalls_only_its_memory() -> None:
    """A fleet has no memory before its first round, and refuses the memory of others."""
    first, second, _ = nodes("svm", None)
    with pytest.raises(LocalError, match="no memory before its first round"):
        first.memory()
    broadcast = new_aggregator("svm", "fixed").start()
    first.answer(broadcast)
    memory = first.memory()
    with pytest.raises(LocalError, match="the memory is of other nodes"):
        second.recall(replace(memory, losses=np.zeros(2)))
    assert bits(second.answer(broadcast)) == bits(
        nodes("svm", None)[1].answer(broadcast)
    )  # the refused memory changed nothing
