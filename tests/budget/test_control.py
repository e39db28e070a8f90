"""Controllers: search range, ties, reasons, and no memory except the previous decision."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.budget.control import (
    AdaptiveTau,
    BalancedTau,
    ControlInputs,
    Decision,
    Estimates,
    FixedTau,
    Reason,
)
from fedbudget.errors import UserError

SOME = Estimates(1.0, 2.0, 3.0)
INPUTS = ControlInputs(SOME, 0.01, np.array([0.013]), np.array([0.13]), np.array([15.0]))
IDENTICAL_NODES = replace(INPUTS, estimates=Estimates(0.0, 0.0, 0.0))


def previous(tau: int) -> Decision:
    return Decision(tau, Reason.MINIMUM)


class TestFixedTau:
    def test_ignores_all_inputs(self) -> None:
        controller = FixedTau(7)
        assert (
            controller.first()
            == controller.next(previous(3), INPUTS)
            == Decision(7, Reason.FIXED)
        )

    def test_needs_no_estimates(self) -> None:
        assert FixedTau(7).estimates is False

    @pytest.mark.parametrize("tau", [0, -3])
    def test_tau_below_one_is_refused(self, tau: int) -> None:
        with pytest.raises(UserError, match=f"tau must be at least 1, not {tau}"):
            FixedTau(tau)


class TestAdaptiveTau:
    def test_starts_with_one_update(self) -> None:
        assert AdaptiveTau().first() == Decision(1, Reason.START)
        assert AdaptiveTau().estimates is True

    def test_keeps_tau_without_estimates(self) -> None:
        assert AdaptiveTau().next(previous(3), replace(INPUTS, estimates=None)) == Decision(
            3, Reason.START
        )

    @pytest.mark.parametrize(
        ("tau", "gamma", "tau_max", "last"),
        [(1, 10, 100, 10), (3, 2.5, 100, 7), (30, 10, 100, 100), (1, 1, 100, 1)],
    )
    def test_search_range(self, tau: int, gamma: float, tau_max: int, last: int) -> None:
        """Candidates are 1 to min(γτ, τ_max)."""
        searched = AdaptiveTau(gamma=gamma, tau_max=tau_max).search_range(
            previous(tau), SOME
        )
        assert searched.tolist() == list(range(1, last + 1))

    def test_leap_for_identical_nodes(self) -> None:
        """With `leap`, τ rises to τ_max at once if δ = 0; without it, by γ per round."""
        assert AdaptiveTau(leap=True).next(previous(1), IDENTICAL_NODES) == Decision(
            100, Reason.SEARCH_LIMIT
        )
        for tau, largest in ((1, 10), (10, 100)):
            assert AdaptiveTau().next(previous(tau), IDENTICAL_NODES) == Decision(
                largest, Reason.SEARCH_LIMIT
            )
        assert AdaptiveTau(leap=True).next(previous(1), INPUTS).tau == 10

    def test_takes_the_minimum_of_g(self) -> None:
        # Direct evaluation of eq. (18): G is 8.1563 for τ = 13, 8.1504 for 14 and 8.1676
        # for 15.
        assert AdaptiveTau().next(previous(5), INPUTS) == Decision(14, Reason.MINIMUM)

    def test_reason_names_the_search_limit(self) -> None:
        assert AdaptiveTau().next(previous(1), INPUTS) == Decision(10, Reason.SEARCH_LIMIT)
        assert AdaptiveTau(tau_max=12).next(previous(5), INPUTS) == Decision(
            12, Reason.SEARCH_LIMIT
        )

    def test_range_of_one_is_a_minimum(self) -> None:
        assert AdaptiveTau(gamma=1).next(previous(1), INPUTS) == Decision(1, Reason.MINIMUM)

    def test_larger_phi_gives_smaller_tau(self) -> None:
        taus = [
            AdaptiveTau(phi=phi).next(previous(10), INPUTS).tau
            for phi in (0.005, 0.025, 0.1, 1.0, 100.0)
        ]
        assert taus == sorted(taus, reverse=True)
        assert len(set(taus)) > 3

    @settings(deadline=None, max_examples=50)
    @given(c=st.floats(1e-6, 1), budget=st.floats(10, 1e6))
    def test_takes_the_smallest_tau_on_ties(self, c: float, budget: float) -> None:
        free = replace(
            IDENTICAL_NODES, c=np.array([c]), b=np.array([0.0]), budget=np.array([budget])
        )
        assert AdaptiveTau().next(previous(10), free) == Decision(1, Reason.MINIMUM)

    def test_overflowing_g_is_never_chosen(self) -> None:
        steep = replace(INPUTS, estimates=Estimates(1.0, 1e8, 1e-3))
        curve = AdaptiveTau().curve(previous(100), steep)
        assert np.isinf(curve).any()
        assert np.isfinite(curve[AdaptiveTau().next(previous(100), steep).tau - 1])

    def test_tau_is_one_if_nothing_fits(self) -> None:
        assert (
            AdaptiveTau().next(previous(10), replace(INPUTS, budget=np.array([0.1]))).tau
            == 1
        )

    @settings(deadline=None, max_examples=50)
    @given(
        tau=st.integers(1, 100),
        rho=st.floats(0, 1e3),
        beta=st.floats(0, 1e3),
        delta=st.floats(0, 1e3),
        budget=st.floats(1, 1e4),
    )
    def test_decisions_are_pure_and_in_range(
        self, tau: int, rho: float, beta: float, delta: float, budget: float
    ) -> None:
        controller = AdaptiveTau()
        inputs = replace(
            INPUTS, estimates=Estimates(rho, beta, delta), budget=np.array([budget])
        )
        first = controller.next(previous(tau), inputs)
        controller.next(previous(99), IDENTICAL_NODES)
        assert controller.next(previous(tau), inputs) == first
        assert 1 <= first.tau <= min(10 * tau, 100)

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"phi": 0.0}, "phi must be positive, not 0"),
            ({"phi": float("nan")}, "phi must be positive"),
            ({"gamma": 0.5}, "gamma must be at least 1, not 0.5"),
            ({"tau_max": 0}, "tau-max must be at least 1, not 0"),
        ],
    )
    def test_invalid_parameters_are_refused(
        self, wrong: dict[str, float], message: str
    ) -> None:
        with pytest.raises(UserError, match=message):
            AdaptiveTau(**wrong)  # type: ignore[arg-type]

    def test_curve_needs_estimates(self) -> None:
        with pytest.raises(ValueError, match="G needs estimates"):
            AdaptiveTau().curve(previous(1), replace(INPUTS, estimates=None))


class TestBalancedTau:
    @staticmethod
    def chosen(
        c: list[float],
        b: list[float],
        budget: list[float],
        last: int = 100,
        worth: float = 10.0,
    ) -> int:
        inputs = ControlInputs(
            None, 0.1, np.array(c, float), np.array(b, float), np.array(budget, float)
        )
        return BalancedTau(worth=worth).next(Decision(last, Reason.BALANCE), inputs).tau

    @pytest.mark.parametrize(
        ("ratio", "worth", "tau"), [(10, 10, 10), (2.5, 10, 5), (10, 100, 32), (0.1, 10, 1)]
    )
    def test_square_root_rule_for_one_resource(
        self, ratio: float, worth: float, tau: int
    ) -> None:
        """τ = √(τ_d b/c)."""
        assert self.chosen([1.0], [ratio], [1e6], worth=worth) == tau

    def test_scarcest_resource_counts(self) -> None:
        assert self.chosen([1, 0], [10, 1], [1e6, 1e9]) == 10  # bytes do not bind
        assert self.chosen([1, 0], [10, 1], [1e9, 1e5]) == 100  # only bytes bind

    def test_at_least_ten_rounds_fit(self) -> None:
        assert self.chosen([1.0], [100.0], [1200.0]) == 20  # instead of √1000
        assert (
            self.chosen([1.0], [100.0], [900.0]) == 10
        )  # a shorter round would save almost nothing

    def test_reason_names_the_length_limit(self) -> None:
        inputs = ControlInputs(
            None, 0.1, np.array([1.0]), np.array([10.0]), np.array([1e6])
        )
        reasons = [
            BalancedTau(worth=100).next(previous(tau), inputs).reason for tau in (10, 16)
        ]
        assert reasons == [Reason.LENGTH, Reason.BALANCE]

    def test_growth_is_limited(self) -> None:
        """τ rises at once to the τ whose updates cost as much as an aggregation, then at
        most doubles.
        """
        assert self.chosen([1.0], [10.0], [1e6], last=1, worth=100) == 10
        assert self.chosen([1.0], [10.0], [1e6], last=10, worth=100) == 20
        assert self.chosen([1.0], [10.0], [1e6], last=20, worth=100) == 32
