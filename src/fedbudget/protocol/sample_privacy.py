"""How a run is planned that protects single samples: how many updates, with which noise, how long, and how far each.

Of T updates each costs ρ/T, so that with n samples at N nodes the noise in the mean gradient has, in d parameters, the
length σ C √(dN)/n, σ² = T/2ρ. For a convex loss, gradient descent with steps η over a way of the length D ends above
the minimum by

    D²/2ηT + ηT s,        s = C² dN/2ρn²,

as far as noise says: only the product ηT matters, and ηT = D/√(2s) = (D/C) q is best, where

    q = n √(ρ/dN)

says how much of C all samples together are against the noise of a whole run. C is half of C₀, which is how long
gradients are at w(0) (their geometric mean, from the first round). Where scores are linear in features of the length
C₀ they change by C₀D, however features are scaled, and a step η = h/CC₀ with h = 1 is about as long as the loss allows.
So hT = C₀D q, and trials (docs/research/theory.md) say that C₀D is about 30:

    T = 60 q updates with h = ½, or as many as fit: down to 30 q with larger h, and fewer with h = 1.

More updates with smaller steps are as good for noise, and better otherwise.

Nodes should agree often, and an aggregation costs no privacy: τ is the smallest with which T updates fit in time and
the rest, up to fifty. It is made anew before every round, from what is left: ρ of a round is its share of what is left.

Differential privacy of single samples: what nodes do, so that nothing that leaves them tells of one.

What is protected is one sample of one node: whoever sees all that nodes send, and knows all other samples, can hardly
tell whether it was there or nothing in its place. How many samples a node has is known to all.

A local update is, of a mini-batch or of all samples of a node,

    w ← w - η ((Σ_j clip(g_j) + σ C z) / m + λw)

g_j is the gradient of sample j, cut to the length C, z standard Gaussian, and m the number of samples in it. The sum
has the sensitivity C, so that the update costs the samples in it ρ = 1/2σ², and others nothing.

A round says what it costs, ρ. Within an epoch no sample comes twice, and epochs begin anew with every round: so in τ
updates a sample is used as often as there are epochs in them, k_i, or in all τ where these take whole shards. A node
has σ_i = √(k_i/2ρ), and whichever its size, no sample pays more than ρ. Nodes have different samples: what is the most
for a sample of each is the most for all together.

That is all; nothing is gained here by sampling at random (amplification), because everyone knows the seed of it.

In the first round w stays, and a node tells how long gradients are, as a sum with noise:

    Σ_j max(-8, min(8, log₂ ‖g_j‖)) + 8 σ z        Sensitivity 8, ρ = 1/2σ².

The aggregator of a run that protects single samples: nodes add the noise, and what they send is known to be private.

As private_rounds.py, with three differences. What costs privacy are local updates, and not aggregations: the ledger is
charged with ρ/τ for each. It is paid for before nodes are asked, for what they answer is known to whoever asked, also
where a round does not come together, or the aggregator is killed. And nodes count by their samples, how many of which
there are being known, so that w is the weighted mean of the w_i.
"""

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.budget.budget import Costs, Ledger
from fedbudget.budget.control import Decision, Reason
from fedbudget.budget.spending import SpendingRule
from fedbudget.data.sampling import BatchIndices
from fedbudget.data.shards import Shards
from fedbudget.models import per_sample
from fedbudget.models.base import Descent, Model
from fedbudget.protocol.aggregator import Outcome
from fedbudget.protocol.messages import Broadcast, LocalError, Private, Report
from fedbudget.protocol.method import PrivateRule
from fedbudget.protocol.node_privacy import (
    FEWEST_ROUNDS,
    MOST_UPDATES,
    PrivateAggregator,
    RoundPlan,
    rho_left,
    rho_total,
)
from fedbudget.protocol.privacy import MEASURED, private_report
from fedbudget.protocol.state import (
    AggregatorState,
    Phase,
    apply_update,
    combine_reports,
    updated,
)
from fedbudget.protocol.sums import Reports, ReportsHere
from fedbudget.protocol.workload import NodeTimes

CLIP = 0.5
"""C, as a share of how long gradients are at w(0)."""
LONGEST_STEP = 1.0
"""h, at most."""
WAY = 30.0
"""hT, in multiples of q."""
UPDATES = 60.0
"""T, in multiples of q, where they fit."""
FEWEST_UPDATES = 10


@dataclass(frozen=True)
class SampleProgress:
    """Where a run is.

    Args:
      updates: that were made.
      rounds: that were made, the first one too.
      most_rounds: that may be made at all, where that is given.
      quality: q.
    """

    updates: int
    rounds: int
    most_rounds: int | None
    quality: float

    @property
    def wanted(self) -> float:
        """Updates that are still to be made."""
        return max(1.0, max(UPDATES * self.quality, FEWEST_UPDATES) - self.updates)

    @property
    def rounds_left(self) -> float:
        return math.inf if self.most_rounds is None else self.most_rounds - self.rounds


@dataclass(frozen=True)
class SampleRoundPlan(RoundPlan):
    """The coming round.

    Args:
      step: h.
    """

    step: float = LONGEST_STEP


def quality(rule: PrivateRule, total: float, parameters: int, samples: int) -> float:
    """q.

    Args:
      total: ρ of the run.
      samples: of all nodes.
    """
    return samples * math.sqrt((1 - MEASURED) * total / (parameters * rule.nodes))


def plan_lengths(ledger: Ledger) -> SampleRoundPlan:
    """The first round, which only asks for lengths."""
    return SampleRoundPlan(Decision(1, Reason.LENGTHS), MEASURED * rho_total(ledger.budget))


def plan_updates(
    rule: PrivateRule, spending: SpendingRule, ledger: Ledger, progress: SampleProgress
) -> SampleRoundPlan | None:
    """The next round, as if all after it were like it; None when there is no ρ left."""
    left = rho_left(ledger)
    if left <= 0:
        return None
    taus = np.arange(1, MOST_UPDATES + 1) if rule.tau is None else np.array([rule.tau])
    fits, scarce = _rounds_that_fit(spending, ledger, taus)
    rounds = np.minimum(fits, progress.rounds_left)
    at = _chosen(taus, rounds, progress)
    tau = int(taus[at])
    needed = (
        math.ceil(progress.wanted / tau)
        if progress.most_rounds is None
        else progress.rounds_left
    )
    planned = max(1.0, min(float(rounds[at]), float(needed)))
    made = progress.updates + planned * tau
    return SampleRoundPlan(
        Decision(tau, Reason.PRIVACY if rule.tau is None else Reason.FIXED),
        left / planned,
        scarce if planned < min(2, needed) and fits[at] <= progress.rounds_left else None,
        min(LONGEST_STEP, WAY * progress.quality / made),
    )


def _chosen(taus: Int64, rounds: Float64, progress: SampleProgress) -> int:
    """The place of the smallest τ with which all updates fit; or else of the one with which most do, while there are
    enough rounds."""
    updates = taus * rounds
    if (enough := updates >= progress.wanted).any():
        return int(np.argmax(enough))
    often = rounds >= min(FEWEST_ROUNDS - progress.rounds, progress.rounds_left)
    return int(np.argmax(np.where(often, updates, 0)))


def _rounds_that_fit(
    spending: SpendingRule, ledger: Ledger, taus: Int64
) -> tuple[Float64, str]:
    """How many rounds of each τ are left of everything but privacy, [taus], and of what there is least."""
    costs = spending.costs(ledger)
    budget = ledger.budget
    each = np.outer(taus, budget.without_privacy(costs.step)) + budget.without_privacy(
        costs.aggregation
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        fits = np.where(each > 0, (budget.array - ledger.spent) / each, np.inf)
    return np.maximum(1.0, np.floor(fits.min(axis=1))), list(budget.limits)[
        int(fits[-1].argmin())
    ]


OCTAVES = 8.0
"""A gradient counts as no longer than 2^8, and no shorter than 2^-8, where lengths are told."""


class NodeNoise(Protocol):
    """Where the noise of nodes comes from."""

    def draw(
        self, round_: int, node: int, update: int, inputs: bytes, size: int
    ) -> Float64:
        """Standard Gaussian numbers, [size].

        Args:
          inputs: a digest of all that an update follows from besides samples. The same gets the same noise, so that an
            answer which is made again tells nothing new; whatever differs gets other noise, or differences would tell.
        """


@dataclass(frozen=True)
class SampleUpdates:
    """Nodes whose samples are protected.

    Args:
      numbers: of the nodes, [nodes].
      noise: their own; without it they make no update.
    """

    model: Model
    shards: Shards
    numbers: Int64
    noise: NodeNoise | None

    def descend(self, broadcast: Broadcast, indices: BatchIndices) -> Descent:
        """The updates of a round; none where only lengths are asked for. No loss is ever looked at."""
        assert broadcast.private is not None
        nodes = len(self.shards)
        w = np.repeat(broadcast.w[None], nodes, axis=0)
        if not broadcast.private.measures:
            for node in range(nodes):
                w[node] = self._descend_one(broadcast, broadcast.private, indices, node)
        return Descent(
            w, np.zeros(nodes), np.zeros((nodes, 0), np.float32), np.zeros(nodes)
        )

    def report(self, broadcast: Broadcast, private: Private, w: Float32 | None) -> Report:
        """All that leaves nodes who have come to these w_i, [nodes, parameters]: of any private round."""
        if not private.per_sample:
            return private_report(broadcast, private, self.numbers, w)
        nothing = np.zeros(len(self.shards))
        report = Report(broadcast.round, self.numbers, self.shards.size, nothing, nothing)
        if w is None:
            return report
        if not private.measures:
            return replace(report, w=w)
        sums = [
            self._sum_of_octaves(broadcast, private, node)
            for node in range(len(self.shards))
        ]
        return replace(report, length=np.array(sums))

    def _descend_one(
        self, broadcast: Broadcast, private: Private, indices: BatchIndices, node: int
    ) -> Float32:
        model = self.model
        rows = self.shards.rows_of(node)
        size = len(rows)
        sigma = noise_multiplier(private, most_uses(indices, node, size))
        regularization = (
            getattr(model, "regularization", 0.0)
            if hasattr(model, "sample_gradients")
            else 0.0
        )
        w: Float32 = broadcast.w
        for update in range(indices.updates):
            positions = positions_of(indices, node, update, size)
            total = per_sample.clipped_sum(
                model, w, self.shards.table, rows[positions], private.clip
            )
            total += (
                sigma
                * private.clip
                * self._draw(broadcast, private, node, update, (w, positions), w.size)
            )
            step = broadcast.eta * (
                total / len(positions) + regularization * w.astype(np.float64)
            )
            w = np.asarray(w - step, np.float32)
        return w

    def _sum_of_octaves(self, broadcast: Broadcast, private: Private, node: int) -> float:
        rows = self.shards.rows_of(node)
        lengths = per_sample.lengths(self.model, broadcast.w, self.shards.table, rows)
        noise = self._draw(broadcast, private, node, 0, (broadcast.w,), 1)[0]
        return float(
            clamped_octaves(lengths).sum() + noise_multiplier(private, 1) * OCTAVES * noise
        )

    def _draw(
        self,
        broadcast: Broadcast,
        private: Private,
        node: int,
        update: int,
        inputs: tuple[NDArray[np.float32 | np.int32], ...],
        size: int,
    ) -> Float64:
        if self.noise is None:
            raise LocalError("nodes whose samples are protected need noise")
        said = f"{broadcast.tau} {broadcast.eta!r} {private.clip!r} {private.rho!r}"
        digest = hashlib.sha256(said.encode())
        for each in inputs:
            digest.update(np.ascontiguousarray(each).data)
        return self.noise.draw(
            broadcast.round, int(self.numbers[node]), update, digest.digest(), size
        )


def noise_multiplier(private: Private, uses: int) -> float:
    """σ of each update of a round, in which no sample is in more than so many of them."""
    return math.sqrt(uses / (2 * private.rho))


def positions_of(
    indices: BatchIndices, node: int, update: int, size: int
) -> NDArray[np.int32]:
    """The samples of an update, each once: one that is to fill a mini-batch a second time is left out."""
    return np.unique(indices.of(node, update, size))


def most_uses(indices: BatchIndices, node: int, size: int) -> int:
    """In how many updates of a round the sample is that is in most."""
    counts = np.zeros(size, np.int64)
    for update in range(indices.updates):
        counts[positions_of(indices, node, update, size)] += 1
    return int(counts.max())


def clamped_octaves(lengths: Float64) -> Float64:
    """Of lengths, as they are told; 0 of a gradient that is not finite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        octaves = np.clip(np.log2(lengths), -OCTAVES, OCTAVES)
    return np.where(np.isfinite(lengths), octaves, 0.0)


_State = AggregatorState[Any, Any]


class SampleAggregator(PrivateAggregator):
    """Runs rounds that protect single samples."""

    def receive(
        self,
        report: Report | Reports,
        costs: Costs,
        *,
        usual: bool = True,
        times: NodeTimes | None = None,
    ) -> Broadcast | Outcome:
        broadcast = self._require_pending(report)
        private = broadcast.private
        budget = self.ledger.budget
        assert isinstance(report, Report)
        assert private is not None
        updates = max(1, broadcast.tau)
        paid = Costs(
            budget.without_privacy(costs.step) + budget.privacy_amount(private.rho / updates),
            budget.without_privacy(costs.aggregation),
        )
        usual = usual and not private.measures  # in which no update is made
        state = updated(self.state, ledger=self.ledger.charge(updates, paid, usual=usual))
        private = replace(private, samples=int(report.sizes.sum()))
        if private.measures:
            clip = first_clip(report)
        else:
            clip = private.clip
            sums = ReportsHere(report).sums
            mean = combine_reports(self.method.combine, report, sums)
            state = updated(state, t=state.t + broadcast.tau)
            state, _, _ = apply_update(state, self.method.update, mean, self._quantize)
        state = updated(state, best=state.w, private=private)
        round_ = self._private_round(state, broadcast, len(report.nodes), private)
        state = self._announce_private(state, clip)
        self.last = round_
        return self._answer(state)

    def charge(self, costs: Costs) -> None:
        """What was spent besides: a round that did not come together was asked for all the same, and is paid for."""
        budget = self.ledger.budget
        asked = self.pending
        if asked is None or asked.private is None or budget.privacy_part(costs.aggregation) > 0:
            super().charge(costs)
        else:
            super().charge(
                Costs(costs.step, costs.aggregation + budget.privacy_amount(asked.private.rho))
            )

    def _announce_private(self, state: _State, clip: float) -> _State:
        rule, state = self.method.private, super()._announce_private(state, clip)
        if rule is not None and state.phase is Phase.ROUND and state.private is not None:
            rule.noise.draw(
                state.round, state.private.rho, 0
            )  # which is the nodes' own: it is only paid for here
        return state

    def _plan(self, state: _State, clip: float, rounds: int | None) -> RoundPlan | None:
        rule = self.method.private
        ledger = state.ledger
        assert rule is not None
        if clip == 0:
            return plan_lengths(ledger)
        samples = 0 if state.private is None else state.private.samples or 0
        worth = quality(rule, rho_total(ledger.budget), state.w.size, samples)
        made = state.round - state.final_rounds
        progress = SampleProgress(
            state.t, made, None if rounds is None else made + rounds, worth
        )
        return plan_updates(rule, self.method.spending, ledger, progress)

    def _with_plan(self, state: _State, plan: RoundPlan, clip: float) -> _State:
        samples = 0 if state.private is None else state.private.samples or 0
        state = updated(state, private=Private(clip, plan.rho, samples))
        if (
            clip == 0
            or not isinstance(plan, SampleRoundPlan)
            or not self.method.step_size.adapts
        ):
            return state
        return updated(
            state, step_size=replace(state.step_size, eta=plan.step * CLIP / clip**2)
        )


def first_clip(report: Report) -> float:
    """C, from sums of octaves of lengths, with noise; nobody's counts as more than it can be."""
    assert report.length is not None
    most = OCTAVES * report.sizes
    sums = np.clip(np.where(np.isfinite(report.length), report.length, 0.0), -most, most)
    return CLIP * math.exp2(float(sums.sum() / report.sizes.sum()))
