"""Private runs that protect single samples: the plan, the nodes' updates, and the
aggregator.

One sample of one node is protected. An observer of everything that nodes send, who also
knows all other samples, can hardly infer whether the sample was there or missing. The
number of samples of each node is public.

**Local updates** (`SamplePrivacy`). An update on a mini-batch, or on all samples of a
node, is

    w ← w - η ((Σ_j clip(g_j) + σ C z) / m + λw)

with g_j the gradient of sample j, clipped to the norm C, z standard Gaussian, and m the
number of samples. The sum has the sensitivity C, so the update costs its samples ρ =
1/2σ², and others nothing.

The broadcast states the cost of a round, ρ. Within an epoch no sample repeats, and epochs
restart with every round. In τ updates a sample is thus used once per epoch, k_i times, or
τ times if updates use whole shards. A node uses σ_i = √(k_i/2ρ), so no sample pays more
than ρ, whatever the size of its node. Nodes have different samples, so the largest cost at
any node is the cost of the run. Random sampling does not amplify privacy here, because its
seed is public.

In the first round w stays. A node reports the norms of its gradients as a sum with noise:

    Σ_j max(-8, min(8, log₂ ‖g_j‖)) + 8 σ z        Sensitivity 8, ρ = 1/2σ².

Each octave is rounded to a grid of 2^20 steps per 8σ, and z is an exact discrete Gaussian
on that grid. The lowest bits of the sum therefore reveal nothing else.

**Plan** (`plan_updates`). With T updates each costs ρ/T. With n samples at N nodes the
noise of the mean gradient then has, in d parameters, the norm σ C √(dN)/n, σ² = T/2ρ. For
a convex loss, gradient descent with steps η over a distance D ends above the minimum by

    D²/2ηT + ηT s,        s = C² dN/2ρn²,

as far as noise is concerned. Only the product ηT matters, and ηT = D/√(2s) = (D/C) q is
best, with

    q = n √(ρ/dN)

the ratio of C over all samples to the noise of a whole run. C is half of C₀, the geometric
mean norm of the gradients at w(0), measured in the first round. If scores are linear in
features of the norm C₀, they change by C₀D for any scaling of the features, and a step η =
h/CC₀ with h = 1 is about the longest that the loss allows. So hT = C₀D q, and C₀D is about
30 in trials (docs/research/theory.md):

    T = 60 q updates with h = ½, or the largest number that fits: down to 30 q with larger
    h, fewer with h = 1.

More updates with smaller steps have the same noise, and are better otherwise. An
aggregation costs no privacy, so nodes aggregate often: τ is the smallest with which T
updates fit into time and the other resources, up to fifty. The plan is renewed before
every round. A round receives its share of the remaining ρ.

**Aggregator** (`SampleAggregator`): as node_privacy.py, with three differences. Local
updates cost privacy, not aggregations: the ledger is charged with ρ/τ for each. A round is
paid for before its broadcast is sent (`payment`), because its answers are known to the
aggregator, also if the round fails or the aggregator is killed. Nodes count by their
samples, so w is the weighted mean of the w_i.

**Secure aggregation** (`SampleSums`, `SampleSumAggregator`). A round publishes only a sum
over the samples of all nodes, with noise in whole numbers from each node
(secure/contents.py):

    Σ_j clip(g_j(w)) + σ C z      Sensitivity C, ρ = 1/2σ². w moves by -η/n of it, λw
                                  included

The noise is that of one node with all samples, times the excess for nodes that drop out.
So q has this excess in place of N. Reports contain no noise, and leave a node only masked.
A round is one update, because the sensitivity of several updates without noise has no
bound. Updates are therefore few and have momentum m: they move w by 1/(1-m) of a step, so
q(1-m) takes the place of q, and T = 30 q(1-m) with h = 1. A round costs ρ when its sum is
opened, as in node_privacy.py.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.budget.budget import Costs, Ledger
from fedbudget.budget.control import Decision, Reason
from fedbudget.budget.spending import SpendingRule
from fedbudget.data.sampling import BatchIndices
from fedbudget.frozen import updated
from fedbudget.models import per_sample
from fedbudget.models.base import Descent, Model
from fedbudget.protocol.features.feature import (
    Feature,
    LocalRound,
    NodeNoise,
    NodeTimes,
    register_feature,
)
from fedbudget.protocol.features.node_privacy import (
    FEWEST_ROUNDS,
    MEASURED,
    MOST_UPDATES,
    PrivacyState,
    PrivateAggregator,
    Release,
    RoundPlan,
    privacy_of,
    rho_left,
    rho_total,
    rounds_that_fit,
    with_privacy,
)
from fedbudget.protocol.messages import (
    Broadcast,
    CatchUp,
    LocalError,
    Private,
    Report,
    SampleNormReport,
    SampleNormRound,
    SampleRound,
    SampleSumNormRound,
    SampleSumRound,
)
from fedbudget.protocol.method import PrivateRule
from fedbudget.protocol.stages import FilteredReports, combine_reports
from fedbudget.protocol.state import AggregatorState, Outcome, Payment
from fedbudget.protocol.sums import NoisySums, Sums
from fedbudget.protocol.update import ServerMomentum

CLIP = 0.5
"""C, as a share of the norm of gradients at w(0)."""
LONGEST_STEP = 1.0
"""Largest h."""
WAY = 30.0
"""hT, in multiples of q."""
UPDATES = 60.0
"""T, in multiples of q, if that fits."""
FEWEST_UPDATES = 10
OCTAVES = 8.0
"""Reported norms are limited to 2^-8 ... 2^8."""

_NORM_BITS = 20
"""The noise of reported norms has a standard deviation of 2 to this power, in steps."""
_MOST_STEPS = 2.0**32
"""Most steps of one sample, so that sums fit into 64 bits."""

_State = AggregatorState[Any, Any]


@dataclass(frozen=True)
class SampleProgress:
    """Progress of a run.

    Args:
      updates: local updates so far.
      rounds: rounds so far, the first one included.
      most_rounds: largest number of rounds, if fixed.
      quality: q.
      longest: T in multiples of q, if that fits.
    """

    updates: int
    rounds: int
    most_rounds: int | None
    quality: float
    longest: float = UPDATES

    @property
    def wanted(self) -> float:
        """Remaining updates."""
        return max(1.0, max(self.longest * self.quality, FEWEST_UPDATES) - self.updates)

    @property
    def rounds_left(self) -> float:
        return math.inf if self.most_rounds is None else self.most_rounds - self.rounds


@dataclass(frozen=True)
class SampleRoundPlan(RoundPlan):
    """Plan of the coming round.

    Args:
      step: h.
    """

    step: float = LONGEST_STEP


def quality(excess: float, total: float, parameters: int, samples: int) -> float:
    """Return q.

    Args:
      excess: variance of all noise relative to that of one node with all samples.
      total: ρ of the run.
      parameters: number of parameters.
      samples: number of samples of all nodes.
    """
    return samples * math.sqrt((1 - MEASURED) * total / (parameters * excess))


def plan_lengths(ledger: Ledger) -> SampleRoundPlan:
    """Plan the first round, which only measures norms."""
    return SampleRoundPlan(Decision(1, Reason.LENGTHS), MEASURED * rho_total(ledger.budget))


def plan_updates(
    rule: PrivateRule, spending: SpendingRule, ledger: Ledger, progress: SampleProgress
) -> SampleRoundPlan | None:
    """Plan the next round, as if all later ones were like it; None if no ρ is left."""
    left = rho_left(ledger)
    if left <= 0:
        return None
    taus = np.arange(1, MOST_UPDATES + 1) if rule.tau is None else np.array([rule.tau])
    fits, scarce = rounds_that_fit(spending, ledger, taus)
    rounds = np.minimum(fits, progress.rounds_left)
    chosen = _chosen(taus, rounds, progress)
    tau = int(taus[chosen])

    needed = progress.rounds_left
    if progress.most_rounds is None:
        needed = math.ceil(progress.wanted / tau)
    planned = max(1.0, min(float(rounds[chosen]), float(needed)))
    last = planned < min(2, needed) and fits[chosen] <= progress.rounds_left
    updates = progress.updates + planned * tau
    return SampleRoundPlan(
        Decision(tau, Reason.PRIVACY if rule.tau is None else Reason.FIXED),
        left / planned,
        scarce if last else None,
        min(LONGEST_STEP, WAY * progress.quality / updates),
    )


def _chosen(taus: Int64, rounds: Float64, progress: SampleProgress) -> int:
    """Return the index of the smallest τ with which all updates fit.

    If there is none, return that of the τ with most updates among those with enough
    rounds.
    """
    updates = taus * rounds
    if (enough := updates >= progress.wanted).any():
        return int(np.argmax(enough))
    often = rounds >= min(FEWEST_ROUNDS - progress.rounds, progress.rounds_left)
    return int(np.argmax(np.where(often, updates, 0)))


@register_feature
@dataclass(frozen=True)
class SamplePrivacy(Feature):
    """Local updates of nodes whose samples are protected."""

    name: ClassVar[str] = "private"
    types: ClassVar[tuple[type, ...]] = (PrivacyState,)
    kinds: ClassVar[tuple[type[Broadcast], ...]] = (SampleNormRound, SampleRound)

    def trial(self, number: int, w: Float32, eta: float) -> Broadcast:
        return SampleRound(round=number, w=w, tau=1, eta=eta, clip=1.0, rho=1.0)

    def begin(self, local: LocalRound) -> None:
        local.epoch = True
        local.draws = max(1, local.draws)

    def descend(self, local: LocalRound) -> Descent:
        """Make the updates of a round. No loss is evaluated."""
        nodes = len(local.numbers)
        rows = [_descend_one(local, local.broadcast, node) for node in range(nodes)]
        zeros = np.zeros(nodes)
        return Descent(np.array(rows), zeros, np.zeros((nodes, 0), np.float32), zeros)

    def report(self, local: LocalRound) -> Mapping[str, Float64]:
        if not isinstance(local.broadcast, SampleNormRound):
            return {}
        nodes = range(len(local.numbers))
        sums = [_sum_of_octaves(local, local.broadcast, node) for node in nodes]
        return {"octaves": np.array(sums)}


@register_feature
@dataclass(frozen=True)
class SampleSums(SamplePrivacy):
    """The sum of clipped gradients that nodes report with secure aggregation."""

    kinds: ClassVar[tuple[type[Broadcast], ...]] = (SampleSumNormRound, SampleSumRound)

    def trial(self, number: int, w: Float32, eta: float) -> Broadcast:
        return SampleSumRound(round=number, w=w, clip=1.0, rho=1.0)

    def end(self, local: LocalRound) -> None:
        nodes = range(len(local.numbers))
        if isinstance(local.broadcast, SampleSumRound):
            clip = local.broadcast.clip
            sums = [_gradient_sum(local, clip, node) for node in nodes]
            local.scratch["sums"] = np.array(sums)
            local.scratch["decay"] = _regularization(local.model) * local.shards.size
        else:
            octaves = [_exact_octaves(local, node) for node in nodes]
            local.scratch["octaves"] = np.array(octaves)

    def report(self, local: LocalRound) -> Mapping[str, Float64]:
        return local.scratch


def _gradient_sum(local: LocalRound, clip: float, node: int) -> Float64:
    """Return the sum of the clipped gradients of one node at w, in float64."""
    rows = local.shards.rows_of(node)
    table = local.shards.table
    return per_sample.clipped_sum(local.model, local.broadcast.w, table, rows, clip)


def _regularization(model: Model) -> float:
    """Return λ, which models without `sample_gradients` add to each gradient themselves."""
    own = hasattr(model, "sample_gradients")
    return getattr(model, "regularization", 0.0) if own else 0.0


def _exact_octaves(local: LocalRound, node: int) -> float:
    """Return the sum of the clamped octaves of one node's gradients."""
    rows = local.shards.rows_of(node)
    table = local.shards.table
    lengths = per_sample.lengths(local.model, local.broadcast.w, table, rows)
    return float(clamped_octaves(lengths).sum())


def _descend_one(local: LocalRound, broadcast: Broadcast, node: int) -> Float32:
    """Make the updates of one node, [parameters]."""
    assert isinstance(broadcast, SampleRound)
    model = local.model
    indices = local.indices
    rows = local.shards.rows_of(node)
    size = len(rows)
    sigma = noise_multiplier(broadcast.rho, most_uses(indices, node, size))
    regularization = _regularization(model)
    settings = f"{broadcast.tau} {broadcast.eta!r} {broadcast.clip!r} {broadcast.rho!r}"
    w: Float32 = broadcast.w
    for update in range(indices.updates):
        positions = positions_of(indices, node, update, size)
        total = per_sample.clipped_sum(
            model, w, local.shards.table, rows[positions], broadcast.clip
        )
        noise = _draw(local, settings, node, update, (w, positions), w.size)
        total += sigma * broadcast.clip * noise
        decay = regularization * w.astype(np.float64)
        step = broadcast.eta * (total / len(positions) + decay)
        w = np.asarray(w - step, np.float32)
    return w


def _sum_of_octaves(local: LocalRound, broadcast: SampleNormRound, node: int) -> float:
    """Return the noisy sum of the norms of one node's gradients."""
    rows = local.shards.rows_of(node)
    lengths = per_sample.lengths(local.model, broadcast.w, local.shards.table, rows)
    sigma = noise_multiplier(broadcast.rho, 1)
    most = math.floor(min(2.0**_NORM_BITS / sigma, _MOST_STEPS))  # of 8 octaves
    steps = np.rint(clamped_octaves(lengths) * (most / OCTAVES)).astype(np.int64)
    digest = _digest(f"{broadcast.rho!r}", (broadcast.w,))
    where = local.broadcast.round, int(local.numbers[node]), 0
    noise = _source(local).draw_integers(*where, digest, 1, _NORM_BITS)[0]
    return float(steps.sum() + noise) * (OCTAVES * sigma / 2.0**_NORM_BITS)


def _draw(
    local: LocalRound,
    settings: str,
    node: int,
    update: int,
    inputs: tuple[NDArray[np.float32 | np.int32], ...],
    size: int,
) -> Float64:
    digest = _digest(settings, inputs)
    where = local.broadcast.round, int(local.numbers[node]), update
    return _source(local).draw(*where, digest, size)


def _source(local: LocalRound) -> NodeNoise:
    if local.noise is None:
        raise LocalError("nodes whose samples are protected need a source of noise")
    return local.noise


def _digest(settings: str, inputs: tuple[NDArray[np.float32 | np.int32], ...]) -> bytes:
    digest = hashlib.sha256(settings.encode())
    for each in inputs:
        digest.update(np.ascontiguousarray(each).data)
    return digest.digest()


def noise_multiplier(rho: float, uses: int) -> float:
    """σ of each update of a round of cost ρ that uses a sample at most `uses` times."""
    return math.sqrt(uses / (2 * rho))


def positions_of(
    indices: BatchIndices, node: int, update: int, size: int
) -> NDArray[np.int32]:
    """Return the samples of an update, without the repetitions that fill a mini-batch."""
    return np.unique(indices.of(node, update, size))


def most_uses(indices: BatchIndices, node: int, size: int) -> int:
    """Return how many updates of a round use the most used sample."""
    counts = np.zeros(size, np.int64)
    for update in range(indices.updates):
        counts[positions_of(indices, node, update, size)] += 1
    return int(counts.max())


def clamped_octaves(lengths: Float64) -> Float64:
    """Return log₂ of norms, limited for the report; 0 for a gradient that is not
    finite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        octaves = np.clip(np.log2(lengths), -OCTAVES, OCTAVES)
    return np.where(np.isfinite(lengths), octaves, 0.0)


class SamplePlanAggregator(PrivateAggregator):
    """Plans rounds that protect single samples, for both of its subclasses."""

    _longest = UPDATES

    def _plan(
        self, state: _State, clip: float | None, rounds: int | None
    ) -> RoundPlan | None:
        ledger = state.ledger
        if clip is None:
            return plan_lengths(ledger)
        made = self._rounds_made(state)
        most = None if rounds is None else made + rounds
        q = self._quality(rho_total(ledger.budget), state.w.size, _samples(state))
        progress = SampleProgress(state.t, made, most, q, self._longest)
        return plan_updates(self._rule, self.method.spending, ledger, progress)

    def _with_plan(self, state: _State, plan: RoundPlan, clip: float | None) -> _State:
        state = with_privacy(state, PrivacyState(clip, plan.rho, _samples(state)))
        if clip is None or not self.method.step_size.adapts:
            return state
        assert isinstance(plan, SampleRoundPlan)
        step_size = replace(state.step_size, eta=plan.step * CLIP / clip**2)
        return updated(state, step_size=step_size)

    def _quality(self, total: float, parameters: int, samples: int) -> float:
        return quality(self._rule.nodes, total, parameters, samples)


class SampleAggregator(SamplePlanAggregator):
    """Runs rounds in which nodes add noise to their own updates."""

    @property
    def payment(self) -> Payment | None:
        """Cost of the pending round: nodes answer as soon as they receive its
        broadcast."""
        broadcast = self.pending
        if not isinstance(broadcast, SampleRound | SampleNormRound):
            return None
        return Payment(broadcast.round, broadcast.rho)

    def receive(
        self,
        reports: Report | Sums | NoisySums,
        costs: Costs,
        *,
        usual: bool = True,
        times: NodeTimes | None = None,
        peers: Int64 | None = None,
    ) -> Broadcast | Outcome:
        broadcast = self._require_pending(reports)
        assert isinstance(broadcast, Private)
        budget = self.ledger.budget
        assert isinstance(reports, Report)
        step = budget.without_privacy(costs.step)
        step = step + budget.privacy_amount(broadcast.rho / broadcast.steps)
        paid = Costs(step, budget.without_privacy(costs.aggregation))
        trained = isinstance(broadcast, SampleRound)
        # A round that only measures makes no update.
        ledger = self.ledger.charge(broadcast.steps, paid, usual=usual and trained)
        state = updated(self.state, ledger=ledger)
        privacy = privacy_of(state)
        assert privacy is not None
        state = with_privacy(state, replace(privacy, samples=int(reports.sizes.sum())))
        if isinstance(broadcast, SampleRound):
            clip = broadcast.clip
            sums = Sums.of(reports, broadcast.report)
            mean = state.w  # if the noise was too large for any w_i to be usable
            if sums.totals["used"]:
                filtered = FilteredReports(sums, reports)
                mean = combine_reports(self.method.combine, filtered)
            state = self._moved(state, mean, broadcast.steps)
        else:
            assert isinstance(reports, SampleNormReport)
            clip = clip_of(reports.octaves, reports.sizes)
        state = updated(state, best=state.w)
        record = self._private_record(state, broadcast, len(reports.nodes))
        state = self._announce_private(state, clip)
        self.last = record
        return self._answer(state)

    def charge(self, costs: Costs) -> None:
        """Charge an amount outside of rounds, and a failed round: its answers are
        known."""
        budget = self.ledger.budget
        payment = self.payment
        if payment is not None and not budget.privacy_part(costs.aggregation) > 0:
            rest = costs.aggregation + budget.privacy_amount(payment.rho)
            costs = Costs(costs.step, rest)
        super().charge(costs)

    def _broadcast(self, state: _State) -> Broadcast:
        privacy = privacy_of(state)
        assert privacy is not None
        common: dict[str, Any] = {
            "round": state.round,
            "w": state.w,
            "rho": privacy.rho,
        }
        if state.round > 1:
            common["catch_up"] = CatchUp(state.best)
        if privacy.clip is None:
            return SampleNormRound(**common)
        return SampleRound(
            **common, tau=state.tau, eta=state.step_size.eta, clip=privacy.clip
        )


class SampleSumAggregator(SamplePlanAggregator):
    """Runs rounds of which only the sum of all gradients is published, with noise.

    A round costs privacy when its sum is opened, so ρ is charged and paid as in
    `PrivateAggregator`.
    """

    _longest = WAY  # each update costs an aggregation

    def _quality(self, total: float, parameters: int, samples: int) -> float:
        update = self.method.update
        momentum = update.momentum if isinstance(update, ServerMomentum) else 0.0
        shares = self._rule.excess
        return (1 - momentum) * quality(shares, total, parameters, samples)

    def _released(self, sums: NoisySums, broadcast: Private) -> Release:
        if isinstance(broadcast, SampleSumRound):
            assert sums.updates is not None
            step = self.state.step_size.eta / sums.samples
            return Release(-step * sums.updates, broadcast.clip)
        return Release(None, clip_of(sums.counts, np.array([sums.samples])))

    def _broadcast(self, state: _State) -> Broadcast:
        privacy = privacy_of(state)
        assert privacy is not None
        common: dict[str, Any] = {
            "round": state.round,
            "w": state.w,
            "rho": privacy.rho,
            "catch_up": CatchUp(state.best) if state.round > 1 else None,
        }
        if privacy.clip is None:
            return SampleSumNormRound(**common)
        return SampleSumRound(**common, clip=privacy.clip)


def clip_of(octaves: Float64, samples: Int64) -> float:
    """Return C from noisy sums of octaves; each sum is limited to its possible range.

    Args:
      octaves: sums over the samples of some nodes each.
      samples: number of these samples.
    """
    most = OCTAVES * samples
    sums = np.clip(np.where(np.isfinite(octaves), octaves, 0.0), -most, most)
    return CLIP * math.exp2(float(sums.sum() / samples.sum()))


def _samples(state: _State) -> int:
    privacy = privacy_of(state)
    return 0 if privacy is None else privacy.samples
