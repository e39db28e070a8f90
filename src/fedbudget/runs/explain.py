"""Why a round had the τ that it had: the G curve that the controller looked at, recomputed from the records.

A controller of a user's own has reasons of its own, which are any text. They are shown as they are, without a curve.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedbudget.arrays import Float64, Int64
from fedbudget.budget.control import (
    AdaptiveTau,
    ControlInputs,
    Controller,
    Decision,
    Estimates,
    Reason,
)
from fedbudget.errors import UserError
from fedbudget.runs.folder import Run

_FROM_G = (Reason.MINIMUM, Reason.SEARCH_LIMIT, Reason.BUDGET, Reason.SPREAD, Reason.REST)
"""Reasons of a controller that looked at G."""


@dataclass(frozen=True)
class Explanation:
    """One round's choice.

    Args:
      tau, reason: what was chosen, and why: a `Reason`, or a text of the controller's own.
      candidates, curve: the τ looked at, and G at each; empty where G was not consulted.
      estimates: what G was figured from.
      eta: the round's step size, for which G is.
      corrected: whether local updates were corrected for drift.
      work: who made how many updates, where that was not τ for all, as in the round's record.
      release: of a private round, what it made known, as in its record.
    """

    round: int
    tau: int
    reason: str
    candidates: Int64
    curve: Float64
    estimates: Estimates | None
    eta: float
    corrected: bool
    work: dict[str, Any] | None = None
    release: dict[str, float] | None = None

    @property
    def shared(self) -> str:
        """How nodes shared the round by their speeds, in a sentence; empty where all made τ updates."""
        if self.work is None:
            return ""
        return (
            f"time is what there is least of, so faster nodes made more updates than the slowest's {self.tau}: they "
            f"counted as {self.work['effective']:.1f} of each node, and nodes waited for "
            f"{self.work['mean_idle']:.0%} of the time of updates, where with the same τ it would be "
            f"{self.work['mean_idle_equal']:.0%}"
        )

    @property
    def private(self) -> str:
        """How much was made known of the nodes, in a sentence; empty where nothing was planned."""
        if self.release is None or "noise" not in self.release:
            return ""
        if "samples" in self.release:
            return (
                f"privacy was shared out over as many local updates as are worth their noise, and τ = {self.tau} is "
                f"the fewest with which they fit: gradients of samples were cut to {self.release['clip']:.3g}, and all "
                f"uses of a sample in this round together had noise of {self.release['noise']:.3g} times that, for "
                f"ρ = {self.release['rho']:.3g}"
            )
        return (
            f"privacy was shared out over as many rounds as give updates the length of their noise or more: this one "
            f"had noise of {self.release['noise']:.3g} times the longest update, {self.release['clip']:.3g}, and paid "
            f"ρ = {self.release['rho']:.3g} for it; τ = {self.tau} takes the time that all of them leave, up to 50"
        )

    @property
    def minimum(self) -> int | None:
        """Where G is smallest."""
        return int(self.candidates[np.argmin(self.curve)]) if len(self.curve) else None

    @property
    def sentence(self) -> str:
        """The reason in a sentence."""
        sentences: dict[str, str] = {
            Reason.START: "not enough had been estimated yet, so the run went on with τ = 1",
            Reason.MINIMUM: f"G(τ) is smallest at τ = {self.tau}",
            Reason.SEARCH_LIMIT: f"G(τ) still falls at τ = {self.tau}, the end of the range that was searched",
            Reason.BALANCE: f"with τ = {self.tau} the budget buys most: longer rounds waste updates, and shorter ones "
            "aggregations",
            Reason.LENGTH: f"longer rounds than τ = {self.tau} would pay, but several must fit, and τ grows by steps",
            Reason.BUDGET: f"no more than τ = {self.tau} fitted in what was left of the budget"
            + (f"; G(τ) is smallest at τ = {self.minimum}" if self.minimum else ""),
            Reason.SPREAD: "few rounds were left, and each took its share of what would have been left over, "
            f"τ = {self.tau}"
            + (f"; G(τ) is smallest at τ = {self.minimum}" if self.minimum else ""),
            Reason.REST: f"nothing would fit after this round, so it took the rest of the budget, τ = {self.tau}"
            + (f"; G(τ) is smallest at τ = {self.minimum}" if self.minimum else ""),
            Reason.FIXED: f"τ = {self.tau} was fixed by the settings",
            Reason.RECOVERY: "the round before went astray, so the run went back to the best parameters known",
            Reason.LENGTHS: "a private run first asks how long updates are, with noise, and moves nothing",
            Reason.PRIVACY: self.private,
            Reason.FINAL: "this last round only evaluated the loss of the final parameters",
        }
        return sentences.get(self.reason, "the controller gave this reason itself")


def explain(run: Run, number: int, controller: Controller) -> Explanation:
    """Recomputes the choice of one round from the records before it.

    Args:
      number: of the round.
      controller: that the run had.
    """
    by_number = {record.round: record for record in run.rounds}
    if number not in by_number:
        last = max(by_number, default=0)
        raise UserError(
            f"{run.path} has no round {number}; it has {f'rounds 1 to {last}' if last else 'none yet'}"
        )
    record = by_number[number]
    before = by_number.get(number - 1)
    candidates = np.empty(0, np.int64)
    curve = np.empty(0)
    estimates = None
    from_g = record.reason in _FROM_G
    if (
        from_g
        and isinstance(controller, AdaptiveTau)
        and before is not None
        and before.rho is not None
    ):
        assert before.beta is not None
        assert before.delta is not None
        estimates = Estimates(before.rho, before.beta, before.delta)
        previous = Decision(
            max(1, round(before.effective_tau)), Reason.MINIMUM
        )  # of which G needs the τ alone
        limits = run.settings.limits()
        inputs = ControlInputs(
            estimates,
            record.eta,
            np.array([(before.expected_c or before.c)[name] for name in limits.limits]),
            np.array([(before.expected_b or before.b)[name] for name in limits.limits]),
            limits.array,
        )
        candidates = controller.search_range(previous, estimates)
        curve = controller.curve(previous, inputs)
    return Explanation(
        number,
        record.tau,
        record.reason,
        candidates,
        curve,
        estimates,
        record.eta,
        record.corrected,
        record.work,
        record.private,
    )
