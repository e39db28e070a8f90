"""The paper's equations as pure functions, one function per equation.

Wang et al., "Adaptive Federated Learning in Resource Constrained Edge Computing Systems",
IEEE JSAC 2019. `h_convex` is an addition of this project.

Two rules hold in this file:

- Every function is vectorised over τ (or x) and takes the paper's letters by name.
- No result loses digits or overflows silently. h keeps its digits for a tiny ηβ. A value
  too large for a float is +inf, so a minimum never selects it.

    eta (η)     step size
    tau (τ)     local updates between two aggregations
    phi (φ)     control parameter
    rho (ρ)     Lipschitz parameter of the loss
    beta (β)    smoothness of the loss
    delta (δ)   divergence of the nodes' gradients
    c, b, R     cost of a local update, of an aggregation, and the budget; one entry per
                resource, [M]
"""

import numpy as np
from numpy.typing import ArrayLike

from fedbudget.arrays import Float64

_SERIES_BELOW = 0.01  # below this ηβx, h is summed as a series instead of subtracted
_SERIES_LAST = 8  # the next term is below 1e-16 of the sum


def h(x: ArrayLike, *, eta: float, beta: float, delta: float) -> Float64:
    r"""Gap between distributed and centralized descent after x local updates, eq. (11).

    .. math:: h(x) = \frac{\delta}{\beta}\left((\eta\beta+1)^x - 1\right) - \eta\delta x

    It is 0 for x = 0 and x = 1, and for every x if β = 0 or δ = 0 (the paper's remark on
    Algorithms 2 and 3).

    Args:
      x: numbers of local updates, any shape, each a whole number of at least 0.

    Returns:
      h at each x; +inf if it is too large for a float.

    >>> h([0, 1, 2], eta=0.5, beta=1.0, delta=2.0)
    array([0. , 0. , 0.5])
    """
    x = np.asarray(x, dtype=np.float64)
    if beta == 0 or delta == 0:
        return np.zeros_like(x)
    u = eta * beta
    small = u * x < _SERIES_BELOW
    with np.errstate(over="ignore", invalid="ignore"):
        # A multiple of ηδ, because δ/β would overflow for a tiny β.
        excess = np.expm1(x * np.log1p(u)) / u - x
        if small.any():
            excess = np.where(small, _binomial_tail(np.where(small, x, 0.0), u), excess)
        gap = eta * delta * np.maximum(excess, 0.0)
    gap = np.where((x == 0) | (x == 1), 0.0, gap)
    return np.where(np.isnan(gap), np.inf, gap)


def h_convex(x: ArrayLike, *, eta: float, beta: float, delta: float) -> Float64:
    r"""The same gap for convex F_i and η ≤ 2/β: it grows with x² instead of exponentially.

    .. math:: h(x) = \eta^2 \beta \delta \frac{x (x - 1)}{2}

    This is the first term of the paper's h as a series in ηβ, so it never exceeds h. See
    docs/research/theory.md for the proof.

    Raises:
      ValueError: ηβ exceeds 2.

    >>> h_convex([0, 1, 2, 10], eta=0.5, beta=1.0, delta=2.0)
    array([ 0. ,  0. ,  0.5, 22.5])
    """
    if not eta * beta <= 2:
        raise ValueError(
            f"ηβ is {eta * beta:g}, but the bound needs ηβ ≤ 2: use a smaller step size"
        )
    x = np.asarray(x, dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        gap = eta * delta * (eta * beta * (x * np.maximum(x - 1, 0) / 2))
    return np.where(np.isnan(gap), np.inf, gap)


def _binomial_tail(x: Float64, u: float) -> Float64:
    """((1+u)^x - 1)/u - x as Σ_{k≥2} C(x,k) u^(k-1).

    For a small ux the subtraction would leave only the last digits.
    """
    nested = np.ones_like(x)
    for k in range(_SERIES_LAST, 2, -1):
        nested = 1 + (x - k + 1) * (u / k) * nested
    return x * (x - 1) / 2 * u * nested


def share_per_update(
    tau: ArrayLike, *, c: ArrayLike, b: ArrayLike, budget: ArrayLike
) -> Float64:
    r"""Share of the budget per local update, aggregations included: 1/T of eq. (18).

    .. math:: \max_m \frac{c_m \tau + b_m}{R'_m \tau}, \qquad R'_m = R_m - b_m - c_m

    It is +inf if some R'_m is not positive, because then not even one round fits.
    """
    tau = np.asarray(tau, dtype=np.float64)
    c, b, usable = _per_resource(c, b, budget)
    with np.errstate(divide="ignore", invalid="ignore"):
        # c + b/τ instead of (cτ + b)/τ: for b = 0 every τ has the same share, to the bit.
        shares = np.where(usable > 0, (c + b / tau[..., None]) / usable, np.inf)
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
    r"""Control objective, eq. (18): Theorem 2 with all updates that the budget allows.

    .. math::
        G(\tau) = \frac{A(\tau)}{2\eta\varphi}
          + \sqrt{\frac{A(\tau)^2}{4\eta^2\varphi^2}
          + \frac{\rho h(\tau)}{\eta\varphi\tau}} + \rho h(\tau),
        \qquad A(\tau) = \max_m \frac{c_m\tau + b_m}{R'_m \tau}

    Args:
      tau: candidates, any shape, each at least 1.
      c, b, budget: cost of an update, of an aggregation, and the budget R, one entry per
        resource.

    Returns:
      G at each τ; +inf if it overflows.

    >>> estimates = {"eta": 0.01, "phi": 0.025, "rho": 1, "beta": 2, "delta": 3}
    >>> int(np.argmin(G([1, 10, 100], **estimates, c=0.013, b=0.13, budget=15)))
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
    r"""Theorem 2, eq. (13): bound on F(w^f) - F(w*) after T = `updates` local updates.

    .. math::
        F(w^f) - F(w^*) \le \frac{1}{2\eta\varphi T}
          + \sqrt{\frac{1}{4\eta^2\varphi^2T^2}
          + \frac{\rho h(\tau)}{\eta\varphi\tau}} + \rho h(\tau)

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
    r"""Lemma 2, eq. (12): bound on F(w(T)) - F(w*) if every interval ends above F(w*) + ε.

    .. math:: F(w(T)) - F(w^*)
        \le \frac{1}{T\left(\eta\varphi - \frac{\rho h(\tau)}{\tau\varepsilon^2}\right)}

    It is +inf if the lemma's condition 2 fails, i.e. if the bracket is not positive.
    """
    tau = np.asarray(tau, dtype=np.float64)
    drift = _drift(tau, eta=eta, rho=rho, beta=beta, delta=delta)
    rate = eta * phi - drift / (tau * epsilon**2)
    with np.errstate(divide="ignore"):
        bound = 1 / (np.asarray(updates, np.float64) * rate)
    return np.where(rate > 0, bound, np.inf)


def contraction(farthest: float, *, eta: float, beta: float) -> float:
    r"""φ of Lemma 2 for a known w*: :math:`\varphi = \omega (1 - \beta\eta/2)`.

    Args:
      farthest: the largest distance of a w((k-1)τ) from w*; ω is the inverse of its
        square.
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

    The proof treats real τ, so the minimum over whole numbers is at most ⌈τ₀⌉.

    Let ν be the resource that binds as τ grows: the largest c_m/R'_m, then the largest
    b_m/R'_m. τ₀ is the largest of

    .. math::
        \max_m \frac{b_m R'_\nu - b_\nu R'_m}{c_\nu R'_m - c_m R'_\nu},\quad
        \frac{\varphi(2+\eta\beta)}{2\rho\delta}
          \left(\frac{2c_\nu b_\nu}{C_2} + \frac{2b_\nu^2}{C_2}\right),\quad
        \frac{1}{\rho\delta\eta\log B}
          \left(\frac{b_\nu}{C_1} + \rho\eta\delta\right) - \frac{1}{\eta\beta},\quad
        \frac{1}{\eta\beta} + \frac12

    where B = ηβ + 1, C₁ = 2ηφR'_ν, C₂ = 4η²φ²R'_ν², and 0/0 = 0.
    """
    c, b, usable = _per_resource(c, b, budget)
    if not (usable > 0).all():
        raise ValueError(
            "the budget does not cover one round: R - b - c must be positive everywhere"
        )

    slope = c / usable
    offset = b / usable
    steepest = np.flatnonzero(slope == slope.max())
    binding = steepest[np.argmax(offset[steepest])]

    # For equal slopes the offset of ν is the largest (choice of ν): no crossing follows.
    rise = slope[binding] - slope
    crossing = np.where(
        rise > 0, (offset - offset[binding]) / np.where(rise > 0, rise, 1.0), 0.0
    )

    c1 = 2 * eta * phi * usable[binding]
    c2 = c1 * c1
    c_v = c[binding]
    b_v = b[binding]
    quadratic = 2 * c_v * b_v / c2 + 2 * b_v * b_v / c2
    root = phi * (2 + eta * beta) / (2 * rho * delta) * quadratic
    log_slope = rho * delta * eta * np.log1p(eta * beta)
    outside = (b_v / c1 + rho * eta * delta) / log_slope - 1 / (eta * beta)
    return float(max(crossing.max(), root, outside, 1 / (eta * beta) + 0.5))


def best_aggregations(tau: int, *, c: ArrayLike, b: ArrayLike, budget: ArrayLike) -> int:
    r"""K*: number of rounds of τ updates that fit into the budget.

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
        raise ValueError(
            "all costs are 0, so the budget does not limit the number of rounds"
        )
    return int(np.floor((usable[bounded] / cost[bounded]).min()))


def best_updates(tau: int, *, c: ArrayLike, b: ArrayLike, budget: ArrayLike) -> int:
    """T* = K* τ*: number of local updates per node that fit into the budget."""
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
    """Right-hand side of Theorem 2 with 1/T = `share`; the bound and G share it."""
    tau = np.asarray(tau, dtype=np.float64)
    drift = _drift(tau, eta=eta, rho=rho, beta=beta, delta=delta)
    with np.errstate(over="ignore", invalid="ignore"):
        half = share / (2 * eta * phi)
        value = half + np.sqrt(half * half + drift / (eta * phi * tau)) + drift
    return np.where(np.isnan(value), np.inf, value)


def _drift(tau: Float64, *, eta: float, rho: float, beta: float, delta: float) -> Float64:
    """ρ h(τ); 0 if ρ = 0, even if h overflows."""
    if rho == 0:
        return np.zeros_like(tau)
    with np.errstate(over="ignore"):
        return rho * h(tau, eta=eta, beta=beta, delta=delta)


def _per_resource(
    c: ArrayLike, b: ArrayLike, budget: ArrayLike
) -> tuple[Float64, Float64, Float64]:
    """c, b and R' = R - b - c, each [M]."""
    c, b, limit = (np.atleast_1d(np.asarray(v, dtype=np.float64)) for v in (c, b, budget))
    return c, b, limit - b - c
