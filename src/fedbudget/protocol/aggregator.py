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
- Features (features/feature.py) add to broadcasts, and follow a round in their own states.
  The aggregator knows none of them by name.

Between two rounds an engine may `forget` nodes and save the `state`; `resume` continues
from it. With a larger budget a run also resumes from DONE, with the round that would have
come next; the final round stays part of the run.

`receive` names the stages of a round; stages.py has a function for each:

1. Limit outliers, and sum the reports (combine.py, sums.py).
2. Charge the ledger with the cost of the round.
3. Compute F(w(t₀)), eq. (2). If it is below F(w^f), w^f ← w(t₀), and the next broadcast
   announces it. The loss of w(t) itself follows one round later, hence the final round.
4. Decide whether to recover: if no w_i(t) is finite, or if η adapts and F(w(t₀)) is far
   above F(w^f), the run returns to w^f with τ=1.
5. Combine the finite w_i(t), eq. (5), and apply the update rule (update.py). If messages
   are compressed, w(t) becomes the vector that nodes will receive.
6. Let features follow: estimates of ρ, β, δ, drift correction, momentum, workload.
7. Choose η and τ. If this is the last round that fits the budget, τ shrinks to fit with the
   final loss, and the broadcast announces STOP. If not even τ=1 fits, the final loss
   follows at once; if that does not fit either, the run ends.
"""

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from fedbudget.arrays import Float32, Int64
from fedbudget.budget.budget import Budget, Costs, Ledger
from fedbudget.budget.control import ControlInputs, Decision, Reason
from fedbudget.budget.spending import Plans, open_ledger, progress
from fedbudget.budget.step_size import StepSizeInputs
from fedbudget.errors import UserError
from fedbudget.frozen import updated
from fedbudget.protocol.features.estimates import EstimateSlopes, EstimatesState
from fedbudget.protocol.features.feature import (
    Choice,
    FeatureSettings,
    NodeTimes,
    Quantize,
    RoundResult,
    defining,
    final_layout,
    report_layout,
)
from fedbudget.protocol.messages import (
    Broadcast,
    CatchUp,
    FinalRound,
    LocalError,
    PeerError,
    Report,
    TrainRound,
)
from fedbudget.protocol.method import Method
from fedbudget.protocol.stages import (
    FilteredReports,
    check_recovery,
    combine_reports,
    filter_reports,
    move,
    pace,
    reopen,
    restart_from,
    step_size_inputs,
    was_last,
    watch_losses,
    with_losses,
)
from fedbudget.protocol.state import AggregatorState, Outcome, Payment, Phase, Round
from fedbudget.protocol.sums import NoisySums, Sums

_State = AggregatorState[Any, Any]


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
        first = {feature.name: feature.first(w) for feature in method.features}
        self.state: _State = AggregatorState(
            phase=Phase.READY,
            features=tuple(map(FeatureSettings.of, method.features)),
            w=w,
            best=w,
            decision=method.controller.first(),
            step_size=method.step_size.first(),
            update=method.update.first(w),
            ledger=open_ledger(budget, expected, method.spending),
            states={name: state for name, state in first.items() if state is not None},
            statistics=statistics,
        )
        self._rounds = rounds
        self._quantize = quantize
        self._sent: tuple[_State, Broadcast] | None = None  # the last broadcast
        features = method.features
        self._message = defining(features, "message")
        self._catch_up = defining(features, "catch_up")
        self._start = defining(features, "start")
        self._unbias = defining(features, "unbias")
        self._after = defining(features, "after")
        self._recorded = defining(features, "recorded")
        self._counted = defining(features, "counted")
        self._choose = defining(features, "choose")
        self._announced = defining(features, "announce")
        self._after_final = defining(features, "after_final")
        self._chosen = defining(features, "chosen")
        self._ends = defining(features, "ends")
        self._restart = defining(features, "restart")
        self._plans = Plans(method.spending)

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
        features = tuple(map(FeatureSettings.of, method.features))
        began = {feature.kind for feature in state.features}
        now = {feature.kind for feature in features}
        for kind in sorted(began ^ now):
            option = "with" if kind in began else "without"
            raise UserError(f"the run began {option} {kind} and must resume {option} it")
        if state.features != features:
            raise UserError(
                "the run began with other options of its features: resume it with the "
                "settings it began with"
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
        decision = state.decision
        starting = decision.reason == Reason.START or not state.step_size.settled
        if self.method.searches_step and starting:
            state, decision = self._next_decision(state, recover=False)
        else:
            state, decision = self._adjusted(state, decision, self._inputs(state))
        answer = self._answer(self._announce(state, decision, best=False))
        assert isinstance(answer, Broadcast)  # a ledger opens only if one round fits
        return answer

    def receive(
        self,
        reports: Report | Sums | NoisySums,
        costs: Costs,
        *,
        usual: bool = True,
        times: NodeTimes | None = None,
        peers: Int64 | None = None,
    ) -> Broadcast | Outcome:
        """Process the reports of a round and return the next broadcast, or the outcome.

        Args:
          reports: the merged reports, or their sums.
          costs: cost of the round.
          usual: whether other rounds are expected to cost the same.
          times: time of a local update at each node, if measured.
          peers: index of each node's peer, [n], if peers are other machines. Their numbers
            are compared with each other, and outliers are capped.
        """
        broadcast = self._require_pending(reports)
        assert not isinstance(reports, NoisySums)  # only private runs have these
        method = self.method
        state = self.state

        # 1. Limit outliers, and sum the reports.
        start = self._starting_point(state)
        filtered = filter_reports(method, reports, broadcast, state, start, peers)
        sums = filtered.sums

        # 2. Charge the ledger.
        ledger = state.ledger.charge(broadcast.steps, costs, usual=usual)
        state = updated(state, ledger=ledger)

        # 3. Losses, and the best w so far. The final round ends here.
        state, best = with_losses(state, sums)
        if not isinstance(broadcast, TrainRound):
            state = watch_losses(state, filtered, best=best, recover=False)
            state = self._follow_final(state, sums)
            self.last = self._round(state, broadcast, filtered, None)
            return self._answer(updated(state, phase=Phase.DONE, became_best=best))

        # 4. Return to the best w, if the run diverges.
        state, recover = check_recovery(state, sums, adapts=method.step_size.adapts)
        state = watch_losses(state, filtered, best=best, recover=recover)

        # 5. Combine the reports and move w.
        state, result = self._move(
            state, broadcast, filtered, start, times, best=best, recover=recover
        )

        # 6. Features follow.
        state = self._follow(state, result)
        record = self._round(state, broadcast, filtered, result)
        for feature in self._restart:
            w = feature.restart(state.states.get(feature.name))
            if w is not None:
                state = restart_from(state, method, self._received(w, state.w))

        # 7. Choose τ, and announce the next round.
        if broadcast.stop:
            state = self._finish(state, best=best)
        else:
            state, decision = self._next_decision(state, recover=result.recover)
            state = self._announce(state, decision, best=best)

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

        Call it between rounds, before sending the last broadcast.

        Args:
          nodes: numbers of the nodes.

        Returns:
          The broadcast to send instead of the last one.
        """
        broadcast = self.pending
        if broadcast is None:
            raise LocalError(f"forget nodes between rounds: the run is {self.state.phase}")
        states = dict(self.state.states)
        for feature in self.method.features:
            before = states.get(feature.name)
            after = feature.forget(before, nodes, states, broadcast)
            if after is not None and after is not before:
                states[feature.name] = after
        known = self.state.states
        if any(state is not known.get(name) for name, state in states.items()):
            self.state = updated(self.state, states=states)
        answer = self.pending
        assert answer is not None
        return answer

    @property
    def ledger(self) -> Ledger:
        """What was spent, and the expected cost of rounds."""
        return self.state.ledger

    @property
    def pending(self) -> Broadcast | None:
        """The last broadcast, while it is unanswered."""
        state = self.state
        if state.phase not in (Phase.ROUND, Phase.FINAL):
            return None
        if self._sent is None or self._sent[0] is not state:
            self._sent = state, self._broadcast(state)
        return self._sent[1]

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
        found = [each.chosen(state.states.get(each.name)) for each in self._chosen]
        chosen = next((each for each in found if each is not None), None)
        w = state.best if chosen is None else chosen.w
        return Outcome(w, state.stopped_by, self.ledger, chosen)

    def _require_pending(self, reports: Report | Sums | NoisySums) -> Broadcast:
        """Return the broadcast that the reports answer; refuse any other report.

        Sums were checked by the process that summed.
        """
        broadcast = self.pending
        if broadcast is None:
            raise LocalError(f"no report is expected: the run is {self.state.phase}")
        if reports.round != broadcast.round:
            raise PeerError(f"a report of round {reports.round} in round {broadcast.round}")
        if isinstance(reports, Report):
            reports.require_answers(broadcast)
        elif self.method.combine.needs_reports:
            rule = type(self.method.combine).__name__
            raise UserError(f"{rule} needs every node's report, and here only sums arrive")
        return broadcast

    def _broadcast(self, state: _State) -> Broadcast:
        """Return the broadcast that follows from a state."""
        states = state.states
        parts = [each.message(states.get(each.name)) for each in self._message]
        missed = [each.catch_up(states.get(each.name)) for each in self._catch_up]
        common: dict[str, Any] = {
            "round": state.round,
            "w": state.w,
            "best": state.became_best,
            "parts": tuple([part for part in parts if part is not None]),
        }
        if state.round > 1:
            kept = tuple([part for part in missed if part is not None])
            common["catch_up"] = CatchUp(state.best, kept)
        if state.phase is Phase.FINAL:
            return FinalRound(**common, report=final_layout(self.method.features))
        return TrainRound(
            **common,
            report=report_layout(self.method.features, state.round == 1),
            tau=state.tau,
            eta=state.step_size.eta,
            effective=state.effective,
            stop=state.stop,
        )

    def _starting_point(self, state: _State) -> Float32:
        """Return the starting point of the nodes' gradients, [parameters]."""
        for feature in self._start:
            states = state.states.get(feature.name)
            start = feature.start(states, state.w, state.statistics)
            if start is not None:
                return start
        return state.w

    def _move(
        self,
        state: _State,
        broadcast: TrainRound,
        filtered: FilteredReports,
        start: Float32,
        times: NodeTimes | None,
        *,
        best: bool,
        recover: bool,
    ) -> tuple[_State, RoundResult]:
        """Combine the reports, choose η and move w; return what features need to follow.

        The arguments are values of `receive`.
        """
        method = self.method
        sums = filtered.sums
        before = self._plans.progress(self.state.ledger, self.state.ends)
        spent = self._plans.progress(state.ledger, state.ends)
        inputs = step_size_inputs(before, spent, sums, best=best)
        step_size = method.step_size.next(state.step_size, inputs)
        first = broadcast.round == 1 and method.searches_step
        scale = step_size.eta / broadcast.eta if first else 1.0
        combined = None if recover else combine_reports(method.combine, filtered)
        mean = combined
        if mean is not None:
            for feature in self._unbias:
                mean = feature.unbias(state.states.get(feature.name), broadcast, mean)
        moved = move(state, method.update, mean, start, broadcast.span, scale, sums)
        if moved.recover:
            step_size = method.step_size.recover(state.step_size, inputs)
        slowdown = pace(step_size.eta, broadcast.eta * scale)
        last = was_last(state)
        received = self._received(moved.w, state.w)
        searched = step_size if broadcast.round == 1 else state.searched
        state = updated(
            state,
            t=state.t + round(broadcast.effective),
            w=received,
            step_size=step_size,
            searched=searched,
            update=moved.update,
        )
        result = RoundResult(
            broadcast,
            sums,
            start,
            combined=None if moved.recover else combined,
            mean=received if moved.mean is moved.w else moved.mean,
            w=received,
            slowdown=slowdown,
            recover=moved.recover,
            capped=filtered.capped,
            times=times,
            quantize=self._quantize,
            statistics=state.statistics,
            last=last,
            ledger=state.ledger,
            states=dict(state.states),
        )
        return state, result

    def _received(self, vector: Float32, known: Float32) -> Float32:
        """Return a vector as nodes receive it, [parameters]; see `Quantize`."""
        return vector if self._quantize is None else self._quantize(vector, known)

    def _follow(self, state: _State, result: RoundResult) -> _State:
        """Let features follow a round, each in its own state."""
        states = result.states
        for feature in self._after:
            after = feature.after(states.get(feature.name), result)
            if after is None:
                states.pop(feature.name, None)
            else:
                states[feature.name] = after
        ends = [each.ends(states.get(each.name)) for each in self._ends]
        return updated(state, states=states, ends=min(ends, default=1.0))

    def _follow_final(self, state: _State, sums: Sums) -> _State:
        """Let features follow the final round."""
        if not self._after_final:
            return state
        states = dict(state.states)
        for feature in self._after_final:
            after = feature.after_final(states.get(feature.name), sums, state.w)
            if after is not None:
                states[feature.name] = after
        return updated(state, states=states)

    def _next_decision(self, state: _State, *, recover: bool) -> tuple[_State, Decision]:
        """Choose τ of the coming round.

        Args:
          state: the state after the last round.
          recover: whether the run returns to w^f.
        """
        if recover:
            return state, Decision(1, Reason.RECOVERY)
        if not state.step_size.settled:
            return state, Decision(1, Reason.START)
        last = state.decision
        for feature in self._counted:
            last = feature.counted(state.states.get(feature.name), last)
        inputs = self._inputs(state)
        decision = self.method.controller.next(last, inputs)
        return self._adjusted(state, decision, inputs)

    def _adjusted(
        self, state: _State, decision: Decision, inputs: ControlInputs
    ) -> tuple[_State, Decision]:
        """Let features change the controller's decision."""
        if not self._choose:
            return state, decision
        states = dict(state.states)
        resources = list(state.ledger.budget.limits)
        choice = Choice(inputs, resources, state.round + 1, states)
        for feature in self._choose:
            own, decision = feature.choose(states.get(feature.name), decision, choice)
            if own is not None:
                states[feature.name] = own
        return updated(state, states=states), decision

    def _inputs(self, state: _State) -> ControlInputs:
        costs = self.method.spending.costs(state.ledger)
        estimates = state.states.get(EstimateSlopes.name)
        return ControlInputs(
            estimates.values if isinstance(estimates, EstimatesState) else None,
            state.step_size.eta,
            costs.step,
            costs.aggregation,
            self._plans.ledger(state.ledger, state.ends).budget.array,
        )

    def _announce(self, state: _State, chosen: Decision, *, best: bool) -> _State:
        """Announce the next round, with τ shortened to fit the budget; or the end."""
        ledger = self._plans.ledger(state.ledger, state.ends)
        plan = self.method.spending.plan(ledger, chosen)
        decision = plan.decision
        stopped_by = plan.stopped_by
        if ledger is not state.ledger and stopped_by is not None:
            stopped_by = "validation"
        if decision is None:
            state = updated(state, decision=chosen, stopped_by=stopped_by)
            return self._finish(state, best=best)

        stop = plan.stop
        if not stop and self._rounds_made(state) + 1 >= self._most_rounds:
            stop = True
            stopped_by = "rounds"
        states = dict(state.states)
        effective = float(decision.tau)
        for feature in self._announced:
            own, effective = feature.announce(states.get(feature.name), decision.tau)
            if own is not None:
                states[feature.name] = own
        return updated(
            state,
            decision=decision,
            stopped_by=stopped_by,
            round=state.round + 1,
            tau=decision.tau,
            effective=effective,
            states=states,
            became_best=best,
            stop=stop,
        )

    def _finish(self, state: _State, *, best: bool) -> _State:
        """Announce the final round, or end the run if the budget does not cover it."""
        evaluated = state.round > 1  # the loss of some w other than w(0)
        reserve = self.method.spending.final_reserve(state.ledger, judged=evaluated)
        if reserve is None or state.ledger.fits(reserve):
            after = {
                feature.name: feature.finish(state.states.get(feature.name))
                for feature in self.method.features
            }
            return updated(
                state,
                phase=Phase.FINAL,
                round=state.round + 1,
                states={name: own for name, own in after.items() if own is not None},
                became_best=best,
                stop=True,
                evaluated=True,
            )
        w = state.best if evaluated else state.w
        return updated(state, phase=Phase.DONE, best=w, became_best=best)

    def _extended(self, state: _State) -> _State:
        """Withdraw the end that was announced or reached, after the limits have grown."""
        if state.stopped_by is None:
            return state
        extended = {
            each.name: each.extended(state.states.get(each.name))
            for each in self.method.features
        }
        states = {name: own for name, own in extended.items() if own is not None}
        reopened = updated(reopen(state), states=states, ends=1.0)
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
        reopened, decision = self._next_decision(reopened, recover=False)
        coming = self._announce(reopened, decision, best=state.became_best)
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

    def _round(
        self,
        state: _State,
        broadcast: Broadcast,
        filtered: FilteredReports,
        result: RoundResult | None,
    ) -> Round:
        """Return the record of a round.

        Args:
          state: the state after it.
          broadcast: its broadcast.
          filtered: its reports.
          result: None for the final round.
        """
        extra: dict[str, Any] = {}
        for feature in self._recorded:
            extra |= feature.recorded(state.states.get(feature.name), result)
        return Round(
            round=broadcast.round,
            t=state.t,
            tau=0 if result is None else result.broadcast.tau,
            reason=Reason.FINAL if result is None else state.decision.reason,
            eta=state.step_size.eta if result is None else result.broadcast.eta,
            loss=state.loss,
            best_loss=state.best_loss,
            ledger=state.ledger,
            expected=self.method.spending.costs(state.ledger),
            nodes=filtered.sums.nodes,
            left_out=filtered.sums.left_out,
            shortened=filtered.shortened,
            outliers=filtered.outliers,
            excluded=state.watch.excluded,
            **extra,
        )
