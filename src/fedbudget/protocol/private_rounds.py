"""The aggregator of a private run: sums with noise are all that w follows, and all that anybody is told.

    READY --start--> ROUND (lengths) --receive--> ROUND --receive--> ... DONE

The order of things in one `receive`: noise is drawn, and with that paid for, whatever comes of it, unless sums have it
already (then it was paid for before they were opened); what the round makes
known moves w, by the update rule; the ledger is charged with what the round cost, ρ included; the next is planned
(private_plan.py). No loss is known, so that w^f is always the last w, and there is no final round.

A round that does not come together makes nothing known, and costs no privacy.
"""

from typing import Any

import numpy as np

from fedbudget.budget import Costs
from fedbudget.errors import UserError
from fedbudget.protocol import steps
from fedbudget.protocol.aggregator import Aggregator, Outcome, Round
from fedbudget.protocol.messages import Broadcast, LocalError, Private, Report
from fedbudget.protocol.privacy import NoisySums, noise_size, release, release_sums
from fedbudget.protocol.private_plan import RoundPlan, plan_round, private_of, rho_left
from fedbudget.protocol.state import AggregatorState, Phase
from fedbudget.protocol.sums import Reports
from fedbudget.protocol.workload import NodeTimes

_State = AggregatorState[Any, Any]


class PrivateAggregator(Aggregator):
    """Runs private rounds; made as an `Aggregator` is, of a method that is private."""

    def start(self) -> Broadcast:
        if self.state.phase is not Phase.READY:
            raise LocalError("the run has started already")
        answer = self._answer(self._announce_private(self.state.updated(phase=Phase.ROUND), clip=0.0))
        if not isinstance(answer, Broadcast):
            raise UserError(f"budget {self.ledger.budget} is too small for one private round")
        return answer

    def receive(
        self, report: Report | Reports, costs: Costs, *, usual: bool = True, times: NodeTimes | None = None
    ) -> Broadcast | Outcome:
        broadcast, rule = self._require_pending(report), self.method.private
        private = broadcast.private
        assert rule is not None
        assert private is not None
        if isinstance(report, NoisySums):  # which were paid for before they were opened
            nodes, released = report.sums.nodes, release_sums(report, private)
        else:
            assert isinstance(report, Report)
            noise = rule.noise.draw(broadcast.round, private.rho, noise_size(private, broadcast.w.size))
            nodes, released = len(report.nodes), release(report, private, noise)
        budget = self.ledger.budget
        rest = budget.but_noise(costs.aggregation) + budget.noise(private.rho)
        paid = Costs(budget.but_noise(costs.step), rest)
        state = self.state.updated(ledger=self.ledger.charge(broadcast.tau, paid, usual=usual))
        if released.update is not None:
            mean = np.asarray(state.w + released.update, np.float32)
            state, _, _ = steps.moved(
                state.updated(t=state.t + broadcast.tau), self.method.update, mean, self._quantize
            )
        state = state.updated(best=state.w)
        round_ = self._private_round(state, broadcast, nodes, private)
        state = self._announce_private(state, released.clip)
        self.last = round_
        return self._answer(state)

    def charge(self, costs: Costs) -> None:
        """What was spent besides; where that leaves less privacy than the coming round was to have, it has the rest."""
        super().charge(costs)
        state, left = self.state, rho_left(self.ledger)
        if state.phase is Phase.ROUND and state.private is not None and state.private.rho > left:
            done = {"phase": Phase.DONE, "stopped_by": self.ledger.budget.by_noise}
            self.state = state.updated(**({"private": state.private.at_cost(left)} if left > 0 else done))

    def _announce_private(self, state: _State, clip: float) -> _State:
        """The next round, as far as there is privacy and the rest for it; or the end.

        Args:
          clip: C of it; 0 where it only asks for lengths.
        """
        made, spending = state.round - state.final_rounds, self.method.spending
        if self._rounds is not None and made >= self._rounds:
            return state.updated(phase=Phase.DONE, stopped_by="rounds")
        more = None if self._rounds is None else self._rounds - made
        plan = self._plan(state, clip, more)
        if plan is None:
            return state.updated(phase=Phase.DONE, stopped_by=state.stopped_by or state.ledger.budget.by_noise)
        fitting = spending.plan(state.ledger, plan.decision)
        if fitting.decision is None:
            return state.updated(phase=Phase.DONE, stopped_by=fitting.stopped_by)
        decision = fitting.decision
        state = state.updated(round=state.round + 1, tau=decision.tau, decision=decision)
        return self._with_plan(state, plan, clip).updated(stopped_by=plan.bound_by)

    def _plan(self, state: _State, clip: float, rounds: int | None) -> RoundPlan | None:
        """The next round; None when there is no privacy left.

        Args:
          rounds: that are to be made, with this one, where that is given.
        """
        rule, spending = self.method.private, self.method.spending
        assert rule is not None
        return plan_round(rule, spending, state.ledger, state.w.size, first=clip == 0, rounds=rounds)

    def _with_plan(self, state: _State, plan: RoundPlan, clip: float) -> _State:
        """With what nodes are told of it."""
        return state.updated(private=private_of(plan, clip))

    def _extended(self, state: _State) -> _State:
        if state.phase is Phase.ROUND:
            return state.updated(stopped_by=None)
        assert state.private is not None
        coming = self._announce_private(steps.reopened(state), state.private.clip)
        if coming.phase is Phase.DONE:
            raise UserError(
                f"budget {state.ledger.budget}: too little is left of {coming.stopped_by} for another round"
            )
        return coming

    def _private_round(self, state: _State, broadcast: Broadcast, nodes: int, private: Private) -> Round:
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
