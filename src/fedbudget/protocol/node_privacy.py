"""How a private run is planned: τ, how many rounds, and how much noise in each, together.

Of K rounds each gets ρ/K, and so the noise in its mean update has, in d parameters, the length √(dK/2ρ) C/n, where an
update has C at most. How far w ends from where it should go is then, with the best C (docs/research/theory.md has the proof),

    in proportion to √(1/K + d/2ρn²).

The second part stays, however many rounds are made. With K* = 4ρ n²/d the first is half of it, and more rounds would
gain little, while time that goes into longer rounds makes better updates. So K* rounds are planned, where time and the
rest allow five updates in each; and twelve at least, for C must follow lengths that fall quickly at first. τ takes what
is left: as long as all rounds fit, up to fifty updates, for nodes that go on alone for longer come to what is best for
each of them. docs/guide/privacy.md has what it gives.

It is made anew before every round, from what is left of each resource: the last round gets all of ρ that is left.

The aggregator of a private run: sums with noise are all that w follows, and all that anybody is told.

    READY --start--> ROUND (lengths) --receive--> ROUND --receive--> ... DONE

The order of things in one `receive`: noise is drawn, and with that paid for, whatever comes of it, unless sums have it
already (then it was paid for before they were opened); what the round makes
known moves w, by the update rule; the ledger is charged with what the round cost, ρ included; the next is planned
(private_plan.py). No loss is known, so that w^f is always the last w, and there is no final round.

A round that does not come together makes nothing known, and costs no privacy.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

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
_NOTHING = 1e-6
"""The share of ρ that is as good as none."""


@dataclass(frozen=True)
class RoundPlan:
    """The coming round.

    Args:
      decision: its τ.
      rho: its ρ.
      bound_by: the resource for want of which it is the last, where that is another than privacy.
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
    """The next round, as if all after it were like it; None when there is no ρ left.

    Args:
      first: it only asks for lengths.
      rounds: that are to be made, with this one, where that is given; otherwise by ρ.
    """
    left = rho_left(ledger)
    if left <= 0:
        return None
    total = rho_total(ledger.budget)
    measured = MEASURED * total if first else 0.0
    wanted = (
        (left - measured) / rho_of_round(rule, total, parameters)
        if rounds is None
        else rounds - first
    )
    fits, scarce = rounds_that_fit(rule, spending, ledger)
    planned = max(1.0, min(fits - first, float(round(wanted))))
    decision = _decision(rule, spending, ledger, planned + first, first)
    last = planned < min(2, round(wanted))  # though there is privacy for more
    return RoundPlan(decision, measured or left / planned, scarce if last else None)


def rho_of_round(rule: PrivateRule, total: float, parameters: int) -> float:
    """ρ with which noise is √2 as long as an update, where that leaves enough rounds."""
    return min(
        rule.excess * parameters / (4 * rule.nodes**2),
        (1 - MEASURED) * total / FEWEST_ROUNDS,
    )


def rounds_that_fit(
    rule: PrivateRule, spending: SpendingRule, ledger: Ledger
) -> tuple[float, str]:
    """How many rounds of a few updates are left of everything but privacy, and of what there is least."""
    updates = rule.tau or FEWEST_UPDATES
    costs = spending.costs(ledger)
    each = ledger.budget.without_privacy(updates * costs.step + costs.aggregation)
    with np.errstate(divide="ignore", invalid="ignore"):
        fits = np.where(each > 0, (ledger.budget.array - ledger.spent) / each, np.inf)
    return max(1.0, float(np.floor(fits.min()))), list(ledger.budget.limits)[
        int(fits.argmin())
    ]


def rho_left(ledger: Ledger) -> float:
    """What may still be made known; 0 where it is hardly anything."""
    left = ledger.budget.privacy_part(ledger.budget.array - ledger.spent)
    return left if left > _NOTHING * rho_total(ledger.budget) else 0.0


def rho_total(budget: Budget) -> float:
    return budget.privacy_part(budget.array)


def _decision(
    rule: PrivateRule, spending: SpendingRule, ledger: Ledger, rounds: float, first: bool
) -> Decision:
    """τ with which so many rounds fit."""
    if rule.tau is not None:
        return Decision(rule.tau, Reason.FIXED)
    costs = spending.costs(ledger)
    steps = ledger.budget.without_privacy(costs.step)
    with np.errstate(divide="ignore", invalid="ignore"):
        fits = np.where(
            steps > 0,
            ((ledger.budget.array - ledger.spent) / rounds - costs.aggregation) / steps,
            np.inf,
        )
    tau = int(max(1.0, min(float(fits.min()), MOST_UPDATES)))
    return Decision(tau, Reason.LENGTHS if first else Reason.PRIVACY)


def private_of(plan: RoundPlan, clip: float) -> Private:
    """What nodes are told of a round.

    Args:
      clip: C; 0 where only lengths are asked for.
    """
    return Private(clip, plan.rho)


_State = AggregatorState[Any, Any]


class PrivateAggregator(Aggregator):
    """Runs private rounds; made as an `Aggregator` is, of a method that is private."""

    def start(self) -> Broadcast:
        if self.state.phase is not Phase.READY:
            raise LocalError("the run has started already")
        answer = self._answer(
            self._announce_private(updated(self.state, phase=Phase.ROUND), clip=0.0)
        )
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
        if isinstance(report, NoisySums):  # which were paid for before they were opened
            nodes = report.sums.nodes
            released = release_sums(report, private)
        else:
            assert isinstance(report, Report)
            noise = rule.noise.draw(
                broadcast.round, private.rho, noise_size(private, broadcast.w.size)
            )
            nodes = len(report.nodes)
            released = release(report, private, noise)
        budget = self.ledger.budget
        rest = budget.without_privacy(costs.aggregation) + budget.privacy_amount(private.rho)
        paid = Costs(budget.without_privacy(costs.step), rest)
        state = updated(
            self.state, ledger=self.ledger.charge(broadcast.tau, paid, usual=usual)
        )
        if released.update is not None:
            mean = np.asarray(state.w + released.update, np.float32)
            state, _, _ = apply_update(
                updated(state, t=state.t + broadcast.tau),
                self.method.update,
                mean,
                self._quantize,
            )
        state = updated(state, best=state.w)
        round_ = self._private_round(state, broadcast, nodes, private)
        state = self._announce_private(state, released.clip)
        self.last = round_
        return self._answer(state)

    def charge(self, costs: Costs) -> None:
        """What was spent besides; where that leaves less privacy than the coming round was to have, it has the rest."""
        super().charge(costs)
        state = self.state
        left = rho_left(self.ledger)
        if (
            state.phase is Phase.ROUND
            and state.private is not None
            and state.private.rho > left
        ):
            if left > 0:
                self.state = updated(state, private=state.private.at_cost(left))
            else:
                resource = self.ledger.budget.by_noise
                self.state = updated(state, phase=Phase.DONE, stopped_by=resource)

    def _announce_private(self, state: _State, clip: float) -> _State:
        """The next round, as far as there is privacy and the rest for it; or the end.

        Args:
          clip: C of it; 0 where it only asks for lengths.
        """
        made = state.round - state.final_rounds
        spending = self.method.spending
        if self._rounds is not None and made >= self._rounds:
            return updated(state, phase=Phase.DONE, stopped_by="rounds")
        more = None if self._rounds is None else self._rounds - made
        plan = self._plan(state, clip, more)
        if plan is None:
            return updated(
                state,
                phase=Phase.DONE,
                stopped_by=state.stopped_by or state.ledger.budget.by_noise,
            )
        fitting = spending.plan(state.ledger, plan.decision)
        if fitting.decision is None:
            return updated(state, phase=Phase.DONE, stopped_by=fitting.stopped_by)
        decision = fitting.decision
        state = updated(state, round=state.round + 1, tau=decision.tau, decision=decision)
        return updated(self._with_plan(state, plan, clip), stopped_by=plan.bound_by)

    def _plan(self, state: _State, clip: float, rounds: int | None) -> RoundPlan | None:
        """The next round; None when there is no privacy left.

        Args:
          rounds: that are to be made, with this one, where that is given.
        """
        rule = self.method.private
        spending = self.method.spending
        assert rule is not None
        return plan_round(
            rule, spending, state.ledger, state.w.size, first=clip == 0, rounds=rounds
        )

    def _with_plan(self, state: _State, plan: RoundPlan, clip: float) -> _State:
        """With what nodes are told of it."""
        return updated(state, private=private_of(plan, clip))

    def _extended(self, state: _State) -> _State:
        if state.phase is Phase.ROUND:
            return updated(state, stopped_by=None)
        assert state.private is not None
        coming = self._announce_private(reopen(state), state.private.clip)
        if coming.phase is Phase.DONE:
            raise UserError(
                f"budget {state.ledger.budget}: too little is left of {coming.stopped_by} for another round"
            )
        return coming

    def _private_round(
        self, state: _State, broadcast: Broadcast, nodes: int, private: Private
    ) -> Round:
        own_steps = broadcast.request.one_step
        return Round(
            round=broadcast.round,
            t=state.t,
            tau=broadcast.tau,
            reason=state.decision.reason,
            eta=0.0 if own_steps else broadcast.eta,
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
