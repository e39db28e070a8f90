"""Which step size next: the rule by hand, and that no run goes astray whatever the data are
scaled by.
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
EARLY = 0.1  # of the budget spent


def follow(
    *betas: float | None, state: AutoStepState | None = None, spent: float = EARLY
) -> AutoStepState:
    """The state after rounds with these β̂."""
    state = state or AUTO.first()
    for beta in betas:
        state = AUTO.next(state, StepSizeInputs(beta, spent))
    return state


class TestRule:
    def test_starts_small_and_unsettled(self) -> None:
        assert (AUTO.first().eta, AUTO.first().settled) == (0.001, False)

    def test_is_kappa_over_beta_once_that_is_known(self) -> None:
        state = follow(None, 100.0)
        assert state.eta == pytest.approx(1 / 100)
        assert state.settled

    def test_grows_tenfold_at_most_until_it_has_settled_and_threefold_afterwards(
        self,
    ) -> None:
        first = follow(1.0)
        assert first.eta == pytest.approx(0.01)
        assert not first.settled
        settled = follow(1.0, 1.0, 1.0)
        assert settled.eta == pytest.approx(1)
        assert settled.settled
        # β̂ falls to nothing: level ln(1e-6)/2, deviation the same, so that β̄ would be 1.
        assert follow(1e-6, state=settled).eta == pytest.approx(1)
        assert follow(1e-6, 1e-6, 1e-6, 1e-6, state=settled).eta <= 3**4

    def test_a_steep_round_counts_at_once_and_is_forgotten_slowly(self) -> None:
        settled = follow(1.0, 1.0, 1.0)
        assert follow(50.0, state=settled).eta == pytest.approx(1 / 50)
        after = follow(50.0, 1.0, state=settled)
        # level: half of ln 50, then a quarter; deviation: half of ln 50, then a half of
        # that and of half of ln 50.
        level, deviation = math.log(50) / 4, (math.log(50) / 2 + math.log(50) / 2) / 2
        assert after.eta == pytest.approx(min(1 / math.exp(level + deviation), 3 / 50))

    def test_no_estimate_changes_nothing(self) -> None:
        settled = follow(1.0, 1.0, 1.0)
        assert follow(None, state=settled) == settled

    def test_falls_over_the_last_quarter_of_the_budget_but_never_to_nothing(self) -> None:
        settled = follow(1.0, 1.0, 1.0)
        etas = [
            follow(1.0, state=settled, spent=spent).eta
            for spent in (0.5, 0.75, 0.875, 0.99, 1.2)
        ]
        assert etas == pytest.approx([1, 1, 0.5, 0.04, 0.02])
        assert follow(
            1.0, state=follow(1.0, state=settled, spent=0.875)
        ).eta == pytest.approx(1)  # steady all the time

    def test_going_back_gives_a_quarter_of_eta_and_half_of_kappa(self) -> None:
        settled = follow(1.0, 1.0, 1.0)
        state = AUTO.recover(settled, StepSizeInputs(1.0, EARLY))
        assert state.eta == pytest.approx(0.25)
        assert state.kappa == pytest.approx(0.5)
        assert follow(1.0, state=state).eta == pytest.approx(0.5)

    @given(st.lists(st.none() | st.floats(1e-9, 1e9), max_size=30), st.floats(0, 2))
    def test_is_positive_and_never_above_kappa_over_the_last_beta(
        self, betas: list[float | None], spent: float
    ) -> None:
        state = follow(*betas, spent=spent)
        assert 0 < state.eta < math.inf
        if betas and betas[-1] is not None:
            assert state.eta <= 1 / betas[-1] * (1 + 1e-9)


def test_a_fixed_one_stays_and_must_be_positive() -> None:
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
    def test_nobody_has_to_set_it(self, case: int) -> None:
        """Softmax regression is far from done with η = 0.01, which is much too small for
        it.
        """
        auto, small = (
            fedbudget.train(model="softmax", case=case, step_size=step_size).loss
            for step_size in ("auto", 0.01)
        )
        assert auto < small / 3

    def test_it_is_in_every_round_s_record_and_small_at_the_end(self) -> None:
        rounds = [
            each for each in fedbudget.train(model="softmax", case=2).rounds if each.tau
        ]
        assert rounds[0].eta == 0.001
        assert rounds[-1].eta < max(each.eta for each in rounds) / 2

    def test_it_waits_with_local_updates_until_it_has_settled(self) -> None:
        rounds = fedbudget.train(
            model="kmeans", method="frugal", case=3, batch_size="full", clusters=4
        ).rounds
        start = [each for each in rounds if each.reason == "start"]
        assert all(each.tau == 1 for each in start)
        assert len(start) > 2

    def test_one_that_is_too_large_is_noticed_and_the_run_goes_back(self) -> None:
        """With features a thousand times as large even the first η is far too large."""
        digits = load()
        result = fedbudget.train(
            model="svm", dataset=replace(digits, scale=digits.scale * 1000), case=2
        )
        assert any(each.reason == "recovery" for each in result.rounds)
        assert result.loss < 0.5

    @pytest.mark.parametrize("seed", range(3))
    def test_no_run_goes_astray(self, seed: int) -> None:
        _assert_no_higher_than_at_the_start(seed)

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(3, 300))
    def test_nor_do_many_more(self, seed: int) -> None:
        _assert_no_higher_than_at_the_start(seed)


def _assert_no_higher_than_at_the_start(seed: int) -> None:
    plan = random_plan(seed)
    start = loss_over(plan.model, plan.model.initial(plan.settings.seed), plan.train)
    assert execute(plan).loss <= start, plan.settings


def random_plan(seed: int) -> SimulatedRun:
    """Any model, case, number of nodes, mini-batch and budget, with features scaled by 0.01
    to 100.
    """
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
        ],  # over the last 0.4
    )
    def test_falls_over_the_last_part(self, spent: float, eta: float) -> None:
        rule = FallingStep(0.2, fall=0.4)
        for follow_up in (rule.next, rule.recover):
            assert follow_up(
                rule.first(), StepSizeInputs(None, spent)
            ).eta == pytest.approx(eta)

    def test_is_as_the_automatic_one_falls(self) -> None:
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
    def test_without_sense_is_refused(self, eta: float, fall: float, message: str) -> None:
        with pytest.raises(UserError, match=message):
            FallingStep(eta, fall)

    def test_in_a_run(self) -> None:
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

    def test_it_begins_with_what_the_search_gave(self) -> None:
        assert self.after(4.0).eta == pytest.approx(0.25)

    def test_it_begins_with_the_mean_and_falls_to_between_that_and_the_largest(
        self,
    ) -> None:
        state = self.RULE.next(self.RULE.first(), StepSizeInputs(8.0, 0.0, 2.0))
        assert state.eta == pytest.approx(1 / 2)
        for _ in range(20):
            state = self.RULE.next(state, StepSizeInputs(9.0, 0.0, 4.0))
        assert state.eta == pytest.approx(1 / 4)

    def test_it_falls_further_only_where_it_would_not_be_stable(self) -> None:
        """Gradient descent is stable below 2/β: where all β̂ are 40 that is 0.05, far below
        the 1/4 of the search.
        """
        assert self.after(4.0, *[7.9] * 20).eta == pytest.approx(1 / 4)
        assert self.after(4.0, *[40.0] * 30).eta == pytest.approx(2 / 40)

    @pytest.mark.parametrize(("share", "eta"), [(0.0, 0.125), (0.07, 0.1), (0.35, 0.005)])
    def test_of_long_rounds_it_is_that_of_the_middle(
        self, share: float, eta: float
    ) -> None:
        """With 0.175 of the budget left it has fallen by half, and with a round of half of
        that by as much more.
        """
        state = self.RULE.next(
            self.after(4.0), StepSizeInputs(4.0, 0.825, 4.0, round_share=share)
        )
        assert state.eta == pytest.approx(eta)

    def test_it_grows_twofold_where_the_loss_is_flatter_and_only_from_the_best(
        self,
    ) -> None:
        """Half old and half new: log β̂ is that of √2, and log 2 was its deviation in both
        rounds.
        """
        assert self.after(4.0, 1.0, 1.0).eta == pytest.approx(1 / 2**1.5)
        assert self.after(4.0, 1.0, 1.0, improved=False).eta == pytest.approx(0.25)
        grown = [self.after(4.0, *[1e-6] * rounds).eta for rounds in range(12)]
        assert max(b / a for a, b in pairwise(grown)) == pytest.approx(2)
        assert grown[-1] > 10 * grown[0]

    def test_one_steep_round_does_not_lower_it(self) -> None:
        """Half old and half new, log β̂ is that of 7.7, with which 1/4 is stable."""
        assert self.after(4.0, 15.0).eta == pytest.approx(0.25)

    def test_it_falls_at_the_end_and_after_going_back(self) -> None:
        assert self.after(4.0, spent=0.825).eta == pytest.approx(0.125)
        back = self.RULE.recover(self.after(4.0), StepSizeInputs(4.0, 0.0, 4.0))
        assert back.eta == pytest.approx(0.25 / 2)

    def test_without_a_beta_it_waits(self) -> None:
        assert (
            self.RULE.next(self.RULE.first(), StepSizeInputs(None, 0.0))
            == self.RULE.first()
        )
