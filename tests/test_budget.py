"""Budgets as written, and the ledger's arithmetic by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.budget import Budget, Costs, Ledger
from fedbudget.errors import UserError
from fedbudget.resources import RESOURCES
from support.problems import costs


class TestReading:
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
    def test_a_limit_is_in_the_resources_own_unit(self, text: str, name: str, limit: float) -> None:
        assert dict(Budget.parse([text]).limits) == pytest.approx({name: limit})

    def test_several_resources_keep_their_order(self) -> None:
        budget = Budget.parse(["bytes=20MB", "time=2min", "money=0.4"])
        assert budget.array.tolist() == [20e6, 120, 0.4]
        assert budget.label(np.array([1.0, 2.0, 3.0])) == {"bytes": 1, "time": 2, "money": 3}
        assert str(budget) == "bytes=20MB, time=120s, money=0.4"

    @pytest.mark.parametrize(
        ("texts", "message"),
        [
            (["time=15parsecs"], r"'time=15parsecs': unknown unit 'parsecs' for time; use .*min"),
            (["energy=15s"], "unknown unit 's' for energy"),
            (["money=3USD"], "unknown unit 'USD' for money; use no unit"),
            (["water=15s"], "unknown resource 'water' in the budget; use one of time, energy, bytes, cpu, money"),
            (["time=-15s"], "'time=-15s': the limit must be a positive number"),
            (["time=0"], "'time=0': the limit must be a positive number"),
            (["time=soon"], "'time=soon': 'soon' is not a number"),
            (["time=nan"], "'nan' is not a number"),
            (["time=e3s"], r"'e3s' is not a number"),
            (["time=1.2.3s"], r"'1\.2\.3s' is not a number"),
            (["time"], "'time' is not understood; write NAME=AMOUNT"),
            (["15s"], "'15s' is not understood"),
            (["time=15s", "bytes=1MB", "time=20s"], "budget time is given twice"),
            (["time=+15s"], r"budget time: \+ adds to the limit of a run that goes on; say which with `resume`"),
            ([], "a run needs a budget, for example time=15s"),
        ],
    )
    def test_a_mistake_is_named(self, texts: list[str], message: str) -> None:
        with pytest.raises(UserError, match=message):
            Budget.parse(texts)

    @pytest.mark.parametrize("limit", [0.0, -1.0, float("nan"), float("inf")])
    def test_a_limit_is_a_positive_number_however_it_was_made(self, limit: float) -> None:
        with pytest.raises(UserError, match=r"budget time=.*: the limit must be a positive number"):
            Budget({"time": limit})


class TestMoreForARunThatGoesOn:
    BUDGET = Budget.parse(["time=15s", "bytes=20MB"])

    def test_a_plus_adds_and_a_plain_limit_takes_the_place(self) -> None:
        assert dict(self.BUDGET.extended(["bytes=30MB", "time=+1min"]).limits) == {"time": 75, "bytes": 30e6}
        assert self.BUDGET.extended([]) == self.BUDGET

    @pytest.mark.parametrize(
        ("texts", "message"),
        [
            (["energy=+5J"], "budget energy: a run that goes on keeps its resources, time, bytes"),
            (["time=+5s", "time=30s"], "budget time is given twice"),
            (["time=+-5s"], "'time=\\+-5s'"),
        ],
    )
    def test_what_is_refused(self, texts: list[str], message: str) -> None:
        with pytest.raises(UserError, match=message):
            self.BUDGET.extended(texts)

    @given(st.fixed_dictionaries({name: st.floats(1e-300, 1e300) for name in RESOURCES}))
    def test_limits_are_written_as_they_are_read(self, limits: dict[str, float]) -> None:
        assert Budget.parse(Budget(limits).texts) == Budget(limits)


class TestResources:
    @pytest.mark.parametrize(
        ("name", "amount", "text"),
        [("bytes", 999, "999B"), ("bytes", 1000, "1kB"), ("bytes", 2.5e9, "2.5GB"), ("time", 0.28914, "0.2891s")],
    )
    def test_amounts_read_as_a_person_would_write_them(self, name: str, amount: float, text: str) -> None:
        assert RESOURCES[name].format(amount) == text


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_cost_is_finite_and_not_negative(bad: float) -> None:
    with pytest.raises(ValueError, match="costs must be finite and not negative"):
        costs([1.0, bad], [0.0, 0.0])
    with pytest.raises(ValueError, match="costs must be finite and not negative"):
        costs([0.0, 0.0], [1.0, bad])


def two(time: float, data: float, *, spent: tuple[float, float] = (0.0, 0.0)) -> Ledger:
    """A ledger of time and bytes: an update takes 2s and no bytes, the rest of a round 3s and 10 bytes."""
    return Ledger(Budget({"time": time, "bytes": data}), costs([2, 0], [3, 10]), np.array(spent))


class TestLedger:
    def test_charges_updates_and_the_rest_of_the_round(self) -> None:
        first = two(100, 100).charge(4, costs([2.5, 0], [1, 12]))
        second = first.charge(1, costs([3, 1], [2, 20]))
        assert first.spent.tolist() == [11, 12]
        assert second.spent.tolist() == [16, 33]
        assert (second.costs.step.tolist(), second.costs.aggregation.tolist()) == ([3, 1], [2, 20])

    def test_what_is_charged_need_not_be_what_is_expected(self) -> None:
        ledger = two(100, 100).charge(4, costs([2.5, 0], [30, 12]), expected=costs([2, 0], [1, 11]))
        assert ledger.spent.tolist() == [40, 12]
        assert (ledger.costs.step.tolist(), ledger.costs.aggregation.tolist()) == ([2, 0], [1, 11])

    def test_costs_of_another_number_of_resources_are_refused(self) -> None:
        for wrong in ((costs([1], [1]),), (costs([1, 1], [1]),), (costs([1, 1], [1, 1]), costs([1], [1]))):
            with pytest.raises(ValueError, match="costs of 2 resources are wanted"):
                two(100, 100).charge(1, *wrong)

    def test_is_a_value(self) -> None:
        ledger = two(100, 100)
        ledger.charge(4, costs([1, 1], [1, 1]))
        assert ledger.spent.tolist() == [0, 0]

    @pytest.mark.parametrize(
        ("tau", "time", "data", "stop"),
        [
            (4, 16.1, 21, False),  # 2·5 + 2·3 = 16 and 20 bytes
            (4, 16.0, 21, True),  # at the limit counts as reached
            (4, 16.1, 20, True),
            (5, 17.9, 21, True),  # 18
            (3, 14.1, 21, False),
        ],
    )
    def test_must_stop_when_any_resource_is_at_its_limit(self, tau: int, time: float, data: float, stop: bool) -> None:
        assert two(time, data).must_stop_with(tau) is stop

    def test_must_stop_counts_what_was_spent(self) -> None:
        assert two(26.1, 100, spent=(10, 0)).must_stop_with(4) is False
        assert two(25.9, 100, spent=(10, 0)).must_stop_with(4) is True

    @pytest.mark.parametrize(
        ("time", "data", "tau", "binding"),
        [
            (28.0, 100, 10, "time"),  # (28 - 2 - 6) / 2
            (27.9, 100, 9, "time"),
            (9.9, 100, 0, "time"),
            (28.0, 19, 0, "bytes"),  # two exchanges are 20 bytes
            (28.0, 20, 10, "time"),
        ],
    )
    def test_affordable_tau_leaves_the_final_loss(self, time: float, data: float, tau: int, binding: str) -> None:
        assert two(time, data).affordable_tau() == (tau, binding)

    def test_the_scarcest_of_two_resources_limits_tau(self) -> None:
        ledger = Ledger(Budget({"time": 100, "cpu": 40}), costs([2, 3], [1, 2]), np.array([10.0, 5.0]))
        # time: (100 - 10 - 2 - 2) / 2 = 43; cpu: (40 - 5 - 3 - 4) / 3 = 9.3
        assert ledger.affordable_tau() == (9, "cpu")

    def test_tau_has_no_limit_where_updates_are_free(self) -> None:
        ledger = Ledger(Budget({"bytes": 100}), costs([0], [10]), np.zeros(1))
        assert ledger.affordable_tau()[0] == np.inf

    def test_the_resource_nearest_its_limit(self) -> None:
        assert two(160, 21).nearest_limit(4) == "bytes"  # 16/160 against 20/21
        assert two(17, 210).nearest_limit(4) == "time"

    def test_can_evaluate_needs_one_update_and_one_exchange(self) -> None:
        assert two(5, 10).can_evaluate() is True
        assert two(4.9, 10).can_evaluate() is False
        assert two(5, 9.9).can_evaluate() is False
        assert two(15, 10, spent=(10, 0)).can_evaluate() is True
        assert two(14.9, 10, spent=(10, 0)).can_evaluate() is False

    def test_share_and_overshoot(self) -> None:
        within, beyond = two(20, 100, spent=(5, 50)), two(20, 100, spent=(26, 50))
        assert within.share == 0.5
        assert within.overshoot.tolist() == [0, 0]
        assert beyond.share == 1
        assert beyond.overshoot.tolist() == [6, 0]


class TestOpening:
    def test_a_budget_for_less_than_a_round_and_the_final_loss_is_refused_with_what_a_round_costs(self) -> None:
        with pytest.raises(
            UserError, match=r"budget bytes=30B is too small: one round costs about 20B.*at least bytes=40B"
        ):
            Ledger.open(Budget({"time": 100, "bytes": 30}), costs([1, 5], [1, 15]))

    def test_the_budget_that_is_asked_for_is_enough(self) -> None:
        expected = costs([0.1234567], [1.0])
        with pytest.raises(UserError, match=r"at least time=2\.247s") as refused:
            Ledger.open(Budget({"time": 1}), expected)
        asked = str(refused.value).rpartition(" ")[2]
        assert Ledger.open(Budget.parse([asked]), expected).affordable_tau()[0] >= 1

    def test_nothing_is_spent_at_first(self) -> None:
        ledger = Ledger.open(Budget({"time": 100, "bytes": 40}), costs([1, 5], [1, 15]))
        assert ledger.spent.tolist() == [0, 0]

    @settings(deadline=None, max_examples=200)
    @given(step=st.floats(1e-6, 10), aggregation=st.floats(1e-6, 10))
    def test_a_budget_for_just_one_round_affords_it_whatever_the_rounding(
        self, step: float, aggregation: float
    ) -> None:
        expected = Costs(np.array([step]), np.array([aggregation]))
        ledger = Ledger.open(Budget({"time": 2 * (step + aggregation)}), expected)
        assert ledger.affordable_tau()[0] == 1
        assert ledger.charge(1, expected).can_evaluate()
