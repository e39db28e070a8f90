"""The paper's equations as pure functions, one function per equation.

Wang et al., "Adaptive Federated Learning in Resource Constrained Edge Computing Systems",
IEEE JSAC 2019.

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
    c = np.atleast_1d(c)
    b = np.atleast_1d(b)
    usable = np.atleast_1d(budget) - b - c
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
    tau = np.asarray(tau, dtype=np.float64)
    share = share_per_update(tau, c=c, b=b, budget=budget)
    with np.errstate(over="ignore", invalid="ignore"):
        drift = np.zeros_like(tau)
        if rho:  # otherwise ρ h(τ) is 0, even if h overflows
            drift = rho * h(tau, eta=eta, beta=beta, delta=delta)
        half = share / (2 * eta * phi)
        value = half + np.sqrt(half * half + drift / (eta * phi * tau)) + drift
    return np.where(np.isnan(value), np.inf, value)
