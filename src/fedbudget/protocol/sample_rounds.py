"""The aggregator of a run that protects single samples: nodes add the noise, and what they send is known to be private.

As private_rounds.py, with three differences. What costs privacy are local updates, and not aggregations: the ledger is
charged with ρ/τ for each. It is paid for before nodes are asked, for what they answer is known to whoever asked, also
where a round does not come together, or the aggregator is killed. And nodes count by their samples, how many of which
there are being known, so that w is the weighted mean of the w_i.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from fedbudget.budget import Costs
from fedbudget.protocol import steps
from fedbudget.protocol.aggregator import Outcome
from fedbudget.protocol.messages import Broadcast, Private, Report
from fedbudget.protocol.private_plan import RoundPlan, rho_total
from fedbudget.protocol.private_rounds import PrivateAggregator
from fedbudget.protocol.sample_plan import CLIP, SampleProgress, SampleRoundPlan, plan_lengths, plan_updates, quality
from fedbudget.protocol.sample_updates import OCTAVES
from fedbudget.protocol.state import AggregatorState, Phase
from fedbudget.protocol.sums import Reports, ReportsHere
from fedbudget.protocol.workload import NodeTimes

_State = AggregatorState[Any, Any]


class SampleAggregator(PrivateAggregator):
    """Runs rounds that protect single samples."""

    def receive(
        self, report: Report | Reports, costs: Costs, *, usual: bool = True, times: NodeTimes | None = None
    ) -> Broadcast | Outcome:
        broadcast = self._require_pending(report)
        private, budget = broadcast.private, self.ledger.budget
        assert isinstance(report, Report)
        assert private is not None
        updates = max(1, broadcast.tau)
        paid = Costs(
            budget.but_noise(costs.step) + budget.noise(private.rho / updates), budget.but_noise(costs.aggregation)
        )
        usual = usual and not private.measures  # in which no update is made
        state = self.state.updated(ledger=self.ledger.charge(updates, paid, usual=usual))
        private = replace(private, samples=int(report.sizes.sum()))
        if private.measures:
            clip = first_clip(report)
        else:
            clip, sums = private.clip, ReportsHere(report).sums
            mean = steps.combined(self.method.combine, report, sums)
            state = state.updated(t=state.t + broadcast.tau)
            state, _, _ = steps.moved(state, self.method.update, mean, self._quantize)
        state = state.updated(best=state.w, private=private)
        round_ = self._private_round(state, broadcast, len(report.nodes), private)
        state = self._announce_private(state, clip)
        self.last = round_
        return self._answer(state)

    def charge(self, costs: Costs) -> None:
        """What was spent besides: a round that did not come together was asked for all the same, and is paid for."""
        budget, asked = self.ledger.budget, self.pending
        if asked is None or asked.private is None or budget.of_noise(costs.aggregation) > 0:
            super().charge(costs)
        else:
            super().charge(Costs(costs.step, costs.aggregation + budget.noise(asked.private.rho)))

    def _announce_private(self, state: _State, clip: float) -> _State:
        rule, state = self.method.private, super()._announce_private(state, clip)
        if rule is not None and state.phase is Phase.ROUND and state.private is not None:
            rule.noise.draw(state.round, state.private.rho, 0)  # which is the nodes' own: it is only paid for here
        return state

    def _plan(self, state: _State, clip: float, rounds: int | None) -> RoundPlan | None:
        rule, ledger = self.method.private, state.ledger
        assert rule is not None
        if clip == 0:
            return plan_lengths(ledger)
        samples = 0 if state.private is None else state.private.samples or 0
        worth = quality(rule, rho_total(ledger.budget), state.w.size, samples)
        made = state.round - state.final_rounds
        progress = SampleProgress(state.t, made, None if rounds is None else made + rounds, worth)
        return plan_updates(rule, self.method.spending, ledger, progress)

    def _with_plan(self, state: _State, plan: RoundPlan, clip: float) -> _State:
        samples = 0 if state.private is None else state.private.samples or 0
        state = state.updated(private=Private(clip, plan.rho, samples))
        if clip == 0 or not isinstance(plan, SampleRoundPlan) or not self.method.step_size.adapts:
            return state
        return state.updated(step_size=replace(state.step_size, eta=plan.step * CLIP / clip**2))


def first_clip(report: Report) -> float:
    """C, from sums of octaves of lengths, with noise; nobody's counts as more than it can be."""
    assert report.length is not None
    most = OCTAVES * report.sizes
    sums = np.clip(np.where(np.isfinite(report.length), report.length, 0.0), -most, most)
    return CLIP * math.exp2(float(sums.sum() / report.sizes.sum()))
