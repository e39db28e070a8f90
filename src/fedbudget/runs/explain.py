"""The reason for the τ of a round, with the curve G(τ) recomputed from the records.

A custom controller may give any text as its reason. It is shown unchanged, without a curve.
"""

from dataclasses import dataclass

import numpy as np

from fedbudget.arrays import Float64, Int64
from fedbudget.budget.control import (
    AdaptiveTau,
    BalancedTau,
    ControlInputs,
    Controller,
    Decision,
    Estimates,
    Reason,
)
from fedbudget.errors import UserError
from fedbudget.runs.folder import Run
from fedbudget.runs.nodes import names_of, read
from fedbudget.runs.record import RoundRecord

_FROM_G = (Reason.MINIMUM, Reason.SEARCH_LIMIT, Reason.BUDGET, Reason.SPREAD, Reason.REST)
"""Reasons of a controller that evaluated G."""
_FROM_COSTS = (Reason.BALANCE, Reason.LENGTH, Reason.BUDGET, Reason.SPREAD, Reason.REST)
"""Reasons of a controller that compared costs."""
G = "G(τ)"
COST = "budget per effective update"


@dataclass(frozen=True)
class Explanation:
    """The decision of one round.

    Args:
      record: the record of the round.
      candidates, curve: the evaluated τ, and the quantity that the controller minimised
        at each; empty if it minimised none.
      estimates: the estimates in G.
      quantity: name of the quantity, `G` or `COST`.
      excluded: names of the nodes whose losses did not count.
    """

    record: RoundRecord
    candidates: Int64
    curve: Float64
    estimates: Estimates | None
    quantity: str = G
    excluded: tuple[str, ...] = ()

    @property
    def minimum(self) -> int | None:
        """The τ with the smallest value of the curve."""
        return int(self.candidates[np.argmin(self.curve)]) if len(self.curve) else None

    @property
    def sentence(self) -> str:
        """The reason as a sentence."""
        tau = f"τ = {self.record.tau}"
        smallest = ""
        if self.minimum:
            smallest = f"; {self.quantity} is smallest at τ = {self.minimum}"
        sentences: dict[str, str] = {
            Reason.START: "there were no estimates yet, so the run continued with τ = 1",
            Reason.MINIMUM: f"G(τ) is smallest at {tau}",
            Reason.SEARCH_LIMIT: f"G(τ) still falls at {tau}, the end of the search range",
            Reason.BALANCE: f"with {tau} the budget buys most: longer rounds waste "
            "updates, and shorter ones aggregations",
            Reason.LENGTH: f"rounds longer than {tau} would pay off, but several must fit, "
            "and τ grows in steps",
            Reason.BUDGET: f"the rest of the budget allowed at most {tau}{smallest}",
            Reason.SPREAD: "few rounds were left, and each took a share of the remainder: "
            f"{tau}{smallest}",
            Reason.REST: "no further round would fit, so this one took the rest of the "
            f"budget: {tau}{smallest}",
            Reason.FIXED: f"{tau} was fixed by the settings",
            Reason.RECOVERY: "the last round failed, so the run returned to its best "
            "parameters",
            Reason.LENGTHS: "a private run first measures the norms of updates, with "
            "noise; this round changes no parameters",
            Reason.PRIVACY: self.private,
            Reason.NEWTON: "nodes made no updates, but reported the gradient and the "
            "Hessian of their losses, from which the next parameters follow",
            Reason.CANDIDATE: "the derivatives of the first round give all solutions, and "
            "this round evaluated one with a ridge",
            Reason.FINAL: "this last round only evaluated the loss of the final parameters",
        }
        return sentences.get(self.record.reason, "the controller gave this reason itself")

    @property
    def shared(self) -> str:
        """How nodes shared the round, as a sentence; empty if all made τ updates."""
        work = self.record.work
        if work is None:
            return ""
        return (
            "time is the scarcest resource, so faster nodes made more updates than the "
            f"slowest node's {self.record.tau}: the round counted as "
            f"{work['effective']:.1f} updates of each node, and nodes were idle for "
            f"{work['mean_idle']:.0%} of the update time instead of "
            f"{work['mean_idle_equal']:.0%} with equal τ"
        )

    @property
    def without(self) -> str:
        """The nodes whose losses did not count, as a sentence; empty without any."""
        if not self.excluded:
            return ""
        return (
            f"the losses of {', '.join(self.excluded)} did not count, because they "
            "contradicted those of the other nodes; the updates did count"
        )

    @property
    def private(self) -> str:
        """Noise and cost of a private round as a sentence; empty if none was planned."""
        release = self.record.private
        if release is None or "noise" not in release:
            return ""
        noise = f"{release['noise']:.3g}"
        clip = f"{release['clip']:.3g}"
        rho = f"ρ = {release['rho']:.3g}"
        if "samples" in release:
            return (
                "the privacy budget was divided among the local updates that are worth "
                f"their noise, and τ = {self.record.tau} is the smallest with which they "
                f"fit: gradients of samples were clipped to {clip}, and all uses of a "
                f"sample in this round had noise of {noise} times that, for {rho}"
            )
        return (
            "the privacy budget was divided among the rounds whose updates are at least as "
            f"long as their noise: this round had noise of {noise} times the longest "
            f"update, {clip}, for {rho}; τ = {self.record.tau} uses the time that is left "
            "for them, up to 50"
        )


def explain(run: Run, number: int, controller: Controller) -> Explanation:
    """Recompute the decision of one round from the records before it.

    Args:
      run: the run.
      number: number of the round.
      controller: the run's controller.
    """
    by_number = {record.round: record for record in run.rounds}
    if number not in by_number:
        present = f"rounds 1 to {max(by_number)}" if by_number else "none yet"
        raise UserError(f"{run.path} has no round {number}; it has {present}")
    record = by_number[number]
    before = by_number.get(number - 1)
    candidates = np.empty(0, np.int64)
    curve = np.empty(0)
    estimates = None
    quantity = G
    if (
        before is not None
        and isinstance(controller, BalancedTau)
        and record.reason in _FROM_COSTS
    ):
        quantity = COST
        candidates = controller.search_range
        curve = controller.curve(_inputs(run, record, before, None))
    elif (
        before is not None
        and isinstance(controller, AdaptiveTau)
        and record.reason in _FROM_G
        and before.rho is not None
    ):
        assert before.beta is not None
        assert before.delta is not None
        estimates = Estimates(before.rho, before.beta, before.delta)
        # G depends on the τ of the previous decision, not on its reason.
        previous = Decision(max(1, round(before.effective_tau)), Reason.MINIMUM)
        candidates = controller.search_range(previous, estimates)
        curve = controller.curve(previous, _inputs(run, record, before, estimates))
    names = names_of(read(run.path), record.excluded) if record.excluded else ()
    return Explanation(record, candidates, curve, estimates, quantity, tuple(names))


def _inputs(
    run: Run, record: RoundRecord, before: RoundRecord, estimates: Estimates | None
) -> ControlInputs:
    """Return what the controller knew before the round `record`."""
    limits = run.settings.limits()
    c = before.expected_c or before.c
    b = before.expected_b or before.b
    return ControlInputs(
        estimates,
        record.eta,
        np.array([c[name] for name in limits.limits]),
        np.array([b[name] for name in limits.limits]),
        limits.array,
    )


@dataclass(frozen=True)
class ReasonSummary:
    """All rounds of a run whose τ has the same reason.

    Args:
      rounds: their number.
      last: number of the last of them.
      smallest, largest: their τ.
      sentence: the reason for the τ of the last one.
    """

    reason: str
    rounds: int
    last: int
    smallest: int
    largest: int
    sentence: str


def reasons(run: Run, controller: Controller) -> list[ReasonSummary]:
    """Return a summary of each reason in the run, the most frequent first."""
    by_reason: dict[str, list[RoundRecord]] = {}
    for record in run.rounds:
        by_reason.setdefault(record.reason, []).append(record)
    summaries = []
    for reason, records in by_reason.items():
        taus = [record.tau for record in records]
        last = records[-1].round
        sentence = explain(run, last, controller).sentence
        summary = ReasonSummary(reason, len(records), last, min(taus), max(taus), sentence)
        summaries.append(summary)
    return sorted(summaries, key=lambda each: -each.rounds)
