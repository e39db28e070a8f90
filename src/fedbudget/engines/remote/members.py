"""Who takes part in a run over a network, connected or not, and how they are doing.

A member is known by a key: the name of a node over gRPC, Flower's number of it there. It keeps its nodes' numbers for
the whole run, also while it is away and when it comes back under another key.
"""

import copy
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from fedbudget.arrays import Int64
from fedbudget.node_status import NodeStatus
from fedbudget.protocol.workload import idle_shares

Key = TypeVar("Key", str, int)

OWN = "aggregator"
"""The name of the node that the aggregator is itself, where it holds data."""

GONE_FOR_GOOD = 10
"""A node that missed so many rounds in a row is no longer counted on."""


@dataclass
class Member:
    """A node that takes part in the run, connected or not.

    Args:
      numbers: of its fleet among all nodes.
      sizes: how many samples each of them has.
      base_round: the last round in which its report was counted; 0 for none.
      lost: it came back without its memory, or is gone for good, and what it knew of drift is lost.
      not_finite: how many of its reports in a row were not finite.
      rounds, missed: how many it took part in, and how many it was asked to and did not.
      step_seconds: of a local update, lately.
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
    updates: int | None = None
    idle: float | None = None
    idle_equal: float | None = None

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
        numbers, sizes = self.numbers.tolist(), self.sizes.tolist()
        return {"numbers": numbers, "sizes": sizes, "base_round": self.base_round, "lost": self.lost}

    def status(self, name: str, state: str, now: float) -> NodeStatus:
        """How it is doing.

        Args:
          state: "away" of one that is not connected.
          now: in seconds since 1970.
        """
        last_seen, size = None if state == "away" else now, int(self.sizes.sum())
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
    """All members, by their keys, in the order in which they joined."""

    def join(self, key: Key, sizes: Sequence[int]) -> Member:
        """One that is new, with the next numbers; or that is back, with its own."""
        samples = np.array(sizes, np.int64)
        if key in self:
            self[key].sizes = samples
        else:
            first = self.nodes(self)
            self[key] = Member(np.arange(first, first + len(sizes), dtype=np.int64), samples)
        return self[key]

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
        return tuple(sorted(number for key in keys for number in self[key].numbers.tolist()))

    def compare(self, keys: Iterable[Key]) -> None:
        """Who of these, that were in a round, has waited for whom."""
        took = [self[key] for key in keys]
        times = np.array([member.step_seconds or 0.0 for member in took])
        waited = idle_shares(times, np.array([member.updates or 1 for member in took]))
        for member, own, equal in zip(took, waited, idle_shares(times, np.ones(len(took))), strict=True):
            member.idle, member.idle_equal = round(float(own), 3), round(float(equal), 3)

    def any_lost(self, coming: int, present: Container[Key]) -> bool:
        """Whether `take_lost` would give any; from any thread."""
        members = list(self.items())
        return any(each.lost or (key not in present and each.gone_for_good(coming)) for key, each in members)

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


def name_order(name: str) -> tuple[tuple[int, str], ...]:
    """Names with numbers in them by these numbers: node-2 before node-10."""
    parts = re.split(r"(\d+)", name)
    return tuple((int(part), "") if part.isdigit() else (0, part) for part in parts)
