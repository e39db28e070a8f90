"""Private runs that protect nodes: the plan of a round, and its aggregator.

**Plan** (`plan_round`): τ, the number of rounds, and the noise of each, together. With K
rounds each receives ρ/K. In d parameters the noise of the mean update then has the norm
√(dK/2ρ) C/n, and an update has at most C. With the best C the distance of the last w from
the optimum is (see docs/research/theory.md for the proof)

    in proportion to √(1/K + d/2ρn²).

The second term does not depend on K. With K* = 4ρ n²/d the first is half of it. More
rounds would gain little, while longer rounds make better updates. K* rounds are therefore
planned if time and the other resources allow five updates in each, and at least twelve,
because C must follow norms that fall quickly at first. τ uses the rest: as large as all
rounds allow, up to fifty, because nodes that continue alone for longer approach their own
optimum. docs/guide/privacy.md has measurements. The plan is renewed before every round
from the rest of each resource. The last round receives all remaining ρ.

**Aggregator** (`PrivateAggregator`): w follows noisy sums, and only these are published.

    READY --start--> ROUND (norms) --receive--> ROUND --receive--> ... DONE

The stages of `receive`:

    1. Noise is drawn and added, unless the sums contain it already.
    2. The update rule moves w by the published update.
    3. The ledger is charged with the cost of the round, ρ included.
    4. The next round is planned.
    5. `payment` is set to the ρ of the round. The engine records it durably before it
    sends
       the next broadcast or returns the outcome. Sums that contain noise were paid for
       before they were opened, so `payment` is None for them.

No loss is known, so w^f is always the last w, and there is no final round. A round that
fails publishes nothing, and costs no privacy.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedbudget.arrays import Float64, Int64
from fedbudget.budget.budget import Budget, Costs, Ledger
from fedbudget.budget.control import Decision, Reason
from fedbudget.budget.spending import SpendingRule
from fedbudget.errors import UserError
from fedbudget.protocol.aggregator import Aggregator, Outcome, Round
from fedbudget.protocol.messages import Broadcast, LocalError, Private, Report
from fedbudget.protocol.method import PrivateRule
from fedbudget.protocol.privacy import (
    MEASURED,
    NoisySums,
    Payment,
    noise_size,
    release,
    release_sums,
)
from fedbudget.protocol.state import AggregatorState, Phase, apply_update, reopen, updated
from fedbudget.protocol.sums import Reports
from fedbudget.protocol.workload import NodeTimes

FEWEST_ROUNDS = 12
FEWEST_UPDATES = 5
MOST_UPDATES = 50

_NEGLIGIBLE = 1e-6  # share of ρ that counts as nothing

_State = AggregatorState[Any, Any]


@dataclass(frozen=True)
class RoundPlan:
    """Plan of the coming round.

    Args:
      decision: its τ.
      rho: its ρ.
      bound_by: the resource, other than privacy, for lack of which it is the last round.
    """

    decision: Decision
    rho: float
    bound_by: str | None = None


def plan_round(
    rule: PrivateRule,
    spending: SpendingRule,
    ledger: Ledger,
    parameters: int,
    *,
    first: bool,
    rounds: int | None,
) -> RoundPlan | None:
    """Plan the next round, as if all later ones were like it; None if no ρ is left.

    Args:
      rule: the private rule.
      spending: the spending rule.
      ledger: the ledger before the round.
      parameters: number of parameters.
      first: whether the round only measures norms.
      rounds: remaining rounds, this one included, if fixed; otherwise ρ determines them.
    """
    left = rho_left(ledger)
    if left <= 0:
        return None
    total = rho_total(ledger.budget)
    measured = MEASURED * total if first else 0.0
    if rounds is None:
        wanted = (left - measured) / rho_of_round(rule, total, parameters)
    else:
        wanted = rounds - first

    shortest = np.array([rule.tau or FEWEST_UPDATES])
    fits, scarce = rounds_that_fit(spending, ledger, shortest)
    planned = max(1.0, min(float(fits[0]) - first, float(round(wanted))))
    decision = _decision(rule, spending, ledger, planned + first, first)
    last = planned < min(2, round(wanted))  # although privacy would allow more
    return RoundPlan(decision, measured or left / planned, scarce if last else None)


def rho_of_round(rule: PrivateRule, total: float, parameters: int) -> float:
    """ρ with which the noise is √2 times as long as an update, but for enough rounds."""
    balanced = rule.excess * parameters / (4 * rule.nodes**2)
    return min(balanced, (1 - MEASURED) * total / FEWEST_ROUNDS)


def rounds_that_fit(
    spending: SpendingRule, ledger: Ledger, taus: Int64
) -> tuple[Float64, str]:
    """Compute how many rounds fit into all resources except privacy.

    Args:
      spending: the spending rule.
      ledger: the ledger before the round.
      taus: τ of the rounds, [taus].

    Returns:
      The number of rounds for each τ, at least 1, [taus]; and the scarcest resource for
      the last τ.
    """
    costs = spending.costs(ledger)
    budget = ledger.budget
    steps = np.outer(taus, budget.without_privacy(costs.step))
    each = steps + budget.without_privacy(costs.aggregation)
    with np.errstate(divide="ignore", invalid="ignore"):
        fits = np.where(each > 0, (budget.array - ledger.spent) / each, np.inf)
    scarce = list(budget.limits)[int(fits[-1].argmin())]
    return np.maximum(1.0, np.floor(fits.min(axis=1))), scarce


def rho_left(ledger: Ledger) -> float:
    """Return the remaining ρ; 0 if it is negligible."""
    left = ledger.budget.privacy_part(ledger.budget.array - ledger.spent)
    return left if left > _NEGLIGIBLE * rho_total(ledger.budget) else 0.0


def rho_total(budget: Budget) -> float:
    """Return the ρ of a whole run."""
    return budget.privacy_part(budget.array)


def _decision(
    rule: PrivateRule, spending: SpendingRule, ledger: Ledger, rounds: float, first: bool
) -> Decision:
    """Largest τ with which `rounds` rounds fit."""
    if rule.tau is not None:
        return Decision(rule.tau, Reason.FIXED)
    costs = spending.costs(ledger)
    steps = ledger.budget.without_privacy(costs.step)
    each = (ledger.budget.array - ledger.spent) / rounds
    with np.errstate(divide="ignore", invalid="ignore"):
        fits = np.where(steps > 0, (each - costs.aggregation) / steps, np.inf)
    tau = int(max(1.0, min(float(fits.min()), MOST_UPDATES)))
    return Decision(tau, Reason.LENGTHS if first else Reason.PRIVACY)


class PrivateAggregator(Aggregator):
    """Runs private rounds. Takes the arguments of `Aggregator`, with a private method."""

    _payment: Payment | None = None

    @property
    def payment(self) -> Payment | None:
        return self._payment

    def start(self) -> Broadcast:
        if self.state.phase is not Phase.READY:
            raise LocalError("the run has started already")
        state = updated(self.state, phase=Phase.ROUND)
        answer = self._answer(self._announce_private(state, clip=0.0))
        if not isinstance(answer, Broadcast):
            raise UserError(
                f"budget {self.ledger.budget} is too small for one private round"
            )
        return answer

    def receive(
        self,
        report: Report | Reports,
        costs: Costs,
        *,
        usual: bool = True,
        times: NodeTimes | None = None,
    ) -> Broadcast | Outcome:
        broadcast = self._require_pending(report)
        rule = self.method.private
        private = broadcast.private
        assert rule is not None
        assert private is not None
        if isinstance(report, NoisySums):
            nodes = report.sums.nodes
            released = release_sums(report, private)
            payment = None  # paid before the sums were opened
        else:
            assert isinstance(report, Report)
            nodes = len(report.nodes)
            size = noise_size(private, broadcast.w.size)
            released = release(report, private, rule.noise.draw(broadcast.round, size))
            payment = Payment(broadcast.round, private.rho)

        budget = self.ledger.budget
        rest = budget.without_privacy(costs.aggregation) + budget.privacy_amount(
            private.rho
        )
        paid = Costs(budget.without_privacy(costs.step), rest)
        ledger = self.ledger.charge(broadcast.tau, paid, usual=usual)
        state = updated(self.state, ledger=ledger)
        if released.update is not None:
            mean = np.asarray(state.w + released.update, np.float32)
            state = updated(state, t=state.t + broadcast.tau)
            state, _, _ = apply_update(state, self.method.update, mean, self._quantize)
        state = updated(state, best=state.w)
        round_ = self._private_round(state, broadcast, nodes, private)
        state = self._announce_private(state, released.clip)
        self._payment = payment
        self.last = round_
        return self._answer(state)

    def charge(self, costs: Costs) -> None:
        """Charge an amount outside of rounds; the coming round has at most the remaining
        ρ."""
        super().charge(costs)
        state = self.state
        left = rho_left(self.ledger)
        if state.phase is not Phase.ROUND or state.private is None:
            return
        if state.private.rho <= left:
            return
        if left > 0:
            self.state = updated(state, private=state.private.at_cost(left))
        else:
            resource = self.ledger.budget.by_noise
            self.state = updated(state, phase=Phase.DONE, stopped_by=resource)

    def _announce_private(self, state: _State, clip: float) -> _State:
        """Announce the next round, or end the run.

        Args:
          state: the state after the last round.
          clip: C of the next round; 0 if it only measures norms.
        """
        more = None if self._rounds is None else self._rounds - self._rounds_made(state)
        if more is not None and more <= 0:
            return updated(state, phase=Phase.DONE, stopped_by="rounds")
        plan = self._plan(state, clip, more)
        if plan is None:
            stopped_by = state.stopped_by or state.ledger.budget.by_noise
            return updated(state, phase=Phase.DONE, stopped_by=stopped_by)
        fitting = self.method.spending.plan(state.ledger, plan.decision)
        decision = fitting.decision
        if decision is None:
            return updated(state, phase=Phase.DONE, stopped_by=fitting.stopped_by)
        state = updated(state, round=state.round + 1, tau=decision.tau, decision=decision)
        return updated(self._with_plan(state, plan, clip), stopped_by=plan.bound_by)

    def _plan(self, state: _State, clip: float, rounds: int | None) -> RoundPlan | None:
        """Plan the next round; None if no privacy is left.

        Args:
          state: the state after the last round.
          clip: C of the next round; 0 if it only measures norms.
          rounds: remaining rounds, this one included, if fixed.
        """
        rule = self.method.private
        assert rule is not None
        return plan_round(
            rule,
            self.method.spending,
            state.ledger,
            state.w.size,
            first=clip == 0,
            rounds=rounds,
        )

    def _with_plan(self, state: _State, plan: RoundPlan, clip: float) -> _State:
        """Set the privacy settings that the broadcast contains."""
        return updated(state, private=Private(clip, plan.rho))

    def _extended(self, state: _State) -> _State:
        if state.phase is Phase.ROUND:
            return updated(state, stopped_by=None)
        assert state.private is not None
        coming = self._announce_private(reopen(state), state.private.clip)
        if coming.phase is Phase.DONE:
            raise UserError(
                f"budget {state.ledger.budget}: too little is left of {coming.stopped_by} "
                "for another round"
            )
        return coming

    def _private_round(
        self, state: _State, broadcast: Broadcast, nodes: int, private: Private
    ) -> Round:
        return Round(
            round=broadcast.round,
            t=state.t,
            tau=broadcast.tau,
            reason=state.decision.reason,
            eta=0.0 if broadcast.request.one_step else broadcast.eta,
            loss=float("nan"),
            best_loss=float("nan"),
            estimates=None,
            kept=(),
            ledger=state.ledger,
            expected=self.method.spending.costs(state.ledger),
            nodes=nodes,
            left_out=(),
            private=private,
        )
