"""Validation: each node holds out some of its rows, and they choose the model.

A node trains on the rows that remain (held_out.py). It evaluates two candidates on the
held-out rows, w(t₀) and the mean of all w so far, and reports sums only. The result of the
run is the candidate with the lowest validation loss, not the last w or the one with the
lowest training loss. When validation stops improving, the run ends.

**The mean of w.** The default's steps are long. A network or a model with many features
fits the training rows within a few rounds, and w is noisy. The mean

    w̄_k = w̄_{k-1} + (w - w̄_{k-1}) / k,    k = 1, 2, ...

lags behind w, is smoother, and lies closer to w(0): it regularises (Polyak and Juditsky,
1992; Izmailov et al., 2018), and validation decides whether that helps. It costs no
traffic, because nodes compute it from the w that they receive. Only a node that missed a
round needs it sent. It starts again (k = 1) after a return to w^f, because w had diverged.

**Comparison.** V(w) is the mean validation loss over nodes, weighted with D_i like the
training loss. Each candidate is compared with the best w so far, w^v, on the same rows:

    gap = Σ D_i (V_i(w) - V_i(w^v)) / Σ D_i

The candidate with the smaller gap replaces w^v if its gap is below 0. The standard error of
a gap follows from blocks of rows at each node, whose gaps are independent:

    s_i² = Σ_b (m_b/m)² (g_b - ḡ)² k/(k-1),     error² = Σ D_i² s_i² / (Σ D_i)²

Nodes remember the block losses of w^v, of w^r below and of the last candidates. So w^v and
w^r themselves are sent only to nodes that missed a round. Nodes of a masked sum compare
digests of all candidates, also those without held-out rows. Otherwise an aggregator could
let one node evaluate a w of its choice, and the others one whose loss it knows.

**Cost.** Two evaluations of m rows cost about as much as 2m / (3 · mini-batch) local
updates: each is one pass forward of the three passes of an update. Nodes report it.
Validation is due when its cost is at most `COST` of the local updates since the last one.

**End.** w^r is the w^v of the last significant improvement. Nodes compare w^v with it as
above, and w^v becomes w^r if it is better by more than `CERTAIN` standard errors and
`LEAST_GAIN` of the loss. The errors of the improvements in between do not tell the error of
their sum, because they depend on each other: where w oscillates, they largely cancel.

If w^r stays for as many validations as it took to find it, and at least `PATIENCE`, the
rest of the budget is given up: the run is planned as if the budget were
`spent / (1 - LANDING)`. The step size then falls over the last rounds as at the end of
every run, because a noisy plateau ends when the step size falls. A run that has not
improved on w(0) goes on, unless w has become significantly worse: some networks start where
their loss is flat.

**Second stage.** A network may overfit long before the budget is spent: the training loss
falls, and the validation loss rises. Such a run returns to w^v once and continues with
dropout (dropout.py). It does so if `OVERFITTED` times in a row the candidates are
significantly worse than w^v, and the training loss is below that of the round of w^v; or at
the end described above. This costs only budget that a longer first stage would waste. w^v
stays the result unless validation improves. If the training loss rises too, w oscillates.
Dropout does not help then, and slows down a network that is still learning.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from fedbudget.arrays import Float32, Float64, Int64, require_shape
from fedbudget.data.shards import Shards
from fedbudget.frozen import updated
from fedbudget.protocol.features.feature import (
    MOST_BEYOND,
    Chosen,
    Feature,
    FeatureState,
    LocalRound,
    NodeMemory,
    Reported,
    RoundResult,
    register_feature,
)
from fedbudget.protocol.features.held_out import SHARE, HeldOut, split
from fedbudget.protocol.messages import Broadcast, FinalRound, RoundPart
from fedbudget.protocol.sums import Sums

MOST_SITES = 1000
"""Nodes up to which the losses of each are kept."""

COST = 0.05
"""Largest cost of validation, as a share of the cost of local updates."""

CERTAIN = 2.0
"""Standard errors of a significant improvement."""

LEAST_GAIN = 0.001
"""Smallest relative improvement that is worth the budget."""

PATIENCE = 30
"""Fewest validations without a significant improvement before a run ends."""

OVERFITTED = 5
"""Validations in a row that show overfitting, after which the second stage begins."""

LANDING = 0.35
"""Last share of a run, over which the step size falls (budget/step_size.py)."""

CANDIDATES = ("validation", "validation_mean")
"""Names of the reported losses of w(t₀) and of the mean of w."""

_REPORTED = Reported(
    {
        "validated": MOST_BEYOND,
        "validation": MOST_BEYOND,
        "validation_mean": MOST_BEYOND,
        "validation_best": MOST_BEYOND,
        "validation_reference": MOST_BEYOND,
        "validation_variance": math.inf,
        "validation_mean_variance": math.inf,
        "validation_reference_variance": math.inf,
        "validation_cost": math.inf,
    }
)


@dataclass(frozen=True)
class MeanOfW:
    """The mean of the w of successive rounds.

    Args:
      w: the mean, [parameters].
      count: number of w in it.
    """

    w: Float32
    count: int

    @classmethod
    def following(cls, last: "MeanOfW | None", w: Float32) -> "MeanOfW":
        """Return the mean with one more w; of this w alone if there is no last mean."""
        if last is None or not last.count:
            return cls(w, 1)
        count = last.count + 1
        with np.errstate(over="ignore", invalid="ignore"):
            return cls(last.w + (w - last.w) / np.float32(count), count)


@dataclass(frozen=True)
class Candidate:
    """Which w was validated.

    Args:
      round: the round that validated it; 0 before the first validation.
      mean: whether it was the mean of w.
    """

    round: int = 0
    mean: bool = False


@dataclass(frozen=True)
class ValidationPart(RoundPart):
    """What a round says about validation.

    Args:
      due: whether nodes validate.
      best: w^v.
      reference: w^r.
      count: number of w in their mean, with w(t₀).
      cost: cost of a validation in local updates, as measured last.
    """

    in_header: ClassVar[bool] = True
    due: bool
    best: Candidate
    reference: Candidate
    count: int
    cost: float = 0.0

    @property
    def extra_steps(self) -> float:
        return self.cost if self.due else 0.0


@dataclass(frozen=True)
class FinalValidationPart(RoundPart):
    """The same in the final round, in which nodes validate.

    Args:
      best: w^v.
      reference: w^r.
      count: number of w in their mean, with w(t₀).
      cost: cost of a validation in local updates.
      w: w^v, for the evaluation on test samples, [parameters].
    """

    best: Candidate
    reference: Candidate
    count: int
    cost: float
    w: Float32

    @property
    def due(self) -> bool:
        """Whether nodes validate."""
        return True

    @property
    def extra_steps(self) -> float:
        return self.cost

    @property
    def result(self) -> Float32:
        return self.w


@dataclass(frozen=True)
class ValidationCatchUp(RoundPart):
    """What nodes need that missed the previous round.

    Args:
      best: w^v.
      w: its parameters, [parameters].
      reference: w^r.
      reference_w: its parameters, [parameters]; None if w^r is w^v.
      mean: the mean of w before the coming round.
    """

    best: Candidate
    w: Float32
    reference: Candidate
    reference_w: Float32 | None
    mean: MeanOfW


@dataclass(frozen=True)
class Evaluated:
    """A candidate that nodes have evaluated.

    Args:
      candidate: which one.
      losses: its loss on each block, [blocks].
      digest: digest of its parameters, [4].
    """

    candidate: Candidate
    losses: Float64
    digest: Int64


@dataclass(frozen=True)
class ValidationMemory(NodeMemory):
    """Losses of blocks at nodes, and the mean of w.

    Args:
      mean: the mean of w, with that of the last round.
      last: candidates of the last round that validated.
      best: w^v.
      reference: w^r.
    """

    mean: MeanOfW
    last: tuple[Evaluated, ...]
    best: Evaluated
    reference: Evaluated

    def require_shapes(self, nodes: int, parameters: int, held_out: HeldOut) -> None:
        require_shape(self.mean.w, parameters)
        for each in (*self.last, self.best, self.reference):
            require_shape(each.losses, len(held_out.blocks))
            require_shape(each.digest, 4)
            if not np.isfinite(each.losses).all():
                raise ValueError("a validation loss is not finite")

    def find(self, candidate: Candidate) -> Evaluated | None:
        """Return a candidate with its losses, if they are known."""
        known = (*self.last, self.best, self.reference)
        return next((each for each in known if each.candidate == candidate), None)


@dataclass(frozen=True)
class ValidationState(FeatureState):
    """Validation at the aggregator.

    Args:
      due: whether the coming round validates.
      final: whether the coming round is the final one.
      w: w^v, [parameters]; w(0) before the first validation.
      mean: the mean of w before the coming round; of no w if it starts again.
      reference_w: w^r, [parameters]; w(0) before the first validation.
      best, reference: which candidates they were.
      loss, error: V(w^v), and the standard error of the last comparison with it.
      last: validation loss of the better one of the last candidates.
      first: V(w(0)).
      training: training loss at the start of the round of w^v; NaN if not reported.
      cost: cost of a validation in local updates.
      worse: number of validations in a row that were significantly worse than w^v, with a
        lower training loss.
      again: whether the second stage has begun.
      returns: whether the coming round returns to w^v.
      updates: cost of the rounds since the last validation, in local updates.
      validations: number of validations.
      improved: number of validations until w^r was found.
      ends: share of the budget after which the run ends.
      sites, first_sites: validation losses of w^v and of w(0) by node number, if the
        aggregator receives the report of every node.
    """

    due: bool
    w: Float32
    mean: MeanOfW
    reference_w: Float32
    best: Candidate = Candidate()
    reference: Candidate = Candidate()
    loss: float = math.nan
    error: float = math.nan
    last: float = math.nan
    first: float = math.nan
    training: float = math.nan
    cost: float = 0.0
    worse: int = 0
    again: bool = False
    returns: bool = False
    updates: float = 0.0
    validations: int = 0
    improved: int = 0
    ends: float = 1.0
    final: bool = False
    sites: Mapping[str, float] = field(default_factory=dict)
    first_sites: Mapping[str, float] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of w in the mean of the coming round."""
        return self.mean.count + 1

    def require_possible(self, w: Float32) -> None:
        for each in (self.w, self.reference_w):
            if each.shape != w.shape or not np.isfinite(each).all():
                raise ValueError("a validated w is not finite, or has another length")
        if self.mean.w.shape != w.shape or self.mean.count < 0:
            raise ValueError("the mean of w has another length")
        if not 0 < self.ends <= 1:
            raise ValueError(f"the run ends after {self.ends} of the budget")


@register_feature
@dataclass(frozen=True)
class Validation(Feature):
    """Validation at nodes.

    Args:
      share: share of each node's rows that is held out.
      spend_all: whether the run continues when validation does not improve.
      second_stage: whether a run that overfits continues with dropout.
    """

    name: ClassVar[str] = "validation"
    types: ClassVar[tuple[type, ...]] = (
        ValidationPart,
        FinalValidationPart,
        ValidationCatchUp,
        ValidationState,
        ValidationMemory,
    )
    share: float = SHARE
    spend_all: bool = False
    second_stage: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:  # a node refuses such a task
            raise ValueError(f"a share of {self.share} cannot be held out")

    # Nodes.

    def reported(self, first: bool) -> Reported:
        return _REPORTED

    def reported_finally(self, kind: type[Broadcast] = FinalRound) -> Reported:
        return _REPORTED

    def hold_out(self, shards: Shards, seed: int) -> tuple[Shards, HeldOut]:
        return split(shards, self.share, seed)

    def measure(self, local: LocalRound) -> None:
        held_out: HeldOut = local.held_out[self.name]
        part = _part_of(local)
        if part is None:
            return
        last: ValidationMemory | None = local.memories.get(self.name)
        if local.missed:
            last = self._caught_up(local, held_out, last)
        w = local.broadcast.w
        known = last is not None and part.count > 1
        mean = MeanOfW.following(last.mean if last is not None and known else None, w)
        if not part.due:
            if last is not None:
                local.memories[self.name] = updated(last, mean=mean)
            return
        candidates = [(Candidate(local.broadcast.round, False), w)]
        if mean.count > 1:
            candidates.append((Candidate(local.broadcast.round, True), mean.w))
        evaluated = [
            Evaluated(which, held_out.losses(local.model, each), _digest(each))
            for which, each in candidates
        ]
        best = None if last is None else last.find(part.best)
        best = best or updated(evaluated[0], candidate=part.best)
        reference = None if last is None else last.find(part.reference)
        reference = reference or updated(best, candidate=part.reference)
        local.memories[self.name] = ValidationMemory(
            mean, tuple(evaluated), best, reference
        )

    def common(self, local: LocalRound) -> Sequence[Float32]:
        memory: ValidationMemory | None = local.memories.get(self.name)
        part = _part_of(local)
        if memory is None or part is None or not part.due:
            return ()
        known = (*memory.last, memory.best, memory.reference)
        return [np.ascontiguousarray(each.digest).view(np.float32) for each in known]

    def _caught_up(
        self, local: LocalRound, held_out: HeldOut, memory: ValidationMemory | None
    ) -> ValidationMemory | None:
        """Return the memory of nodes that missed the previous round, if there is one."""
        missed = local.broadcast.catch_up
        sent = None if missed is None else missed.part(ValidationCatchUp)
        if sent is None:
            return memory

        def find(candidate: Candidate, w: Float32) -> Evaluated:
            known = None if memory is None else memory.find(candidate)
            if known is not None:
                return known
            return Evaluated(candidate, held_out.losses(local.model, w), _digest(w))

        best = find(sent.best, sent.w)
        reference = best
        if sent.reference_w is not None:
            reference = find(sent.reference, sent.reference_w)
        return ValidationMemory(sent.mean, (), best, reference)

    def report(self, local: LocalRound) -> dict[str, Float64]:
        nodes = len(local.numbers)
        part = _part_of(local)
        if part is None or not part.due:
            return {name: np.zeros(nodes) for name in _REPORTED.numbers}
        held_out: HeldOut = local.held_out[self.name]
        memory: ValidationMemory = local.memories[self.name]
        best = memory.best.losses
        of_w = held_out.compare(memory.last[0].losses, best)
        of_mean = held_out.compare(memory.last[-1].losses, best)
        of_reference = held_out.compare(memory.reference.losses, best)
        trained = local.shards.size
        sizes = trained + held_out.rows
        batch = local.sampler.batch or trained
        return {
            "validated": (held_out.rows > 0).astype(np.float64),
            "validation": of_w["loss"],
            "validation_mean": of_mean["loss"],
            "validation_best": of_w["best"],
            "validation_reference": of_reference["loss"],
            "validation_variance": sizes * of_w["variance"],
            "validation_mean_variance": sizes * of_mean["variance"],
            "validation_reference_variance": sizes * of_reference["variance"],
            "validation_cost": 2 * held_out.rows / (3 * batch),
        }

    # Aggregator.

    def first(self, w: Float32) -> ValidationState:
        return ValidationState(due=True, w=w, mean=MeanOfW(w, 0), reference_w=w)

    def message(self, state: ValidationState) -> RoundPart | None:
        if state.final and state.best.round:
            return FinalValidationPart(
                state.best, state.reference, state.count, state.cost, state.w
            )
        return ValidationPart(
            state.due, state.best, state.reference, state.count, state.cost
        )

    def catch_up(self, state: ValidationState) -> RoundPart | None:
        if not state.best.round and not state.mean.count:
            return None
        same = state.reference == state.best
        reference_w = None if same else state.reference_w
        return ValidationCatchUp(
            state.best, state.w, state.reference, reference_w, state.mean
        )

    def after(self, state: ValidationState, result: RoundResult) -> ValidationState:
        w = result.broadcast.w
        mean = MeanOfW.following(state.mean, w)
        cost = result.cost
        state = updated(state, updates=state.updates + cost, mean=mean)
        if state.due:
            state = self._judged(state, result.sums, w)
            state = self._ended(state, result.sums, result.spent)
        if result.recover:
            mean = MeanOfW(result.w, 0)
        due = state.cost <= COST * (state.updates + cost)
        return updated(state, due=due, mean=mean)

    def after_final(
        self, state: ValidationState, sums: Sums, w: Float32
    ) -> ValidationState:
        state = updated(state, mean=MeanOfW.following(state.mean, w))
        return self._judged(state, sums, w)

    def finish(self, state: ValidationState) -> ValidationState:
        return updated(state, due=True, final=True)

    def chosen(self, state: ValidationState) -> Chosen | None:
        if not state.best.round:
            return None
        return Chosen(
            state.w,
            state.best.round,
            state.best.mean,
            state.loss,
            state.first,
            state.reference.round or 1,
            state.sites,
            state.first_sites,
        )

    def restart(self, state: ValidationState) -> Float32 | None:
        return state.w if state.returns else None

    def recovered(self, state: ValidationState) -> ValidationState:
        return updated(
            state,
            due=True,
            mean=MeanOfW(state.w, 0),
            improved=max(1, state.validations),
            worse=0,
            returns=False,
        )

    def ends(self, state: ValidationState) -> float:
        return state.ends

    def extended(self, state: ValidationState) -> ValidationState:
        return updated(state, ends=1.0, improved=max(1, state.validations), final=False)

    def recorded(
        self, state: ValidationState, result: RoundResult | None
    ) -> dict[str, Any]:
        if state.updates or math.isnan(state.last):  # w was not validated
            return {}
        return {
            "validation": state.last,
            "validation_best": state.loss,
            "validation_error": state.error,
        }

    def _judged(self, state: ValidationState, sums: Sums, w: Float32) -> ValidationState:
        """Compare the better one of the validated candidates with w^v."""
        totals = sums.totals
        weight = totals["validated"]
        if not weight > 0:
            return updated(state, updates=0)
        name = min(CANDIDATES, key=totals.__getitem__)
        loss = totals[name] / weight
        best_loss = totals["validation_best"] / weight
        variance = totals[f"{name}_variance"] / weight**2
        state = updated(
            state,
            last=loss,
            error=math.sqrt(max(0.0, variance)),
            cost=totals["validation_cost"] / totals["data"],
            updates=0,
            validations=state.validations + 1,
        )
        best = Candidate(sums.round, name != CANDIDATES[0])
        sites = _site_losses(sums, name)
        if not state.best.round:
            return updated(
                state,
                w=w,
                reference_w=w,
                best=best,
                reference=best,
                loss=loss,
                first=loss,
                training=_training_loss(sums),
                sites=sites,
                first_sites=sites,
            )
        state = _with_reference(state, totals, best_loss)
        if not loss < best_loss:
            return updated(state, loss=best_loss)
        return updated(
            state,
            w=state.mean.w if best.mean else w,
            best=best,
            loss=loss,
            training=_training_loss(sums),
            sites=sites,
        )

    def _ended(self, state: ValidationState, sums: Sums, spent: float) -> ValidationState:
        """Begin the second stage, or give up the rest of the budget, if validation has
        stopped improving."""
        waited = state.validations - state.improved
        worse = state.last - state.loss > CERTAIN * state.error
        overfits = worse and not _training_loss(sums) >= state.training
        if overfits or state.worse:
            state = updated(state, worse=state.worse + 1 if overfits else 0)
        if self.spend_all or state.ends < 1:
            return state
        stalled = waited >= max(PATIENCE, state.improved) and (state.improved or worse)
        second = self.second_stage and not state.again and spent < 1 - LANDING
        if second and (stalled or state.worse >= OVERFITTED):
            return updated(state, again=True, returns=True)
        return updated(state, ends=min(1.0, spent / (1 - LANDING))) if stalled else state


def _part_of(local: LocalRound) -> ValidationPart | FinalValidationPart | None:
    kinds = local.broadcast.by_kind
    return kinds.get(ValidationPart) or kinds.get(FinalValidationPart)


def _with_reference(
    state: ValidationState, totals: Mapping[str, float], best_loss: float
) -> ValidationState:
    """Make w^v the new w^r if it is significantly better."""
    weight = totals["validated"]
    gain = totals["validation_reference"] / weight - best_loss
    error = math.sqrt(max(0.0, totals["validation_reference_variance"])) / weight
    if not gain > max(CERTAIN * error, LEAST_GAIN * abs(best_loss)):
        return state
    return updated(
        state,
        reference_w=state.w,
        reference=state.best,
        improved=state.validations - 1,
    )


def _training_loss(sums: Sums) -> float:
    """Return the training loss at the start of a round; NaN if nodes do not report it."""
    if "losses" not in sums.totals:
        return math.nan
    return sums.totals["losses"] / sums.totals["data"]


def _digest(w: Float32) -> Int64:
    """Return a digest of w, [4]."""
    data = np.ascontiguousarray(w, "<f4").data
    return np.frombuffer(hashlib.blake2b(data, digest_size=32).digest(), np.int64)


def _site_losses(sums: Sums, name: str) -> dict[str, float]:
    """Return the validation loss of a candidate at each node that has one.

    It is empty if only sums arrived.
    """
    report = sums.report
    if report is None or "validation" not in report.numbers:
        return {}
    if len(report.nodes) > MOST_SITES:
        return {}
    known = report.numbers["validated"] > 0
    numbers = map(str, report.nodes[known].tolist())
    return dict(zip(numbers, report.numbers[name][known].tolist(), strict=True))
