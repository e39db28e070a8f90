"""How a node is doing, for those who watch a run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class NodeStatus:
    """A node as it was when it was looked at.

    Args:
      numbers: of its fleet among all nodes.
      state: in words; None where that has no meaning.
      rounds, missed: that it took part in, and that it was asked to and did not; None where nobody counts.
      step_seconds: of a local update, lately.
      last_seen: when it was last connected, in seconds since 1970; None of one that is away.
    """

    name: str
    numbers: tuple[int, ...]
    samples: int
    state: str | None = None
    rounds: int | None = None
    missed: int | None = None
    step_seconds: float | None = None
    last_seen: float | None = None
