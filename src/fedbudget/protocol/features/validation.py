"""Validation: each node holds out some of its rows, and they choose the model.

A node trains on the rows that remain. It evaluates w(t₀) on the held-out rows, and reports
sums only. The result of the run is the w with the lowest validation loss, not the last w or
the one with the lowest training loss. When validation stops improving, the run ends.

**Held-out rows.** `share` is 15 %, and more if all nodes together have few rows
(`share_for`). A node with n rows holds out `share` of them, at most `MOST_ROWS`, and
none if that is fewer than `FEWEST_ROWS`: a mean over fewer rows is too noisy, and reveals
too much of each row. The positions depend on n and the seed alone. So nodes with identical
shards hold out the same rows, and a node holds out the same rows on every engine.

**Comparison.** V(w) is the mean validation loss over nodes, weighted with D_i like the
training loss. Two w are compared on the same rows:

    gap = Σ D_i (V_i(w) - V_i(w^v)) / Σ D_i,    w^v: the best w so far

w replaces w^v if the gap is below 0. The standard error of the gap follows from `BLOCKS`
blocks of rows at each node, whose gaps are independent:

    s_i² = Σ_b (m_b/m)² (g_b - ḡ)² k/(k-1),     error² = Σ D_i² s_i² / (Σ D_i)²

Nodes remember the block losses of w^v and of the last validated w, so w^v itself is sent
only to nodes that missed a round.

**Cost.** An evaluation of m rows costs about as much as m / (3 · mini-batch) local updates:
one pass forward of the three passes of an update. Nodes report it. Validation is due when
its cost is at most `COST` of the local updates since the last one.

**End.** The run improves significantly when the total gap since the last significant
improvement exceeds `CERTAIN` standard errors and `LEAST_GAIN` of the loss. If it does not
within as many validations as before, and at least `PATIENCE`, the rest of the budget is
given up: the run is planned as if the budget were `spent / (1 - LANDING)`. The step size
then falls over the last rounds as at the end of every run, because a noisy plateau ends
when the step size falls. A run that has not improved on w(0) goes on, unless w has become
significantly worse: some networks start where their loss is flat.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.data.sampling import BatchIndices
from fedbudget.data.shards import Shards
from fedbudget.models.base import Model
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
from fedbudget.protocol.messages import RoundPart
from fedbudget.protocol.sums import LARGEST, Sums
from fedbudget.randomness import Stream, generator

SHARE = 0.15
LARGEST_SHARE = 0.3
ENOUGH_ROWS = 150
"""Share of rows that is held out: more of few rows, up to `LARGEST_SHARE`, to have
`ENOUGH_ROWS` rows over all nodes. With fewer, chance decides which w looks best."""

FEWEST_ROWS = 10
MOST_ROWS = 1000
"""Limits of a node's held-out rows."""

MOST_SITES = 1000
"""Nodes up to which the losses of each are kept."""

BLOCKS = 8
BLOCK_ROWS = 5
"""Largest number of blocks of a node's held-out rows, and fewest rows of a block."""

COST = 0.05
"""Largest cost of validation, as a share of the cost of local updates."""

CERTAIN = 2.0
"""Standard errors of a significant improvement."""

LEAST_GAIN = 0.001
"""Smallest relative improvement that is worth the budget."""

PATIENCE = 30
"""Fewest validations without a significant improvement before a run ends."""

LANDING = 0.35
"""Last share of a run, over which the step size falls (budget/step_size.py)."""

_REPORTED = Reported(
    {
        "validated": MOST_BEYOND,
        "validation": MOST_BEYOND,
        "validation_best": MOST_BEYOND,
        "validation_variance": math.inf,
        "validation_cost": math.inf,
    }
)


def share_for(rows: int) -> float:
    """Return the share to hold out of all rows of a run.

    >>> share_for(300), share_for(750), share_for(10_000)
    (0.3, 0.2, 0.15)
    """
    return min(LARGEST_SHARE, max(SHARE, ENOUGH_ROWS / max(1, rows)))


def held_out_rows(rows: int, share: float = SHARE) -> int:
    """Return how many of a node's rows are held out.

    >>> held_out_rows(60), held_out_rows(100), held_out_rows(100_000)
    (0, 15, 1000)
    """
    held_out = min(round(share * rows), MOST_ROWS)
    return held_out if FEWEST_ROWS <= held_out < rows else 0


def split(shards: Shards, share: float, seed: int) -> tuple[Shards, "HeldOut | None"]:
    """Split the shards of nodes into rows to train on and held-out rows.

    Args:
      shards: all rows of the nodes.
      share: share to hold out.
      seed: seed of the run.

    Returns:
      the rows to train on; and the held-out rows, None if no node has any.
    """
    if not any(held_out_rows(int(size), share) for size in shards.size):
        return shards, None
    known: dict[tuple[int, int], tuple[Any, Any]] = {}
    train = []
    held_out = []
    for node in range(len(shards)):
        key = int(shards.start[node]), int(shards.size[node])
        if key not in known:
            rows = shards.rows_of(node)
            count = held_out_rows(len(rows), share)
            order = generator(seed, Stream.VALIDATION, len(rows)).permutation(len(rows))
            known[key] = rows[np.sort(order[count:])], rows[order[:count]]
        kept, out = known[key]
        train.append(kept)
        held_out.append(out)
    return Shards.of(shards.table, train), HeldOut.of(shards, held_out)


@dataclass(frozen=True)
class HeldOut:
    """Held-out rows of n nodes, in blocks.

    Args:
      blocks: the rows of each block.
      owner: index of each block's node, [blocks].
      weights: share of each block in the rows of its node, [blocks].
      rows: number of held-out rows of each node, [n].
    """

    blocks: Shards
    owner: Int64
    weights: Float64
    rows: Int64

    @classmethod
    def of(cls, shards: Shards, held_out: "list[Any]") -> "HeldOut":
        """Divide each node's held-out rows into blocks."""
        parts = []
        owner = []
        for node, rows in enumerate(held_out):
            if len(rows):
                blocks = min(BLOCKS, max(1, len(rows) // BLOCK_ROWS))
                parts += np.array_split(rows, blocks)
                owner += [node] * blocks
        sizes = np.array([len(rows) for rows in held_out], np.int64)
        owners = np.array(owner, np.int64)
        divided = Shards.of(shards.table, parts)
        return cls(divided, owners, divided.size / sizes[owners], sizes)

    def losses(self, model: Model, w: Float32) -> Float64:
        """Return the loss of w on each block, [blocks]; finite, also if w diverged."""
        with np.errstate(over="ignore", invalid="ignore"):
            losses = model.losses(
                w[None], self.blocks, BatchIndices.whole(len(self.blocks))
            )
        return np.clip(np.nan_to_num(losses, nan=LARGEST), -LARGEST, LARGEST)

    def means(self, values: Float64) -> Float64:
        """Return the mean over each node's rows, [n], from values of blocks."""
        return self._sums(self.weights * values)

    def variances(self, values: Float64) -> Float64:
        """Return the squared standard error of each node's mean, [n]."""
        deviations = self.weights * (values - self.means(values)[self.owner])
        blocks = self._sums(np.ones(len(self.owner)))
        factor = blocks / np.maximum(1, blocks - 1)
        return self._sums(np.square(deviations)) * factor

    def _sums(self, values: Float64) -> Float64:
        sums = np.bincount(self.owner, values, minlength=len(self.rows))
        return np.asarray(sums, np.float64)


@dataclass(frozen=True)
class ValidationPart(RoundPart):
    """Request to validate w(t₀).

    Args:
      best: the round that started with w^v; 0 before the first validation.
      cost: cost of a validation in local updates, as measured last.
    """

    in_header: ClassVar[bool] = True
    best: int
    cost: float = 0.0

    @property
    def extra_steps(self) -> float:
        return self.cost


@dataclass(frozen=True)
class FinalValidationPart(RoundPart):
    """The same in the final round.

    Args:
      best: the round that started with w^v.
      cost: cost of a validation in local updates.
      w: w^v, for the evaluation on test samples, [parameters].
    """

    best: int
    cost: float
    w: Float32

    @property
    def extra_steps(self) -> float:
        return self.cost

    @property
    def result(self) -> Float32:
        return self.w


@dataclass(frozen=True)
class ValidationCatchUp(RoundPart):
    """w^v, for nodes that do not remember its losses.

    Args:
      best: the round that started with it.
      w: [parameters].
    """

    best: int
    w: Float32


@dataclass(frozen=True)
class ValidationMemory(NodeMemory):
    """Losses of blocks at nodes.

    Args:
      last, best: the rounds that started with the last validated w and with w^v.
      last_losses, best_losses: their losses on each block, [blocks].
    """

    last: int
    last_losses: Float64
    best: int
    best_losses: Float64


@dataclass(frozen=True)
class ValidationState(FeatureState):
    """Validation at the aggregator.

    Args:
      due: whether the coming round validates.
      final: whether the coming round is the final one.
      w: w^v, [parameters]; w(0) before the first validation.
      best: the round that started with it; 0 before the first validation.
      loss, error: V(w^v), and the standard error of the last comparison with it.
      last: validation loss of the last validated w.
      first: V(w(0)).
      cost: cost of a validation in local updates.
      updates: cost of the rounds since the last validation, in local updates.
      count: number of validations.
      gain, variance: improvement since the last significant one, and its squared error.
      improved: number of validations until the last significant improvement.
      improved_round: the round that started with that w.
      ends: share of the budget after which the run ends.
      sites, first_sites: validation losses of w^v and of w(0) by node number, if the
        aggregator receives the report of every node.
    """

    due: bool
    w: Float32
    best: int = 0
    loss: float = math.nan
    error: float = math.nan
    last: float = math.nan
    first: float = math.nan
    cost: float = 0.0
    updates: float = 0.0
    count: int = 0
    gain: float = 0.0
    variance: float = 0.0
    improved: int = 0
    improved_round: int = 1
    ends: float = 1.0
    final: bool = False
    sites: Mapping[str, float] = field(default_factory=dict)
    first_sites: Mapping[str, float] = field(default_factory=dict)

    def require_possible(self, w: Float32) -> None:
        if self.w.shape != w.shape or not np.isfinite(self.w).all():
            raise ValueError("the validated w is not finite, or has another length")
        if not 0 < self.ends <= 1:
            raise ValueError(f"the run ends after {self.ends} of the budget")


@register_feature
@dataclass(frozen=True)
class Validation(Feature):
    """Validation at nodes.

    Args:
      share: share of each node's rows that is held out.
      spend_all: whether the run continues when validation does not improve.
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

    # Nodes.

    def reported(self, first: bool) -> Reported:
        return _REPORTED

    def reported_finally(self) -> Reported:
        return _REPORTED

    def hold_out(self, shards: Shards, seed: int) -> tuple[Shards, HeldOut | None]:
        return split(shards, self.share, seed)

    def measure(self, local: LocalRound) -> None:
        held_out: HeldOut | None = local.held_out.get(self.name)
        memory = local.memories.get(self.name)
        broadcast = local.broadcast
        missed = broadcast.catch_up
        if held_out is None:
            return
        if local.missed and missed is not None:
            sent = missed.part(ValidationCatchUp)
            if sent is not None and (memory is None or memory.best != sent.best):
                losses = held_out.losses(local.model, sent.w)
                memory = ValidationMemory(sent.best, losses, sent.best, losses)
        kinds = broadcast.by_kind
        part = kinds.get(ValidationPart) or kinds.get(FinalValidationPart)
        if part is not None:
            losses = held_out.losses(local.model, broadcast.w)
            best = losses
            if memory is not None and part.best == memory.last:
                best = memory.last_losses
            elif memory is not None and part.best == memory.best:
                best = memory.best_losses
            local.scratch[self.name] = losses, best
            memory = ValidationMemory(broadcast.round, losses, part.best, best)
        if memory is not None:
            local.memories[self.name] = memory

    def report(self, local: LocalRound) -> dict[str, Float64]:
        nodes = len(local.numbers)
        held_out: HeldOut | None = local.held_out.get(self.name)
        if held_out is None or self.name not in local.scratch:
            return {name: np.zeros(nodes) for name in _REPORTED.numbers}
        losses, best = local.scratch[self.name]
        trained = local.shards.size
        sizes = trained + held_out.rows
        batch = local.sampler.batch or trained
        return {
            "validated": (held_out.rows > 0).astype(np.float64),
            "validation": held_out.means(losses),
            "validation_best": held_out.means(best),
            "validation_variance": sizes * held_out.variances(losses - best),
            "validation_cost": held_out.rows / (3 * batch),
        }

    # Aggregator.

    def first(self, w: Float32) -> ValidationState:
        return ValidationState(due=True, w=w)

    def message(self, state: ValidationState) -> RoundPart | None:
        if not state.due:
            return None
        if state.final and state.best:
            return FinalValidationPart(state.best, state.cost, state.w)
        return ValidationPart(state.best, state.cost)

    def catch_up(self, state: ValidationState) -> RoundPart | None:
        return ValidationCatchUp(state.best, state.w) if state.best else None

    def after(self, state: ValidationState, result: RoundResult) -> ValidationState:
        broadcast = result.broadcast
        state = replace(state, updates=state.updates + result.cost)
        if state.due:
            state = self._judged(state, result.sums, broadcast.w)
            state = self._ended(state, result.spent)
        return replace(state, due=state.cost <= COST * (state.updates + result.cost))

    def after_final(
        self, state: ValidationState, sums: Sums, w: Float32
    ) -> ValidationState:
        return self._judged(state, sums, w)

    def finish(self, state: ValidationState) -> ValidationState:
        return replace(state, due=True, final=True)

    def chosen(self, state: ValidationState) -> Chosen | None:
        if not state.best:
            return None
        return Chosen(
            state.w,
            state.best,
            state.loss,
            state.first,
            state.improved_round,
            state.sites,
            state.first_sites,
        )

    def ends(self, state: ValidationState) -> float:
        return state.ends

    def extended(self, state: ValidationState) -> ValidationState:
        return replace(state, ends=1.0, improved=max(1, state.count), final=False)

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
        """Compare the validated w with w^v."""
        totals = sums.totals
        weight = totals["validated"]
        if not weight > 0:
            return replace(state, updates=0)
        loss = totals["validation"] / weight
        best_loss = totals["validation_best"] / weight
        variance = totals["validation_variance"] / weight**2
        state = replace(
            state,
            last=loss,
            error=math.sqrt(max(0.0, variance)),
            cost=totals["validation_cost"] / totals["data"],
            updates=0,
            count=state.count + 1,
        )
        number = sums.round
        sites = _site_losses(sums)
        if not state.best:
            return replace(
                state,
                w=w,
                best=number,
                loss=loss,
                first=loss,
                sites=sites,
                first_sites=sites,
            )
        gap = loss - best_loss
        if not gap < 0:
            return replace(state, loss=best_loss)
        gain = state.gain - gap
        total = state.variance + variance
        significant = gain > max(CERTAIN * math.sqrt(total), LEAST_GAIN * abs(loss))
        state = replace(
            state, w=w, best=number, loss=loss, gain=gain, variance=total, sites=sites
        )
        if not significant:
            return state
        return replace(
            state, gain=0.0, variance=0.0, improved=state.count, improved_round=number
        )

    def _ended(self, state: ValidationState, spent: float) -> ValidationState:
        """Give up the rest of the budget if validation has stopped improving."""
        waited = state.count - state.improved
        worse = state.last - state.loss > CERTAIN * state.error
        if self.spend_all or state.ends < 1 or not (state.improved or worse):
            return state
        if waited < max(PATIENCE, state.improved):
            return state
        return replace(state, ends=min(1.0, spent / (1 - LANDING)))


def _site_losses(sums: Sums) -> dict[str, float]:
    """Return the validation loss of each node that has one; empty if only sums arrived."""
    report = sums.report
    if report is None or "validation" not in report.numbers:
        return {}
    if len(report.nodes) > MOST_SITES:
        return {}
    known = report.numbers["validated"] > 0
    numbers = map(str, report.nodes[known].tolist())
    return dict(zip(numbers, report.numbers["validation"][known].tolist(), strict=True))
