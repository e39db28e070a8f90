"""How many local updates each node makes in a round, where some nodes are faster than others: nobody waits long.

With the same τ at all nodes a round lasts as long as τ updates of the slowest one, and the others are idle. So a round
has a length instead: k updates of the slowest node, c_s each. Node i makes what it can in that time,

    τ_i = ⌊k c_s / c_i⌋,      at least k, and at most τ_max,

and its way counts as if it had made as many updates as everyone. With d_i = (w(t₀) - w_i(t)) / ητ_i, what its updates
went along on average, it reports w(t₀) - η τ_eff d_i, so that the mean of reports is

    w(t) = w(t₀) - η τ_eff Σ p_i d_i,      τ_eff = min(mean of τ_i, 1.5 · harmonic mean of τ_i).

The harmonic mean is safe: on average nobody's way is made longer than it was. The mean is faster, and goes too far
where speeds differ much. An update rule whose w goes on by itself finds by itself how far: then τ_eff is the harmonic
mean, with which the loss was lower in most trials (docs/research/unequal-speeds.md). All that is made from w_i(t) and ητ elsewhere
(drift.py, estimates.py) holds with τ_eff in the place of τ. With drift corrected, the point that rounds come to rest at
is the minimum of F, whatever the τ_i (docs/research/theory.md), and without it is not: so nodes make different numbers of
updates only in rounds that are corrected.

And only where time is what there is least of: an update more costs energy and CPU time, and with these alone the same
τ for all was better. The controller chooses τ as if all made the same number of updates, and k is what brings τ_eff
nearest to it: what is gained makes rounds shorter, and not longer in effect. (An update of the effective node is
cheaper, so that the controller would want more of them; that gave half of the gain.) The ledger counts updates of the
slowest node: what a round costs is k c_s + b, and a budget is planned as ever. k is a whole number, so a node that is
far slower than the rest makes one update in each round, and the others do not wait for more than that.

How long a local update takes is measured: the median of a node's last rounds, so that one that is slow for a moment
does not count, and one that stays slow is followed after three.

FedNova: nodes that make different numbers of updates count alike (Wang et al., NeurIPS 2020).

Where a node passes over its samples so many times in a round, one with more samples makes more updates, and plain
averaging then minimises another loss than F, in which such nodes weigh more. With d_i = (w(t₀) - w_i(t)) / ητ_i, what a
node's updates went along on average, and p_i = D_i / D, FedNova's rule is

    w(t) = w(t₀) - η τ_eff Σ p_i d_i,      τ_eff = Σ p_i τ_i.

Nodes do their part of it, as they do where work is shared by speed (workload.py): each reports w(t₀) - η τ_eff d_i, and
the mean of reports is w(t). Here τ is what the node with the most samples makes, so that it is what a round takes, and
τ_i = τ D_i / max D_j, rounded, at least 1. τ_eff is of all nodes, also where some miss a round. Where all have as many
samples it is FedAvg.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedbudget.arrays import Float64, Int64
from fedbudget.protocol.messages import Broadcast, Work

WINDOW = 5
"""Rounds of a node that its time is the median of."""
RECENT = 10
"""One that was in none of so many last rounds is not waited for, and does not set their length."""
LEAST_GAIN = 1.1
"""τ_eff / k from which on it is worth while: what differs by less is noise of clocks."""
STRETCH = 1.5
"""How many times the harmonic mean τ_eff may be."""


class NodeTimes(NamedTuple):
    """What a local update took at nodes in one round.

    Args:
      nodes: their numbers, rising, [n].
      times: in any unit that is the same for all nodes and rounds, [n].
    """

    nodes: Int64
    times: Float64


@dataclass(frozen=True)
class StepTimes:
    """What a local update took at nodes in their last rounds.

    Args:
      nodes: their numbers, rising, [n].
      times: in any unit, the newest first, NaN where there is none, [n, WINDOW].
      seen: the round that each was last in, [n].
    """

    nodes: Int64
    times: Float64
    seen: Int64

    @classmethod
    def none(cls) -> "StepTimes":
        return cls(np.empty(0, np.int64), np.empty((0, WINDOW)), np.empty(0, np.int64))

    def after(self, number: int, fresh: NodeTimes) -> "StepTimes":
        """With one more round; what is not a positive number says nothing."""
        nodes, times = fresh
        sane = np.isfinite(times) & (times > 0)
        nodes, times = nodes[sane], times[sane]
        known = self._with(nodes)
        at = np.searchsorted(known.nodes, nodes)
        rows = known.times.copy()
        seen = known.seen.copy()
        rows[at, 1:] = rows[at, :-1]
        rows[at, 0] = times
        seen[at] = number
        return StepTimes(known.nodes, rows, seen)

    def typical(self) -> Float64:
        """Of each node, [n]."""
        return np.nanmedian(self.times, axis=1) if len(self.nodes) else np.empty(0)

    def _with(self, nodes: Int64) -> "StepTimes":
        missing = np.setdiff1d(nodes, self.nodes)
        if not len(missing):
            return self
        order = np.argsort(np.append(self.nodes, missing), kind="stable")
        times = np.append(self.times, np.full((len(missing), WINDOW), np.nan), axis=0)
        return StepTimes(
            np.append(self.nodes, missing)[order],
            times[order],
            np.append(self.seen, np.zeros(len(missing), np.int64))[order],
        )

    def require_possible(self) -> None:
        """Refuses what no run comes to: raises ValueError."""
        n = len(self.nodes)
        if (
            self.nodes.ndim != 1
            or self.times.shape != (n, WINDOW)
            or self.seen.shape != (n,)
        ):
            raise ValueError(
                f"times of {self.nodes.shape} nodes have shapes {self.times.shape} and {self.seen.shape}"
            )
        if (
            (np.diff(self.nodes) <= 0).any()
            or (self.nodes < 0).any()
            or (self.times <= 0).any()
        ):
            raise ValueError("times are not those of nodes in order")


@dataclass(frozen=True)
class Workload:
    """How nodes share a round, as their times are.

    Args:
      ratios: c_s / c_i of each node that takes part these days, 1 of the slowest, [n].
      nodes: their numbers.
      most: τ_max.
      stretch: how many times the harmonic mean τ_eff may be.
    """

    nodes: Int64
    ratios: Float64
    most: int
    stretch: float = STRETCH

    @classmethod
    def of(
        cls, times: StepTimes, coming: int, most: int, stretch: float = STRETCH
    ) -> "Workload | None":
        """Of the coming round; None where nothing is known of any node."""
        typical = times.typical()
        recent = times.seen >= coming - RECENT
        if not recent.any():
            return None
        return cls(
            times.nodes[recent], typical[recent].max() / typical[recent], most, stretch
        )

    @property
    def gain(self) -> float:
        """τ_eff / k of long rounds."""
        return effective_tau(self.ratios, self.stretch)

    def updates(self, length: int) -> Int64:
        """τ_i in a round of k updates of the slowest node, [n]."""
        # Times that are multiples of each other are so but for rounding.
        most = max(length, self.most)
        return np.clip(np.floor(length * self.ratios * (1 + 1e-9)), length, most).astype(
            np.int64
        )

    def length(self, tau: int) -> int:
        """k whose τ_eff comes nearest to τ, as a ratio."""
        # τ_eff is at least k, and grows with it
        low = 1
        high = max(1, tau)
        while low < high:
            middle = (low + high) // 2
            low, high = (
                (low, middle) if self._effective(middle) >= tau else (middle + 1, high)
            )
        below = max(1, low - 1)
        return below if tau / self._effective(below) < self._effective(low) / tau else low

    def work(self, length: int) -> Work:
        """What all nodes are told, by their numbers; one of which nothing is known makes k updates."""
        own = self.updates(length)
        all_nodes = np.full(int(self.nodes[-1]) + 1, length)
        all_nodes[self.nodes] = own
        return Work(
            effective_tau(own, self.stretch), int(own.max()), tuple(all_nodes.tolist())
        )

    def _effective(self, length: int) -> float:
        return effective_tau(self.updates(length), self.stretch)


@dataclass(frozen=True)
class WorkShares:
    """Who made how many updates in a round that was shared by speed, and who waited for whom.

    Args:
      effective: τ_eff.
      nodes: that took part, [n].
      updates: τ_i, [n].
      idle, idle_equal: the share of that time in which each waited, and would have with the same τ for all, [n].
    """

    effective: float
    nodes: Int64
    updates: Int64
    idle: Float64
    idle_equal: Float64

    @classmethod
    def of(cls, broadcast: Broadcast, fresh: NodeTimes | None) -> "WorkShares | None":
        """Of a round that has been made; None where all made the same number, or nobody knows what it took."""
        if broadcast.work is None or fresh is None:
            return None
        nodes, times = fresh
        updates = broadcast.updates(nodes)
        equal = idle_shares(times, np.ones(len(nodes)))
        return cls(
            broadcast.work.effective, nodes, updates, idle_shares(times, updates), equal
        )


def idle_shares(times: Float64, updates: Int64 | Float64) -> Float64:
    """How much of the time that the longest takes for its updates each node waits for it, [n].

    Args:
      times: of one update of each.
      updates: that each makes.

    >>> idle_shares(np.array([0.25, 1.0]), np.array([1, 1])), idle_shares(np.array([0.25, 1.0]), np.array([4, 1]))
    (array([0.75, 0.  ]), array([0., 0.]))
    """
    took = times * updates
    longest = took.max(initial=0.0)
    return 1 - took / longest if longest > 0 else np.zeros_like(times)


def effective_tau(updates: Int64 | Float64, stretch: float = STRETCH) -> float:
    """τ_eff.

    >>> effective_tau(np.array([4, 4, 1, 1, 1])), effective_tau(np.array([3, 3]))
    (2.142857142857143, 3.0)
    """
    return float(min(updates.mean(), stretch * len(updates) / (1 / updates).sum()))


@dataclass(frozen=True)
class DataWorkload:
    """Who makes how many updates, by samples.

    Args:
      sizes: D_i of all nodes, by their numbers.

    >>> DataWorkload((10, 40, 20)).work(8)
    Work(effective=6.0, most=8, updates=(2, 8, 4))
    """

    sizes: tuple[int, ...]

    def work(self, tau: int) -> Work:
        """What all nodes are told."""
        sizes = np.array(self.sizes, np.float64)
        updates = np.maximum(1, np.rint(tau * sizes / sizes.max())).astype(np.int64)
        return Work(
            float(sizes @ updates / sizes.sum()),
            int(updates.max()),
            tuple(updates.tolist()),
        )
