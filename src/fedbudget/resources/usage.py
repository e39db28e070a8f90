"""What a round used, as counters say it: at one node, and at all nodes together.

Readings go by the name of their resource. What was not read is not in them, which is not zero.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Reading:
    """What one counter says of a round at a node.

    Args:
      step: of one local update.
      whole: of the whole round.
      host: whose counter it is, where all nodes on a machine read the same one; see `host.py`.
    """

    step: float
    whole: float
    host: str = ""


@dataclass(frozen=True)
class NodeCosts:
    """What a round took at a node, or at several that were measured together.

    Args:
      readings: by resource.
      nodes: how many they are.
      wire_bytes: of their messages, both ways, as if each had sent its own; 0 where an engine counts them itself.
      here: in the aggregator's own process, whose counters have the whole round already.
      evaluation: what evaluating on test samples took besides, by resource; in a trial, what it will take.
    """

    readings: Mapping[str, Reading]
    nodes: int = 1
    wire_bytes: int = 0
    here: bool = False
    evaluation: Mapping[str, Reading] = field(default_factory=dict)

    @property
    def step_seconds(self) -> float:
        return self.readings["time"].step

    @property
    def seconds(self) -> float:
        return self.readings["time"].whole

    def within(self, most: Mapping[str, float], updates: int) -> "NodeCosts":
        """The same with no more of each resource than there was.

        Args:
          most: by resource.
        """
        readings, evaluation = _held(self.readings, most, updates), _held(self.evaluation, most, 1)
        if readings is self.readings and evaluation is self.evaluation:
            return self
        return replace(self, readings=readings, evaluation=evaluation)


def _held(readings: Mapping[str, Reading], limits: Mapping[str, float], updates: int) -> Mapping[str, Reading]:
    held = {}
    for name, reading in readings.items():
        most = limits.get(name, math.inf)
        if reading.step > most / updates or reading.whole > most:
            held[name] = replace(reading, step=min(reading.step, most / updates), whole=min(reading.whole, most))
    return {**readings, **held} if held else readings


@dataclass(frozen=True)
class CombinedReading:
    """What the counters of all nodes together say of a round.

    Args:
      step: of one local update.
      whole: of the whole round.
      nodes: how many nodes it is of.
      estimated: whether any of it is an estimate, and not read from a meter.
    """

    step: float
    whole: float
    nodes: int
    estimated: bool = False


@dataclass(frozen=True)
class RoundUsage:
    """What an engine measured of one round; meters turn it into costs.

    Args:
      updates: local updates in it, each at every node; the final loss counts as one.
      nodes: how many took part.
      wire_bytes: all messages of the round, of all nodes, both ways.
      readings: by resource.
      slowness: how many times as long as at a node of speed 1 the updates of the slowest took, where that is simulated.
    """

    updates: int
    nodes: int
    wire_bytes: int
    readings: Mapping[str, CombinedReading]
    slowness: float = 1.0

    def __post_init__(self) -> None:
        for name, reading in self.readings.items():
            if not 0 <= reading.nodes <= self.nodes:
                raise ValueError(f"{name} of {reading.nodes} of {self.nodes} nodes cannot be metered")

    @property
    def step_seconds(self) -> float:
        """Per local update, of the slowest node."""
        return self.readings["time"].step

    @property
    def seconds(self) -> float:
        """Of the whole round."""
        return self.readings["time"].whole

    def as_round_of(self, nodes: int, wire_bytes: int) -> "RoundUsage":
        """A trial that some nodes have made alone, as a round of so many with such messages."""
        readings = {name: replace(each, nodes=min(each.nodes, nodes)) for name, each in self.readings.items()}
        return replace(self, nodes=nodes, wire_bytes=wire_bytes, readings=readings)

    def delayed(self, seconds: float) -> "RoundUsage":
        """The same, had the round taken so much longer besides its local updates."""
        time = self.readings["time"]
        return replace(self, readings={**self.readings, "time": replace(time, whole=time.whole + seconds)})
