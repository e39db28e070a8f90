"""The list of resources, and what a round used of each.

A resource of one's own is a subclass of `Resource` in a file of its own, and an entry here or a call of `register`: in
the aggregator's process, and at nodes that are to read a counter for it.
"""

import re
from collections.abc import Sequence

from fedbudget.resources.counters import Snapshot
from fedbudget.resources.energy import Energy
from fedbudget.resources.kinds import Bytes, Cpu, Money, Time
from fedbudget.resources.privacy import Privacy
from fedbudget.resources.resource import NodeCosts, Resource, RoundUsage

TIME = Time()

RESOURCES: dict[str, Resource] = {
    resource.name: resource
    for resource in (TIME, Energy(), Bytes(), Cpu(), Money(), Privacy())
}


def register(resource: Resource) -> None:
    """Makes a resource known to budgets, meters and views of this process."""
    if not re.fullmatch("[A-Za-z]+", resource.name):
        raise ValueError(f"the name of a resource has letters only, not {resource.name!r}")
    if resource.name in RESOURCES:
        raise ValueError(f"there is a resource {resource.name} already")
    RESOURCES[resource.name] = resource


def most_within(seconds: float) -> dict[str, float]:
    """What a machine can use of each resource in so much time, for `NodeCosts.within`; of most there is no limit.

    Other counters than the clock ran on while a node waited for its round: of them there is a second at least.
    """
    return {TIME.name: seconds} | {
        name: resource.most_a_second * max(1.0, seconds)
        for name, resource in RESOURCES.items()
        if name != TIME.name
    }


def round_usage(
    nodes: Sequence[NodeCosts],
    *,
    updates: int = 1,
    own: Snapshot | None = None,
    wire_bytes: int | None = None,
) -> RoundUsage:
    """What all nodes together used in a round, combined as each resource says.

    Args:
      updates: local updates of each.
      own: what the aggregator's process counted in the whole round; None of a trial round, that nodes make alone.
      wire_bytes: of all messages, where they were counted; else as nodes say.
    """
    present = [costs for costs in nodes if costs.nodes]
    counted = {} if own is None else own.values
    names = dict.fromkeys(
        [TIME.name, *counted, *(name for costs in present for name in costs.readings)]
    )
    combined = {
        name: RESOURCES[name].combine(present, counted.get(name))
        for name in names
        if name in RESOURCES
    }
    return RoundUsage(
        updates,
        sum(costs.nodes for costs in present),
        sum(costs.wire_bytes for costs in present) if wire_bytes is None else wire_bytes,
        {name: reading for name, reading in combined.items() if reading is not None},
    )
