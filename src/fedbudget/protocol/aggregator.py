"""Algorithm 2 as a state machine: reports and costs in, the next broadcast or the outcome out.

Rules: no clock, no file, no randomness; what changes is one frozen value, `state`, and that in `start`, `receive`,
`charge`, `forget`, `interrupt` and `give_up` only; a report that is refused changes nothing; of nodes only sums are
looked at, which are the same bits whoever summed (sums.py), unless the combination rule needs every report.

    READY --start--> ROUND --receive--> ROUND ... --receive--> FINAL --receive--> DONE
                       |                                         ^                 ^
                       '-- nothing more fits, or only the final loss does --'      |
    any phase --interrupt--> DONE            ROUND or FINAL --give_up--------------'

Between two rounds an engine may `forget` nodes, and take the `state` to disk; `resume` goes on from it. With more
budget that is also possible from DONE, with the round that would have come next; the final round stays the run's.

The order of things in one `receive` of a round from t₀ to t:

    1. The ledger is charged with what the round cost, and told what the next is thought to cost.
    2. F(w(t₀)), eq. (2); when it is below F(w^f), w^f ← w(t₀), and nodes are told so with the next broadcast. The loss
       of w(t) itself is known one round later, hence the final round.
    3. w(t): the w_i(t) that are finite are combined to their mean (combine.py), eq. (5), by which the update rule moves
       w (update.py). When there is none, or when η adapts and F(w(t₀)) is far above F(w^f), the run goes back to w^f,
       the w that is known to be good, with τ=1. Where messages are compressed with loss, w(t) becomes what nodes will
       hold of it, before all that follows.
    4. ρ̂, β̂, δ̂ (estimates.py). Where drift is corrected, nodes' divergences say whether to go on with it (drift.py).
    5. The step size chooses η, and the controller τ. When the ledger says that this round would be the last to fit, τ
       falls to what fits and STOP is sent with it, and room is kept for the final loss, which then follows whatever the
       round has cost. When not even τ=1 fits, the final loss comes at once; when that does not fit, the run ends.
"""

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
from fedbudget.protocol import state as stages
from fedbudget.protocol.drift import Divergence, DriftState
from fedbudget.protocol.estimates import next_estimates
from fedbudget.protocol.messages import Broadcast, LocalError, PeerError, Private, Report
from fedbudget.protocol.method import Choice, Method, choose
from fedbudget.protocol.state import AggregatorState, Phase
from fedbudget.protocol.sums import Reports, ReportsHere, Sums
from fedbudget.protocol.update import without_statistics
from fedbudget.protocol.workload import NodeTimes, StepTimes, WorkShares

_State = AggregatorState[Any, Any]


@dataclass(frozen=True)
class Round:
    """One round of a run, as it is recorded.

    Args:
      round: counts from 1.
      t: local updates per node when it ended.
      tau: local updates in it; 0 in the final round, which only evaluates the loss.
      reason: why this τ.
      eta: step size.
      loss: F(w(t₀)), at the w that the round started from; on mini-batches when descent is stochastic.
      best_loss: F(w^f) on the same samples, w^f as of the end of the round.
      estimates: ρ̂, β̂, δ̂ as they stand after the round.
      kept: the estimates among them that this round could not give, and that are still an earlier round's.
      ledger: what it cost, and what was spent until its end.
      expected: ĉ and b̂ that the next τ is chosen with; None where no τ is chosen.
      nodes: how many nodes took part.
      left_out: the numbers of those among them whose w_i was not finite.
      shortened: and of those whose update was longer than the combination rule believes.
      missed: the numbers of nodes that were asked to take part and did not answer in time; the engine knows.
      corrected: whether drift was corrected in it.
      divergence: of the nodes' gradients without drift correction and with it, until the round before; None where
        drift is never corrected.
      evaluation: what nodes' test samples say, where they were asked; the engine knows.
      work: who made how many updates, where that was not τ for all; τ is then of the slowest node.
      private: what it was as a private round; then no loss is known, and η is 0 where nodes have their own.
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
    """How a run ended: w^f, and what stopped it (a resource's name, `rounds`, `interrupted`)."""

    w: Float32
    stopped_by: str
    ledger: Ledger


class Aggregator:
    """Runs Algorithm 2 over any number of fleets.

    Args:
      w: w(0), [parameters].
      method: what decides.
      budget: what may be spent.
      expected: what a round is thought to cost before the first one has been made.
      rounds: the most rounds to make, besides the budget.
      quantize: what nodes will hold of vectors; these themselves when left out.
      statistics: how many of w's last numbers are running statistics, see statistics.py.
    """

    def __init__(
        self,
        w: Float32,
        *,
        method: Method,
        budget: Budget,
        expected: Costs,
        rounds: int | None = None,
        quantize: stages.Quantize | None = None,
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
        quantize: stages.Quantize | None = None,
        more: bool = False,
    ) -> "Aggregator":
        """The aggregator that had this state; the other arguments are what that one was made with.

        Args:
          more: but for limits that are larger now: an end that was near or reached is taken back.
        """
        if state.ledger.budget.limits.keys() != budget.limits.keys():
            raise UserError(
                f"the run that is to go on has a budget of {state.ledger.budget}, not of {budget}"
            )
        if state.request.drift != method.correct_drift:
            does, not_so = (
                ("does not correct", "does")
                if method.correct_drift
                else ("corrects", "does not")
            )
            raise UserError(
                f"the run that is to go on {does} drift, and what it is to go on with {not_so}"
            )
        if state.request != method.request:
            raise UserError(
                f"the run that is to go on asks nodes for other things: {state.request}"
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
        state = state.updated(ledger=replace(state.ledger, budget=budget))
        self.state = self._extended(state) if more else state
        return self

    def start(self) -> Broadcast:
        if self.state.phase is not Phase.READY:
            raise LocalError("the run has started already")
        state = self.state.updated(phase=Phase.ROUND)
        first = Choice(state.decision, self.method.by_data)
        if self.method.request.one_step:
            first = choose(self.method, state, recover=False)
        answer = self._answer(self._announce(state, first, best=False))
        assert isinstance(answer, Broadcast)  # a ledger opens only when one round fits
        return answer

    def receive(
        self,
        report: Report | Reports,
        costs: Costs,
        *,
        usual: bool = True,
        times: NodeTimes | None = None,
    ) -> Broadcast | Outcome:
        """One round's reports, merged or already summed, and what the round cost.

        Args:
          costs: what is charged.
          usual: whether that says anything of what other rounds will cost.
          times: what a local update took at each node, where that is known.
        """
        broadcast = self._require_pending(report)
        method = self.method
        given = report
        report = stages.believed(method.combine, given, self.state)
        reports = ReportsHere(report) if isinstance(report, Report) else report
        sums = reports.sums
        ledger = self.ledger.charge(max(1, broadcast.tau), costs, usual=usual)
        state, best = stages.with_losses(self.state.updated(ledger=ledger), sums)
        if state.phase is Phase.FINAL:
            self.last = self._round(state, broadcast, sums)
            return self._answer(state.updated(phase=Phase.DONE, became_best=best))
        state = stages.with_times(
            state.updated(t=state.t + round(broadcast.effective)), broadcast, times
        )
        state, recover = stages.with_verdict(state, sums, adapts=method.step_size.adapts)
        combined = mean = None if recover else stages.combined(method.combine, report, sums)
        if mean is not None:
            mean = stages.unbiased(state, broadcast, mean)
        spent = progress(ledger, method.spending)
        before = progress(self.ledger, method.spending)
        improved = best and sums.loss_gap < -sums.loss_gap_error
        inputs = StepSizeInputs(
            sums.largest_beta, spent, sums.mean_beta, improved, max(0.0, spent - before)
        )
        scale = stages.first_scale(method.step_size, state, broadcast, inputs)
        start, state = state.start, stages.with_retreat(state, method.update, sums)
        state, mean, recover = stages.moved(
            state, method.update, mean, self._quantize, span=broadcast.span, scale=scale
        )
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
            state = state.updated(estimates=estimates)
        if state.drift is not None:
            known = report if isinstance(report, Report) else sums.report
            anew = (
                recover or report is not given
            )  # or c would not be the mean of what nodes know of themselves
            state = stages.with_drift(
                state, state.drift, known, sums, broadcast, recover=anew, start=start
            )
            if self._quantize is not None:
                state = stages.with_bias(state, broadcast, None if recover else combined)
        work = WorkShares.of(broadcast, times)
        shortened = stages.changed(given, report)
        round_ = replace(
            self._round(state, broadcast, sums), kept=kept, work=work, shortened=shortened
        )
        follow = method.step_size.recover if recover else method.step_size.next
        state = state.updated(step_size=follow(state.step_size, inputs))
        state = stages.at_pace(
            state, method.update, broadcast, broadcast.eta * scale, recover=recover
        )
        if broadcast.stop:
            state = self._finish(state, best=best)
        else:
            state = self._announce(state, choose(method, state, recover=recover), best=best)
        self.last = round_  # when nothing can fail any more, of what may be the user's own
        return self._answer(state)

    def charge(self, costs: Costs) -> None:
        """What was spent besides rounds that were counted: on one that did not come together, say."""
        self.state = self.state.updated(
            ledger=self.ledger.charge_besides(costs.aggregation)
        )

    def interrupt(self, costs: Costs | None = None) -> Outcome:
        """Ends the run where it is, with w^f as known.

        Args:
          costs: what the unfinished round has cost so far, as `aggregation`.
        """
        if self.state.phase is Phase.DONE:
            raise LocalError("the run has ended already")
        return self._end(costs, "interrupted")

    def give_up(self, costs: Costs, stopped_by: str) -> Outcome:
        """Ends the run in the middle of a round that never came together, with w^f as known.

        Args:
          costs: what that round has cost, as `aggregation`; no updates are counted.
          stopped_by: a resource that is gone, say.
        """
        if self.pending is None:
            raise LocalError(f"there is no round to give up: the run is {self.state.phase}")
        return self._end(costs, stopped_by)

    def forget(self, nodes: Collection[int]) -> Broadcast:
        """Nodes that have left for good, or have come back without their memory, no longer count.

        To be called between rounds, before the broadcast is sent that was answered last; returns the one to send
        instead. Where these nodes' c_i had a part in c, it asks for a round without correction (drift.py says why), and
        is otherwise the same.
        """
        broadcast = self.pending
        state = self.state
        if broadcast is None:
            raise LocalError(
                f"nodes are forgotten between rounds: the run is {state.phase}"
            )
        drift = None if state.drift is None else state.drift.forget(nodes)
        if drift is None or drift is state.drift:
            return broadcast
        if drift.coming.correct and broadcast.tau > 0:
            drift = replace(drift, coming=replace(drift.coming, correct=False))
            state = stages.with_coming_delta(state, drift).updated(work=None)
        self.state = state.updated(drift=drift)
        return self.state.broadcast

    @property
    def ledger(self) -> Ledger:
        return self.state.ledger

    @property
    def pending(self) -> Broadcast | None:
        """What was broadcast last and is not answered yet."""
        return (
            self.state.broadcast if self.state.phase in (Phase.ROUND, Phase.FINAL) else None
        )

    @property
    def outcome(self) -> Outcome | None:
        """How the run ended, if it did."""
        state = self.state
        over = state.phase is Phase.DONE and state.stopped_by is not None
        return Outcome(state.best, state.stopped_by or "", self.ledger) if over else None

    def _require_pending(self, report: Report | Reports) -> Broadcast:
        """Checks a report against what was asked for; of sums that is for whoever summed to do."""
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
        """The next round, with the τ that was chosen or as much of it as fits; or the end."""
        plan = self.method.spending.plan(state.ledger, choice.decision)
        state = state.updated(
            decision=plan.decision or choice.decision, stopped_by=plan.stopped_by
        )
        if plan.decision is None:
            return self._finish(state, best=best)
        stop = plan.stop
        if (
            not stop
            and self._rounds is not None
            and state.round + 1 - state.final_rounds >= self._rounds
        ):
            stop, state = True, state.updated(stopped_by="rounds")
        tau = plan.decision.tau
        workload = choice.workload
        work = None if workload is None else workload.work(tau)
        return state.updated(
            round=state.round + 1, tau=tau, work=work, became_best=best, stop=stop
        )

    def _finish(self, state: _State, *, best: bool) -> _State:
        """No more rounds: the loss of w(T), if there is room for it; otherwise w^f is what is known to be good."""
        judged = state.round > 1  # any w but w(0)
        room = self.method.spending.final_room(state.ledger, judged=judged)
        if room is None or state.ledger.fits(room):
            return stages.final_round(state, best=best)
        return state.updated(
            phase=Phase.DONE, best=state.best if judged else state.w, became_best=best
        )

    def _extended(self, state: _State) -> _State:
        """Without the end that was announced or reached, now that there is more to spend."""
        if state.stopped_by is None:
            return state
        reopened = stages.reopened(state)
        if (
            self._rounds is not None
            and reopened.round - reopened.final_rounds >= self._rounds
        ):
            if state.phase is Phase.ROUND:
                return reopened.updated(stop=True, stopped_by="rounds")
            raise UserError(
                f"`rounds` is {self._rounds}, and all of them were made: give more `rounds` to go on"
            )
        if state.phase is Phase.ROUND:
            return reopened
        inputs = StepSizeInputs(None, progress(state.ledger, self.method.spending))
        reopened = reopened.updated(
            step_size=self.method.step_size.next(state.step_size, inputs)
        )
        coming = self._announce(
            reopened, choose(self.method, reopened, recover=False), best=state.became_best
        )
        if coming.phase is not Phase.ROUND and state.phase is Phase.DONE:
            raise UserError(
                f"budget {state.ledger.budget}: too little is left of {coming.stopped_by} for one more round"
            )
        return coming

    def _end(self, costs: Costs | None, stopped_by: str) -> Outcome:
        """Before its time; what the next round would cost is still what it was."""
        if costs is not None:
            self.charge(costs)
        outcome = self._answer(self.state.updated(phase=Phase.DONE, stopped_by=stopped_by))
        assert isinstance(outcome, Outcome)
        return outcome

    def _answer(self, state: _State) -> Broadcast | Outcome:
        """Takes the state on, and gives what follows from it."""
        self.state = state
        answer = self.pending or self.outcome
        assert answer is not None
        return answer

    def _round(self, state: _State, broadcast: Broadcast, sums: Sums) -> Round:
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
            corrected=broadcast.drift is not None
            and broadcast.drift.correct
            and broadcast.tau > 0,
            divergence=None if state.drift is None else state.drift.divergence,
        )
