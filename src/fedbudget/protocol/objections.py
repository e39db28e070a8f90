"""Limits on reported losses: a node that w harms is heard, and a false loss is bounded.

The losses decide whether w(t₀) becomes w^f, and whether the run returns to w^f. Both
depend on the change g_i = F_i(w(t₀)) - F_i(w^f), which a node measures on the same samples.
The aggregator cannot verify it. A node may report a rise because w harms it, or because it
attacks the run. In one round these look the same, near convergence most of all: the other
nodes' changes are then tiny, so that no multiple of them is a limit for an honest node. The
rules below are safe in both cases. They apply to three or more peers on other machines.

Let S be the loss level: the median loss over peers, in the first round or at w^f now,
whichever is larger. If fewer than three peers took part in the first round, it is that of
the first round with three, and F(w(0)) in rules 1 and 2 if that is more. Let D_p be the
number of samples of a node's peer.

1. **Limits.** A rise counts up to 20 S D / D_p, and a fall up to 2 S, or up to 100 times
   the median change if that is more. A change beyond its limit counts as the limit, with
   its sign. So each peer can raise the mean loss by 20 S. The others can lower it by no
   more than their own losses, so the mean shows the rise: w(t₀) does not become w^f, and
   the run returns to w^f. Honest nodes hardly reach the limit, because the run returns
   when the mean loss has risen by half. A fall that is cut harms no node. F_i(w^f) is
   limited to 1000 S.
2. **Flattery.** Suppose that w(t₀) would become w^f, although the median peer's loss rises
   by more than S / 10 and is above that of the first round. Then falls count as 0. So a
   minority cannot make a w look best that is worse than w(0) for most.
3. **False reports.** If w(t₀) is w^f, every honest g_i is exactly 0. A minority that
   reports more than S / 50 is excluded.
4. **Persistent objections.** Nodes object if they report a rise of more than S / 10, and
   belong to a minority of peers. Their objection is decisive if without them the run would
   not return to w^f, or if without them w(t₀) would become w^f. A return reduces η and
   drops the momentum, so after a few returns a node with a smooth loss has no reason to
   object. A node is excluded after `MOST_RETURNS` returns because of its objections, or
   `MOST_KEPT` rounds in a row in which w^f stayed because of them.

An excluded node's losses count as the mean of the others, and the step size rule continues
from its state before the first return because of an objection. The node's w_i still counts.
The record and the log name it, with the reason.

**Bound.** A minority of false losses can cause at most `MOST_RETURNS` returns in a run, and
can keep w^f for at most `MOST_KEPT` rounds in a row. A rise of less than S / 10 can keep
w^f only while w(t₀) is better for the others by less than S D_p / (10 (D - D_p)) on
average. In 44 federations of honest nodes with different data, the most were 7 returns and
8 rounds in a row. Rounds are counted in a row, because a harmed honest node may object in
more than 25 rounds between two changes of w^f.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from fedbudget.arrays import Flags, Float64
from fedbudget.protocol.messages import LossReport
from fedbudget.protocol.outliers import FEWEST, Outlier, PeerGroups, median, reference

_MAX_LOSS = 1e3  # limit of F_i(w^f), times the loss level
_MAX_RISE = 20.0  # limit of the rise of the mean loss, times the loss level
_MAX_FALL = 2.0  # limit of the fall of a node's loss, times the loss level
_MAX_RATIO = 100.0  # changes up to this multiple of the median change are accepted
_FALSE = 0.02  # larger change at w^f itself, as a share of the loss level: a false report
_OBJECTION = 0.1  # smallest rise that is an objection, as a share of the loss level

MOST_RETURNS = 12
"""Returns to w^f that a node's objections may cause before it is excluded."""

MOST_KEPT = 25
"""Rounds in a row in which they may keep w^f before it is excluded."""


class Exclusion(StrEnum):
    """Why a node's losses do not count."""

    FALSE = "it reported a change of loss although w was unchanged"
    RETURNS = f"the run returned to its best model {MOST_RETURNS} times because of them"
    KEPT = f"the best model stayed for {MOST_KEPT} rounds in a row because of them"


@dataclass(frozen=True)
class Objector:
    """A node with decisive objections.

    Args:
      node: number of the node.
      returns: number of returns to w^f that its objections caused.
      kept: number of the latest rounds in a row in which its objections kept w^f.
      excluded: why its losses do not count; None while they do.
    """

    node: int
    returns: int = 0
    kept: int = 0
    excluded: Exclusion | None = None

    def objected(self, *, returned: bool) -> "Objector":
        """Count a decisive objection.

        Args:
          returned: whether the run returned to w^f, instead of keeping it.
        """
        returns = self.returns + returned
        kept = 0 if returned else self.kept + 1
        excluded = self.excluded
        if excluded is None and returns >= MOST_RETURNS:
            excluded = Exclusion.RETURNS
        if excluded is None and kept >= MOST_KEPT:
            excluded = Exclusion.KEPT
        return replace(self, returns=returns, kept=kept, excluded=excluded)


@dataclass(frozen=True)
class LossWatch:
    """What the aggregator remembers of reported losses.

    Args:
      level: median loss over peers in the first round with three of them; 0 before it.
      start: typical loss at w(0): `level`, or F(w(0)) if fewer took part in round 1.
      objectors: nodes with decisive objections, by rising number.
    """

    level: float = 0.0
    start: float = 0.0
    objectors: tuple[Objector, ...] = ()

    @property
    def excluded(self) -> tuple[Objector, ...]:
        """The nodes whose losses do not count."""
        return tuple([each for each in self.objectors if each.excluded is not None])

    def with_false(self, nodes: Collection[int]) -> "LossWatch":
        """Exclude nodes with a false report."""
        if not nodes:
            return self
        known = {each.node: each for each in self.objectors}
        for node in nodes:
            known[node] = replace(known.get(node, Objector(node)), excluded=Exclusion.FALSE)
        return self._with(known)

    def after(self, objection: "Objection | None", *, returned: bool) -> "LossWatch":
        """Count the decisive objection of a round.

        Args:
          objection: the objection; None if there was none, or if it was not decisive.
          returned: whether it caused a return to w^f, instead of keeping it.
        """
        nodes = () if objection is None else objection.nodes
        if not nodes and not any(each.kept for each in self.objectors):
            return self
        known = {each.node: each for each in self.objectors}
        for node, each in known.items():
            if node not in nodes:
                known[node] = replace(each, kept=0)
        for node in nodes:
            objector = known.get(node, Objector(node))
            known[node] = objector.objected(returned=returned)
        return self._with(known)

    def _with(self, known: dict[int, Objector]) -> "LossWatch":
        return replace(self, objectors=tuple([known[node] for node in sorted(known)]))


@dataclass(frozen=True)
class Objection:
    """Nodes that report a large rise of their loss, against most peers.

    Args:
      nodes: their numbers.
      loss, best_loss: F(w(t₀)) and F(w^f) of all other nodes.
    """

    nodes: tuple[int, ...]
    loss: float
    best_loss: float


@dataclass(frozen=True)
class LimitedLosses:
    """Losses of a round within their limits.

    Args:
      report: the report; the same object if no loss was changed.
      watch: the watch, with the loss level and with nodes excluded for a false report.
      objection: the objection of a minority, if there is one.
      outliers: outliers by node number.
    """

    report: LossReport
    watch: LossWatch
    objection: Objection | None
    outliers: dict[int, tuple[Outlier, ...]]


def limit_losses(
    report: LossReport,
    peers: PeerGroups,
    watch: LossWatch,
    first_loss: float,
    *,
    at_best: bool,
) -> LimitedLosses:
    """Limit the losses in the reports of nodes on other machines.

    Args:
      report: the merged reports.
      peers: their peers.
      watch: the watch before the round.
      first_loss: F(w(0)); not finite in the first round.
      at_best: whether w(t₀) equals w^f.
    """
    if len(peers.distinct) < FEWEST:
        return LimitedLosses(report, watch, None, {})
    with np.errstate(invalid="ignore"):
        change = report.losses - report.best_losses
    level = watch.level
    if not level:
        level = reference(peers.medians(report.losses))
        late = math.isfinite(first_loss)
        watch = replace(watch, level=level, start=max(level, first_loss) if late else level)
    level = max(level, reference(peers.medians(report.best_losses)))

    limits = _limits(report, peers, change, max(level, watch.start), first_loss)
    best = limits.best(report.best_losses)
    counted = limits.change(change)
    outliers = limits.outliers(report, best, change, counted)
    becomes_best = float(report.sizes @ counted) < 0
    if becomes_best and _worse_than_start(report, peers, change, watch):
        counted = np.maximum(counted, 0.0)

    if at_best:
        false = ~(np.abs(change) <= _FALSE * level)
        if false.any() and peers.minority(false):
            watch = watch.with_false(report.nodes[false].tolist())
    excluded = np.isin(report.nodes, [each.node for each in watch.excluded])
    others = ~excluded
    if excluded.any() and others.any():
        best = np.where(excluded, _mean(report, best, others), best)
        counted = np.where(excluded, _mean(report, counted, others), counted)

    changed = (best != report.best_losses) | (counted != change)
    if changed.any():
        losses = np.where(changed, best + counted, report.losses)
        numbers = {**report.numbers, "losses": losses, "best_losses": best}
        report = replace(report, numbers=numbers)
    rises = counted > _OBJECTION * level
    return LimitedLosses(report, watch, _objection(report, peers, rises, others), outliers)


@dataclass(frozen=True)
class _Limits:
    """Limits of losses.

    Args:
      rise: largest rise of each node's loss, [n].
      fall: largest fall.
      loss: largest magnitude of F_i(w^f).
      unknown: what F_i(w^f) counts as if it is NaN.
    """

    rise: Float64
    fall: float
    loss: float
    unknown: float

    def best(self, losses: Float64) -> Float64:
        """Limit F_i(w^f), [n]."""
        clipped = np.clip(losses, -self.loss, self.loss)
        return np.where(np.isnan(losses), self.unknown, clipped)

    def change(self, change: Float64) -> Float64:
        """Limit changes, [n]; NaN counts as the largest rise."""
        clipped = np.clip(change, -self.fall, self.rise)
        return np.where(np.isnan(change), self.rise, clipped)

    def outliers(
        self, report: LossReport, best: Float64, change: Float64, counted: Float64
    ) -> dict[int, tuple[Outlier, ...]]:
        """Return what was limited, by node number."""
        found: dict[int, tuple[Outlier, ...]] = {}
        for node in np.flatnonzero(best != report.best_losses).tolist():
            reported = float(report.best_losses[node])
            limit = math.copysign(self.loss, reported)
            outlier = Outlier("loss", reported, limit, float(best[node]))
            found[int(report.nodes[node])] = (outlier,)
        for node in np.flatnonzero(counted != change).tolist():
            number = int(report.nodes[node])
            limit = float(counted[node])
            outlier = Outlier("loss change", float(change[node]), limit, limit)
            found[number] = (*found.get(number, ()), outlier)
        return found


def _limits(
    report: LossReport, peers: PeerGroups, change: Float64, level: float, first_loss: float
) -> _Limits:
    """Return the limits of a round.

    Args:
      report: the reports.
      peers: their peers.
      change: reported changes, [n].
      level: the loss level.
      first_loss: F(w(0)); not finite in the first round.
    """
    accepted = _MAX_RATIO * reference(peers.medians(change))
    start = first_loss if math.isfinite(first_loss) else 0.0
    decisive = _MAX_RISE * max(level, start)
    sizes = peers.totals(report.sizes)
    return _Limits(
        rise=np.maximum(accepted, decisive * (report.sizes.sum() / sizes)),
        fall=max(accepted, _MAX_FALL * level),
        loss=_MAX_LOSS * level,
        unknown=level,
    )


def _worse_than_start(
    report: LossReport, peers: PeerGroups, change: Float64, watch: LossWatch
) -> bool:
    """Whether w(t₀) is worse for the median peer than w^f and than w(0)."""
    if not median(peers.medians(change)) > _OBJECTION * watch.level:
        return False
    return median(peers.medians(report.losses)) > watch.start


def _objection(
    report: LossReport, peers: PeerGroups, rises: Flags, counted: Flags
) -> Objection | None:
    """Return the objection of a minority, if there is one.

    Args:
      report: the limited report.
      peers: its peers.
      rises: whether each node reports a large rise, [n].
      counted: whether each node's losses count, [n].
    """
    objectors = rises & counted
    others = counted & ~rises
    if not objectors.any() or not others.any() or not peers.minority(objectors):
        return None
    return Objection(
        tuple(report.nodes[objectors].tolist()),
        _mean(report, report.losses, others),
        _mean(report, report.best_losses, others),
    )


def _mean(report: LossReport, values: Float64, nodes: Flags) -> float:
    """Return the mean of values over some nodes, weighted by D_i."""
    return float(np.average(values[nodes], weights=report.sizes[nodes]))
