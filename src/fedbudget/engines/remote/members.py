"""Members of a run over a network, connected or not, and their status.

A member is identified by a key: a node's name over gRPC, Flower's node number over Flower.
It keeps its nodes' numbers for the whole run, also while it is away and when it returns
under another key.
"""

import copy
import math
import re
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from fedbudget.arrays import Int64
from fedbudget.node_status import NodeStatus
from fedbudget.protocol.outliers import FEWEST, MOST_SAMPLES
from fedbudget.secure.contents import weights_of

Key = TypeVar("Key", str, int)

OWN = "aggregator"
"""Name of the aggregator's own node, if it holds data."""

MAX_ROUNDS_AWAY = 10
"""A node that missed more rounds than this in a row counts as lost."""

DEFAULT_SHARE = 0.5  # largest share of the average for one member


@dataclass
class Member:
    """A node, or gateway of several nodes, that takes part in the run.

    The attribute `counted` is the number of samples that count per node (`Members`).

    Args:
      numbers: of its nodes among all nodes.
      sizes: number of samples of each node, as reported when it first joined.
      base_round: the last round that counted its report; 0 for none.
      lost: it returned without memory, or was away too long, and its drift state is lost.
      not_finite: number of its latest reports in a row that were not finite.
      rounds, missed: number of rounds with its report, and without although requested.
      step_seconds: time of a recent local update.
      outlier_reported: a warning about its outliers was logged.
      oversized: it claims an implausible number of samples.
      updates: local updates of each of its nodes in the last round.
      idle, idle_equal: idle fraction of that round's update time, and the fraction with
        the same τ at all nodes.
    """

    numbers: Int64
    sizes: Int64
    base_round: int = 0
    lost: bool = False
    not_finite: int = 0
    rounds: int = 0
    missed: int = 0
    step_seconds: float | None = None
    outlier_reported: bool = False
    oversized: bool = False
    updates: int | None = None
    idle: float | None = None
    idle_equal: float | None = None

    def __post_init__(self) -> None:
        self.counted = self.sizes

    def forget(self) -> None:
        """Record that its memory of earlier rounds is lost."""
        self.lost = self.lost or bool(self.base_round)
        self.base_round = 0

    def saved(self) -> dict[str, Any]:
        """Its state in a checkpoint, as plain JSON."""
        return {
            "numbers": self.numbers.tolist(),
            "sizes": self.sizes.tolist(),
            "base_round": self.base_round,
            "lost": self.lost,
        }

    def status(self, name: str, state: str, now: float) -> NodeStatus:
        """Its current status.

        Args:
          state: "away" if it is not connected.
          now: in seconds since 1970.
        """
        return NodeStatus(
            name,
            tuple(self.numbers.tolist()),
            int(self.sizes.sum()),
            state,
            self.rounds,
            self.missed,
            self.step_seconds,
            last_seen=None if state == "away" else now,
            updates=self.updates,
            idle=self.idle,
            idle_equal=self.idle_equal,
        )


class Members(dict[Key, Member]):
    """All members by key, in the order in which they joined.

    Args:
      share: largest share of the average for one of three or more members. With None it
        is 0.5, and a member that claims an implausible number of samples counts for almost
        nothing: otherwise any false claim would earn half of the average.
      cap: samples of a member that count at most; replaces `share` if nodes weight their
        own reports (secure/contents.py).
    """

    def __init__(
        self,
        members: Mapping[Key, Member] | None = None,
        *,
        share: float | None = None,
        cap: int | None = None,
    ) -> None:
        super().__init__()
        self.update(members or {})
        self._share = share
        self.cap = cap
        for key, counted in self._shares().items():
            self[key].counted = counted

    def join(self, key: Key, sizes: Sequence[int]) -> Member:
        """Add a new member with the next numbers, or return the one with this key.

        A returning member keeps its numbers and its first sizes: with a new claim at each
        return it could choose its weight in the average.
        """
        if key not in self:
            first = max(
                (int(member.numbers[-1]) + 1 for member in self.values()), default=0
            )
            numbers = np.arange(first, first + len(sizes), dtype=np.int64)
            self[key] = Member(numbers, np.array(sizes, np.int64))
            self._update_shares()
        return self[key]

    def replace(self, old: Key, new: Key, sizes: Sequence[int]) -> Member:
        """Move a member that returned without memory to another key."""
        self[new] = self.pop(old)
        self[new].forget()
        return self.join(new, sizes)

    def _update_shares(self) -> None:
        for key, counted in self._shares().items():
            member = self[key]
            if not np.array_equal(counted, member.counted):
                member.counted = counted
                member.lost = member.lost or bool(member.base_round)  # c used other D_i

    def _shares(self) -> dict[Key, Int64]:
        """Samples that count, by member; the aggregator's own data are trusted."""
        if self.cap is not None:
            return {key: weights_of(each.sizes, self.cap) for key, each in self.items()}
        claimed = {
            key: int(member.sizes.sum()) for key, member in self.items() if key != OWN
        }
        counted = {key: self[key].sizes for key in claimed}
        median = float(np.median(list(claimed.values()) or [0]))
        limited = self._share is None and len(counted) >= FEWEST
        for key, size in list(claimed.items()):
            self[key].oversized = limited and size > MOST_SAMPLES * median
            if self[key].oversized:
                counted[key] = np.ones_like(self[key].sizes)
                del claimed[key]
        if len(claimed) < FEWEST:
            return counted

        most = largest_within(list(claimed.values()), self._share or DEFAULT_SHARE)
        for key, size in claimed.items():
            if size > most:
                scaled = (self[key].sizes * (most / size)).astype(np.int64)
                counted[key] = np.maximum(1, scaled)
        return counted

    def nodes(self, keys: Iterable[Key]) -> int:
        """Number of nodes of these members."""
        return sum(len(self[key].numbers) for key in keys)

    def numbers(self, keys: Iterable[Key]) -> tuple[int, ...]:
        """Numbers of all nodes of these members, ascending."""
        return tuple(
            sorted(number for key in keys for number in self[key].numbers.tolist())
        )

    def having(self, numbers: Collection[int]) -> frozenset[Key]:
        """Members whose first node has one of these numbers: a member acts as a whole."""
        return frozenset(
            key for key, member in self.items() if int(member.numbers[0]) in numbers
        )

    def compare(self, keys: Iterable[Key]) -> None:
        """Compute the idle fractions of the members of a round."""
        each = [(self[key].step_seconds or 0.0, self[key]) for key in keys]
        longest = max(
            (seconds * (member.updates or 1) for seconds, member in each), default=0.0
        )
        slowest = max((seconds for seconds, _ in each), default=0.0)
        for seconds, member in each:
            busy = seconds * (member.updates or 1)
            member.idle = round(1 - busy / longest, 3) if longest > 0 else 0.0
            member.idle_equal = round(1 - seconds / slowest, 3) if slowest > 0 else 0.0

    def any_lost(self, coming: int, present: Container[Key]) -> bool:
        """Whether `take_lost` would return any node; from any thread."""
        earliest = coming - MAX_ROUNDS_AWAY
        return any(
            member.lost or (0 < member.base_round < earliest and key not in present)
            for key, member in list(self.items())
        )

    def take_lost(self, coming: int, present: Container[Key]) -> list[int]:
        """Numbers of nodes whose drift state is lost, each returned once.

        Args:
          coming: number of the next round.
          present: keys of connected members.
        """
        lost: list[int] = []
        earliest = coming - MAX_ROUNDS_AWAY
        for key, member in self.items():
            if 0 < member.base_round < earliest and key not in present:
                member.forget()
            if member.lost:
                member.lost = False
                lost += member.numbers.tolist()
        return lost

    def snapshot(self) -> dict[Key, Member]:
        """Copies of all members; from any thread."""
        # `copy` does not yield to another thread between two fields, so that each copy is
        # consistent.
        return {key: copy.copy(member) for key, member in list(self.items())}


@dataclass
class Counters:
    """Traffic so far.

    Args:
      sent, received: bytes of all messages, including gRPC frames.
      saved: bytes that compression saved.
      late: number of reports that arrived after their round.
      dropped: number of peers that broke the protocol.
      refused: number of peers that were not admitted.
    """

    sent: int = 0
    received: int = 0
    saved: int = 0
    late: int = 0
    dropped: int = 0
    refused: int = 0

    @property
    def wire_bytes(self) -> int:
        """Bytes of all messages, both ways."""
        return self.sent + self.received


def name_order(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key that compares numbers in names as numbers: node-2 before node-10."""
    parts = re.split(r"(\d+)", name)
    return tuple((int(part), "") if part.isdigit() else (0, part) for part in parts)


def samples_cap(sizes: Sequence[int], share: float | None) -> int:
    """Cap on the samples of a member for a whole run, in which others may join.

    Args:
      sizes: samples of each member at the start of the run.
      share: largest share of the average for one member; 0.5 if None.

    >>> samples_cap([10, 20, 30], None), samples_cap([10, 20, 1000], 0.4)
    (60, 20)
    """
    share = share or DEFAULT_SHARE
    median = float(np.median(sizes))
    plausible = [size for size in sizes if size <= MOST_SAMPLES * median]
    most = largest_within(plausible, share)
    if most == math.inf:  # a further member could still exceed the share
        most = sum(plausible) * share / max(1 - share, 1e-6)
    return max(1, min(int(most), 2**40 - 1))


def largest_within(sizes: Sequence[int], share: float) -> float:
    """Cap on each size so that none exceeds this share of their sum.

    With the k largest capped at m, m = share (k m + the others).

    >>> largest_within([10, 20, 1000], 0.5), largest_within([10, 20, 25], 0.5)
    (30.0, inf)
    """
    if share * len(sizes) <= 1:  # the smallest possible share: all count the same
        return float(min(sizes, default=1))
    others = sum(sizes)
    for capped, size in enumerate(sorted(sizes, reverse=True)):
        most = share * others / (1 - capped * share)
        if size <= most:
            return most if capped else math.inf
        others -= size
    return math.inf
