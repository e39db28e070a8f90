"""Controllers: how many local updates (τ) the next round has.

A controller is a value with one pure step: `next(previous, inputs)` returns the next
decision. The previous decision is its only state. A decision carries the reason for its τ.
Add a controller as one more class, here or in your own program.

    FixedTau       the same τ in every round
    AdaptiveTau    the paper's τ* = argmin G(τ), eq. (19)
    BalancedTau    τ from the cost of an aggregation
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import ClassVar, Protocol

import numpy as np

from fedbudget.arrays import Float64, Int64
from fedbudget.budget import theory
from fedbudget.errors import UserError


class Reason(StrEnum):
    """Why a τ was chosen."""

    START = "start"  # no estimates yet
    MINIMUM = "minimum of G"
    BALANCE = "aggregation cost"  # balances cheap rounds against useful updates
    LENGTH = "round limit"  # longer rounds would pay, but several must fit
    SEARCH_LIMIT = "search limit"  # G still falls at the end of the search range
    BUDGET = "budget"  # the largest τ that fits into the rest of the budget
    SPREAD = "remaining rounds"  # longer, to spread the rest over the last rounds
    REST = "rest of the budget"  # longer, because no further round would fit
    FIXED = "fixed"
    RECOVERY = "recovery"  # the last round failed and the run returned to w^f
    PRIVACY = "privacy plan"  # the longest rounds for which time suffices
    LENGTHS = "update norms"  # first round of a private run: measures norms
    NEWTON = "Newton step"  # no updates: derivatives over all samples
    CANDIDATE = "ridge"  # no updates: the loss of a regularised solution
    FINAL = "final loss"  # no updates, only the loss of the last w


@dataclass(frozen=True)
class Decision:
    """Decision of a controller.

    Args:
      tau: local updates in the coming round.
      reason: why: a `Reason`, or a few words of your own, which are shown to users.
    """

    tau: int
    reason: str

    def __post_init__(self) -> None:
        if self.tau < 1:
            raise UserError(
                f"the controller chose {self.tau} local updates; a round needs at least 1"
            )


@dataclass(frozen=True)
class Estimates:
    """ρ̂, β̂ and δ̂ of one round."""

    rho: float
    beta: float
    delta: float


@dataclass(frozen=True)
class ControlInputs:
    """Measurements that a controller may use.

    Args:
      estimates: the newest ρ̂, β̂ and δ̂; None before the first.
      eta: step size of the coming round.
      c, b: cost of a local update and of an aggregation, [M].
      budget: R, [M].
    """

    estimates: Estimates | None
    eta: float
    c: Float64
    b: Float64
    budget: Float64


class Controller(Protocol):
    """Chooses τ before every round.

    The budget may shorten a round. At the end of a run it may also lengthen rounds, up to
    the attribute `tau_max` of the controller; never, if it has none.
    """

    @property
    def estimates(self) -> bool:
        """Whether nodes must estimate ρ, β and δ."""

    def first(self) -> Decision:
        """Return the decision for round 1.

        With `Reason.START` it is only a starting point, and `next` chooses τ of round 1
        from the costs of a trial round. A search for the step size begins with rounds of
        one update instead.
        """

    def next(self, previous: Decision, inputs: ControlInputs) -> Decision:
        """Choose τ of the coming round.

        Args:
          previous: decision for the last round, after changes by the budget.
          inputs: measurements so far.

        Returns:
          the decision. The budget may still change its τ.
        """


@dataclass(frozen=True)
class FixedTau:
    """The same τ in every round: federated averaging; with τ = 1 synchronous descent."""

    estimates: ClassVar[bool] = False
    tau: int

    def __post_init__(self) -> None:
        if self.tau < 1:
            raise UserError(f"tau must be at least 1, not {self.tau}")

    def first(self) -> Decision:
        return Decision(self.tau, Reason.FIXED)

    def next(self, previous: Decision, inputs: ControlInputs) -> Decision:
        return self.first()


@dataclass(frozen=True)
class AdaptiveTau:
    """τ* = argmin G(τ), eq. (19), recomputed in every round from the newest estimates.

    Args:
      phi: the paper's control parameter; larger values give smaller τ.
      gamma: the next τ is at most `gamma` times the last.
      tau_max: the largest τ.
      leap: search up to `tau_max` at once if nodes do not differ (δ̂ = 0). γ limits the
        damage of an inaccurate h, and h is 0 then. The paper has no such rule.

    >>> controller = AdaptiveTau(phi=0.025)
    >>> costs = np.array([0.013]), np.array([0.13]), np.array([15.0])
    >>> inputs = ControlInputs(Estimates(1.0, 2.0, 3.0), 0.01, *costs)
    >>> controller.next(Decision(5, Reason.MINIMUM), inputs)
    Decision(tau=14, reason=<Reason.MINIMUM: 'minimum of G'>)
    """

    estimates: ClassVar[bool] = True
    phi: float = 0.025
    gamma: float = 10.0
    tau_max: int = 100
    leap: bool = False

    def __post_init__(self) -> None:
        if not self.phi > 0:
            raise UserError(f"phi must be positive, not {self.phi:g}")
        if not self.gamma >= 1:
            raise UserError(f"gamma must be at least 1, not {self.gamma:g}")
        if self.tau_max < 1:
            raise UserError(f"tau-max must be at least 1, not {self.tau_max}")

    def first(self) -> Decision:
        return Decision(1, Reason.START)

    def next(self, previous: Decision, inputs: ControlInputs) -> Decision:
        if inputs.estimates is None:
            return Decision(previous.tau, Reason.START)
        curve = self.curve(previous, inputs)
        best = int(np.argmin(curve))
        limited = best == len(curve) - 1 and len(curve) > 1
        return Decision(best + 1, Reason.SEARCH_LIMIT if limited else Reason.MINIMUM)

    def search_range(self, previous: Decision, estimates: Estimates) -> Int64:
        """Return the candidates 1..min(⌊γτ*⌋, τ_max), or 1..τ_max for a leap."""
        most = self.tau_max
        if not (self.leap and estimates.delta == 0):
            most = int(min(self.gamma * previous.tau, self.tau_max))
        return np.arange(1, most + 1)

    def curve(self, previous: Decision, inputs: ControlInputs) -> Float64:
        """Evaluate G over the search range."""
        if inputs.estimates is None:
            raise ValueError("G needs estimates, and no round has returned any")
        return theory.G(
            self.search_range(previous, inputs.estimates),
            eta=inputs.eta,
            phi=self.phi,
            **vars(inputs.estimates),
            c=inputs.c,
            b=inputs.b,
            budget=inputs.budget,
        )


@dataclass(frozen=True)
class BalancedTau:
    """τ from the cost of an aggregation: the default method's controller.

    Suppose that τ updates in a row are worth τ / (1 + τ/τ_d) single updates. The budget
    then buys most at

        τ* = argmin max_m (c_m τ + b_m) / R_m · (1 + τ/τ_d) / τ,

    with one resource τ* = √(τ_d b/c). With τ_d = 10, ten updates in a row are worth five:
    drift correction uses gradients of the previous round, and the aggregator accelerates w
    only between rounds. τ_d is a guess. A value wrong by a factor f costs at most (√f +
    1/√f) / 2 times the budget, 1.06 for f = 2.

    Two limits apply. At least ten rounds must fit; this does not shorten a round whose
    updates cost less than a tenth of its aggregation. And τ at most doubles from round to
    round, or rises at once to the τ whose updates cost as much as the aggregation.

    Args:
      tau_max: the largest τ.
      worth: τ_d.
      rounds: rounds that must fit into the budget.

    >>> costs = np.array([0.013]), np.array([0.13]), np.array([15.0])
    >>> BalancedTau().next(Decision(1, Reason.START), ControlInputs(None, 0.01, *costs)).tau
    10
    """

    estimates: ClassVar[bool] = False
    tau_max: int = 100
    worth: float = 10.0
    rounds: int = 10

    def first(self) -> Decision:
        return Decision(1, Reason.START)

    def next(self, previous: Decision, inputs: ControlInputs) -> Decision:
        search = self.search_range
        shares = self._shares(inputs)
        cost = shares.max(axis=1)
        binding = int(shares[0].argmax())
        c = inputs.c[binding]
        b = inputs.b[binding]

        wanted = int(np.argmin(self._curve(cost))) + 1
        cheap = int((10 * search * c <= b).sum())
        fit = max(1, cheap, int((cost * self.rounds <= 1).sum()))
        even = int(min(b / c, self.tau_max)) if c > 0 else self.tau_max
        reach = max(2 * previous.tau, even)

        tau = max(1, min(wanted, fit, reach))
        return Decision(tau, Reason.BALANCE if tau == wanted else Reason.LENGTH)

    @property
    def search_range(self) -> Int64:
        """The candidates 1..τ_max."""
        return _search(self.tau_max, self.worth)[0]

    def curve(self, inputs: ControlInputs) -> Float64:
        """Return the share of the budget that one effective update costs, by τ."""
        return self._curve(self._shares(inputs).max(axis=1))

    def _curve(self, cost: Float64) -> Float64:
        return np.asarray(cost * _search(self.tau_max, self.worth)[1])

    def _shares(self, inputs: ControlInputs) -> Float64:
        """Return the share of each limit that a round costs, [τ, M]."""
        costs = self.search_range[:, None] * inputs.c + inputs.b
        return np.asarray(costs / inputs.budget)


@lru_cache(4)
def _search(tau_max: int, worth: float) -> tuple[Int64, Float64]:
    """Return all τ, and the inverse of what τ updates in a row are worth; read-only."""
    search = np.arange(1, tau_max + 1)
    inverse = 1 / search + 1 / worth
    search.setflags(write=False)
    inverse.setflags(write=False)
    return search, inverse
