"""Status of a node, for displays of a run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class NodeStatus:
    """Status of a node at one moment; None for values that are not measured.

    Args:
      name: name of the node.
      numbers: numbers of its fleet among all nodes.
      samples: number of its training samples.
      state: description of its state, such as `away`.
      rounds: number of rounds that it took part in.
      missed: number of rounds in which it did not answer.
      step_seconds: recent time of a local update.
      last_seen: time of the last connection, in seconds since 1970; None if it is away.
      updates: local updates that it made in the last round.
      idle: fraction of that round's updates during which it waited for others.
      idle_equal: the same fraction if all nodes made the same number of updates.
      speed: speed of a simulated node, relative to the measured simulated costs.
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
