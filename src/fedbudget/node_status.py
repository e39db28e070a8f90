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
      updates: local updates that it made in the last round.
      idle, idle_equal: the share of that round's updates that it waited for others, and would have with the same τ.
      speed: of a simulated node; 1 is what simulated costs were measured at.
    """

    name: str
    numbers: tuple[int, ...]
    samples: int
    state: str | None = None
    rounds: int | None = None
    missed: int | None = None
    step_seconds: float | None = None
    last_seen: float | None = None
    updates: int | None = None
    idle: float | None = None
    idle_equal: float | None = None
    speed: float | None = None
