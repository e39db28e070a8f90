"""Who takes part in a run over a network, connected or not, and how they are doing."""

import re
from dataclasses import dataclass

from fedbudget.arrays import Int64

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
      broken: how many of its reports in a row were not finite.
      rounds, missed: how many it took part in, and how many it was asked to and did not.
      step_seconds: of a local update, lately.
    """

    numbers: Int64
    sizes: Int64
    base_round: int = 0
    lost: bool = False
    broken: int = 0
    rounds: int = 0
    missed: int = 0
    step_seconds: float | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def forget(self) -> None:
        """It remembers nothing of the rounds in which it was counted."""
        self.lost, self.base_round = self.lost or bool(self.base_round), 0


@dataclass
class Counters:
    """What happened so far, in bytes and numbers.

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


def name_order(name: str) -> tuple[tuple[int, str], ...]:
    """Names with numbers in them by these numbers: node-2 before node-10."""
    parts = re.split(r"(\d+)", name)
    return tuple((int(part), "") if part.isdigit() else (0, part) for part in parts)
