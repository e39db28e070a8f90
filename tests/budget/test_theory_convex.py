"""The bound for convex losses, against descents with known constants and against the
paper's h.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.arrays import Float64
from fedbudget.budget import theory
from support.problems import LocalGradient, Trajectory, algorithm_1
from support.regression import Regression

relaxed = settings(deadline=None, max_examples=80)


@relaxed
@given(
    eta=st.floats(1e-6, 10),
    product=st.floats(1e-9, 2),
    delta=st.floats(1e-6, 1e6),
    x=st.lists(st.integers(0, 10**6), min_size=1),
)
def test_never_above_the_papers_bound(
    eta: float, product: float, delta: float, x: list[int]
) -> None:
    constants = {"eta": eta, "beta": product / eta, "delta": delta}
    assert (theory.h_convex(x, **constants) <= theory.h(x, **constants) * (1 + 1e-12)).all()


def test_equals_the_papers_for_two() -> None:
    constants = {"eta": 0.5, "beta": 1.5, "delta": 3.0}
    assert float(theory.h_convex(2, **constants)) == pytest.approx(
        float(theory.h(2, **constants)), rel=1e-14
    )


def test_large_step_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ηβ is 2\.2"):
        theory.h_convex(3, eta=1.1, beta=2.0, delta=1.0)


@relaxed
@given(
    seed=st.integers(0, 2**32 - 1),
    share=st.floats(0.02, 2.0),
    tau=st.integers(1, 12),
    rounds=st.integers(1, 5),
)
def test_bounds_linear_regression(seed: int, share: float, tau: int, rounds: int) -> None:
    regression = Regression.random(seed, spread=1.0)
    eta = share / regression.beta * (1 - 1e-9)
    path = regression.descend(tau, rounds, eta)
    delta = regression.delta(path.v.reshape(-1, path.w.shape[1]))
    bound = theory.h_convex(np.arange(tau + 1), eta=eta, beta=regression.beta, delta=delta)
    require_within(path, bound)


@relaxed
@given(seed=st.integers(0, 2**32 - 1), share=st.floats(0.02, 2.0), tau=st.integers(1, 15))
def test_bounds_logistic_regression(seed: int, share: float, tau: int) -> None:
    """The curvature of this loss changes with w."""
    rng = np.random.default_rng(seed)
    nodes, features, samples = int(rng.integers(2, 5)), int(rng.integers(1, 5)), 15
    x = rng.normal(size=(nodes, samples, features)) + rng.normal(size=(nodes, 1, features))
    y = np.sign(rng.normal(size=(nodes, samples)) + rng.normal(size=(nodes, 1)))

    def local(node: int) -> LocalGradient:
        def gradient(w: Float64) -> Float64:
            margins = y[node] * (x[node] @ w)
            return np.asarray(-(y[node] / (1 + np.exp(margins))) @ x[node] / samples)

        return gradient

    gradients = [local(node) for node in range(nodes)]
    beta = max(float(np.linalg.eigvalsh(own.T @ own / samples)[-1]) for own in x) / 4
    eta = share / beta * (1 - 1e-9)
    path = algorithm_1(
        gradients, [1] * nodes, rng.normal(size=features), tau=tau, rounds=3, eta=eta
    )
    points = path.v.reshape(-1, features)
    differences = np.array([[own(v) for own in gradients] for v in points])
    differences -= differences.mean(axis=1, keepdims=True)
    delta = float(np.linalg.norm(differences, axis=2).max(axis=0).mean())
    require_within(
        path, theory.h_convex(np.arange(tau + 1), eta=eta, beta=beta, delta=delta)
    )


def require_within(path: Trajectory, bound: Float64) -> None:
    """Assert that ‖w(t) - v_[k](t)‖ is at most the bound in every interval."""
    for k, v in enumerate(path.v):
        gap = np.linalg.norm(path.w[k * path.tau : (k + 1) * path.tau + 1] - v, axis=1)
        assert (gap <= bound * (1 + 1e-9) + 1e-12).all()


def test_bound_is_tight() -> None:
    """With ten tiny steps the gap is close to the bound, so the tests above can fail."""
    worst = 0.0
    for seed in range(20):
        regression = Regression.random(seed, spread=1.0)
        eta = 0.02 / regression.beta
        path = regression.descend(10, 1, eta)
        bound = theory.h_convex(
            10, eta=eta, beta=regression.beta, delta=regression.delta(path.v[0])
        )
        worst = max(worst, float(np.linalg.norm(path.w[10] - path.v[0, 10])) / float(bound))
    assert 0.3 < worst <= 1
