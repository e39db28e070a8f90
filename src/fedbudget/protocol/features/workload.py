"""Workloads: how many local updates each node makes in a round.

**By speed** (`SpeedWorkload`). With the same τ at all nodes, a round lasts as long as τ
updates of the slowest node, and the others are idle. Here a round lasts k updates of the
slowest node, c_s each. Node i makes as many updates as fit into that time,

    τ_i = ⌊k c_s / c_i⌋,      at least k, and at most τ_max,

and its step is rescaled as if all nodes had made the same number of updates. With the mean
gradient of its updates, d_i = (w(t₀) - w_i(t)) / ητ_i, it reports w(t₀) - η τ_eff d_i, so
that the mean of the reports is

    w(t) = w(t₀) - η τ_eff Σ p_i d_i,      τ_eff = min(mean of τ_i, 1.5 · harmonic mean of
    τ_i).

The harmonic mean is safe: on average no step becomes longer. The mean is faster, but goes
too far if speeds differ much. An update rule with momentum finds the right length itself.
With it τ_eff is the harmonic mean, which gave a lower loss in most trials
(docs/research/unequal-speeds.md). Formulas with w_i(t) and ητ elsewhere (drift.py,
estimates.py) hold with τ_eff instead of τ. With drift correction the fixed point of the
rounds is the minimum of F for all τ_i (docs/research/theory.md); without it is not. Nodes
therefore make different numbers of updates only in corrected rounds.

This applies only if time is the scarcest resource. Additional updates cost energy and CPU
time, and with those limits alone the same τ for all was better. The controller chooses τ
as if all nodes made the same number of updates, and k is chosen such that τ_eff comes
nearest to τ. The gain makes rounds shorter, not longer in effect. (An update of the
effective node is cheaper, so the controller could choose more of them; that gave half of
the gain.) The ledger counts updates of the slowest node: a round costs k c_s + b. k is a
whole number, so the other nodes wait for at least one update of a very slow node in every
round.

The time of a local update is the median of a node's last rounds. One slow round has no
effect, and a permanent change has after three rounds.

**By data** (`DataWorkload`): FedNova (Wang et al., NeurIPS 2020). If each node makes the
same number of passes over its samples in a round, nodes with more samples make more
updates. Plain averaging then minimises a loss other than F, in which these nodes weigh
more. With p_i = D_i / D FedNova's rule is

    w(t) = w(t₀) - η τ_eff Σ p_i d_i,      τ_eff = Σ p_i τ_i.

Nodes rescale their reports as above. τ is the number of updates of the node with the most
samples, so it determines the duration of a round, and τ_i = τ D_i / max D_j, rounded, at
least 1. τ_eff includes all nodes, also if some miss a round. With equal numbers of samples
it is FedAvg.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.budget.control import Decision
from fedbudget.protocol.features.drift import corrects
from fedbudget.protocol.features.feature import (
    Choice,
    Feature,
    FeatureState,
    LocalRound,
    NodeTimes,
    RoundResult,
    register_feature,
)
from fedbudget.protocol.messages import Broadcast, PeerError, RoundPart

WINDOW = 5
"""Rounds of a node over which its median time is taken."""
RECENT = 10
"""A node absent from this many last rounds does not determine the length of a round."""
LEAST_GAIN = 1.1
"""Smallest τ_eff / k for which sharing by speed is used; less is clock noise."""
STRETCH = 1.5
"""Largest τ_eff, as a multiple of the harmonic mean."""


@dataclass(frozen=True)
class Work(RoundPart):
    """Local updates of each node, if nodes make different numbers.

    Args:
      effective: τ_eff, the number of local updates that the round's move of w represents.
      most: the largest number; every node draws this number of mini-batches, so that all
        nodes draw the same ones.
      updates: τ_i of the addressed nodes, in node order.
      usual: local updates of a node that has no entry.
    """

    in_header: ClassVar[bool] = True
    effective: float
    most: int
    updates: tuple[int, ...]
    usual: int

    def to(self, nodes: Int64) -> "Work":
        """Select the work of some nodes from the work of all nodes, numbered from 0."""
        return replace(self, updates=self.of(nodes))

    def of(self, nodes: Int64) -> tuple[int, ...]:
        """Return the updates of some nodes."""
        known = len(self.updates)
        return tuple(
            [self.updates[node] if node < known else self.usual for node in nodes.tolist()]
        )

    def require_possible(self) -> None:
        fewest = min(self.updates, default=0)
        if not 0 < self.effective <= self.most < 2**31 or fewest < 1:
            raise ValueError(f"updates are {self.updates}, effectively {self.effective}")


def most_updates(broadcast: Broadcast) -> int:
    """Largest number of local updates of a node."""
    work: Work | None = broadcast.by_kind.get(Work)
    return broadcast.steps if work is None else work.most


def updates_of(broadcast: Broadcast, nodes: Int64) -> Int64:
    """Local updates of each of these nodes in a round to all nodes, [n]."""
    work = broadcast.by_kind.get(Work)
    if work is None:
        return np.full(len(nodes), broadcast.steps)
    return np.array(work.of(nodes))


@dataclass(frozen=True)
class StepTimes:
    """Times of a local update at each node in its last rounds.

    Args:
      nodes: numbers of the nodes, ascending, [n].
      times: in any unit, newest first, NaN if missing, [n, WINDOW].
      seen: last round of each node, [n].
    """

    nodes: Int64
    times: Float64
    seen: Int64

    @classmethod
    def none(cls) -> "StepTimes":
        return cls(np.empty(0, np.int64), np.empty((0, WINDOW)), np.empty(0, np.int64))

    def after(self, number: int, fresh: NodeTimes) -> "StepTimes":
        """Add the times of one round; values that are not positive numbers are ignored."""
        sane = np.isfinite(fresh.times) & (fresh.times > 0)
        nodes = fresh.nodes[sane]
        known = self._with(nodes)
        at = np.searchsorted(known.nodes, nodes)
        rows = known.times.copy()
        rows[at, 1:] = rows[at, :-1]
        rows[at, 0] = fresh.times[sane]
        seen = known.seen.copy()
        seen[at] = number
        return StepTimes(known.nodes, rows, seen)

    def typical(self) -> Float64:
        """Median time of each node, [n]."""
        return np.nanmedian(self.times, axis=1) if len(self.nodes) else np.empty(0)

    def _with(self, nodes: Int64) -> "StepTimes":
        missing = np.setdiff1d(nodes, self.nodes)
        if not len(missing):
            return self
        every = np.append(self.nodes, missing)
        order = np.argsort(every, kind="stable")
        times = np.append(self.times, np.full((len(missing), WINDOW), np.nan), axis=0)
        seen = np.append(self.seen, np.zeros(len(missing), np.int64))
        return StepTimes(every[order], times[order], seen[order])

    def require_possible(self) -> None:
        """Raise ValueError for values that no run produces; a file may be damaged."""
        n = len(self.nodes)
        shapes = (self.nodes.shape, self.times.shape, self.seen.shape)
        if shapes != ((n,), (n, WINDOW), (n,)):
            raise ValueError(f"nodes, times and last rounds have shapes {shapes}")
        ascending = (np.diff(self.nodes) > 0).all() and (self.nodes >= 0).all()
        if not ascending or (self.times <= 0).any():
            raise ValueError("step times are not positive, or nodes are not in order")


@dataclass(frozen=True)
class SpeedShares:
    """How nodes share a round by their speeds.

    Args:
      nodes: numbers of the recent nodes, [n].
      ratios: c_s / c_i of each, 1 for the slowest, [n].
      most: τ_max.
      stretch: largest τ_eff, as a multiple of the harmonic mean.
    """

    nodes: Int64
    ratios: Float64
    most: int
    stretch: float = STRETCH

    @classmethod
    def of(
        cls, times: StepTimes, coming: int, most: int, stretch: float = STRETCH
    ) -> "SpeedShares | None":
        """Return the workload of the coming round; None if no times are known."""
        recent = times.seen >= coming - RECENT
        if not recent.any():
            return None
        typical = times.typical()[recent]
        return cls(times.nodes[recent], typical.max() / typical, most, stretch)

    @property
    def gain(self) -> float:
        """τ_eff / k for long rounds."""
        return effective_tau(self.ratios, self.stretch)

    def updates(self, length: int) -> Int64:
        """τ_i in a round of k updates of the slowest node, [n]."""
        most = max(length, self.most)
        # The factor absorbs rounding errors if times are multiples of each other.
        updates = np.floor(length * self.ratios * (1 + 1e-9))
        return np.clip(updates, length, most).astype(np.int64)

    def length(self, tau: int) -> int:
        """k with a τ_eff nearest to τ, as a ratio; τ_eff is at least k and grows with
        it."""
        low = 1
        high = max(1, tau)
        while low < high:
            middle = (low + high) // 2
            if self._effective(middle) >= tau:
                high = middle
            else:
                low = middle + 1
        below = max(1, low - 1)
        return below if tau / self._effective(below) < self._effective(low) / tau else low

    def work(self, length: int) -> Work:
        """Return the updates of all nodes for the broadcast; unknown nodes make k
        updates."""
        own = self.updates(length)
        updates = np.full(int(self.nodes[-1]) + 1, length)
        updates[self.nodes] = own
        effective = effective_tau(own, self.stretch)
        return Work(effective, int(own.max()), tuple(updates.tolist()), length)

    def _effective(self, length: int) -> float:
        return effective_tau(self.updates(length), self.stretch)


@dataclass(frozen=True)
class WorkShares:
    """Updates and idle time of each node in a round shared by speed.

    Args:
      effective: τ_eff.
      nodes: numbers of the nodes that took part, [n].
      updates: τ_i, [n].
      idle: fraction of the round during which each node was idle, [n].
      idle_equal: the same if all nodes had made τ updates, [n].
    """

    effective: float
    nodes: Int64
    updates: Int64
    idle: Float64
    idle_equal: Float64

    @classmethod
    def of(cls, broadcast: Broadcast, fresh: NodeTimes | None) -> "WorkShares | None":
        """Return the shares of a finished round; None if all made τ updates or times are
        unknown."""
        work = broadcast.by_kind.get(Work)
        if work is None or fresh is None:
            return None
        nodes, times = fresh
        updates = np.array(work.of(nodes))
        idle = idle_shares(times, updates)
        equal = idle_shares(times, np.ones(len(nodes)))
        return cls(work.effective, nodes, updates, idle, equal)


def idle_shares(times: Float64, updates: Int64 | Float64) -> Float64:
    """Fraction of the round during which each node is idle, [n].

    Args:
      times: time of one update at each node, [n].
      updates: number of updates of each node, [n].

    >>> times = np.array([0.25, 1.0])
    >>> idle_shares(times, np.array([1, 1])), idle_shares(times, np.array([4, 1]))
    (array([0.75, 0.  ]), array([0., 0.]))
    """
    took = times * updates
    longest = took.max(initial=0.0)
    return 1 - took / longest if longest > 0 else np.zeros_like(times)


def effective_tau(updates: Int64 | Float64, stretch: float = STRETCH) -> float:
    """τ_eff of nodes that make these updates.

    >>> effective_tau(np.array([4, 4, 1, 1, 1])), effective_tau(np.array([3, 3]))
    (2.142857142857143, 3.0)
    """
    return float(min(updates.mean(), stretch * len(updates) / (1 / updates).sum()))


@dataclass(frozen=True)
class DataShares:
    """Updates in proportion to the nodes' samples: FedNova.

    Args:
      sizes: D_i of all nodes, in the order of their numbers.

    >>> DataShares((10, 40, 20)).work(8)
    Work(effective=6.0, most=8, updates=(2, 8, 4), usual=8)
    """

    sizes: tuple[int, ...]

    def work(self, tau: int) -> Work:
        """Return the updates of all nodes for the broadcast."""
        sizes = np.array(self.sizes, np.float64)
        updates = np.maximum(1, np.rint(tau * sizes / sizes.max())).astype(np.int64)
        effective = float(sizes @ updates / sizes.sum())
        return Work(effective, int(updates.max()), tuple(updates.tolist()), tau)


@dataclass(frozen=True)
class WorkloadState(FeatureState):
    """Workload at the aggregator.

    Args:
      times: time of a local update at each node; empty if shared by data.
      work: local updates of each node in the announced round, unless all make τ.
      shares: how nodes share the coming round, between the choice and the announcement.
    """

    times: StepTimes
    work: Work | None = None
    shares: "SpeedShares | DataShares | None" = None

    def require_possible(self, w: Float32) -> None:
        self.times.require_possible()
        if self.work is not None:
            self.work.require_possible()


class _Workload(Feature):
    """What both workloads have in common."""

    name: ClassVar[str] = "workload"
    types: ClassVar[tuple[type, ...]] = (Work, WorkloadState)

    def begin(self, local: LocalRound) -> None:
        work = local.broadcast.by_kind.get(Work)
        if work is None:
            return
        nodes = len(local.numbers)
        if len(work.updates) != nodes or not 1 <= min(work.updates) <= work.most:
            raise PeerError(f"{nodes} nodes cannot make {work.updates} updates")
        if max(work.updates) > work.most:
            raise PeerError(f"{work.updates} updates are more than {work.most}")
        local.draws = work.most
        local.counts = np.array(work.updates)
        local.scale_by(np.float32(work.effective) / local.counts.astype(np.float32))

    def first(self, w: Float32) -> WorkloadState:
        return WorkloadState(StepTimes.none())

    def message(self, state: WorkloadState) -> RoundPart | None:
        return state.work

    def announce(self, state: WorkloadState, tau: int) -> tuple[WorkloadState, float]:
        if state.shares is None:
            return WorkloadState(state.times), tau
        work = state.shares.work(tau)
        return WorkloadState(state.times, work), work.effective

    def finish(self, state: WorkloadState) -> WorkloadState:
        return WorkloadState(state.times)

    def recorded(
        self, state: WorkloadState, result: RoundResult | None
    ) -> Mapping[str, Any]:
        if result is None:
            return {}
        return {"work": WorkShares.of(result.broadcast, result.times)}


@register_feature
@dataclass(frozen=True)
class SpeedWorkload(_Workload):
    """Faster nodes make more local updates, if time is the scarcest resource.

    Args:
      most: largest number of updates of a node.
      stretch: largest τ_eff, as a multiple of the harmonic mean.
    """

    most: int
    stretch: float = STRETCH

    def after(self, state: WorkloadState, result: RoundResult) -> WorkloadState:
        if result.times is None:
            return state
        times = state.times.after(result.broadcast.round, result.times)
        return replace(state, times=times)

    def counted(self, state: WorkloadState, decision: Decision) -> Decision:
        if state.work is None:
            return decision
        return replace(decision, tau=max(1, round(state.work.effective)))

    def choose(
        self, state: WorkloadState, decision: Decision, choice: Choice
    ) -> tuple[WorkloadState, Decision]:
        shares = None
        if corrects(choice.states):
            shares = SpeedShares.of(state.times, choice.round, self.most, self.stretch)
        if shares is None or shares.gain < LEAST_GAIN:
            return replace(state, shares=None), decision
        if choice.scarcest(decision.tau) != "time":
            return replace(state, shares=None), decision
        length = shares.length(decision.tau)
        return replace(state, shares=shares), Decision(length, decision.reason)

    def forget(
        self,
        state: WorkloadState,
        nodes: Collection[int],
        states: Mapping[str, FeatureState],
        broadcast: Broadcast,
    ) -> WorkloadState:
        if state.work is None or corrects(states):
            return state
        return WorkloadState(state.times)


@register_feature
@dataclass(frozen=True)
class DataWorkload(_Workload):
    """Nodes make local updates in proportion to their samples: FedNova.

    Args:
      sizes: D_i of all nodes, in the order of their numbers.
    """

    sizes: tuple[int, ...]

    def choose(
        self, state: WorkloadState, decision: Decision, choice: Choice
    ) -> tuple[WorkloadState, Decision]:
        return replace(state, shares=DataShares(self.sizes)), decision
