"""Step size rules checked by hand, and runs with any scale of the data end with a lower
loss.
"""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedbudget
from fedbudget.budget.step_size import (
    AutoStep,
    AutoStepState,
    FallingStep,
    FixedStep,
    SearchedStep,
    SearchedStepState,
    StepSizeInputs,
)
from fedbudget.data.builtin import digits as load
from fedbudget.data.dataset import Dataset
from fedbudget.errors import UserError
from fedbudget.launch.execute import execute
from fedbudget.launch.prepared import Overrides
from fedbudget.launch.simulate import SimulatedRun, simulate
from fedbudget.models.base import loss_over
from fedbudget.settings.settings import Settings

AUTO = AutoStep(kappa=1.0, fall=0.25)  # simple numbers
EARLY = 0.1  # share of the budget that is spent


def follow(
    *betas: float | None, state: AutoStepState | None = None, spent: float = EARLY
) -> AutoStepState:
    """Return the state after rounds with these β̂."""
    state = state or AUTO.first()
    for beta in betas:
        state = AUTO.next(state, StepSizeInputs(beta, spent))
    return state


class TestAutoStep:
    def test_starts_small_and_unsettled(self) -> None:
        assert (AUTO.first().eta, AUTO.first().settled) == (0.001, False)

    def test_is_kappa_over_beta(self) -> None:
        state = follow(None, 100.0)
        assert state.eta == pytest.approx(1 / 100)
        assert state.settled

    def test_growth_is_limited(
        self,
    ) -> None:
        """η grows at most tenfold per round until it settles, and threefold afterwards."""
        first = follow(1.0)
        assert first.eta == pytest.approx(0.01)
        assert not first.settled
        settled = follow(1.0, 1.0, 1.0)
        assert settled.eta == pytest.approx(1)
        assert settled.settled
        # β̂ falls to 1e-6: level and deviation are ln(1e-6)/2 in size, so β̄ would be 1.
        assert follow(1e-6, state=settled).eta == pytest.approx(1)
        assert follow(1e-6, 1e-6, 1e-6, 1e-6, state=settled).eta <= 3**4

    def test_steep_round_lowers_it_at_once(self) -> None:
        """Later rounds let η grow back slowly."""
        settled = follow(1.0, 1.0, 1.0)
        assert follow(50.0, state=settled).eta == pytest.approx(1 / 50)
        after = follow(50.0, 1.0, state=settled)
        # Level: ln(50)/2, then ln(50)/4. Deviation: ln(50)/2 in both rounds.
        level = math.log(50) / 4
        deviation = math.log(50) / 2
        assert after.eta == pytest.approx(min(1 / math.exp(level + deviation), 3 / 50))

    def test_round_without_estimate_keeps_state(self) -> None:
        settled = follow(1.0, 1.0, 1.0)
        assert follow(None, state=settled) == settled

    def test_falls_over_the_last_quarter(self) -> None:
        """η falls over the last quarter of the budget, to 2 % of its steady value."""
        settled = follow(1.0, 1.0, 1.0)
        etas = [
            follow(1.0, state=settled, spent=spent).eta
            for spent in (0.5, 0.75, 0.875, 0.99, 1.2)
        ]
        assert etas == pytest.approx([1, 1, 0.5, 0.04, 0.02])
        late = follow(1.0, state=settled, spent=0.875)
        assert follow(1.0, state=late).eta == pytest.approx(1)  # the steady η is kept

    def test_recovery_quarters_eta_and_halves_kappa(self) -> None:
        settled = follow(1.0, 1.0, 1.0)
        state = AUTO.recover(settled, StepSizeInputs(1.0, EARLY))
        assert state.eta == pytest.approx(0.25)
        assert state.kappa == pytest.approx(0.5)
        assert follow(1.0, state=state).eta == pytest.approx(0.5)

    @given(st.lists(st.none() | st.floats(1e-9, 1e9), max_size=30), st.floats(0, 2))
    def test_is_at_most_kappa_over_beta(
        self, betas: list[float | None], spent: float
    ) -> None:
        state = follow(*betas, spent=spent)
        assert 0 < state.eta < math.inf
        if betas and betas[-1] is not None:
            assert state.eta <= 1 / betas[-1] * (1 + 1e-9)


def test_fixed_step_never_changes() -> None:
    step = FixedStep(0.3)
    assert (
        step.next(step.first(), StepSizeInputs(5.0, 0.99))
        == step.recover(step.first(), StepSizeInputs(5.0, 0.99))
        == step.first()
    )
    with pytest.raises(
        UserError, match="step-size must be auto or a positive number, not -1"
    ):
        FixedStep(-1.0)


class TestRuns:
    @pytest.mark.parametrize("case", [1, 2, 3, 4])
    def test_automatic_step_beats_small_step(self, case: int) -> None:
        """Softmax regression needs a far larger η than 0.01."""
        auto, small = (
            fedbudget.train(
                model="softmax", case=case, step_size=step_size, validation=0
            ).loss
            for step_size in ("auto", 0.01)
        )
        assert auto < small / 3

    def test_records_contain_a_falling_step(self) -> None:
        rounds = [
            each for each in fedbudget.train(model="softmax", case=2).rounds if each.tau
        ]
        assert rounds[0].eta == 0.001
        assert rounds[-1].eta < max(each.eta for each in rounds) / 2

    def test_tau_is_one_until_settled(self) -> None:
        rounds = fedbudget.train(
            model="kmeans", method="frugal", case=3, batch_size="full", clusters=4
        ).rounds
        start = [each for each in rounds if each.reason == "start"]
        assert all(each.tau == 1 for each in start)
        assert len(start) > 2

    def test_features_of_a_large_scale(self) -> None:
        """With features a thousand times as large, the first search finds an η for them."""
        digits = load()
        result = fedbudget.train(
            model="svm", dataset=replace(digits, scale=digits.scale * 1000), case=2
        )
        losses = [each.loss for each in result.rounds]
        assert max(losses) <= losses[0]
        assert result.loss < 0.5

    @pytest.mark.parametrize("seed", range(3))
    def test_loss_never_ends_above_start(self, seed: int) -> None:
        _assert_loss_not_above_start(seed)

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(3, 300))
    def test_loss_never_ends_above_start_slow(self, seed: int) -> None:
        _assert_loss_not_above_start(seed)


def _assert_loss_not_above_start(seed: int) -> None:
    plan = random_plan(seed)
    start = loss_over(plan.model, plan.model.initial(plan.settings.seed), plan.train)
    assert execute(plan).loss <= start, plan.settings


def random_plan(seed: int) -> SimulatedRun:
    """Return a run with random settings, on features scaled by 0.01 to 100."""
    rng = np.random.default_rng(seed)
    digits: Dataset = load()
    scaled = replace(digits, scale=digits.scale * 10 ** rng.uniform(-2, 2))
    settings = Settings(
        model=str(rng.choice(["svm", "softmax", "kmeans", "linear"])),
        partition=f"case:{rng.integers(1, 5)}",
        nodes=int(rng.integers(2, 51)),
        batch_size="full" if rng.random() < 0.2 else 1,
        budget=(f"time={math.exp(rng.uniform(math.log(3), math.log(60))):.1f}s",),
        seed=int(rng.integers(1000)),
        evaluations=1,
    )
    plan = simulate(settings, Overrides(dataset=scaled))
    if settings.batch_size == "full" or rng.random() < 0.2:
        return plan
    most = min(200, int(plan.shards.size.min()))
    return simulate(
        replace(settings, batch_size=round(math.exp(rng.uniform(0, math.log(most))))),
        Overrides(dataset=scaled),
    )


class TestFallingStep:
    @pytest.mark.parametrize(
        ("spent", "eta"),
        [
            (0.0, 0.2),
            (0.6, 0.2),
            (0.8, 0.1),
            (0.9, 0.05),
            (0.999, 0.004),
            (1.0, 0.004),
        ],
    )
    def test_falls_over_the_last_share(self, spent: float, eta: float) -> None:
        rule = FallingStep(0.2, fall=0.4)
        for follow_up in (rule.next, rule.recover):
            assert follow_up(
                rule.first(), StepSizeInputs(None, spent)
            ).eta == pytest.approx(eta)

    def test_falls_like_the_automatic_step(self) -> None:
        rule = FallingStep(0.3)
        for spent in (0.1, 0.7, 0.83, 0.99):
            auto = AutoStep().next(
                AutoStepState(0.3, steady=0.3), StepSizeInputs(None, spent)
            )
            assert rule.next(
                rule.first(), StepSizeInputs(None, spent)
            ).eta == pytest.approx(auto.eta)

    @pytest.mark.parametrize(
        ("eta", "fall", "message"),
        [
            (0.0, 0.3, "step-size must be"),
            (0.1, 0.0, "step-fall must be"),
            (0.1, 1.1, "step-fall must be"),
        ],
    )
    def test_invalid_parameters_are_refused(
        self, eta: float, fall: float, message: str
    ) -> None:
        with pytest.raises(UserError, match=message):
            FallingStep(eta, fall)

    def test_falls_in_a_run(self) -> None:
        result = fedbudget.train(
            case=2, budget="time=3s", tau=5, step_size=0.1, step_fall=0.5
        )
        etas = [record.eta for record in result.rounds if record.tau]
        assert etas[0] == 0.1
        assert etas == sorted(etas, reverse=True)
        assert 0.002 <= etas[-1] < 0.03


class TestSearchedStep:
    RULE = SearchedStep()

    def after(
        self, *betas: float, improved: bool = True, spent: float = 0.0
    ) -> SearchedStepState:
        state = self.RULE.first()
        for beta in betas:
            state = self.RULE.next(state, StepSizeInputs(beta, spent, beta, improved))
        return state

    def test_starts_with_the_searched_value(self) -> None:
        assert self.after(4.0).eta == pytest.approx(0.25)

    def test_starts_from_the_mean_beta(
        self,
    ) -> None:
        """η then falls to a value between those of the mean and of the largest β̂."""
        state = self.RULE.next(self.RULE.first(), StepSizeInputs(8.0, 0.0, 2.0))
        assert state.eta == pytest.approx(1 / 2)
        for _ in range(20):
            state = self.RULE.next(state, StepSizeInputs(9.0, 0.0, 4.0))
        assert state.eta == pytest.approx(1 / 4)

    def test_falls_only_to_stay_stable(self) -> None:
        """Gradient descent is stable below 2/β. With β̂ = 40 that is 0.05, far below the
        1/4 of the search.
        """
        assert self.after(4.0, *[7.9] * 20).eta == pytest.approx(1 / 4)
        assert self.after(4.0, *[40.0] * 30).eta == pytest.approx(2 / 40)

    @pytest.mark.parametrize(("share", "eta"), [(0.0, 0.125), (0.07, 0.1), (0.35, 0.005)])
    def test_long_rounds_use_their_midpoint(self, share: float, eta: float) -> None:
        """With 0.175 of the budget left η has fallen by half. A round of 0.07 uses the η
        for the middle of the round.
        """
        state = self.RULE.next(
            self.after(4.0), StepSizeInputs(4.0, 0.825, 4.0, round_share=share)
        )
        assert state.eta == pytest.approx(eta)

    def test_grows_only_after_an_improvement(
        self,
    ) -> None:
        """With equal weights for old and new, log β̂ is log √2 and its deviation log 2. η
        at most doubles per round.
        """
        assert self.after(4.0, 1.0, 1.0).eta == pytest.approx(1 / 2**1.5)
        assert self.after(4.0, 1.0, 1.0, improved=False).eta == pytest.approx(0.25)
        grown = [self.after(4.0, *[1e-6] * rounds).eta for rounds in range(12)]
        assert max(b / a for a, b in pairwise(grown)) == pytest.approx(2)
        assert grown[-1] > 10 * grown[0]

    def test_one_steep_round_is_ignored(self) -> None:
        """With equal weights for old and new, β̂ is 7.7, and η = 1/4 is stable."""
        assert self.after(4.0, 15.0).eta == pytest.approx(0.25)

    def test_falls_at_end_and_after_recovery(self) -> None:
        assert self.after(4.0, spent=0.825).eta == pytest.approx(0.125)
        back = self.RULE.recover(self.after(4.0), StepSizeInputs(4.0, 0.0, 4.0))
        assert back.eta == pytest.approx(0.25 / 2)

    def test_waits_for_the_first_beta(self) -> None:
        assert (
            self.RULE.next(self.RULE.first(), StepSizeInputs(None, 0.0))
            == self.RULE.first()
        )
