"""A round in progress: who was asked, who has answered, and when that is enough."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from fedbudget.engines.remote.members import Member
from fedbudget.engines.remote.messages import Answer
from fedbudget.protocol.messages import Broadcast

_Name = TypeVar("_Name", str, int)


@dataclass
class PendingRound:
    """A round in progress.

    Args:
      least: how many nodes must report.
      owing: names of peers that were asked and have not answered.
      instances: of those that have been asked.
      overdue: its deadline has passed.
      expired: it ends with what it has.
      trouble: what went wrong on our side.
    """

    broadcast: Broadcast
    least: int
    owing: set[str] = field(default_factory=set)
    answers: dict[str, Answer] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    instances: dict[str, str] = field(default_factory=dict)
    overdue: bool = False
    expired: bool = False
    trouble: Exception | None = None
    lean: list[bytes] | None = None
    timers: list[asyncio.TimerHandle] = field(default_factory=list)

    def ask(self, name: str, instance: str) -> None:
        """Someone is asked, and owes a report from now on."""
        self.owing.add(name)
        self.asked.add(name)
        self.instances[name] = instance

    def nodes(self, members: Mapping[str, Member]) -> int:
        """How many nodes have reported."""
        return sum(len(members[name]) for name in self.answers)

    def counted(self) -> dict[str, Answer]:
        """The reports that count."""
        return finite(self.answers)


@dataclass(frozen=True)
class CollectedRound:
    """What came of a round.

    Args:
      answers: in the order of nodes' numbers.
      broken: numbers of nodes whose report was not finite, and was set aside.
      missed: numbers of nodes that were asked and did not answer in time.
      enough: whether as many as were needed have answered.
    """

    answers: list[Answer]
    broken: tuple[int, ...]
    missed: tuple[int, ...]
    enough: bool


def finite(answers: dict[_Name, Answer]) -> dict[_Name, Answer]:
    """The reports that are finite; all of them when none is: the aggregator knows what to do then."""
    return {name: answer for name, answer in answers.items() if _is_finite(answer)} or answers


def _is_finite(answer: Answer) -> bool:
    report = answer.report
    parts = (report.losses, report.best_losses, report.w)
    return all(part is None or bool(np.isfinite(part).all()) for part in parts)
