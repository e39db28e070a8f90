"""Parsing of budgets, and the ledger's arithmetic checked by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbudget.budget.budget import Budget, CostStatistics, Ledger
from fedbudget.errors import UserError
from fedbudget.resources import RESOURCES
from support.problems import costs


class TestParse:
    @pytest.mark.parametrize(
        ("text", "name", "limit"),
        [
            ("time=15s", "time", 15),
            ("time=15", "time", 15),
            ("time=2min", "time", 120),
            ("time=1e3s", "time", 1000),
            ("time=250ms", "time", 0.25),
            ("time=1.5h", "time", 5400),
            ("energy=500J", "energy", 500),
            ("energy=2kWh", "energy", 7.2e6),
            ("bytes=20MB", "bytes", 20e6),
            ("bytes=1MiB", "bytes", 1048576),
            ("cpu=30s", "cpu", 30),
            ("money=0.40", "money", 0.4),
            (" bytes = 3 kB ", "bytes", 3000),
        ],
    )
    def test_units_are_converted(self, text: str, name: str, limit: float) -> None:
        assert dict(Budget.parse([text]).limits) == pytest.approx({name: limit})

    def test_resources_keep_their_order(self) -> None:
        budget = Budget.parse(["bytes=20MB", "time=2min", "money=0.4"])
        assert budget.array.tolist() == [20e6, 120, 0.4]
        assert budget.label(np.array([1.0, 2.0, 3.0])) == {
            "bytes": 1,
            "time": 2,
            "money": 3,
        }
        assert str(budget) == "bytes=20MB, time=2min, money=0.4"

    @pytest.mark.parametrize(
        ("texts", "message"),
        [
            (
                ["time=15parsecs"],
                r"'time=15parsecs': unknown unit 'parsecs' for time; use .*min",
            ),
            (["energy=15s"], "unknown unit 's' for energy"),
            (["money=3USD"], "unknown unit 'USD' for money; use no unit"),
            (
                ["water=15s"],
                "unknown resource 'water' in the budget; "
                "use one of time, energy, bytes, cpu, money",
            ),
            (["time=-15s"], "'time=-15s': the limit must be a positive number"),
            (["time=0"], "'time=0': the limit must be a positive number"),
            (["time=soon"], "'time=soon': 'soon' is not a number"),
            (["time=nan"], "'nan' is not a number"),
            (["time=e3s"], r"'e3s' is not a number"),
            (["time=1.2.3s"], r"'1\.2\.3s' is not a number"),
            (["time"], "'time' is not understood; write NAME=AMOUNT"),
            (["15s"], "'15s' is not understood"),
            (["time=15s", "bytes=1MB", "time=20s"], "budget time is given twice"),
            (
                ["time=+15s"],
                r"budget time: \+ extends the limit of a resumed run; set ",
            ),
            ([], "a run needs a budget, for example time=15s"),
        ],
    )
    def test_wrong_text_is_refused(self, texts: list[str], message: str) -> None:
        with pytest.raises(UserError, match=message):
            Budget.parse(texts)

    @pytest.mark.parametrize("limit", [0.0, -1.0, float("nan"), float("inf")])
    def test_limits_must_be_positive(self, limit: float) -> None:
        with pytest.raises(
            UserError, match=r"budget time=.*: the limit must be a positive number"
        ):
            Budget({"time": limit})


class TestExtend:
    BUDGET = Budget.parse(["time=15s", "bytes=20MB"])

    def test_plus_adds_and_plain_limit_replaces(self) -> None:
        assert dict(self.BUDGET.extended(["bytes=30MB", "time=+1min"]).limits) == {
            "time": 75,
            "bytes": 30e6,
        }
        assert self.BUDGET.extended([]) == self.BUDGET

    @pytest.mark.parametrize(
        ("texts", "message"),
        [
            (
                ["energy=+5J"],
                "budget energy: a resumed run keeps its resources, time, bytes",
            ),
            (["time=+5s", "time=30s"], "budget time is given twice"),
            (["time=+-5s"], "'time=\\+-5s'"),
        ],
    )
    def test_wrong_extension_is_refused(self, texts: list[str], message: str) -> None:
        with pytest.raises(UserError, match=message):
            self.BUDGET.extended(texts)

    @given(st.fixed_dictionaries({name: st.floats(1e-300, 1e300) for name in RESOURCES}))
    def test_texts_parse_to_the_same_budget(self, limits: dict[str, float]) -> None:
        assert Budget.parse(Budget(limits).texts) == Budget(limits)


class TestFormat:
    @pytest.mark.parametrize(
        ("name", "amount", "text"),
        [
            ("bytes", 999, "999B"),
            ("bytes", 1000, "1kB"),
            ("bytes", 2.5e9, "2.5GB"),
            ("time", 0.28914, "0.2891s"),
        ],
    )
    def test_amounts_have_readable_units(self, name: str, amount: float, text: str) -> None:
        assert RESOURCES[name].format(amount) == text


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_costs_are_finite_and_not_negative(bad: float) -> None:
    with pytest.raises(ValueError, match="costs must be finite and not negative"):
        costs([1.0, bad], [0.0, 0.0])
    with pytest.raises(ValueError, match="costs must be finite and not negative"):
        costs([0.0, 0.0], [1.0, bad])


def ledger_of_two(
    time: float, data: float, *, spent: tuple[float, float] = (0.0, 0.0)
) -> Ledger:
    """Return a ledger of time and bytes. An update costs 2 s and no bytes, the rest of a
    round 3 s and 10 bytes.
    """
    ledger = Ledger.open(Budget({"time": time, "bytes": data}), costs([2, 0], [3, 10]))
    return ledger.charge_extra(np.array(spent))


class TestLedger:
    def test_charges_updates_and_aggregation(self) -> None:
        first = ledger_of_two(100, 100).charge(4, costs([2.5, 0], [1, 12]))
        second = first.charge(1, costs([3, 1], [2, 20]))
        assert first.spent.tolist() == [11, 12]
        assert second.spent.tolist() == [16, 33]
        assert (second.costs.step.tolist(), second.costs.aggregation.tolist()) == (
            [3, 1],
            [2, 20],
        )
        assert (second.previous.step.tolist(), second.previous.aggregation.tolist()) == (
            [2.5, 0],
            [1, 12],
        )

    def test_extra_charge_changes_no_estimate(self) -> None:
        ledger = ledger_of_two(100, 100)
        more = ledger.charge_extra(np.array([30.0, 0]))
        assert more.spent.tolist() == [30, 0]
        assert (more.costs, more.statistics) == (ledger.costs, ledger.statistics)

    def test_unusual_round_changes_no_statistics(self) -> None:
        ledger = ledger_of_two(100, 100)
        after = ledger.charge(4, costs([2.5, 0], [50, 12]), usual=False)
        assert after.spent.tolist() == [60, 12]
        assert after.statistics is ledger.statistics

    def test_wrong_number_of_costs_is_refused(self) -> None:
        for wrong in (costs([1], [1]), costs([1, 1], [1])):
            with pytest.raises(ValueError, match="expected costs of 2 resources"):
                ledger_of_two(100, 100).charge(1, wrong)

    def test_charge_leaves_the_ledger_unchanged(self) -> None:
        ledger = ledger_of_two(100, 100)
        ledger.charge(4, costs([1, 1], [1, 1]))
        assert ledger.spent.tolist() == [0, 0]

    def test_fits_up_to_the_limit(self) -> None:
        assert ledger_of_two(15, 10, spent=(10, 0)).fits(np.array([5.0, 10]))
        assert not ledger_of_two(15, 10, spent=(10, 0)).fits(np.array([5.01, 10]))
        assert not ledger_of_two(15, 10, spent=(10, 0)).fits(np.array([5.0, 10.1]))

    def test_nearest_limit(self) -> None:
        assert ledger_of_two(160, 21).nearest_limit(np.array([16.0, 20])) == "bytes"
        assert ledger_of_two(17, 210).nearest_limit(np.array([16.0, 20])) == "time"

    def test_share_and_overshoot(self) -> None:
        within, beyond = (
            ledger_of_two(20, 100, spent=(5, 50)),
            ledger_of_two(20, 100, spent=(26, 50)),
        )
        assert within.share == 0.5
        assert within.overshoot.tolist() == [0, 0]
        assert beyond.share == 1
        assert beyond.overshoot.tolist() == [6, 0]


class TestStatistics:
    @staticmethod
    def after(
        rounds: list[tuple[int, float, float]], c: float = 1.0, b: float = 1.0
    ) -> CostStatistics:
        """Return the statistics after these rounds of (updates, step cost, aggregation
        cost), starting from the expected costs c and b.
        """
        statistics = CostStatistics.before(costs([c], [b]), np.array([0.5]))
        for updates, step, aggregation in rounds:
            statistics = statistics.after(updates, costs([step], [aggregation]))
        return statistics

    def test_recent_rounds_weigh_more(self) -> None:
        """Weights rise by one per round, and the expected cost is the first: (1·1 + 2·3 +
        3·5) / 6.
        """
        statistics = self.after([(1, 3.0, 3.0), (1, 5.0, 5.0)])
        assert statistics.mean.step[0] == pytest.approx(22 / 6)

    @pytest.mark.parametrize("rounds", [200, 400])
    def test_mean_and_deviation_match_the_noise(self, rounds: int) -> None:
        """The mean is within three standard errors for forty rounds; b has deviation 0.3, c
        has 0.2/√τ.
        """
        rng = np.random.default_rng(rounds)
        drawn = [(9, *rng.normal([2.0, 5.0], [0.2 / 3, 0.3])) for _ in range(rounds)]
        statistics = self.after(drawn, 2.0, 5.0)
        assert statistics.mean.aggregation[0] == pytest.approx(5, abs=0.3 * 3 / np.sqrt(20))
        assert statistics.mean.step[0] == pytest.approx(2, abs=0.2)
        assert np.sqrt(statistics.variance.aggregation[0]) == pytest.approx(0.3, rel=0.5)
        assert statistics.deviation((9,))[0] == pytest.approx(
            np.hypot(9 * 0.2 / 3, 0.3), rel=0.5
        )

    def test_short_rounds_vary_more_per_update(self) -> None:
        """A round of 100 updates shows their average: a single update has ten times its
        deviation.
        """
        rng = np.random.default_rng(0)
        statistics = self.after([(100, rng.normal(1.0, 0.4 / 10), 0.0) for _ in range(300)])
        assert statistics.deviation((1,))[0] == pytest.approx(0.4, rel=0.4)
        assert statistics.deviation((100,))[0] == pytest.approx(4.0, rel=0.4)

    def test_peak_excess_decays(self) -> None:
        steady = [(2, 1.0, 1.0)] * 50
        slow = self.after([*steady, (2, 1.0, 9.0)])
        assert slow.peak[0] == pytest.approx(8, rel=0.01)
        later = self.after([*steady, (2, 1.0, 9.0), *steady])
        assert later.peak[0] == pytest.approx(8 * 0.95**50, rel=0.05)

    def test_first_round_sets_no_peak(self) -> None:
        assert self.after([(1, 50.0, 50.0)]).peak[0] == 0

    def test_extreme_round_is_capped_at_tenfold(self) -> None:
        """The mean is (1 + 2·10) / 3 after a cold start; further rounds lower it."""
        assert self.after([(1, 1.0, 5000.0)]).mean.aggregation[0] == pytest.approx(7)
        assert (
            self.after([(1, 1.0, 5000.0), *[(1, 1.0, 1.0)] * 8]).mean.aggregation[0] < 1.5
        )

    def test_mean_reaches_200_fold_cost_quickly(self) -> None:
        assert self.after([(1, 1.0, 200.0)] * 8).mean.aggregation[0] == pytest.approx(
            200, rel=0.2
        )

    def test_mean_follows_a_persistent_change(self) -> None:
        statistics = self.after([(1, 1.0, 1.0)] * 1000 + [(1, 3.0, 3.0)] * 60)
        assert statistics.mean.step[0] == pytest.approx(3.0, rel=0.05)
