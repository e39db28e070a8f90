"""The aggregator as a state machine: Algorithm 2 of the paper.

    READY --start--> ROUND --receive--> ROUND ... --receive--> FINAL --receive--> DONE
                       |                                         ^                 ^
                       '-- the budget allows no other round -----'                 |
    any phase --interrupt--> DONE            ROUND or FINAL --give_up--------------'

Rules of this file:

- No clock, no file, no randomness.
- All that changes is one frozen value, `state`. Only `start`, `receive`, `charge`,
  `forget`, `interrupt` and `give_up` replace it. A report that is refused changes nothing.
- The aggregator reads sums over nodes (sums.py), which are the same bits in any grouping.
  Only some combination rules need every node's report.

Between two rounds an engine may `forget` nodes and save the `state`; `resume` continues
from it. With a larger budget a run also resumes from DONE, with the round that would have
come next; the final round stays part of the run.

`receive` names the stages of a round; state.py has a function for each:

1. Charge the ledger with the cost of the round.
2. Compute F(w(t₀)), eq. (2). If it is below F(w^f), w^f ← w(t₀), and the next broadcast
   announces it. The loss of w(t) itself follows one round later, hence the final round.
3. Decide whether to recover: if no w_i(t) is finite, or if η adapts and F(w(t₀)) is far
   above F(w^f), the run returns to w^f with τ=1.
4. Combine the finite w_i(t), eq. (5) (combine.py), and apply the update rule (update.py).
   If messages are compressed, w(t) becomes the vector that nodes will receive.
5. Estimate ρ̂, β̂, δ̂ (estimates.py).
6. Decide from the nodes' divergences whether to correct drift in the next round (drift.py).
7. Choose η and τ. If this is the last round that fits the budget, τ shrinks to fit with the
   final loss, and the broadcast announces STOP. If not even τ=1 fits, the final loss
   follows at once; if that does not fit either, the run ends.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedbudget.arrays import Float32
from fedbudget.budget.budget import Budget, Costs, Ledger
from fedbudget.budget.control import Estimates, Reason
from fedbudget.budget.spending import open_ledger, progress
from fedbudget.budget.step_size import StepSizeInputs
from fedbudget.errors import UserError
from fedbudget.evaluation.points import NodeEvaluation
from fedbudget.protocol.drift import Divergence, DriftState
from fedbudget.protocol.estimates import next_estimates
from fedbudget.protocol.messages import Broadcast, LocalError, PeerError, Private, Report
from fedbudget.protocol.method import Choice, Method, choose
from fedbudget.protocol.privacy import Payment
from fedbudget.protocol.state import (
    AggregatorState,
    Phase,
    Quantize,
    apply_update,
    cap_outliers,
    check_recovery,
    combine_reports,
    damp_velocity,
    first_round_scale,
    reopen,
    rescale_velocity,
    shortened_nodes,
    step_size_inputs,
    updated,
    with_bias,
    with_coming_delta,
    with_drift,
    with_losses,
    with_times,
    without_bias,
)
from fedbudget.protocol.sums import Reports, ReportsHere, Sums
from fedbudget.protocol.update import without_statistics
from fedbudget.protocol.workload import NodeTimes, StepTimes, WorkShares

_State = AggregatorState[Any, Any]


@dataclass(frozen=True)
class Round:
    """Record of one round.

    Args:
      round: number of the round, from 1.
      t: local updates per node at its end.
      tau: local updates in it; 0 in the final round, which only evaluates the loss.
      reason: why the controller chose this τ.
      eta: step size.
      loss: F(w(t₀)) at the start of the round; on mini-batches if descent is stochastic.
      best_loss: F(w^f) on the same samples, with w^f as of the end of the round.
      estimates: ρ̂, β̂, δ̂ after the round.
      kept: names of the estimates that this round could not renew.
      ledger: cost of the round, and what was spent until its end.
      expected: ĉ and b̂ for the next choice of τ; None if no τ is chosen.
      nodes: number of nodes that took part.
      left_out: numbers of the nodes whose w_i was not finite.
      corrected: whether drift was corrected.
      divergence: divergence of the nodes' gradients without and with drift correction,
        until the round before; None without drift correction.
      missed: numbers of the nodes that did not answer in time; set by the engine.
      evaluation: results on the nodes' test samples, if requested; set by the engine.
      work: local updates of each node, unless all made τ; τ is then the slowest node's.
      shortened: numbers of the nodes whose update the combination rule shortened.
      private: settings of a private round. It has no loss; η is 0 if nodes use their own.
    """

    round: int
    t: int
    tau: int
    reason: str
    eta: float
    loss: float
    best_loss: float
    estimates: Estimates | None
    kept: tuple[str, ...]
    ledger: Ledger
    expected: Costs | None
    nodes: int
    left_out: tuple[int, ...]
    corrected: bool = False
    divergence: Divergence | None = None
    missed: tuple[int, ...] = ()
    evaluation: NodeEvaluation | None = None
    work: WorkShares | None = None
    shortened: tuple[int, ...] = ()
    private: Private | None = None


@dataclass(frozen=True)
class Outcome:
    """End of a run.

    Args:
      w: w^f, [parameters].
      stopped_by: name of a resource, `rounds` or `interrupted`.
      ledger: what was spent.
    """

    w: Float32
    stopped_by: str
    ledger: Ledger


class Aggregator:
    """Run Algorithm 2 over any number of fleets.

    Args:
      w: w(0), [parameters].
      method: the rules that decide.
      budget: limits of the run.
      expected: expected cost of a round before the first measurement.
      rounds: maximum number of rounds, in addition to the budget.
      quantize: converts a vector to what nodes receive of it; None without compression.
      statistics: number of running statistics at the end of w (update.py).
    """

    def __init__(
        self,
        w: Float32,
        *,
        method: Method,
        budget: Budget,
        expected: Costs,
        rounds: int | None = None,
        quantize: Quantize | None = None,
        statistics: int = 0,
    ) -> None:
        self.method = method
        self.last: Round | None = None
        self.state: _State = AggregatorState(
            phase=Phase.READY,
            request=method.request,
            w=w,
            best=w,
            decision=method.controller.first(),
            step_size=method.step_size.first(),
            update=method.update.first(w),
            ledger=open_ledger(budget, expected, method.spending),
            drift=DriftState.first(w) if method.correct_drift else None,
            statistics=statistics,
            times=None if method.by_speed is None else StepTimes.none(),
        )
        self._rounds = rounds
        self._quantize = quantize

    @classmethod
    def resume(
        cls,
        state: _State,
        *,
        method: Method,
        budget: Budget,
        rounds: int | None = None,
        quantize: Quantize | None = None,
        more: bool = False,
    ) -> "Aggregator":
        """Return the aggregator that had this state.

        Args:
          state: state of the earlier aggregator.
          method, budget, rounds, quantize: arguments of the earlier aggregator.
          more: whether limits are larger now; then an announced end is withdrawn.
        """
        old = state.ledger.budget
        if old.limits.keys() != budget.limits.keys():
            raise UserError(f"the resumed run has a budget of {old}, not of {budget}")
        if state.request.drift != method.correct_drift:
            option = "with" if state.request.drift else "without"
            raise UserError(
                f"the run began {option} drift correction and must resume {option} it"
            )
        if state.request != method.request:
            raise UserError(
                f"the run began with other requests to its nodes: {state.request}; "
                "resume it with the settings it began with"
            )
        free = Costs(np.zeros_like(budget.array), np.zeros_like(budget.array))
        self = cls(
            state.w,
            method=method,
            budget=budget,
            expected=free,
            rounds=rounds,
            quantize=quantize,
        )
        state = updated(state, ledger=replace(state.ledger, budget=budget))
        self.state = self._extended(state) if more else state
        return self

    def start(self) -> Broadcast:
        """Return the first broadcast."""
        if self.state.phase is not Phase.READY:
            raise LocalError("the run has started already")
        state = updated(self.state, phase=Phase.ROUND)
        first = Choice(state.decision, self.method.by_data)
        if self.method.request.one_step:
            first = choose(self.method, state, recover=False)
        answer = self._answer(self._announce(state, first, best=False))
        assert isinstance(answer, Broadcast)  # a ledger opens only if one round fits
        return answer

    def receive(
        self,
        report: Report | Reports,
        costs: Costs,
        *,
        usual: bool = True,
        times: NodeTimes | None = None,
    ) -> Broadcast | Outcome:
        """Process the reports of a round and return the next broadcast, or the outcome.

        Args:
          report: the merged reports, or their sums.
          costs: cost of the round.
          usual: whether other rounds are expected to cost the same.
          times: time of a local update at each node, if measured.
        """
        broadcast = self._require_pending(report)
        method = self.method
        capped = cap_outliers(method.combine, report, self.state)
        reports = ReportsHere(capped) if isinstance(capped, Report) else capped
        sums = reports.sums

        # 1. Charge the ledger.
        ledger = self.ledger.charge(max(1, broadcast.tau), costs, usual=usual)
        state = updated(self.state, ledger=ledger)

        # 2. Losses, and the best w so far. The final round ends here.
        state, best = with_losses(state, sums)
        if state.phase is Phase.FINAL:
            self.last = self._round(state, broadcast, sums)
            return self._answer(updated(state, phase=Phase.DONE, became_best=best))
        state = updated(state, t=state.t + round(broadcast.effective))
        state = with_times(state, broadcast, times)

        # 3. Return to the best w, if the run diverges.
        state, recover = check_recovery(state, sums, adapts=method.step_size.adapts)

        # 4. Combine the reports and move w.
        combined = None
        mean = None
        if not recover:
            combined = combine_reports(method.combine, capped, sums)
            mean = without_bias(state, broadcast, combined)
        inputs = step_size_inputs(method.spending, self.ledger, ledger, sums, best=best)
        scale = first_round_scale(method.step_size, state, broadcast, inputs)
        start = state.start
        state = damp_velocity(state, method.update, sums)
        state, mean, recover = apply_update(
            state, method.update, mean, self._quantize, span=broadcast.span, scale=scale
        )

        # 5. Estimate ρ, β, δ.
        kept: tuple[str, ...] = ()
        if broadcast.request.estimate:
            parameters = without_statistics(mean, state.statistics)
            estimates, kept = next_estimates(
                state.estimates,
                reports,
                broadcast,
                parameters,
                from_nodes=method.delta_from_nodes,
            )
            state = updated(state, estimates=estimates)

        # 6. Drift correction. It restarts if reports were capped: c would not be the mean
        #    of the c_i that the nodes computed.
        restart = recover or capped is not report
        known = capped if isinstance(capped, Report) else sums.report
        state = with_drift(state, known, sums, broadcast, restart=restart, start=start)
        if self._quantize is not None:
            state = with_bias(state, broadcast, None if recover else combined)

        record = replace(
            self._round(state, broadcast, sums),
            kept=kept,
            work=WorkShares.of(broadcast, times),
            shortened=shortened_nodes(report, capped),
        )

        # 7. Choose the step size and τ, and announce the next round.
        follow = method.step_size.recover if recover else method.step_size.next
        state = updated(state, step_size=follow(state.step_size, inputs))
        eta = broadcast.eta * scale
        state = rescale_velocity(state, method.update, broadcast, eta, recover=recover)
        if broadcast.stop:
            state = self._finish(state, best=best)
        else:
            state = self._announce(state, choose(method, state, recover=recover), best=best)

        self.last = record  # only now: a custom rule may have raised in any stage above
        return self._answer(state)

    def charge(self, costs: Costs) -> None:
        """Charge a cost outside of counted rounds, such as of a round that failed.

        Args:
          costs: the cost, as `aggregation`.
        """
        ledger = self.ledger.charge_extra(costs.aggregation)
        self.state = updated(self.state, ledger=ledger)

    def interrupt(self, costs: Costs | None = None) -> Outcome:
        """End the run now, with the current w^f.

        Args:
          costs: cost of the unfinished round so far, as `aggregation`.
        """
        if self.state.phase is Phase.DONE:
            raise LocalError("the run has ended already")
        return self._end(costs, "interrupted")

    def give_up(self, costs: Costs, stopped_by: str) -> Outcome:
        """End the run in a round that cannot complete, with the current w^f.

        Args:
          costs: cost of that round, as `aggregation`; its updates do not count.
          stopped_by: reason, such as the name of an exhausted resource.
        """
        if self.pending is None:
            raise LocalError(f"there is no round to give up: the run is {self.state.phase}")
        return self._end(costs, stopped_by)

    def forget(self, nodes: Collection[int]) -> Broadcast:
        """Remove nodes that left for good or returned without their memory.

        Call it between rounds, before sending the last broadcast. If the c_i of these nodes
        are part of c, the new broadcast requests a round without drift correction (drift.py
        has the reason).

        Args:
          nodes: numbers of the nodes.

        Returns:
          The broadcast to send instead of the last one.
        """
        broadcast = self.pending
        state = self.state
        if broadcast is None:
            raise LocalError(f"forget nodes between rounds: the run is {state.phase}")
        drift = None if state.drift is None else state.drift.forget(nodes)
        if drift is None or drift is state.drift:
            return broadcast
        if drift.coming.correct and broadcast.tau > 0:
            drift = replace(drift, coming=replace(drift.coming, correct=False))
            state = updated(with_coming_delta(state, drift), work=None)
        self.state = updated(state, drift=drift)
        return self.state.broadcast

    @property
    def ledger(self) -> Ledger:
        """What was spent, and the expected cost of rounds."""
        return self.state.ledger

    @property
    def pending(self) -> Broadcast | None:
        """The last broadcast, while it is unanswered."""
        running = self.state.phase in (Phase.ROUND, Phase.FINAL)
        return self.state.broadcast if running else None

    @property
    def payment(self) -> Payment | None:
        """Privacy cost that must be recorded before the last answer leaves the process."""
        return None

    @property
    def outcome(self) -> Outcome | None:
        """The outcome, if the run has ended."""
        state = self.state
        if state.phase is not Phase.DONE or state.stopped_by is None:
            return None
        return Outcome(state.best, state.stopped_by, self.ledger)

    def _require_pending(self, report: Report | Reports) -> Broadcast:
        """Return the broadcast that the report answers; refuse any other report.

        Sums were checked by the process that summed.
        """
        broadcast = self.pending
        if broadcast is None:
            raise LocalError(f"no report is expected: the run is {self.state.phase}")
        number = report.round if isinstance(report, Report) else report.sums.round
        if number != broadcast.round:
            raise PeerError(f"a report of round {number} in round {broadcast.round}")
        if isinstance(report, Report):
            report.require_answers(broadcast)
        elif self.method.combine.needs_reports:
            rule = type(self.method.combine).__name__
            raise UserError(f"{rule} needs every node's report, and here only sums arrive")
        return broadcast

    def _announce(self, state: _State, choice: Choice, *, best: bool) -> _State:
        """Announce the next round, with τ shortened to fit the budget; or the end."""
        plan = self.method.spending.plan(state.ledger, choice.decision)
        decision = plan.decision
        if decision is None:
            state = updated(state, decision=choice.decision, stopped_by=plan.stopped_by)
            return self._finish(state, best=best)

        stop = plan.stop
        stopped_by = plan.stopped_by
        if not stop and self._rounds_made(state) + 1 >= self._most_rounds:
            stop = True
            stopped_by = "rounds"
        work = None if choice.workload is None else choice.workload.work(decision.tau)
        return updated(
            state,
            decision=decision,
            stopped_by=stopped_by,
            round=state.round + 1,
            tau=decision.tau,
            work=work,
            became_best=best,
            stop=stop,
        )

    def _finish(self, state: _State, *, best: bool) -> _State:
        """Announce the final round, or end the run if the budget does not cover it."""
        evaluated = state.round > 1  # the loss of some w other than w(0)
        reserve = self.method.spending.final_reserve(state.ledger, judged=evaluated)
        if reserve is None or state.ledger.fits(reserve):
            return updated(
                state,
                phase=Phase.FINAL,
                round=state.round + 1,
                tau=0,
                work=None,
                became_best=best,
                stop=True,
            )
        w = state.best if evaluated else state.w
        return updated(state, phase=Phase.DONE, best=w, became_best=best)

    def _extended(self, state: _State) -> _State:
        """Withdraw the end that was announced or reached, after the limits have grown."""
        if state.stopped_by is None:
            return state
        reopened = reopen(state)
        in_round = state.phase is Phase.ROUND
        if self._rounds_made(reopened) >= self._most_rounds:
            if in_round:
                return updated(reopened, stop=True, stopped_by="rounds")
            raise UserError(
                f"`rounds` is {self._rounds}, and the run has made all of them: "
                "set a larger `rounds` to resume"
            )
        if in_round:
            return reopened

        inputs = StepSizeInputs(None, progress(state.ledger, self.method.spending))
        step_size = self.method.step_size.next(state.step_size, inputs)
        reopened = updated(reopened, step_size=step_size)
        choice = choose(self.method, reopened, recover=False)
        coming = self._announce(reopened, choice, best=state.became_best)
        if coming.phase is not Phase.ROUND and state.phase is Phase.DONE:
            raise UserError(
                f"budget {state.ledger.budget}: too little is left of {coming.stopped_by} "
                "for one more round"
            )
        return coming

    @property
    def _most_rounds(self) -> float:
        return math.inf if self._rounds is None else self._rounds

    def _rounds_made(self, state: _State) -> int:
        return state.round - state.final_rounds

    def _end(self, costs: Costs | None, stopped_by: str) -> Outcome:
        if costs is not None:
            self.charge(costs)
        state = updated(self.state, phase=Phase.DONE, stopped_by=stopped_by)
        outcome = self._answer(state)
        assert isinstance(outcome, Outcome)
        return outcome

    def _answer(self, state: _State) -> Broadcast | Outcome:
        """Store the state and return what follows from it."""
        self.state = state
        answer = self.pending or self.outcome
        assert answer is not None
        return answer

    def _round(self, state: _State, broadcast: Broadcast, sums: Sums) -> Round:
        drift = broadcast.drift
        return Round(
            round=broadcast.round,
            t=state.t,
            tau=broadcast.tau,
            reason=state.decision.reason if broadcast.tau else Reason.FINAL,
            eta=broadcast.eta,
            loss=state.loss,
            best_loss=state.best_loss,
            estimates=state.estimates,
            kept=(),
            ledger=state.ledger,
            expected=self.method.spending.costs(state.ledger),
            nodes=sums.nodes,
            left_out=sums.left_out,
            corrected=drift is not None and drift.correct and broadcast.tau > 0,
            divergence=None if state.drift is None else state.drift.divergence,
        )
