"""Spending rules: `CarefulSpending` keeps the budget, `PaperSpending` follows Algorithm 2
to the letter.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from fedbudget.budget.budget import PRIOR_ROUNDS, Budget, Costs, Ledger
from fedbudget.budget.control import Decision, Reason
from fedbudget.budget.spending import (
    _CERTAIN,
    _LIKELY,
    CarefulSpending,
    PaperSpending,
    SpendingRule,
    _certain,
    open_ledger,
    progress,
)
from fedbudget.errors import UserError
from support.problems import costs

CAREFUL, PAPER = CarefulSpending(), PaperSpending()
WANTED = Decision(10, Reason.MINIMUM)


def ledger_of_two(
    time: float, data: float, *, spent: tuple[float, float] = (0.0, 0.0)
) -> Ledger:
    """Return a ledger of time and bytes. An update costs 2 s and no bytes, the rest of a
    round 3 s and 10 bytes.
    """
    ledger = Ledger.open(Budget({"time": time, "bytes": data}), costs([2, 0], [3, 10]))
    return ledger.charge_extra(np.array(spent))


def tau(decision: Decision | None) -> int:
    return 0 if decision is None else decision.tau


class TestPaper:
    @pytest.mark.parametrize(
        ("wanted", "time", "data", "stop"),
        [
            (4, 16.1, 21, False),  # 2·5 + 2·3 = 16 and 20 bytes
            (4, 16.0, 21, True),  # at the limit counts as reached
            (4, 16.1, 20, True),
            (5, 17.9, 21, True),  # 18
            (3, 14.1, 21, False),
        ],
    )
    def test_stops_at_the_limit(
        self, wanted: int, time: float, data: float, stop: bool
    ) -> None:
        assert (
            PAPER.plan(ledger_of_two(time, data), Decision(wanted, Reason.MINIMUM)).stop
            is stop
        )

    @pytest.mark.parametrize(
        ("time", "data", "fits", "binding"),
        [
            (28.0, 100, 10, "time"),  # (28 - 2 - 6) / 2
            (27.9, 100, 9, "time"),
            (9.9, 100, 0, "time"),
            (28.0, 19, 0, "bytes"),  # two exchanges are 20 bytes
            (38.0, 100, 15, "time"),
        ],
    )
    def test_tau_falls_until_it_fits(
        self, time: float, data: float, fits: int, binding: str
    ) -> None:
        plan = PAPER.plan(ledger_of_two(time, data), Decision(1000, Reason.MINIMUM))
        assert (tau(plan.decision), plan.stopped_by) == (fits, binding)

    def test_scarcest_resource_limits_tau(self) -> None:
        ledger = Ledger.open(Budget({"time": 100, "cpu": 40}), costs([2, 3], [1, 2]))
        # time: (100 - 10 - 2 - 2) / 2 = 43; cpu: (40 - 5 - 3 - 4) / 3 = 9.3
        plan = PAPER.plan(
            ledger.charge_extra(np.array([10.0, 5.0])), Decision(1000, Reason.MINIMUM)
        )
        assert (tau(plan.decision), plan.stopped_by) == (9, "cpu")

    def test_costs_come_from_the_previous_round(self) -> None:
        ledger = (
            ledger_of_two(100, 100)
            .charge(1, costs([3, 0], [4, 10]))
            .charge(1, costs([5, 0], [6, 10]))
        )
        assert PAPER.costs(ledger).step[0] == 3

    @settings(deadline=None, max_examples=200)
    @given(step=st.floats(1e-6, 10), aggregation=st.floats(1e-6, 10))
    def test_budget_for_one_round_affords_it(self, step: float, aggregation: float) -> None:
        expected = Costs(np.array([step]), np.array([aggregation]))
        ledger = open_ledger(Budget({"time": 2 * (step + aggregation)}), expected, PAPER)
        assert tau(PAPER.plan(ledger, WANTED).decision) == 1


class TestOpenLedger:
    def test_too_small_budget_is_refused(self) -> None:
        """The message names the cost of a round and the least budget."""
        with pytest.raises(
            UserError,
            match=r"bytes=30B is too small: one round costs about 20B.*at least bytes=40B$",
        ):
            open_ledger(Budget({"time": 100, "bytes": 30}), costs([1, 5], [1, 15]), PAPER)

    @pytest.mark.parametrize("rule", [CAREFUL, PAPER])
    def test_recommended_budget_is_enough(self, rule: SpendingRule) -> None:
        expected = costs([0.1234567], [1.0])
        with pytest.raises(UserError, match=r"at least time=") as refused:
            open_ledger(Budget({"time": 1}), expected, rule)
        recommended = str(refused.value).partition("at least ")[2].split(" ")[0]
        ledger = open_ledger(Budget.parse([recommended]), expected, rule)
        assert rule.plan(ledger, WANTED).decision is not None

    def test_recommended_budget_has_a_safety_margin(self) -> None:
        with pytest.raises(UserError, match=r"at least time=\d.*s \(with a safety margin"):
            open_ledger(Budget({"time": 4.1}), costs([1], [1]), CAREFUL)


def test_reserve_is_exceeded_in_one_percent() -> None:
    """Integrates over the excess x of the last round, in standard deviations. The final
    loss is evaluated if `_LIKELY` deviations remain for it.
    """
    reserve = np.sqrt(2) * _CERTAIN
    over, _ = integrate.quad(
        lambda x: stats.norm.pdf(x) * stats.norm.sf(reserve - x), -10, reserve - _LIKELY
    )
    assert over == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("rounds", [0, 3, 10, 30])
def test_certainty_matches_students_t(rounds: int) -> None:
    assert _certain(rounds) == pytest.approx(
        stats.t.ppf(stats.norm.cdf(_CERTAIN), rounds + PRIOR_ROUNDS), rel=0.02
    )


def simulate_run(
    rng: np.random.Generator, limit: float, wanted: Decision, *, b: float = 0.13
) -> tuple[Ledger, int, bool]:
    """Simulate the costs of a whole run with the paper's cost distributions.

    Returns the ledger, the number of rounds and whether the loss of w(T) was evaluated.
    """

    def draw(updates: int) -> Costs:
        step = np.maximum(rng.normal(0.013, 0.007, updates), 0).mean()
        return costs([step], [max(0.0, rng.normal(b, 0.41 * b))])

    ledger, rounds = open_ledger(Budget({"time": limit}), costs([0.013], [b]), CAREFUL), 0
    while (decision := CAREFUL.plan(ledger, wanted).decision) is not None:
        ledger, rounds = ledger.charge(decision.tau, draw(decision.tau)), rounds + 1
    if judged := ledger.fits(CAREFUL.final_reserve(ledger)):
        ledger = ledger.charge(1, draw(1))
    return ledger, rounds, judged


class TestCareful:
    def test_reserves_the_final_evaluations(self) -> None:
        """The nodes evaluate w and w^f once each, for every τ."""
        with_evaluation, ledger = (
            CarefulSpending(evaluation={"time": 7.0}),
            ledger_of_two(1000, 1000),
        )
        for reserve, without in (
            (with_evaluation.reserve(ledger, 5), CAREFUL.reserve(ledger, 5)),
            (with_evaluation.reserve(ledger, 0), CAREFUL.reserve(ledger, 0)),
            (with_evaluation.final_reserve(ledger), CAREFUL.final_reserve(ledger)),
        ):
            assert (reserve - without).tolist() == pytest.approx([14.0, 0.0])

    @pytest.mark.parametrize(
        ("limit", "wanted", "b"),
        [(3, 1, 0.13), (15, 10, 0.13), (15, 100, 0.13), (15, 30, 1.3)],
    )
    def test_budgets_are_kept_and_used(self, limit: float, wanted: int, b: float) -> None:
        """At most 2 % of 300 runs exceed the budget, none by much, and little is left over.

        A rate of 1 % gives more than 2 % once in 30 tests. If an exchange is long compared
        with the budget, one run in six skips its final loss.
        """
        rng = np.random.default_rng(wanted)
        runs = [
            simulate_run(rng, limit, Decision(wanted, Reason.MINIMUM), b=b)
            for _ in range(300)
        ]
        over = np.array([ledger.overshoot[0] for ledger, _, _ in runs])
        left = np.array([limit - ledger.spent[0] for ledger, _, _ in runs])
        assert (over > 0).mean() <= 0.02
        # One exchange, plus the reserve for this exchange and for the final loss.
        assert left.mean() <= 2.6 * b
        assert (over > 0.01 * limit).mean() <= 0.005
        assert np.mean([judged for _, _, judged in runs]) >= (
            0.97 if 0.41 * b < 0.005 * limit else 0.83
        )

    def test_equal_costs_leave_little(self) -> None:
        ledger = Ledger.open(Budget({"time": 100.0}), costs([1], [4]))
        while (decision := CAREFUL.plan(ledger, WANTED).decision) is not None:
            ledger = ledger.charge(decision.tau, costs([1], [4]))
        left = ledger.budget.array - ledger.charge(1, costs([1], [4])).spent
        # One round of one update, plus the reserve for the prior deviation.
        assert 0 <= left[0] <= 5 + 4

    def test_last_round_takes_the_rest(self) -> None:
        ledger = ledger_of_two(10_000, 10_000)
        for _ in range(400):
            ledger = ledger.charge(4, costs([2, 0], [3, 10]))
        reserve = CAREFUL.reserve(ledger, 10)[0]
        # An update costs 2 s, and a round at least 5 s.
        for more, fits in ((-1.0, 9), (0.0, 10), (4.1, 12), (4.9, 12)):
            near = ledger.charge_extra(
                np.array([10_000 - reserve - more - ledger.spent[0], 0.0])
            )
            assert tau(
                CAREFUL.plan(near, Decision(10, Reason.MINIMUM)).decision
            ) == pytest.approx(fits, abs=0.5)
            assert tau(CAREFUL.plan(near, Decision(10, Reason.FIXED)).decision) == min(
                10, fits
            )

    def test_rest_is_spread_over_last_rounds(self) -> None:
        """A round with τ = 10 costs 23 s and an update 2 s. With budget for 4.4 rounds,
        each of 4 rounds can take 2.3 s more.
        """
        ledger = ledger_of_two(10_000, 10_000)
        for _ in range(400):
            ledger = ledger.charge(4, costs([2, 0], [3, 10]))
        reserve = CAREFUL.reserve(ledger, 0)[0]
        for rounds, longer in (
            (4.4, 11),
            (4.05, 10),
            (2.9, 15),
            (10.9, 11),
            (11.9, 10),
            (50.9, 10),
        ):
            near = ledger.charge_extra(
                np.array([10_000 - reserve - rounds * 23 - ledger.spent[0], 0.0])
            )
            plan = CAREFUL.plan(near, Decision(10, Reason.MINIMUM)).decision
            assert plan == Decision(
                longer, Reason.SPREAD if longer > 10 else Reason.MINIMUM
            )
            assert CAREFUL.plan(near, Decision(10, Reason.FIXED)).decision == Decision(
                10, Reason.FIXED
            )

    def test_final_loss_is_skipped_over_budget(self) -> None:
        ledger = ledger_of_two(100, 1000)
        for _ in range(5):
            ledger = ledger.charge(1, costs([2, 0], [3, 10]))
        late = ledger.charge_extra(np.array([71.0, 0.0]))
        assert ledger.fits(CAREFUL.final_reserve(ledger))
        assert not late.fits(CAREFUL.final_reserve(late))

    def test_only_loss_is_evaluated_if_likely(self) -> None:
        """A round costs 5 s on average, so with 5 s left it fits in half of all cases."""
        ledger = ledger_of_two(100, 1000).charge(1, costs([2, 0], [3, 10]))
        late = ledger.charge_extra(np.array([90.0, 0.0]))
        assert not late.fits(CAREFUL.final_reserve(late))
        assert late.fits(CAREFUL.final_reserve(late, judged=False))
        assert not late.charge_extra(np.array([0.1, 0.0])).fits(
            CAREFUL.final_reserve(late, judged=False)
        )

    def test_final_loss_rarely_exceeds_by_much(self) -> None:
        """A round costs 5 s on average. The final loss may exceed the budget of 100 s by
        more than 1 % in one of 50 cases.
        """
        ledger = ledger_of_two(100, 1000).charge(1, costs([2, 0], [3, 10]))
        reserve = CAREFUL.final_reserve(ledger)[0] - 5
        deviation = ledger.statistics.deviation((1,))[0]
        assert stats.norm.sf((reserve + 1) / deviation) == pytest.approx(1 / 50, rel=0.02)

    def test_progress_is_one_after_all_rounds(self) -> None:
        ledger = ledger_of_two(100, 1000)
        assert progress(ledger, CAREFUL) == 0
        for _ in range(5):
            ledger = ledger.charge(3, costs([2, 0], [3, 10]))
        reserve = CAREFUL.reserve(ledger, 0)[0]
        assert progress(ledger, CAREFUL) == pytest.approx(45 / (100 - reserve))
        assert progress(
            ledger.charge_extra(np.array([55 - reserve, 0.0])), CAREFUL
        ) == pytest.approx(1)
