"""Which τ next.

A controller is a value with one pure step: `next(previous, inputs)` gives the next decision, and the previous
decision is all the state there is. A decision says why it was made. A new controller is one more class, here or in a
user's own program.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Protocol

import numpy as np

from fedbudget.arrays import Float64, Int64
from fedbudget.budget import theory
from fedbudget.errors import UserError


class Reason(StrEnum):
    """Why a τ was chosen."""

    START = "start"  # nothing has been estimated yet
    MINIMUM = "minimum of G"
    BALANCE = "cost of an aggregation"  # longer rounds would waste updates, and shorter ones aggregations
    LENGTH = "limit of a round"  # longer rounds would pay, but several must fit, and τ grows step by step
    SEARCH_LIMIT = "search limit"  # G still falls at the end of the search range
    BUDGET = "budget"  # no more fits in what is left
    SPREAD = "rounds that are left"  # a little longer than wanted, so that nothing is left over after the last
    REST = "rest of the budget"  # longer than wanted, because nothing would fit after it
    FIXED = "fixed"
    RECOVERY = "recovery"  # the last round gave nothing finite
    PRIVACY = "plan of privacy"  # as long as time allows for all rounds that ε buys
    LENGTHS = "lengths of updates"  # a private run must know these first
    FINAL = "final loss"  # no updates any more, only the loss of the last w


@dataclass(frozen=True)
class Decision:
    """What a controller decided.

    Args:
      tau: local updates in the coming round.
      reason: why; a `Reason`, or a controller's own in a few words, as people are shown it.
    """

    tau: int
    reason: str

    def __post_init__(self) -> None:
        if self.tau < 1:
            raise UserError(
                f"a round has at least 1 local update, and the controller chose {self.tau}"
            )


@dataclass(frozen=True)
class Estimates:
    """ρ̂, β̂ and δ̂ of one round."""

    rho: float
    beta: float
    delta: float


@dataclass(frozen=True)
class ControlInputs:
    """What a controller may look at: the newest estimates and costs, the coming step size and the budget R, [M]."""

    estimates: Estimates | None
    eta: float
    c: Float64
    b: Float64
    budget: Float64


class Controller(Protocol):
    """Chooses τ, round by round."""

    @property
    def estimates(self) -> bool:
        """Whether nodes must estimate ρ, β and δ for it."""

    def first(self) -> Decision:
        """The decision for the first round."""

    def next(self, previous: Decision, inputs: ControlInputs) -> Decision:
        """The decision for the coming round; the budget may still lower its τ."""


@dataclass(frozen=True)
class FixedTau:
    """The same τ in every round: the canonical federated averaging, and with τ=1 synchronous descent."""

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
      gamma: how many times larger than the last τ the next may be.
      tau_max: the largest τ of all.
      leap: where nodes do not differ at all, δ̂ = 0, take the largest τ at once: γ guards against an h that is not known
        well enough, and there is none. The paper has no such rule.

    >>> controller = AdaptiveTau(phi=0.025)
    >>> inputs = ControlInputs(Estimates(1.0, 2.0, 3.0), 0.01, np.array([0.013]), np.array([0.13]), np.array([15.0]))
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
        """The τ looked at: 1..min(⌊γτ*⌋, τ_max), or to τ_max after a leap."""
        leaps = self.leap and estimates.delta == 0
        return np.arange(
            1,
            self.tau_max + 1
            if leaps
            else int(min(self.gamma * previous.tau, self.tau_max)) + 1,
        )

    def curve(self, previous: Decision, inputs: ControlInputs) -> Float64:
        """G over the search range."""
        if inputs.estimates is None:
            raise ValueError("there is no G before the first estimates")
        search = self.search_range(previous, inputs.estimates)
        estimates = vars(inputs.estimates)
        c = inputs.c
        b = inputs.b
        budget = inputs.budget
        return theory.G(
            search, eta=inputs.eta, phi=self.phi, **estimates, c=c, b=b, budget=budget
        )


@dataclass(frozen=True)
class BalancedTau:
    """τ by what an aggregation costs. If τ updates in a row are worth τ / (1 + τ/τ_d) of them, the budget buys most at

        τ* = argmin max_m (c_m τ + b_m) / R_m · (1 + τ/τ_d) / τ,      with one resource τ* = √(τ_d b/c).

    τ_d = 10 is how many updates in a row are worth half of what they would be one by one: drift is corrected by what
    was known a round ago, and only rounds tell the aggregator that w can go faster. It is a guess; one that is wrong by
    a factor f costs at most (√f + 1/√f) / 2 times the budget, 1.06 for f = 2. At least ten rounds must fit, but for
    updates that cost less than a tenth of the aggregation, which would save nothing. τ grows to twice the last at a
    time, or at once to where updates cost what the aggregation does.

    Args:
      tau_max: the largest τ of all.
      worth: τ_d.
      rounds: that must fit.

    >>> inputs = ControlInputs(None, 0.01, np.array([0.013]), np.array([0.13]), np.array([15.0]))
    >>> BalancedTau().next(Decision(1, Reason.START), inputs).tau
    10
    """

    estimates: ClassVar[bool] = False
    tau_max: int = 100
    worth: float = 10.0
    rounds: int = 10

    def first(self) -> Decision:
        return Decision(1, Reason.START)

    def next(self, previous: Decision, inputs: ControlInputs) -> Decision:
        search = np.arange(1, self.tau_max + 1)
        shares = (np.outer(search, inputs.c) + inputs.b) / inputs.budget
        cost = shares.max(axis=1)
        binding = int(shares[0].argmax())
        wanted = int(np.argmin(cost * (1 / search + 1 / self.worth))) + 1
        cheap = int((10 * search * inputs.c[binding] <= inputs.b[binding]).sum())
        fit = max(1, cheap, int((cost * self.rounds <= 1).sum()))
        even = (
            int(min(inputs.b[binding] / inputs.c[binding], self.tau_max))
            if inputs.c[binding] > 0
            else self.tau_max
        )
        reach = max(2 * previous.tau, even)
        tau = max(1, min(wanted, fit, reach))
        return Decision(tau, Reason.BALANCE if tau == wanted else Reason.LENGTH)
