"""The equations against exact arithmetic, and the theorems against descents whose constants
are known.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedbudget.arrays import Float64
from fedbudget.budget import theory
from support.problems import Trajectory
from support.regression import Regression

relaxed = settings(deadline=None, max_examples=60)


def magnitudes(low: float, high: float) -> st.SearchStrategy[float]:
    """Positive numbers, all powers of ten between two exponents alike."""
    return st.floats(low, high).map(lambda exponent: float(10**exponent))


def exact_h(x: int, eta: float, beta: float, delta: float) -> Fraction:
    """Eq. (11) in rational arithmetic."""
    e, b, d = Fraction(eta), Fraction(beta), Fraction(delta)
    return d / b * ((e * b + 1) ** x - 1) - e * d * x


class TestH:
    @relaxed
    @given(eta=magnitudes(-6, 1), beta=magnitudes(-9, 6), delta=magnitudes(-6, 6))
    def test_is_zero_for_no_update_and_for_one(
        self, eta: float, beta: float, delta: float
    ) -> None:
        assert theory.h([0, 1], eta=eta, beta=beta, delta=delta).tolist() == [0, 0]

    @relaxed
    @given(eta=magnitudes(-6, 1), beta=magnitudes(-12, 6), delta=magnitudes(-6, 6))
    def test_never_falls(self, eta: float, beta: float, delta: float) -> None:
        gap = theory.h(np.arange(3000), eta=eta, beta=beta, delta=delta)
        assert (gap >= 0).all()
        assert (gap[1:] >= gap[:-1]).all()

    @pytest.mark.parametrize("product", [1e-14, 1e-8, 1e-3, 1.0])
    def test_never_falls_however_far_it_goes(self, product: float) -> None:
        gap = theory.h(
            np.unique(np.logspace(0, 9, 400).astype(int)), eta=1.0, beta=product, delta=1.0
        )
        assert (gap[1:] >= gap[:-1]).all()

    @relaxed
    @given(
        eta=magnitudes(-4, 0),
        beta=magnitudes(-10, 2),
        delta=magnitudes(-6, 6),
        x=st.integers(2, 150),
    )
    def test_has_all_digits_of_exact_arithmetic(
        self, eta: float, beta: float, delta: float, x: int
    ) -> None:
        exact = exact_h(x, eta, beta, delta)
        assert (
            abs(Fraction(float(theory.h(x, eta=eta, beta=beta, delta=delta))) - exact)
            <= exact / 10**12
        )

    @pytest.mark.parametrize("beta", [1e-14, 1e-100, 1e-300])
    @pytest.mark.parametrize("x", [2, 3, 100])
    def test_has_all_digits_where_eta_beta_is_tiny(self, beta: float, x: int) -> None:
        exact = exact_h(x, 1.0, beta, 1e10)
        assert (
            abs(Fraction(float(theory.h(x, eta=1.0, beta=beta, delta=1e10))) - exact)
            <= exact / 10**13
        )

    @pytest.mark.parametrize("product", [0.0999 / 40, 0.1001 / 40])
    def test_agrees_with_exact_arithmetic_on_both_sides_of_the_series(
        self, product: float
    ) -> None:
        exact = exact_h(40, 0.5, 2 * product, 1.0)
        assert float(theory.h(40, eta=0.5, beta=2 * product, delta=1.0)) == pytest.approx(
            float(exact), rel=1e-13
        )

    def test_is_plus_infinity_where_it_overflows(self) -> None:
        assert theory.h([1, 10, 2000, 10**6], eta=1.0, beta=1.0, delta=1.0)[
            2:
        ].tolist() == [
            np.inf,
            np.inf,
        ]

    @pytest.mark.parametrize(("beta", "delta"), [(0.0, 3.0), (3.0, 0.0), (0.0, 0.0)])
    def test_is_zero_without_curvature_or_divergence(
        self, beta: float, delta: float
    ) -> None:
        assert not theory.h([0, 1, 2, 100, 10**6], eta=0.1, beta=beta, delta=delta).any()

    def test_by_hand(self) -> None:
        # δ/β ((ηβ+1)^3 - 1) - 3ηδ with η = 1/8, β = 4, δ = 2 is 0.5 · 2.375 - 0.75
        assert float(theory.h(3, eta=0.125, beta=4.0, delta=2.0)) == pytest.approx(
            0.4375, rel=1e-14
        )


@dataclass(frozen=True)
class Setting:
    """All that G depends on but τ."""

    eta: float
    phi: float
    rho: float
    beta: float
    delta: float
    c: Sequence[float]
    b: Sequence[float]
    budget: Sequence[float]

    def G(self, tau: int | Float64) -> Float64:
        return theory.G(tau, **vars(self))

    @property
    def tau_upper_limit(self) -> float:
        return theory.tau_upper_limit(**vars(self))

    def exact_G(self, tau: int) -> Decimal:
        """Eq. (18) with 60 digits, resource after resource."""
        with localcontext() as context:
            context.prec = 60
            eta, phi, rho, beta, delta = (
                Decimal(v) for v in (self.eta, self.phi, self.rho, self.beta, self.delta)
            )
            h = delta / beta * ((eta * beta + 1) ** tau - 1) - eta * delta * tau
            shares = []
            for c, b, budget in zip(
                map(Decimal, self.c),
                map(Decimal, self.b),
                map(Decimal, self.budget),
                strict=True,
            ):
                shares.append((c * tau + b) / ((budget - b - c) * tau))
            share = max(shares)
            root = (share**2 / (4 * eta**2 * phi**2) + rho * h / (eta * phi * tau)).sqrt()
            return share / (2 * eta * phi) + root + rho * h


@st.composite
def setting(draw: st.DrawFn, resources: int) -> Setting:
    """Any sizes that a run may have, with η ≤ 1/β and a budget of 10 to 10,000 rounds."""
    eta = draw(magnitudes(-3, -1))
    c = [draw(magnitudes(-3, 0)) for _ in range(resources)]
    b = [draw(magnitudes(-2, 1)) for _ in range(resources)]
    rounds = [draw(magnitudes(1, 4)) for _ in range(resources)]
    return Setting(
        eta=eta,
        phi=draw(magnitudes(-3, 0)),
        rho=draw(magnitudes(-1, 1)),
        beta=draw(st.floats(0.05, 1)) / eta,
        delta=draw(magnitudes(-1, 1)),
        c=c,
        b=b,
        budget=[
            (n + 1) * (own_c + own_b) for n, own_c, own_b in zip(rounds, c, b, strict=True)
        ],
    )


PAPER = Setting(
    eta=0.01, phi=0.025, rho=1.0, beta=2.0, delta=3.0, c=[0.013], b=[0.13], budget=[15.0]
)


class TestG:
    @pytest.mark.parametrize("resources", [1, 3])
    @relaxed
    @given(data=st.data(), tau=st.integers(1, 200))
    def test_agrees_with_sixty_digits(
        self, resources: int, data: st.DataObject, tau: int
    ) -> None:
        case = data.draw(setting(resources))
        assert float(case.G(tau)) == pytest.approx(float(case.exact_G(tau)), rel=1e-11)

    def test_by_hand_where_nodes_do_not_differ(self) -> None:
        # h = 0, so G = A/(ηφ) with A = (1·4 + 2)/((13 - 3)·4) = 0.15
        assert float(
            theory.G(4, eta=0.5, phi=0.1, rho=7, beta=0, delta=0, c=1, b=2, budget=13)
        ) == pytest.approx(3.0)

    def test_is_plus_infinity_where_it_overflows_and_never_the_minimum(self) -> None:
        curve = theory.G(
            np.arange(1, 3000),
            eta=1.0,
            phi=0.025,
            rho=1e10,
            beta=1.0,
            delta=1.0,
            c=1,
            b=1,
            budget=100,
        )
        assert curve[-1] == np.inf
        assert np.isfinite(curve[np.argmin(curve)])

    def test_is_plus_infinity_where_not_even_one_round_fits(self) -> None:
        assert theory.G(
            [1, 5], eta=1, phi=1, rho=1, beta=1, delta=1, c=[1, 1], b=[1, 1], budget=[9, 2]
        ).tolist() == [
            np.inf,
            np.inf,
        ]

    def test_is_the_same_for_every_tau_where_aggregation_is_free_and_nodes_do_not_differ(
        self,
    ) -> None:
        curve = theory.G(
            np.arange(1, 101),
            eta=0.01,
            phi=0.025,
            rho=0,
            beta=0,
            delta=0,
            c=0.1,
            b=0,
            budget=15,
        )
        assert np.ptp(curve) == 0

    def test_does_not_ask_for_h_where_rho_is_zero(self) -> None:
        curve = theory.G(
            [1, 5000], eta=1, phi=1, rho=0, beta=1, delta=1, c=1, b=0, budget=11
        )
        assert curve.tolist() == pytest.approx([0.1, 0.1])


class TestProposition1:
    @pytest.mark.parametrize("resources", [1, 3])
    @relaxed
    @given(data=st.data())
    def test_tau_goes_to_one_as_the_budget_grows(
        self, resources: int, data: st.DataObject
    ) -> None:
        case = data.draw(setting(resources))
        vast = Setting(**vars(case) | {"budget": [1e15 * limit for limit in case.budget]})
        assert np.argmin(vast.G(np.arange(1.0, 2000.0))) == 0

    def test_tau_is_larger_with_less(self) -> None:
        assert (
            np.argmin(PAPER.G(np.arange(1.0, 200.0))) + 1 == 14
        )  # by a plain evaluation of eq. (18)


class TestProposition2:
    @pytest.mark.parametrize("resources", [1, 3])
    @settings(deadline=None, max_examples=100)
    @given(data=st.data())
    def test_g_rises_from_the_upper_limit_on(
        self, resources: int, data: st.DataObject
    ) -> None:
        case = data.draw(setting(resources))
        limit = case.tau_upper_limit
        assume(limit < 2e5)
        beyond = case.G(
            np.concatenate([[limit], np.arange(np.ceil(limit), 3 * limit + 100)])
        )
        beyond = beyond[np.isfinite(beyond)]
        assert (beyond[1:] >= beyond[:-1] * (1 - 1e-12)).all()

    @pytest.mark.parametrize("resources", [1, 3])
    @settings(deadline=None, max_examples=100)
    @given(data=st.data())
    def test_no_minimum_beyond_the_upper_limit(
        self, resources: int, data: st.DataObject
    ) -> None:
        case = data.draw(setting(resources))
        limit = case.tau_upper_limit
        assume(limit < 2e5)
        assert np.argmin(case.G(np.arange(1.0, 3 * limit + 100))) + 1 <= np.ceil(limit)

    def test_among_whole_numbers_the_minimum_may_be_the_next_one(self) -> None:
        """The proposition's proof is about real τ: beyond τ₀ = 5.92 G rises, and still G(6)
        is below G(5).
        """
        case = Setting(
            eta=1 / 32,
            phi=1,
            rho=1,
            beta=8,
            delta=0.1,
            c=[1, 0.01],
            b=[0.01, 1],
            budget=[57.01, 11.01],
        )
        assert case.tau_upper_limit == pytest.approx((0.1 - 0.01 / 56) / (1 / 56 - 0.001))
        assert min(range(1, 50), key=case.exact_G) == 6
        assert np.argmin(case.G(np.arange(1.0, 50.0))) + 1 == 6

    def test_by_hand(self) -> None:
        # ηβ = 1, R' = 100, C₁ = C₂ = 1: the third term, (1 + 0.5)/(0.5 log 2) - 1, is the
        # largest.
        case = Setting(
            eta=0.5, phi=0.01, rho=1, beta=2, delta=1, c=[1], b=[1], budget=[102]
        )
        assert case.tau_upper_limit == pytest.approx(3 / np.log(2) - 1)

    def test_by_hand_where_resources_cross(self) -> None:
        # 0.01τ + 0.01 of the first resource's R' overtakes 0.5 of the second's at τ = 49.
        case = Setting(
            eta=0.5,
            phi=0.01,
            rho=1,
            beta=2,
            delta=1,
            c=[1, 0],
            b=[1, 50],
            budget=[102, 150],
        )
        assert case.tau_upper_limit == pytest.approx(49)

    def test_refuses_a_budget_that_does_not_cover_one_round(self) -> None:
        with pytest.raises(ValueError, match="does not cover one round"):
            _ = Setting(
                eta=0.5, phi=0.01, rho=1, beta=2, delta=1, c=[1], b=[1], budget=[2]
            ).tau_upper_limit


class TestBestRounds:
    def test_by_hand_for_one_resource(self) -> None:
        # R' = 15 - 0.2 - 0.05 = 14.75, a round of 10 costs 0.7: 21.07 rounds.
        assert theory.best_aggregations(10, c=0.05, b=0.2, budget=15) == 21
        assert theory.best_updates(10, c=0.05, b=0.2, budget=15) == 210

    def test_the_scarcest_resource_decides(self) -> None:
        # R' = (100, 65); a round of 3 costs (5, 10): min(20, 6.5).
        assert theory.best_aggregations(3, c=[1, 0], b=[2, 10], budget=[103, 75]) == 6
        assert theory.best_updates(3, c=[1, 0], b=[2, 10], budget=[103, 75]) == 18

    def test_no_round_where_none_fits(self) -> None:
        assert theory.best_aggregations(1, c=2, b=2, budget=3) == 0

    def test_nothing_that_costs_nothing_has_a_last_round(self) -> None:
        with pytest.raises(ValueError, match="all costs are 0"):
            theory.best_aggregations(1, c=0, b=0, budget=3)


@st.composite
def descents(draw: st.DrawFn, spread: float) -> tuple[Regression, Trajectory, float]:
    """A regression, its descent and η ≤ 1/β."""
    regression = Regression.random(draw(st.integers(0, 2**32 - 1)), spread=spread)
    eta = draw(st.floats(0.02, 1.0)) / regression.beta
    return (
        regression,
        regression.descend(draw(st.integers(1, 12)), draw(st.integers(1, 6)), eta),
        eta,
    )


@settings(deadline=None, max_examples=80)
@given(descents(spread=1.0))
def test_theorem_1_distributed_descent_stays_within_h_of_centralized(
    case: tuple[Regression, Trajectory, float],
) -> None:
    regression, path, eta = case
    delta = regression.delta(path.v.reshape(-1, path.w.shape[1]))
    bound = theory.h(np.arange(path.tau + 1), eta=eta, beta=regression.beta, delta=delta)
    for k, v in enumerate(path.v):
        gap = np.linalg.norm(path.w[k * path.tau : (k + 1) * path.tau + 1] - v, axis=1)
        assert (gap <= bound + 1e-12).all()


def test_theorem_1_is_no_loose_promise() -> None:
    """For the second update the gap is of h's own size, so that the theorem's test could
    fail.
    """
    worst = 0.0
    for seed in range(20):
        regression = Regression.random(seed, spread=1.0)
        path = regression.descend(2, 1, 0.5 / regression.beta)
        delta = regression.delta(path.v[0])
        bound = float(
            theory.h(2, eta=0.5 / regression.beta, beta=regression.beta, delta=delta)
        )
        worst = max(worst, float(np.linalg.norm(path.w[2] - path.v[0, 2])) / bound)
    assert 0.3 < worst <= 1


@settings(deadline=None, max_examples=80)
@given(descents(spread=1.0))
def test_theorem_2_bounds_the_loss_at_the_best_aggregate(
    case: tuple[Regression, Trajectory, float],
) -> None:
    regression, path, eta = case
    every = np.concatenate([path.w, path.v.reshape(-1, path.w.shape[1])])
    farthest = float(np.linalg.norm(path.aggregated[:-1] - regression.best, axis=1).max())
    bound = theory.convergence_bound(
        len(path.w) - 1,
        path.tau,
        eta=eta,
        phi=theory.contraction(farthest, eta=eta, beta=regression.beta),
        rho=regression.rho(every),
        beta=regression.beta,
        delta=regression.delta(every),
    )
    assert min(regression.excess(w) for w in path.aggregated) <= float(bound)


def test_lemma_2_bounds_the_loss_at_the_last_aggregate() -> None:
    where_it_says_something = 0
    for seed in range(60):
        regression = Regression.random(seed, spread=0.02)
        eta = 0.3 / regression.beta
        path = regression.descend(1 + seed % 3, 2, eta)
        every = np.concatenate([path.w, path.v.reshape(-1, path.w.shape[1])])
        farthest = float(
            np.linalg.norm(path.aggregated[:-1] - regression.best, axis=1).max()
        )
        bound = theory.last_iterate_bound(
            len(path.w) - 1,
            path.tau,
            epsilon=min(regression.excess(w) for w in [*path.v[:, -1], path.w[-1]]),
            eta=eta,
            phi=theory.contraction(farthest, eta=eta, beta=regression.beta),
            rho=regression.rho(every),
            beta=regression.beta,
            delta=regression.delta(every),
        )
        assert regression.excess(path.w[-1]) <= float(bound)
        where_it_says_something += bool(np.isfinite(bound))
    assert where_it_says_something >= 20


def test_lemma_2_says_nothing_where_its_second_condition_fails() -> None:
    assert (
        theory.last_iterate_bound(
            10, 5, epsilon=1e-3, eta=0.1, phi=0.01, rho=1, beta=1, delta=1
        )
        == np.inf
    )


def test_lemma_2_by_hand() -> None:
    # h(2) = η²βδ = 0.25; ηφ - ρh/(τε²) = 0.25 - 0.25/(2·4) = 0.21875; over T = 8: 1/1.75
    bound = theory.last_iterate_bound(
        8, 2, epsilon=2.0, eta=0.5, phi=0.5, rho=1, beta=1, delta=1
    )
    assert float(bound) == pytest.approx(1 / 1.75)


def test_phi_by_hand() -> None:
    assert theory.contraction(2.0, eta=0.5, beta=1.0) == 0.1875  # (1 - 0.25) / 2²
