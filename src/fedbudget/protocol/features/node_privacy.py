"""Differential privacy of nodes: bounded updates, noise in published sums, and the plan.

A node is protected with all its samples. Even an observer of all published values, i.e. of
every w of a run, can hardly infer whether a node's updates were part of the sums or 0
instead. The number of nodes is public.

**A round** publishes, for n nodes:

    Σ clip(Δ_i) + σ C z      Δ_i = w_i(t) - w(t₀), clipped to the norm C; z standard
                             Gaussian. Sensitivity C, ρ = 1/2σ²
    Σ (b_i - ½) + ½ σ_b z    b_i = 1 if the norm of Δ_i is at most C. Sensitivity ½,
                             ρ = 1/2σ_b²

All nodes count alike. w moves by the first sum over n. With the second, C follows the first
quartile of the norms (Andrew et al., 2021): C ← C exp(-½ (share of b_i - ¼)). It receives a
fiftieth of a round's ρ. Before the first round C is unknown. The first round therefore
publishes only how many updates have norms of at most 2^-8, 2^-7 ... 2^8, with noise and for
a twentieth of all ρ. C starts at the first quartile of that, and w stays as it is.

Nothing else leaves a node: no loss, no ρ̂_i or β̂_i, no test result. The aggregator
therefore cannot compare two w, and the last w is the result.

The aggregator adds the noise and is trusted to do so. With secure aggregation it sees only
sums; each node then adds a share of the noise in whole numbers (secure/contents.py), and
sums arrive with noise (`NoisySums`).

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
       sends the next broadcast or returns the outcome. Sums that contain noise were paid
       for before they were opened, so `payment` is None for them.

No loss is known, so w^f is always the last w, and there is no final round. A round that
fails publishes nothing, and costs no privacy.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.budget.budget import Budget, Costs, Ledger
from fedbudget.budget.control import Decision, Reason
from fedbudget.budget.spending import SpendingRule
from fedbudget.errors import UserError
from fedbudget.frozen import updated
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.features.estimates import one_of, own_steps, searched_steepness
from fedbudget.protocol.features.feature import (
    Feature,
    FeatureState,
    LocalRound,
    NodeTimes,
    register_feature,
)
from fedbudget.protocol.messages import (
    Broadcast,
    CatchUp,
    LocalError,
    NormReport,
    NormRound,
    Private,
    PrivateRound,
    Report,
    SampleRound,
    SampleSumRound,
    UpdateReport,
)
from fedbudget.protocol.method import PrivateRule
from fedbudget.protocol.stages import move, reopen
from fedbudget.protocol.state import AggregatorState, Outcome, Payment, Phase, Round
from fedbudget.protocol.sums import NoisySums, Sums, add_up

MEASURED = 0.05
"""Share of all ρ for the first round, which measures norms."""
COUNTED = 0.02
"""Share of a round's ρ for the count with which C follows the norms."""
QUANTILE = 0.25
"""Quantile of the norms that C follows."""
PACE = 0.5
"""Rate with which C follows; fast, because norms fall quickly in the first rounds."""

_OCTAVES = np.arange(-8.0, 9.0)
ALL_OCTAVES = math.sqrt(len(_OCTAVES)) / 2
"""Sensitivity of the counts of all octaves."""
_STEPS = 8  # reported norms per octave
_SHRINK = 1 - 1e-6
"""A clipped update is shorter than C by this factor, because rounding to 32 bits could
lengthen it."""
FEWEST_ROUNDS = 12
FEWEST_UPDATES = 5
MOST_UPDATES = 50

_NEGLIGIBLE = 1e-6  # share of ρ that counts as nothing

_State = AggregatorState[Any, Any]


class Multipliers(NamedTuple):
    """Noise of a round, in multiples of the sensitivity."""

    updates: float
    counts: float

    @property
    def rho(self) -> float:
        return sum(1 / (2 * sigma**2) for sigma in self if sigma < math.inf)


def multipliers(broadcast: Broadcast) -> Multipliers:
    """Return the noise multipliers of a private round from its ρ."""
    assert isinstance(broadcast, Private)
    rho = broadcast.rho
    if isinstance(broadcast, PrivateRound):
        return Multipliers(
            math.sqrt(1 / (2 * (1 - COUNTED) * rho)), math.sqrt(1 / (2 * COUNTED * rho))
        )
    if isinstance(broadcast, SampleRound | SampleSumRound):  # for all updates together
        return Multipliers(math.sqrt(1 / (2 * rho)), math.inf)
    return Multipliers(math.inf, math.sqrt(1 / (2 * rho)))


@dataclass(frozen=True)
class PrivacyState(FeatureState):
    """Privacy of the announced round, at the aggregator.

    Args:
      clip: C; None if the round only measures norms.
      rho: its privacy cost ρ.
      samples: number of samples of all nodes, as far as known; 0 if nodes are protected.
    """

    clip: float | None
    rho: float
    samples: int = 0

    def require_possible(self, w: Float32) -> None:
        clip = 1.0 if self.clip is None else self.clip
        if not (0 < clip < math.inf and 0 <= self.rho < math.inf):
            raise ValueError(f"a private round is {self}")


@register_feature
@dataclass(frozen=True)
class NodePrivacy(Feature):
    """What nodes of a private run report.

    Args:
      own_steps: whether nodes use their own step sizes η_i = 1/β̂_i in every update.
    """

    name: ClassVar[str] = "private"
    types: ClassVar[tuple[type, ...]] = (PrivacyState,)
    kinds: ClassVar[tuple[type[Broadcast], ...]] = (NormRound, PrivateRound)
    own_steps: bool = False

    def trial(self, number: int, w: Float32, eta: float) -> Broadcast:
        return PrivateRound(round=number, w=w, tau=1, eta=eta, clip=1.0, rho=1.0)

    def measure(self, local: LocalRound) -> None:
        if self.own_steps:
            first = one_of(local.indices, 0)
            steepness = searched_steepness(
                local.model, local.shards, first, local.broadcast.w
            )
            local.eta = own_steps(steepness, float(local.eta))

    def report(self, local: LocalRound) -> Mapping[str, Float64 | Float32]:
        assert local.w is not None
        updates = local.w - local.broadcast.w
        values: dict[str, Float64 | Float32] = {"lengths": reported_norms(updates)}
        if isinstance(local.broadcast, PrivateRound):
            values["updates"] = clipped(updates, local.broadcast.clip)
        return values


def clipped(updates: Float32, clip: float) -> Float32:
    """Clip updates [n, parameters] to the norm C; one that is not finite becomes 0."""
    with np.errstate(over="ignore", invalid="ignore"):
        lengths = update_norms(updates)
        scale = np.minimum(1.0, _SHRINK * clip / np.where(lengths > 0, lengths, 1.0))
        short = np.asarray(updates * scale[:, None], np.float32)
    known = np.isfinite(lengths)
    return short if known.all() else np.where(known[:, None], short, np.float32(0))


def update_norms(updates: Float32) -> Float64:
    """Norms of updates, [n]; infinite or NaN if an update is not finite."""
    return np.asarray(np.sqrt(np.square(updates, dtype=np.float64).sum(axis=1)))


def reported_norms(updates: Float32) -> Float64:
    """Norms as nodes report them, in eighths of octaves, rounded up, [n].

    An update that is not finite has the largest norm.
    """
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        steps = np.ceil(_STEPS * np.log2(update_norms(updates)))
    longest = _STEPS * (_OCTAVES[-1] + 1)
    shortest = _STEPS * (_OCTAVES[0] - 1)
    return np.asarray(np.clip(np.where(np.isnan(steps), longest, steps), shortest, longest))


@dataclass(frozen=True)
class Release:
    """Published result of a round.

    Args:
      update: step of w, [parameters]; None if the round only measured norms.
      clip: the next C.
    """

    update: Float64 | None
    clip: float


def with_noise(report: NormReport, broadcast: Broadcast, noise: Float64) -> NoisySums:
    """Sum the reports of a round, and add noise.

    Updates are clipped again, because a node may not have done it.

    Args:
      report: the report of all nodes.
      broadcast: its broadcast.
      noise: standard Gaussian numbers, [`noise_size`].
    """
    sigma = multipliers(broadcast)
    counts = _total(report, counted(report, broadcast))
    nodes = len(report.nodes)
    if not isinstance(broadcast, PrivateRound):
        counts = counts + sigma.counts * ALL_OCTAVES * noise
        return NoisySums(report.round, nodes, counts, None)
    assert isinstance(report, UpdateReport)
    updates = _total(report, clipped(report.updates, broadcast.clip))
    updates = updates + sigma.updates * broadcast.clip * noise[:-1]
    counts = counts + sigma.counts * 0.5 * noise[-1:]
    return NoisySums(report.round, nodes, counts, updates)


def release(noisy: NoisySums, broadcast: Broadcast) -> Release:
    """Compute the published result of a round."""
    shares = noisy.counts / noisy.nodes + 0.5
    if not isinstance(broadcast, PrivateRound):
        return Release(None, first_clip(shares))
    assert noisy.updates is not None
    clip = next_clip(broadcast.clip, float(shares[0]))
    return Release(noisy.updates / noisy.nodes, clip)


def counted(report: NormReport, broadcast: Broadcast) -> Float64:
    """b_i - ½ of each node, [n, 1]; for each octave if the round measures norms, [n,
    octaves]."""
    octaves = _OCTAVES
    if isinstance(broadcast, PrivateRound):
        octaves = np.array([math.log2(broadcast.clip)])
    return no_longer(report.lengths, octaves)


def no_longer(lengths: Float64, octaves: Float64) -> Float64:
    """½ if a node's norm is at most 2^octave, else -½, [n, octaves].

    This holds for any reported value, so a node's share in a sum has the norm ½, or √17/2
    for all octaves.
    """
    return np.where(lengths[:, None] <= _STEPS * octaves, 0.5, -0.5)


def count_size(broadcast: Broadcast) -> int:
    """Return how many counts a round publishes."""
    return 1 if isinstance(broadcast, PrivateRound) else len(_OCTAVES)


def noise_size(broadcast: Broadcast) -> int:
    """Return how many noise numbers a round needs."""
    updates = broadcast.w.size if isinstance(broadcast, PrivateRound) else 0
    return updates + count_size(broadcast)


def first_clip(shares: Float64) -> float:
    """Return the first quartile of norms, from the noisy shares of norms within each
    octave.

    Noisy shares may fall although they should rise. Isotonic regression by averaging
    yields the nearest rising sequence.
    """
    rising: list[tuple[float, int]] = []
    for share in shares.tolist():
        rising.append((share, 1))
        while len(rising) > 1 and rising[-2][0] >= rising[-1][0]:
            (one, ones), (two, twos) = rising[-2:]
            rising[-2:] = [((one * ones + two * twos) / (ones + twos), ones + twos)]
    levels = [level for level, _ in rising]
    counts = [count for _, count in rising]
    smooth = np.clip(np.repeat(levels, counts), 0.0, 1.0)
    return math.exp2(np.interp(QUANTILE, smooth, _OCTAVES))


def next_clip(clip: float, share: float) -> float:
    """Return the next C, from the noisy share of updates within C."""
    coming = clip * math.exp(-PACE * (min(1.0, max(0.0, share)) - QUANTILE))
    shortest = 2.0 ** _OCTAVES[0].item()
    longest = 2.0 ** _OCTAVES[-1].item()
    return float(min(longest, max(shortest, coming)))


def _total(report: NormReport, values: Float32 | Float64) -> Float64:
    """Sum over nodes along their tree; each node counts once."""
    return np.asarray(add_up(report.nodes, np.ones(len(report.nodes)), values))


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
        answer = self._answer(self._announce_private(state, clip=None))
        if not isinstance(answer, Broadcast):
            raise UserError(
                f"budget {self.ledger.budget} is too small for one private round"
            )
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
        broadcast = self._require_pending(reports)
        assert isinstance(broadcast, Private)
        payment = None  # noisy sums were paid for before they were opened
        if not isinstance(reports, NoisySums):
            assert isinstance(reports, NormReport)
            noise = self._rule.noise.draw(broadcast.round, noise_size(broadcast))
            reports = with_noise(reports, broadcast, noise)
            payment = Payment(broadcast.round, broadcast.rho)
        released = self._released(reports, broadcast)

        budget = self.ledger.budget
        rest = budget.without_privacy(costs.aggregation)
        rest = rest + budget.privacy_amount(broadcast.rho)
        paid = Costs(budget.without_privacy(costs.step), rest)
        ledger = self.ledger.charge(broadcast.steps, paid, usual=usual)
        state = updated(self.state, ledger=ledger)
        privacy = privacy_of(state)
        assert privacy is not None
        state = with_privacy(state, replace(privacy, samples=reports.samples))
        if released.update is not None:
            mean = np.asarray(state.w + released.update, np.float32)
            state = self._moved(state, mean, broadcast.steps)
        state = updated(state, best=state.w)
        record = self._private_record(state, broadcast, reports.nodes)
        state = self._announce_private(state, released.clip)
        self._payment = payment
        self.last = record
        return self._answer(state)

    def charge(self, costs: Costs) -> None:
        """Charge an amount outside of rounds; the coming round has at most the remaining
        ρ."""
        super().charge(costs)
        state = self.state
        privacy = privacy_of(state)
        left = rho_left(self.ledger)
        if state.phase is not Phase.ROUND or privacy is None or privacy.rho <= left:
            return
        if left > 0:
            self.state = with_privacy(state, replace(privacy, rho=left))
        else:
            resource = self.ledger.budget.by_noise
            self.state = updated(state, phase=Phase.DONE, stopped_by=resource)

    @property
    def _rule(self) -> PrivateRule:
        assert self.method.private is not None
        return self.method.private

    def _released(self, sums: NoisySums, broadcast: Private) -> Release:
        """Compute the published result of a round."""
        return release(sums, broadcast)

    def _broadcast(self, state: _State) -> Broadcast:
        privacy = privacy_of(state)
        assert privacy is not None
        common: dict[str, Any] = {
            "round": state.round,
            "w": state.w,
            "rho": privacy.rho,
            "tau": state.tau,
            "eta": state.step_size.eta,
        }
        if state.round > 1:
            common["catch_up"] = CatchUp(state.best)
        if privacy.clip is None:
            return NormRound(**common)
        return PrivateRound(**common, clip=privacy.clip)

    def _moved(self, state: _State, mean: Float32, updates: int) -> _State:
        """Move w by the update rule."""
        moved = move(state, self.method.update, mean, state.w)
        w = moved.w if self._quantize is None else self._quantize(moved.w, state.w)
        return updated(state, w=w, update=moved.update, t=state.t + updates)

    def _announce_private(self, state: _State, clip: float | None) -> _State:
        """Announce the next round, or end the run.

        Args:
          state: the state after the last round.
          clip: C of the next round; None if it only measures norms.
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
        state = updated(
            state,
            round=state.round + 1,
            tau=decision.tau,
            decision=decision,
            stopped_by=plan.bound_by,
        )
        return self._with_plan(state, plan, clip)

    def _plan(
        self, state: _State, clip: float | None, rounds: int | None
    ) -> RoundPlan | None:
        """Plan the next round; None if no privacy is left.

        Args:
          state: the state after the last round.
          clip: C of the next round; None if it only measures norms.
          rounds: remaining rounds, this one included, if fixed.
        """
        return plan_round(
            self._rule,
            self.method.spending,
            state.ledger,
            state.w.size,
            first=clip is None,
            rounds=rounds,
        )

    def _with_plan(self, state: _State, plan: RoundPlan, clip: float | None) -> _State:
        """Set the privacy settings that the broadcast contains."""
        return with_privacy(state, PrivacyState(clip, plan.rho))

    def _extended(self, state: _State) -> _State:
        if state.phase is Phase.ROUND:
            return updated(state, stopped_by=None)
        privacy = privacy_of(state)
        assert privacy is not None
        coming = self._announce_private(reopen(state), privacy.clip)
        if coming.phase is Phase.DONE:
            raise UserError(
                f"budget {state.ledger.budget}: too little is left of {coming.stopped_by} "
                "for another round"
            )
        return coming

    def _private_record(self, state: _State, broadcast: Private, nodes: int) -> Round:
        own_steps = (
            isinstance(self._rule.feature, NodePrivacy) and self._rule.feature.own_steps
        )
        privacy = privacy_of(state)
        sigma = multipliers(broadcast)
        values = {
            "clip": getattr(broadcast, "clip", 0.0),
            "noise": sigma.updates,
            "count_noise": sigma.counts,
            "rho": broadcast.rho,
            "samples": 0 if privacy is None else privacy.samples,
        }
        return Round(
            round=broadcast.round,
            t=state.t,
            tau=broadcast.steps,
            reason=state.decision.reason,
            eta=0.0 if own_steps else state.step_size.eta,
            loss=math.nan,
            best_loss=math.nan,
            ledger=state.ledger,
            expected=self.method.spending.costs(state.ledger),
            nodes=nodes,
            private={name: value for name, value in values.items() if 0 < value < math.inf},
        )


def privacy_of(state: _State) -> PrivacyState | None:
    privacy = state.states.get(NodePrivacy.name)
    return privacy if isinstance(privacy, PrivacyState) else None


def with_privacy(state: _State, privacy: PrivacyState) -> _State:
    return updated(state, states={**state.states, NodePrivacy.name: privacy})
