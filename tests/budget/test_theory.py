"""The paper's equations against exact arithmetic, and its theorems on descents with known
constants.
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
    """Positive numbers, log-uniform between two powers of ten."""
    return st.floats(low, high).map(lambda exponent: float(10**exponent))


def exact_h(x: int, eta: float, beta: float, delta: float) -> Fraction:
    """Eq. (11) in rational arithmetic."""
    e, b, d = Fraction(eta), Fraction(beta), Fraction(delta)
    return d / b * ((e * b + 1) ** x - 1) - e * d * x


class TestH:
    @relaxed
    @given(eta=magnitudes(-6, 1), beta=magnitudes(-9, 6), delta=magnitudes(-6, 6))
    def test_is_zero_up_to_one_update(self, eta: float, beta: float, delta: float) -> None:
        assert theory.h([0, 1], eta=eta, beta=beta, delta=delta).tolist() == [0, 0]

    @relaxed
    @given(eta=magnitudes(-6, 1), beta=magnitudes(-12, 6), delta=magnitudes(-6, 6))
    def test_never_falls(self, eta: float, beta: float, delta: float) -> None:
        gap = theory.h(np.arange(3000), eta=eta, beta=beta, delta=delta)
        assert (gap >= 0).all()
        assert (gap[1:] >= gap[:-1]).all()

    @pytest.mark.parametrize("product", [1e-14, 1e-8, 1e-3, 1.0])
    def test_never_falls_up_to_large_x(self, product: float) -> None:
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
    def test_matches_exact_arithmetic(
        self, eta: float, beta: float, delta: float, x: int
    ) -> None:
        exact = exact_h(x, eta, beta, delta)
        assert (
            abs(Fraction(float(theory.h(x, eta=eta, beta=beta, delta=delta))) - exact)
            <= exact / 10**12
        )

    @pytest.mark.parametrize("beta", [1e-14, 1e-100, 1e-300])
    @pytest.mark.parametrize("x", [2, 3, 100])
    def test_matches_exact_arithmetic_for_tiny_beta(self, beta: float, x: int) -> None:
        exact = exact_h(x, 1.0, beta, 1e10)
        assert (
            abs(Fraction(float(theory.h(x, eta=1.0, beta=beta, delta=1e10))) - exact)
            <= exact / 10**13
        )

    @pytest.mark.parametrize("product", [0.0999 / 40, 0.1001 / 40])
    def test_matches_around_the_series_threshold(self, product: float) -> None:
        exact = exact_h(40, 0.5, 2 * product, 1.0)
        assert float(theory.h(40, eta=0.5, beta=2 * product, delta=1.0)) == pytest.approx(
            float(exact), rel=1e-13
        )

    def test_overflow_is_infinity(self) -> None:
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
    """All inputs of G except τ."""

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
        """Eq. (18) with 60 digits, one resource at a time."""
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
    """Settings within the range of real runs, with η ≤ 1/β and a budget of 10 to 10,000
    rounds.
    """
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
    def test_matches_sixty_digits(
        self, resources: int, data: st.DataObject, tau: int
    ) -> None:
        case = data.draw(setting(resources))
        assert float(case.G(tau)) == pytest.approx(float(case.exact_G(tau)), rel=1e-11)

    def test_by_hand_for_identical_nodes(self) -> None:
        # h = 0, so G = A/(ηφ) with A = (1·4 + 2)/((13 - 3)·4) = 0.15
        assert float(
            theory.G(4, eta=0.5, phi=0.1, rho=7, beta=0, delta=0, c=1, b=2, budget=13)
        ) == pytest.approx(3.0)

    def test_overflow_is_never_the_minimum(self) -> None:
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

    def test_infinity_if_no_round_fits(self) -> None:
        assert theory.G(
            [1, 5], eta=1, phi=1, rho=1, beta=1, delta=1, c=[1, 1], b=[1, 1], budget=[9, 2]
        ).tolist() == [
            np.inf,
            np.inf,
        ]

    def test_constant_for_free_aggregation(
        self,
    ) -> None:
        """With b = 0 and identical nodes every τ has the same G, to the bit."""
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

    def test_ignores_h_if_rho_is_zero(self) -> None:
        """h overflows for τ = 5000, but ρ = 0 removes it."""
        curve = theory.G(
            [1, 5000], eta=1, phi=1, rho=0, beta=1, delta=1, c=1, b=0, budget=11
        )
        assert curve.tolist() == pytest.approx([0.1, 0.1])


class TestProposition1:
    @pytest.mark.parametrize("resources", [1, 3])
    @relaxed
    @given(data=st.data())
    def test_vast_budget_gives_tau_one(self, resources: int, data: st.DataObject) -> None:
        case = data.draw(setting(resources))
        vast = Setting(**vars(case) | {"budget": [1e15 * limit for limit in case.budget]})
        assert np.argmin(vast.G(np.arange(1.0, 2000.0))) == 0

    def test_small_budget_gives_larger_tau(self) -> None:
        # 14 by direct evaluation of eq. (18)
        assert np.argmin(PAPER.G(np.arange(1.0, 200.0))) + 1 == 14


class TestProposition2:
    @pytest.mark.parametrize("resources", [1, 3])
    @settings(deadline=None, max_examples=100)
    @given(data=st.data())
    def test_g_rises_beyond_the_limit(self, resources: int, data: st.DataObject) -> None:
        """The integer minimum is therefore at most ⌈τ₀⌉."""
        case = data.draw(setting(resources))
        limit = case.tau_upper_limit
        assume(limit < 2e5)
        beyond = case.G(
            np.concatenate([[limit], np.arange(np.ceil(limit), 3 * limit + 100)])
        )
        beyond = beyond[np.isfinite(beyond)]
        assert (beyond[1:] >= beyond[:-1] * (1 - 1e-12)).all()

    def test_integer_minimum_may_exceed_limit(self) -> None:
        """The proof treats real τ. G rises beyond τ₀ = 5.92, but G(6) is below G(5)."""
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
        # ηβ = 1, R' = 100, C₁ = C₂ = 1: the third term, (1 + 0.5)/(0.5 log 2) - 1, is
        # the largest.
        case = Setting(
            eta=0.5, phi=0.01, rho=1, beta=2, delta=1, c=[1], b=[1], budget=[102]
        )
        assert case.tau_upper_limit == pytest.approx(3 / np.log(2) - 1)

    def test_by_hand_for_crossing_resources(self) -> None:
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

    def test_budget_below_one_round_is_refused(self) -> None:
        with pytest.raises(ValueError, match="does not cover one round"):
            _ = Setting(
                eta=0.5, phi=0.01, rho=1, beta=2, delta=1, c=[1], b=[1], budget=[2]
            ).tau_upper_limit


class TestBestRounds:
    def test_by_hand_for_one_resource(self) -> None:
        # R' = 15 - 0.2 - 0.05 = 14.75, a round of 10 costs 0.7: 21.07 rounds.
        assert theory.best_aggregations(10, c=0.05, b=0.2, budget=15) == 21
        assert theory.best_updates(10, c=0.05, b=0.2, budget=15) == 210

    def test_scarcest_resource_decides(self) -> None:
        # R' = (100, 65); a round of 3 costs (5, 10): min(20, 6.5).
        assert theory.best_aggregations(3, c=[1, 0], b=[2, 10], budget=[103, 75]) == 6
        assert theory.best_updates(3, c=[1, 0], b=[2, 10], budget=[103, 75]) == 18

    def test_zero_if_no_round_fits(self) -> None:
        assert theory.best_aggregations(1, c=2, b=2, budget=3) == 0

    def test_zero_costs_are_refused(self) -> None:
        with pytest.raises(ValueError, match="all costs are 0"):
            theory.best_aggregations(1, c=0, b=0, budget=3)


@st.composite
def descents(draw: st.DrawFn, spread: float) -> tuple[Regression, Trajectory, float]:
    """A random regression, its descent, and η ≤ 1/β."""
    regression = Regression.random(draw(st.integers(0, 2**32 - 1)), spread=spread)
    eta = draw(st.floats(0.02, 1.0)) / regression.beta
    return (
        regression,
        regression.descend(draw(st.integers(1, 12)), draw(st.integers(1, 6)), eta),
        eta,
    )


@settings(deadline=None, max_examples=80)
@given(descents(spread=1.0))
def test_theorem_1_bounds_the_gap(
    case: tuple[Regression, Trajectory, float],
) -> None:
    """Distributed descent stays within h of centralized descent."""
    regression, path, eta = case
    delta = regression.delta(path.v.reshape(-1, path.w.shape[1]))
    bound = theory.h(np.arange(path.tau + 1), eta=eta, beta=regression.beta, delta=delta)
    for k, v in enumerate(path.v):
        gap = np.linalg.norm(path.w[k * path.tau : (k + 1) * path.tau + 1] - v, axis=1)
        assert (gap <= bound + 1e-12).all()


def test_theorem_1_is_tight() -> None:
    """For the second update the gap is close to h, so the test above can fail."""
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
def test_theorem_2_bounds_the_loss(
    case: tuple[Regression, Trajectory, float],
) -> None:
    """The bound holds for the best aggregated w."""
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


def test_lemma_2_bounds_the_loss() -> None:
    """The bound holds for the last aggregated w."""
    finite = 0
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
        finite += bool(np.isfinite(bound))
    assert finite >= 20


def test_lemma_2_infinity_without_condition_2() -> None:
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
