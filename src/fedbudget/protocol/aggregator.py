"""Algorithm 2 as a state machine: reports and costs in, the next broadcast or the outcome out.

Rules: no clock, no file, no randomness; a state changes in `start`, `receive`, `interrupt` and `give_up` only; a report
that is refused changes nothing; of nodes only sums are looked at, which are the same bits whoever summed (sums.py).

    READY --start--> ROUND --receive--> ROUND ... --receive--> FINAL --receive--> DONE
                       |                                         ^                 ^
                       '-- nothing more fits, or only the final loss does --'      |
    any state --interrupt--> DONE            ROUND or FINAL --give_up--------------'

Between two rounds an engine may `forget` nodes, and take the aggregator's `memory` to disk; `recall` goes on from it.

The order of things in one `receive` of a round from t₀ to t:

    1. w(t) ← Σ D_i w_i(t) / D, eq. (5), over the nodes whose w_i(t) is finite. When none is, or when η adapts and
       F(w(t₀)) is far above F(w^f), the run goes back to w^f, the w that is known to be good, with τ=1. Where messages
       are compressed with loss, w(t) is settled: it becomes what nodes will hold of it, before all that follows.
    2. F(w(t₀)), eq. (2); when it is below F(w^f), w^f ← w(t₀), and nodes are told so with the next broadcast. The loss
       of w(t) itself is known one round later, hence the final round.
    3. ρ̂, β̂, δ̂ from the nodes' estimates, weighted by D_i; δ̂ from their gradients as in the paper, or from the w_i(t)
       that are here anyway: δ̂_i = ‖w_i(t) - w(t)‖ / ητ, the divergence of what the nodes stepped along, averaged over
       the interval. What is not a finite, sane number never reaches the controller: that estimate stays what it was,
       and the round's record says so. Where drift is corrected, nodes' divergences say whether to go on with it.
    4. The ledger is charged with what the round cost, and told what the next is thought to cost.
    5. The step size chooses η, and the controller τ. When the ledger says that this round would be the last to fit, τ
       falls to what fits and STOP is sent with it, and room is kept for the final loss, which then follows whatever the
       round has cost. When not even τ=1 fits, the final loss comes at once; when that does not fit, the run ends.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

import numpy as np

from fedbudget.arrays import Float32
from fedbudget.budget import Budget, Costs, Ledger
from fedbudget.control import ControlInputs, Controller, Decision, Estimates, Reason
from fedbudget.errors import UserError
from fedbudget.protocol.drift import Divergence, mean_gradient, next_mean
from fedbudget.protocol.memory import Memory
from fedbudget.protocol.messages import Broadcast, CatchUp, Drift, LocalError, PeerError, Report, Request
from fedbudget.protocol.sums import ABSURD, Reports, ReportsHere, Sums
from fedbudget.step_size import StepSize, StepSizeInputs

Delta = Literal["gradient", "parameters"]
"""What δ is estimated from."""

Quantize = Callable[[Float32, Float32], Float32]
"""What nodes will hold of a new w, from it and the w of the broadcast before."""


class State(Enum):
    READY = "ready"
    ROUND = "round"
    FINAL = "final"
    DONE = "done"


@dataclass(frozen=True)
class Round:
    """What happened in one round; the run's record of it.

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
      ledger: what was spent until its end, and the estimates ĉ and b̂ of what the next round costs; these are what this
        one cost, unless something else was expected.
      nodes: how many nodes took part.
      left_out: the numbers of those among them whose w_i was not finite.
      missed: the numbers of nodes that were asked to take part and did not answer in time; the engine knows.
      corrected: whether drift was corrected in it.
      divergence: of the nodes' gradients without drift correction and with it, until the round before; None where
        drift is never corrected.
    """

    round: int
    t: int
    tau: int
    reason: Reason
    eta: float
    loss: float
    best_loss: float
    estimates: Estimates | None
    kept: tuple[str, ...]
    ledger: Ledger
    nodes: int
    left_out: tuple[int, ...]
    corrected: bool = False
    divergence: Divergence | None = None
    missed: tuple[int, ...] = ()


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
      budget: what may be spent.
      controller: which τ next.
      step_size: which η next.
      expected: what a round is thought to cost before the first one has been made.
      rounds: the most rounds to make, besides the budget.
      correct_drift: whether local updates are corrected for drift, see drift.py.
      delta: what δ is estimated from, the nodes' gradients or their parameters.
      quantize: what nodes will hold of a new w; the w itself when left out.
    """

    def __init__(
        self,
        w: Float32,
        *,
        budget: Budget,
        controller: Controller,
        step_size: StepSize,
        expected: Costs,
        rounds: int | None = None,
        correct_drift: bool = False,
        delta: Delta = "gradient",
        quantize: Quantize | None = None,
    ) -> None:
        self.state = State.READY
        self.ledger = Ledger.open(budget, expected)
        self.last: Round | None = None
        self._controller = controller
        self._step_size = step_size
        self._pace = step_size.first()
        self._rounds = rounds
        self._w = w  # w(t₀), as last broadcast
        self._loss = np.inf  # F(w(t₀))
        self._best = w  # w^f
        self._best_loss = np.inf
        self._first_loss = np.inf  # F(w(0))
        self._worse = False  # F(w(t₀)) was much larger than F(w^f)
        self._t = 0
        self._decision = controller.first()
        self._estimates: Estimates | None = None
        self._delta = delta
        self._quantize = quantize
        self._drift = Drift(correct=True, share=1.0) if correct_drift else None  # as the next broadcast says it
        self._divergence: Divergence | None = None
        self._mean = np.zeros_like(w)  # c
        self._uncorrected = 0  # the last round without correction
        self._nodes = np.empty(0, np.int64)  # all that ever took part, but for those forgotten
        self._sizes = np.empty(0, np.int64)
        self._broadcast: Broadcast | None = None
        self._stopped_by: str | None = None

    def start(self) -> Broadcast:
        if self.state is not State.READY:
            raise LocalError("the run has started already")
        self.state = State.ROUND
        answer = self._within_budget(best=False)
        assert isinstance(answer, Broadcast)  # a ledger opens only when one round fits
        return answer

    def receive(self, report: Report | Reports, costs: Costs, expected: Costs | None = None) -> Broadcast | Outcome:
        """One round's reports, merged or already summed, and what the round cost.

        Args:
          costs: what is charged.
          expected: what the next round is thought to cost, ĉ and b̂; the same when left out.
        """
        broadcast = self._expect(report)
        reports = ReportsHere(report) if isinstance(report, Report) else report
        sums = reports.sums
        self.ledger = self.ledger.charge(max(1, broadcast.tau), costs, expected)
        became_best = self._keep_best(sums)
        if self.state is State.FINAL:
            self._record(sums, broadcast, kept=())
            return self._finish()
        self._t += broadcast.tau
        astray = self._is_astray(sums)
        w = self._best if astray or sums.w is None else sums.mean(sums.w)
        if self._quantize is not None:
            w = self._quantize(w, self._w)
        kept = self._estimate(reports, broadcast, w)
        if broadcast.drift is not None:
            everyone = self._meet(report) if isinstance(report, Report) else sums.everyone
            self._follow_drift(sums, broadcast, broadcast.drift, w, everyone or sums.totals.data, astray)
        self._record(sums, broadcast, kept=kept)
        self._w = w
        seen = StepSizeInputs(sums.largest_beta, self.ledger.share)
        follow = self._step_size.after_trouble if astray else self._step_size.next
        self._pace = follow(self._pace, seen)
        return self._final(best=became_best) if broadcast.stop else self._next(became_best, recover=astray)

    def interrupt(self, costs: Costs | None = None) -> Outcome:
        """Ends the run where it is, with w^f as known.

        Args:
          costs: what the unfinished round has cost so far, as `aggregation`.
        """
        if self.state is State.DONE:
            raise LocalError("the run has ended already")
        return self._end(costs, "interrupted")

    def charge(self, costs: Costs) -> None:
        """What was spent besides rounds that were counted: on one that did not come together, say."""
        self.ledger = self.ledger.charge(0, costs, self.ledger.costs)

    def give_up(self, costs: Costs, stopped_by: str) -> Outcome:
        """Ends the run in the middle of a round that never came together, with w^f as known.

        Args:
          costs: what that round has cost, as `aggregation`; no updates are counted.
          stopped_by: a resource that is gone, say.
        """
        if self.state not in (State.ROUND, State.FINAL):
            raise LocalError(f"there is no round to give up: the run is {self.state.value}")
        return self._end(costs, stopped_by)

    def forget(self, nodes: Collection[int]) -> Broadcast:
        """Nodes that have left for good, or have come back without their memory, no longer count.

        To be called between rounds, before the broadcast is sent that was answered last; returns the one to send
        instead. Where these nodes' c_i had a part in c, it asks for a round without correction (drift.py says why), and
        is otherwise the same.
        """
        broadcast = self.pending
        if broadcast is None:
            raise LocalError(f"nodes are forgotten between rounds: the run is {self.state.value}")
        known = np.isin(self._nodes, np.array(sorted(nodes), np.int64))
        self._nodes, self._sizes = self._nodes[~known], self._sizes[~known]
        if broadcast.drift is None or not broadcast.drift.correct or broadcast.tau == 0 or not known.any():
            return broadcast
        self._drift = replace(broadcast.drift, correct=False)
        self._foresee_divergence()
        self._broadcast = replace(broadcast, drift=self._drift)
        return self._broadcast

    @property
    def pending(self) -> Broadcast | None:
        """What was last said and is not answered yet."""
        return self._broadcast if self.state in (State.ROUND, State.FINAL) else None

    @property
    def outcome(self) -> Outcome | None:
        """How the run ended, if it did."""
        return (
            Outcome(self._best, self._stopped_by, self.ledger)
            if self.state is State.DONE and self._stopped_by
            else None
        )

    def memory(self) -> Memory:
        """All that is needed to go on from here, once the run has started; `pending` is part of it."""
        broadcast = self._broadcast
        if self.state is State.READY or broadcast is None:
            raise LocalError("a run that has not started has nothing to remember")
        return Memory(
            state=self.state.value,
            round=broadcast.round,
            tau=broadcast.tau,
            became_best=broadcast.best,
            stop=broadcast.stop,
            w=self._w,
            best=self._best,
            mean=None if self._drift is None else self._mean,
            loss=self._loss,
            best_loss=self._best_loss,
            first_loss=self._first_loss,
            worse=self._worse,
            t=self._t,
            decision=self._decision,
            pace=self._pace,
            estimates=self._estimates,
            drift=self._drift,
            divergence=self._divergence,
            uncorrected=self._uncorrected,
            nodes=self._nodes,
            sizes=self._sizes,
            costs=self.ledger.costs,
            spent=self.ledger.spent,
            stopped_by=self._stopped_by,
        )

    @classmethod
    def recall(
        cls,
        memory: Memory,
        *,
        budget: Budget,
        controller: Controller,
        step_size: StepSize,
        rounds: int | None = None,
        correct_drift: bool = False,
        delta: Delta = "gradient",
        quantize: Quantize | None = None,
    ) -> "Aggregator":
        """The aggregator that `memory` was taken from; the other arguments are what that one was made with."""
        if memory.spent.shape != budget.array.shape:
            raise UserError(f"the run that is to go on has a budget of {len(memory.spent)} resources, not {budget}")
        if (memory.mean is not None) != correct_drift or (memory.drift is not None) != correct_drift:
            does, not_so = ("does not correct", "does") if correct_drift else ("corrects", "does not")
            raise UserError(f"the run that is to go on {does} drift, and what it is to go on with {not_so}")
        nothing = np.zeros_like(memory.spent)
        self = cls(
            memory.w,
            budget=budget,
            controller=controller,
            step_size=step_size,
            expected=Costs(nothing, nothing),
            rounds=rounds,
            correct_drift=correct_drift,
            delta=delta,
            quantize=quantize,
        )
        self.ledger = Ledger(budget, memory.costs, memory.spent)
        self._pace = memory.pace
        self._loss = memory.loss
        self._best, self._best_loss = memory.best, memory.best_loss
        self._first_loss = memory.first_loss
        self._worse = memory.worse
        self._t = memory.t
        self._decision = memory.decision
        self._estimates = memory.estimates
        self._drift, self._divergence = memory.drift, memory.divergence
        self._mean = self._mean if memory.mean is None else memory.mean
        self._uncorrected = memory.uncorrected
        self._nodes, self._sizes = memory.nodes, memory.sizes
        self._stopped_by = memory.stopped_by
        self._broadcast = self._message(memory.round, memory.tau, best=memory.became_best, stop=memory.stop)
        self.state = State(memory.state)
        return self

    def _expect(self, report: Report | Reports) -> Broadcast:
        """Checks a report against what was asked for; of sums that is for whoever summed to do."""
        if self._broadcast is None or self.state not in (State.ROUND, State.FINAL):
            raise LocalError(f"no report is expected: the run is {self.state.value}")
        broadcast = self._broadcast
        number = report.round if isinstance(report, Report) else report.sums.round
        if number != broadcast.round:
            raise PeerError(f"a report of round {number} in round {broadcast.round}")
        if isinstance(report, Report):
            report.require_answers(broadcast)
        return broadcast

    def _keep_best(self, sums: Sums) -> bool:
        """Step 2: is w(t₀) the new w^f?"""
        loss = sums.totals.loss / sums.totals.data
        self._loss, self._best_loss = loss, sums.totals.best_loss / sums.totals.data
        if self._t == 0 and self.state is State.ROUND:
            self._best_loss = self._first_loss = loss
            return False
        if not loss < self._best_loss:
            return False
        self._best, self._best_loss = self._w, loss
        return True

    def _is_astray(self, sums: Sums) -> bool:
        """Whether to go back to w^f: nothing is finite or, where η adapts, w(t₀) is much worse than w^f.

        A loss on small mini-batches is noisy, the more so where it is nearly 0: much worse is by half, by a tenth of
        where the run started, and twice in a row, or tenfold at once.
        """
        limit = self._best_loss + max(0.5 * self._best_loss, 0.1 * self._first_loss)
        before, self._worse = self._worse, not self._loss <= limit
        worse = (before and self._worse) or not self._loss <= 10 * limit
        if not sums.totals.used or (self._step_size.adapts and worse):
            self._worse = False
            return True
        return False

    def _estimate(self, reports: Reports, broadcast: Broadcast, w: Float32) -> tuple[str, ...]:
        """Step 3: takes the new estimates in; returns the names of those that had to stay."""
        sums = reports.sums
        if not broadcast.request.estimate or sums.w is None:
            return ()
        totals, fresh = sums.totals, {}
        delta = None
        if not broadcast.request.gradient:
            delta = _ratio(float(sums.total(reports.distance_sums("w", w))[0]), totals.used) / (
                broadcast.eta * broadcast.tau
            )
        elif sums.gradients is not None and totals.used:
            apart = reports.distance_sums("gradients", sums.mean(sums.gradients))
            delta = _ratio(float(sums.total(apart)[0]), totals.used)
        elif sums.gradients is not None:
            delta = math.nan
        if sums.slopes:
            fresh["rho"] = _ratio(totals.rho, totals.rho_of)
            fresh["beta"] = _ratio(totals.beta, totals.beta_of)
        elif delta == 0:  # in the first round, of nodes that do not differ: then ρ and β have no part in G
            fresh["rho"] = fresh["beta"] = 0.0
        if delta is not None:
            fresh["delta"] = delta
        good = {name: value for name, value in fresh.items() if 0 <= value < ABSURD}
        kept = tuple(name for name in fresh if name not in good)
        if self._estimates is not None:
            self._estimates = replace(self._estimates, **good)
        elif len(good) == 3:
            self._estimates = Estimates(**good)
        return kept

    def _follow_drift(
        self, sums: Sums, broadcast: Broadcast, drift: Drift, w: Float32, everyone: float, astray: bool
    ) -> None:
        """Keeps c, and decides whether the next round is corrected.

        Args:
          everyone: D of all nodes that ever took part.
        """
        share = 0.0 if astray else sums.totals.used / everyone
        before = self._mean if drift.correct else None
        self._mean = next_mean(before, mean_gradient(broadcast.w, w, broadcast.eta * broadcast.tau), share)
        if not drift.correct:
            self._uncorrected = broadcast.round
        fresh = Divergence(sums.totals.plain / sums.totals.data, sums.totals.corrected / sums.totals.data)
        self._divergence = fresh if self._divergence is None else self._divergence.then(fresh)
        correct = self._divergence.correct and not astray
        self._drift = Drift(correct, share)
        if correct != drift.correct:
            self._foresee_divergence()

    def _foresee_divergence(self) -> None:
        """The coming round is corrected where the last was not, or the other way: δ̂ is of how it was, so far."""
        if self._estimates is not None and self._divergence is not None and self._drift is not None:
            coming = self._divergence.corrected if self._drift.correct else self._divergence.plain
            self._estimates = replace(self._estimates, delta=coming)

    def _meet(self, report: Report) -> float:
        """D of all nodes that ever took part, with these."""
        if not (np.array_equal(report.nodes, self._nodes) and np.array_equal(report.sizes, self._sizes)):
            nodes, sizes = np.append(report.nodes, self._nodes), np.append(report.sizes, self._sizes)
            self._nodes, first = np.unique(nodes, return_index=True)
            self._sizes = sizes[first]
        return float(np.add.reduce(self._sizes))

    def _next(self, became_best: bool, *, recover: bool) -> Broadcast | Outcome:
        """Step 5."""
        if recover:
            self._decision = Decision(1, Reason.RECOVERY)
        elif not self._pace.settled:
            self._decision = Decision(1, Reason.START)
        else:
            ledger = self.ledger
            inputs = ControlInputs(
                self._estimates, self._pace.eta, ledger.costs.step, ledger.costs.aggregation, ledger.budget.array
            )
            self._decision = self._controller.next(self._decision, inputs)
        return self._within_budget(best=became_best)

    def _within_budget(self, *, best: bool) -> Broadcast | Outcome:
        """The next round with the τ that was chosen, or as much of it as fits."""
        stop = False
        if self.ledger.must_stop_with(self._decision.tau):
            stop = True
            fits, self._stopped_by = self.ledger.affordable_tau()
            if fits < 1:
                return self._final(best=best) if self.ledger.can_evaluate() else self._finish()
            if fits < self._decision.tau:
                self._decision = Decision(int(fits), Reason.BUDGET)
            else:
                self._stopped_by = self.ledger.nearest_limit(self._decision.tau)
        elif self._number + 1 == self._rounds:
            stop, self._stopped_by = True, "rounds"
        return self._say(self._decision.tau, best=best, stop=stop)

    def _final(self, *, best: bool) -> Broadcast:
        """Asks for the loss of the last w(t)."""
        self.state = State.FINAL
        return self._say(0, best=best, stop=True)

    def _finish(self) -> Outcome:
        self.state = State.DONE
        assert self._stopped_by is not None
        return Outcome(self._best, self._stopped_by, self.ledger)

    def _end(self, costs: Costs | None, stopped_by: str) -> Outcome:
        """Before its time; what the next round would cost is still what it was."""
        if costs is not None:
            self.charge(costs)
        self._stopped_by = stopped_by
        return self._finish()

    def _say(self, tau: int, *, best: bool, stop: bool) -> Broadcast:
        self._broadcast = self._message(self._number + 1, tau, best=best, stop=stop)
        return self._broadcast

    def _message(self, number: int, tau: int, *, best: bool, stop: bool) -> Broadcast:
        mean = None if self._drift is None else self._mean
        return Broadcast(
            number,
            self._w,
            tau,
            self._pace.eta,
            Request(
                estimate=self._controller.estimates or self._step_size.adapts,
                gradient=self._delta == "gradient",
                curvature=self._step_size.adapts,
                drift=self._drift is not None,
            ),
            best=best,
            stop=stop,
            drift=self._drift,
            catch_up=CatchUp(self._best, mean, self._uncorrected) if number > 1 else None,
        )

    @property
    def _number(self) -> int:
        """The round that was last broadcast."""
        return 0 if self._broadcast is None else self._broadcast.round

    def _record(self, sums: Sums, broadcast: Broadcast, *, kept: tuple[str, ...]) -> None:
        self.last = Round(
            round=broadcast.round,
            t=self._t,
            tau=broadcast.tau,
            reason=self._decision.reason if broadcast.tau else Reason.FINAL,
            eta=broadcast.eta,
            loss=self._loss,
            best_loss=self._best_loss,
            estimates=self._estimates,
            kept=kept,
            ledger=self.ledger,
            nodes=sums.nodes,
            left_out=sums.left_out,
            corrected=broadcast.drift is not None and broadcast.drift.correct and broadcast.tau > 0,
            divergence=self._divergence,
        )


def _ratio(amount: float, of: float) -> float:
    return amount / of if of else math.nan
