"""The paper's equations, and a bound of our own beside them (`h_convex`), as pure functions.

Wang et al., "Adaptive Federated Learning in Resource Constrained Edge Computing Systems", IEEE JSAC 2019.

Two rules hold in this file. Every function is vectorised over τ (or x) and takes the paper's letters by name. Nothing
here cancels or overflows quietly: h is evaluated so that tiny ηβ keeps its digits, and what is too large to be
represented is +inf, which no minimum ever picks.

    eta (η)     step size                       rho (ρ)     Lipschitz parameter of the loss
    phi (φ)     control parameter               beta (β)    smoothness of the loss
    c, b, R     cost of a local update, of an   delta (δ)   divergence of the nodes' gradients
                aggregation, and the budget;    tau (τ)     local updates between two aggregations
                one entry per resource, [M]
"""

import numpy as np
from numpy.typing import ArrayLike

from fedbudget.arrays import Float64

_SERIES_BELOW = 0.01  # where ηβx is smaller, h is summed as a series instead of subtracted
_SERIES_LAST = 8  # the term after it is below 1e-16 of the sum


def h(x: ArrayLike, *, eta: float, beta: float, delta: float) -> Float64:
    r"""Gap between distributed and centralized descent after x local updates, eq. (11).

    .. math:: h(x) = \frac{\delta}{\beta}\left((\eta\beta+1)^x - 1\right) - \eta\delta x

    It is 0 for x = 0 and x = 1, and everywhere when β = 0 or δ = 0 (the paper's remark on Algorithms 2 and 3).

    Args:
      x: numbers of local updates, any shape, each a whole number of at least 0.

    Returns:
      h at each x; +inf where it is too large for a float.

    >>> h([0, 1, 2], eta=0.5, beta=1.0, delta=2.0)
    array([0. , 0. , 0.5])
    """
    x = np.asarray(x, dtype=np.float64)
    if beta == 0 or delta == 0:
        return np.zeros_like(x)
    u = eta * beta
    small = u * x < _SERIES_BELOW
    with np.errstate(over="ignore", invalid="ignore"):
        excess = (
            np.expm1(x * np.log1p(u)) / u - x
        )  # times ηδ; δ/β would overflow where β is tiny
        if small.any():
            excess = np.where(small, _binomial_tail(np.where(small, x, 0.0), u), excess)
        gap = eta * delta * np.maximum(excess, 0.0)
    gap = np.where((x == 0) | (x == 1), 0.0, gap)
    return np.where(np.isnan(gap), np.inf, gap)


def h_convex(x: ArrayLike, *, eta: float, beta: float, delta: float) -> Float64:
    r"""The same gap where every F_i is convex and η ≤ 2/β: it grows with x², and not exponentially.

    .. math:: h(x) = \eta^2 \beta \delta \frac{x (x - 1)}{2}

    It is the first term of the paper's h as a series in ηβ, and so never above it; docs/research/theory.md has the proof.

    >>> h_convex([0, 1, 2, 10], eta=0.5, beta=1.0, delta=2.0)
    array([ 0. ,  0. ,  0.5, 22.5])
    """
    if not eta * beta <= 2:
        raise ValueError(
            f"where ηβ is {eta * beta:g} and not at most 2, descent may leave every bound behind"
        )
    x = np.asarray(x, dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        gap = eta * delta * (eta * beta * (x * np.maximum(x - 1, 0) / 2))
    return np.where(np.isnan(gap), np.inf, gap)


def _binomial_tail(x: Float64, u: float) -> Float64:
    """((1+u)^x - 1)/u - x as Σ_{k≥2} C(x,k) u^(k-1): where ux is small, subtracting leaves only the last digits."""
    nested = np.ones_like(x)
    for k in range(_SERIES_LAST, 2, -1):
        nested = 1 + (x - k + 1) * (u / k) * nested
    return x * (x - 1) / 2 * u * nested


def share_per_update(
    tau: ArrayLike, *, c: ArrayLike, b: ArrayLike, budget: ArrayLike
) -> Float64:
    r"""The share of the budget that one local update takes, aggregations included: 1/T of eq. (18).

    .. math:: \max_m \frac{c_m \tau + b_m}{R'_m \tau}, \qquad R'_m = R_m - b_m - c_m

    It is +inf where R'_m is not positive: not even one round fits.
    """
    tau = np.asarray(tau, dtype=np.float64)
    c, b, usable = _per_resource(c, b, budget)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(
            usable > 0, (c + b / tau[..., None]) / usable, np.inf
        )  # the same for every τ where b = 0
    return np.asarray(shares.max(axis=-1))


def G(
    tau: ArrayLike,
    *,
    eta: float,
    phi: float,
    rho: float,
    beta: float,
    delta: float,
    c: ArrayLike,
    b: ArrayLike,
    budget: ArrayLike,
) -> Float64:
    r"""The control objective, eq. (18): the bound of Theorem 2 with the most updates that the budget allows.

    .. math::
        G(\tau) = \frac{A(\tau)}{2\eta\varphi}
          + \sqrt{\frac{A(\tau)^2}{4\eta^2\varphi^2} + \frac{\rho h(\tau)}{\eta\varphi\tau}} + \rho h(\tau),
        \qquad A(\tau) = \max_m \frac{c_m\tau + b_m}{R'_m \tau}

    Args:
      tau: candidates, any shape, each at least 1.
      c, b, budget: cost of an update, of an aggregation, and the budget R, one entry per resource.

    Returns:
      G at each τ; +inf where it overflows.

    >>> curve = G([1, 10, 100], eta=0.01, phi=0.025, rho=1, beta=2, delta=3, c=0.013, b=0.13, budget=15)
    >>> int(np.argmin(curve))
    1
    """
    share = share_per_update(tau, c=c, b=b, budget=budget)
    return _bound(share, tau, eta=eta, phi=phi, rho=rho, beta=beta, delta=delta)


def convergence_bound(
    updates: ArrayLike,
    tau: ArrayLike,
    *,
    eta: float,
    phi: float,
    rho: float,
    beta: float,
    delta: float,
) -> Float64:
    r"""Theorem 2, eq. (13): how far the loss at w^f can be above the best possible, after T = `updates` local updates.

    .. math::
        F(w^f) - F(w^*) \le \frac{1}{2\eta\varphi T}
          + \sqrt{\frac{1}{4\eta^2\varphi^2T^2} + \frac{\rho h(\tau)}{\eta\varphi\tau}} + \rho h(\tau)

    It holds for convex losses and η ≤ 1/β, with φ = ω(1 - βη/2) (see `contraction`).
    """
    share = 1 / np.asarray(updates, dtype=np.float64)
    return _bound(share, tau, eta=eta, phi=phi, rho=rho, beta=beta, delta=delta)


def last_iterate_bound(
    updates: ArrayLike,
    tau: ArrayLike,
    *,
    epsilon: float,
    eta: float,
    phi: float,
    rho: float,
    beta: float,
    delta: float,
) -> Float64:
    r"""Lemma 2, eq. (12): the same for w(T) itself, where every interval ends at least ε above the best possible loss.

    .. math:: F(w(T)) - F(w^*) \le \frac{1}{T\left(\eta\varphi - \frac{\rho h(\tau)}{\tau\varepsilon^2}\right)}

    It is +inf where the lemma's condition 2 fails, that is where the bracket is not positive.
    """
    tau = np.asarray(tau, dtype=np.float64)
    rate = eta * phi - _drift(tau, eta=eta, rho=rho, beta=beta, delta=delta) / (
        tau * epsilon**2
    )
    with np.errstate(divide="ignore"):
        return np.where(
            rate > 0,
            1 / (np.asarray(updates, np.float64) * np.where(rate > 0, rate, 1.0)),
            np.inf,
        )


def contraction(farthest: float, *, eta: float, beta: float) -> float:
    r"""φ of Lemma 2, where it can be known: :math:`\varphi = \omega (1 - \beta\eta/2)`.

    Args:
      farthest: the largest distance of a w((k-1)τ) from w*; ω is one over its square.
    """
    return (1 - beta * eta / 2) / farthest**2


def tau_upper_limit(
    *,
    eta: float,
    phi: float,
    rho: float,
    beta: float,
    delta: float,
    c: ArrayLike,
    b: ArrayLike,
    budget: ArrayLike,
) -> float:
    r"""τ₀ of Proposition 2: beyond it G only rises. Needs η ≤ 1/β and ρ, β, δ > 0.

    The proof is about real τ, so over whole numbers the minimum is at most ⌈τ₀⌉.

    With ν the resource that binds as τ grows (the largest c_m/R'_m, then the largest b_m/R'_m), the largest of

    .. math::
        \max_m \frac{b_m R'_\nu - b_\nu R'_m}{c_\nu R'_m - c_m R'_\nu},\quad
        \frac{\varphi(2+\eta\beta)}{2\rho\delta}\left(\frac{2c_\nu b_\nu}{C_2} + \frac{2b_\nu^2}{C_2}\right),\quad
        \frac{1}{\rho\delta\eta\log B}\left(\frac{b_\nu}{C_1} + \rho\eta\delta\right) - \frac{1}{\eta\beta},\quad
        \frac{1}{\eta\beta} + \frac12

    where B = ηβ + 1, C₁ = 2ηφR'_ν, C₂ = 4η²φ²R'_ν², and 0/0 = 0.
    """
    c, b, usable = _per_resource(c, b, budget)
    if not (usable > 0).all():
        raise ValueError(
            "the budget does not cover one round: R - b - c must be positive for every resource"
        )
    slope = c / usable
    offset = b / usable
    steepest = np.flatnonzero(slope == slope.max())
    binding = steepest[np.argmax(offset[steepest])]
    # Where the slopes are equal the offsets of the others are no larger (choice of ν), so no crossing lies ahead.
    rise = slope[binding] - slope
    crossing = np.where(
        rise > 0, (offset - offset[binding]) / np.where(rise > 0, rise, 1.0), 0.0
    )
    c1 = 2 * eta * phi * usable[binding]
    c2 = c1 * c1
    c_v = c[binding]
    b_v = b[binding]
    root = (
        phi
        * (2 + eta * beta)
        / (2 * rho * delta)
        * (2 * c_v * b_v / c2 + 2 * b_v * b_v / c2)
    )
    outside = (b_v / c1 + rho * eta * delta) / (
        rho * delta * eta * np.log1p(eta * beta)
    ) - 1 / (eta * beta)
    return float(max(crossing.max(), root, outside, 1 / (eta * beta) + 0.5))


def best_aggregations(tau: int, *, c: ArrayLike, b: ArrayLike, budget: ArrayLike) -> int:
    r"""K*: how many rounds of τ updates the budget allows.

    .. math:: K^* = \left\lfloor \min_m \frac{R'_m}{c_m\tau^* + b_m} \right\rfloor

    >>> best_aggregations(10, c=0.01, b=0.1, budget=15)
    74
    """
    c, b, usable = _per_resource(c, b, budget)
    cost = c * tau + b
    if (usable < 0).any():
        return 0
    bounded = cost > 0
    if not bounded.any():
        raise ValueError("nothing costs anything, so no number of rounds is the last")
    return int(np.floor((usable[bounded] / cost[bounded]).min()))


def best_updates(tau: int, *, c: ArrayLike, b: ArrayLike, budget: ArrayLike) -> int:
    """T* = K* τ*: how many local updates per node the budget allows."""
    return best_aggregations(tau, c=c, b=b, budget=budget) * tau


def _bound(
    share: Float64,
    tau: ArrayLike,
    *,
    eta: float,
    phi: float,
    rho: float,
    beta: float,
    delta: float,
) -> Float64:
    """The right-hand side of Theorem 2 with 1/T = `share`; shared by the bound itself and by G."""
    tau = np.asarray(tau, dtype=np.float64)
    drift = _drift(tau, eta=eta, rho=rho, beta=beta, delta=delta)
    with np.errstate(over="ignore", invalid="ignore"):
        half = share / (2 * eta * phi)
        value = half + np.sqrt(half * half + drift / (eta * phi * tau)) + drift
    return np.where(np.isnan(value), np.inf, value)


def _drift(tau: Float64, *, eta: float, rho: float, beta: float, delta: float) -> Float64:
    """ρ h(τ), where an h that overflowed is still a finite number, so that ρ = 0 gives 0."""
    with np.errstate(over="ignore"):
        return (
            np.zeros_like(tau)
            if rho == 0
            else rho * h(tau, eta=eta, beta=beta, delta=delta)
        )


def _per_resource(
    c: ArrayLike, b: ArrayLike, budget: ArrayLike
) -> tuple[Float64, Float64, Float64]:
    """c, b and R' = R - b - c, each [M]."""
    c, b, limit = (np.atleast_1d(np.asarray(v, dtype=np.float64)) for v in (c, b, budget))
    return c, b, limit - b - c
