"""Who takes part in a run over a network, connected or not, and how they are doing.

A member is known by a key: the name of a node over gRPC, Flower's number of it there. It keeps its nodes' numbers for
the whole run, also while it is away and when it comes back under another key.
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
from fedbudget.protocol.combine import FEWEST, MOST_SAMPLES

Key = TypeVar("Key", str, int)

OWN = "aggregator"
"""The name of the node that the aggregator is itself, where it holds data."""

_SHARE = 0.5  # of the average that one may have, unless a user says

GONE_FOR_GOOD = 10
"""A node that missed so many rounds in a row is no longer counted on."""


@dataclass
class Member:
    """A node that takes part in the run, connected or not; `counted` is how many of its samples count (`Members`).

    Args:
      numbers: of its fleet among all nodes.
      sizes: how many samples each of them has, as was told when it came first.
      base_round: the last round in which its report was counted; 0 for none.
      lost: it came back without its memory, or is gone for good, and what it knew of drift is lost.
      not_finite: how many of its reports in a row were not finite.
      rounds, missed: how many it took part in, and how many it was asked to and did not.
      step_seconds: of a local update, lately.
      doubted: it has said what was not believed.
      oversized: it says that it has more samples than is believed.
      updates: that each of its nodes made in the last round.
      idle, idle_equal: the share of that round's updates that it waited for others, and would have with the same τ.
    """

    numbers: Int64
    sizes: Int64
    base_round: int = 0
    lost: bool = False
    not_finite: int = 0
    rounds: int = 0
    missed: int = 0
    step_seconds: float | None = None
    doubted: bool = False
    oversized: bool = False
    updates: int | None = None
    idle: float | None = None
    idle_equal: float | None = None

    def __post_init__(self) -> None:
        self.counted = self.sizes

    def __len__(self) -> int:
        return len(self.numbers)

    def forget(self) -> None:
        """It remembers nothing of the rounds in which it was counted."""
        self.lost, self.base_round = self.lost or bool(self.base_round), 0

    def gone_for_good(self, coming: int) -> bool:
        """Whether one that is away has missed so many rounds before the coming one that it is no longer counted on."""
        return bool(self.base_round) and coming - self.base_round > GONE_FOR_GOOD

    def saved(self) -> dict[str, Any]:
        """What a checkpoint must hold of it, as plain JSON."""
        numbers = self.numbers.tolist()
        sizes = self.sizes.tolist()
        return {
            "numbers": numbers,
            "sizes": sizes,
            "base_round": self.base_round,
            "lost": self.lost,
        }

    def status(self, name: str, state: str, now: float) -> NodeStatus:
        """How it is doing.

        Args:
          state: "away" of one that is not connected.
          now: in seconds since 1970.
        """
        last_seen = None if state == "away" else now
        size = int(self.sizes.sum())
        numbers = tuple(self.numbers.tolist())
        return NodeStatus(
            name,
            numbers,
            size,
            state,
            self.rounds,
            self.missed,
            self.step_seconds,
            last_seen,
            updates=self.updates,
            idle=self.idle,
            idle_equal=self.idle_equal,
        )


class Members(dict[Key, Member]):
    """All members, by their keys, in the order in which they joined.

    Args:
      share: the largest that one may have of the average, where they are three or more. None for a half, and for
        nearly nothing where it says that it has very many times as many samples as most: who would have half of the
        average by such a word could have it by any.
    """

    def __init__(
        self, members: Mapping[Key, Member] | None = None, *, share: float | None = None
    ) -> None:
        super().__init__()
        self.update(members or {})
        self._share = share
        for key, counted in self._shares().items():
            self[key].counted = counted

    def join(self, key: Key, sizes: Sequence[int]) -> Member:
        """One that is new, with the next numbers; or that is back, with its own, and with as many samples as before:
        who could say another number every time would have any say in the average.
        """
        if key not in self:
            first = max(
                (int(member.numbers[-1]) + 1 for member in self.values()), default=0
            )
            numbers = np.arange(first, first + len(sizes), dtype=np.int64)
            self[key] = Member(numbers, np.array(sizes, np.int64))
            self._share_out()
        return self[key]

    def _share_out(self) -> None:
        """Holds every member to its share."""
        for key, counted in self._shares().items():
            member = self[key]
            if not np.array_equal(counted, member.counted):
                member.counted = counted
                member.lost = member.lost or bool(member.base_round)  # c was of other D_i

    def _shares(self) -> dict[Key, Int64]:
        """How many samples of each count; the aggregator's own data are not in doubt."""
        told = {key: int(member.sizes.sum()) for key, member in self.items() if key != OWN}
        counted = {key: self[key].sizes for key in told}
        usual = float(np.median(list(told.values()) or [0]))
        for key, size in list(told.items()):
            self[key].oversized = (
                self._share is None
                and len(counted) >= FEWEST
                and size > MOST_SAMPLES * usual
            )
            if self[key].oversized:
                counted[key] = np.ones_like(self[key].sizes)
                del told[key]
        most = (
            _largest_within(list(told.values()), self._share or _SHARE)
            if len(told) >= FEWEST
            else math.inf
        )
        for key, size in told.items():
            if size > most:
                counted[key] = np.maximum(
                    1, (self[key].sizes * (most / size)).astype(np.int64)
                )
        return counted

    def replace(self, old: Key, new: Key, sizes: Sequence[int]) -> Member:
        """One is back under another key, without its memory."""
        self[new] = self.pop(old)
        self[new].forget()
        return self.join(new, sizes)

    def nodes(self, keys: Iterable[Key]) -> int:
        """How many nodes these members are."""
        return sum(len(self[key]) for key in keys)

    def numbers(self, keys: Iterable[Key]) -> tuple[int, ...]:
        """Of all nodes of these members, rising."""
        return tuple(
            sorted(number for key in keys for number in self[key].numbers.tolist())
        )

    def with_any(self, numbers: Collection[int]) -> frozenset[Key]:
        """Those whose first node has one of these numbers: a member is asked as a whole."""
        return frozenset(
            key for key, member in self.items() if int(member.numbers[0]) in numbers
        )

    def compare(self, keys: Iterable[Key]) -> None:
        """Who of these, that were in a round, has waited for whom."""
        each = [(self[key].step_seconds or 0.0, self[key]) for key in keys]
        longest = max(
            (seconds * (member.updates or 1) for seconds, member in each), default=0.0
        )
        slowest = max((seconds for seconds, _ in each), default=0.0)
        for seconds, member in each:
            member.idle = _idle_share(seconds * (member.updates or 1), longest)
            member.idle_equal = _idle_share(seconds, slowest)

    def any_lost(self, coming: int, present: Container[Key]) -> bool:
        """Whether `take_lost` would give any; from any thread."""
        members = list(self.items())
        return any(
            each.lost or (key not in present and each.gone_for_good(coming))
            for key, each in members
        )

    def take_lost(self, coming: int, present: Container[Key]) -> list[int]:
        """Numbers of nodes whose knowledge of drift is lost, as of the round to come; each is given once.

        Args:
          present: the keys of members that are connected.
        """
        lost: list[int] = []
        for key, member in self.items():
            if key not in present and member.gone_for_good(coming):
                member.forget()
            if member.lost:
                member.lost = False
                lost += member.numbers.tolist()
        return lost

    def snapshot(self) -> dict[Key, Member]:
        """All as they are now; from any thread."""
        # A member that changes meanwhile is copied as it was before or after: nothing in `copy` lets another thread in
        # between two of its fields.
        return {key: copy.copy(member) for key, member in list(self.items())}


def _idle_share(took: float, longest: float) -> float:
    """Of the time that the longest took, to a thousandth; in numpy, that of a few takes ten times as long."""
    return round(1 - took / longest, 3) if longest > 0 else 0.0


@dataclass
class Counters:
    """What passed so far, in bytes and numbers.

    Args:
      sent, received: bytes of all messages, with gRPC's frames.
      saved: bytes that compression has saved.
      late: reports that came after their round.
      dropped, refused: peers that broke the rules, and that were not let in.
    """

    sent: int = 0
    received: int = 0
    saved: int = 0
    late: int = 0
    dropped: int = 0
    refused: int = 0

    @property
    def wire_bytes(self) -> int:
        """Of all messages, both ways."""
        return self.sent + self.received


def _largest_within(sizes: Sequence[int], share: float) -> float:
    """What each may count for at most, so that none is more than this share of them all: with the k largest held to m,
    m = share (k m + the others).

    >>> _largest_within([10, 20, 1000], 0.5), _largest_within([10, 20, 25], 0.5)
    (30.0, inf)
    """
    if share * len(sizes) <= 1:  # as small as can be: all count the same
        return float(min(sizes, default=1))
    others = sum(sizes)
    for held, size in enumerate(sorted(sizes, reverse=True)):
        most = share * others / (1 - held * share)
        if size <= most:
            return most if held else math.inf
        others -= size
    return math.inf


def name_order(name: str) -> tuple[tuple[int, str], ...]:
    """Names with numbers in them by these numbers: node-2 before node-10."""
    parts = re.split(r"(\d+)", name)
    return tuple((int(part), "") if part.isdigit() else (0, part) for part in parts)
