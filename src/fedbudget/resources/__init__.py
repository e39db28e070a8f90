"""The registry of resources, and the usage of a round over all nodes.

To add a resource, subclass `Resource` and call `register`: in the aggregator's process,
and at every node that reads a counter for it.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedbudget.resources.energy import Energy
from fedbudget.resources.kinds import Bytes, Cpu, Money, Time
from fedbudget.resources.privacy import Privacy
from fedbudget.resources.resource import Reading, Resource, Usage

TIME = Time()

RESOURCES: dict[str, Resource] = {
    resource.name: resource
    for resource in (TIME, Energy(), Bytes(), Cpu(), Money(), Privacy())
}


def register(resource: Resource) -> None:
    """Add a resource to the budgets, meters and views of this process."""
    if not re.fullmatch("[A-Za-z]+", resource.name):
        raise ValueError(f"a resource's name consists of letters, not {resource.name!r}")
    if resource.name in RESOURCES:
        raise ValueError(f"a resource named {resource.name} exists already")
    RESOURCES[resource.name] = resource


def within(usage: Usage, seconds: float, updates: int) -> Usage:
    """Return the usage with each reading capped by what a machine can use in a time.

    Counters other than the clock continue while a node waits for its round. Their limit is
    that of one second at least.

    Args:
      seconds: time of the round on another clock.
      updates: local updates in the round.
    """
    parts: list[dict[str, Reading]] = []
    beyond = False
    for readings, steps in ((usage.readings, updates), (usage.evaluation, 1)):
        capped = dict(readings)
        for name, reading in readings.items():
            most = math.inf
            if name == TIME.name:
                most = seconds
            elif name in RESOURCES:
                most = RESOURCES[name].most_a_second * max(1.0, seconds)
            if reading.step > most / steps or reading.whole > most:
                beyond = True
                step = min(reading.step, most / steps)
                capped[name] = replace(reading, step=step, whole=min(reading.whole, most))
        parts.append(capped)
    if not beyond:  # the usual case
        return usage
    return replace(usage, readings=parts[0], evaluation=parts[1])


def round_usage(
    nodes: Sequence[Usage],
    *,
    updates: int = 1,
    own: Mapping[str, float] | None = None,
    wire_bytes: int = 0,
) -> Usage:
    """Return the usage of a round over all nodes, combined by each resource's rule.

    Args:
      nodes: measured at each node.
      updates: local updates at each node.
      own: use of the aggregator's process in the whole round; None for a trial round,
        which nodes make alone.
      wire_bytes: bytes that the engine counted, in addition to those of `nodes`.
    """
    present = [usage for usage in nodes if usage.nodes]
    count = sum(usage.nodes for usage in present)
    counted = {} if own is None else own
    names = {TIME.name, *counted}.union(*(usage.readings for usage in present))
    readings = {}
    for name, resource in RESOURCES.items():
        reading = resource.combine(present, counted.get(name)) if name in names else None
        if reading is None:
            continue
        if not 0 <= reading.nodes <= count:
            raise ValueError(
                f"{name} was read at {reading.nodes} nodes of a round with {count}"
            )
        readings[name] = reading
    wire_bytes += sum(usage.wire_bytes for usage in present)
    return Usage(readings, count, wire_bytes, updates)
