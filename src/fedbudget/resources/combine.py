"""How the readings of many nodes become one: of the slowest, of all added up, or of every machine once.

Every function here has the same arguments, and `Resource.combine` chooses one of them:

  name: of the resource.
  nodes: that took part.
  own: what the aggregator's process used in the whole round; None where that is not known, as of a trial round.

The result is None where nobody has read the resource. Where only some nodes have, the others are taken to have used as
much as these on average: what one does not tell is unknown, and no reason to end a run.
"""

import math
from collections.abc import Sequence

from fedbudget.resources.host import is_estimate, machine
from fedbudget.resources.usage import CombinedReading, NodeCosts, Reading

_UNKNOWN = Reading(math.nan, math.nan)


def slowest(name: str, nodes: Sequence[NodeCosts], own: float | None) -> CombinedReading:
    """All wait for the slowest node; the aggregator's clock has the whole round."""
    readings = [costs.readings.get(name, _UNKNOWN) for costs in nodes]
    step, whole = (_max([getattr(reading, part) for reading in readings]) for part in ("step", "whole"))
    return CombinedReading(step, whole if own is None else own, _count(nodes))


def total(name: str, nodes: Sequence[NodeCosts], own: float | None) -> CombinedReading | None:
    """All nodes and the aggregator add up; what is in the aggregator's process counts once."""
    if own is None and not any(name in costs.readings for costs in nodes):
        return None
    step = _sum_of_all(name, "step", nodes)
    whole = _sum_of_all(name, "whole", [costs for costs in nodes if own is None or not costs.here])
    return CombinedReading(step, whole if own is None else own + whole, _count(nodes))


def once_per_host(name: str, nodes: Sequence[NodeCosts], own: float | None) -> CombinedReading | None:
    """Nodes on one machine read one counter, which counts once; of nodes without a counter nothing is known."""
    read = [(costs, costs.readings[name]) for costs in nodes if name in costs.readings]
    if not read:
        return None
    steps: dict[str, float] = {}
    wholes: dict[str, float] = {}
    for _, reading in read:
        host = machine(reading.host)
        steps[host] = max(steps.get(host, 0.0), reading.step)
        wholes[host] = max(wholes.get(host, 0.0), reading.whole)
    count, estimated = _count([costs for costs, _ in read]), any(is_estimate(reading.host) for _, reading in read)
    return CombinedReading(sum(steps.values()), sum(wholes.values()), count, estimated)


def _sum_of_all(name: str, part: str, nodes: Sequence[NodeCosts]) -> float:
    """Over nodes that tell, and as much on average for the others; nan where none tells."""
    told = [costs for costs in nodes if name in costs.readings]
    total = sum(getattr(costs.readings[name], part) for costs in told)
    if len(told) == len(nodes):
        return float(total)
    return float(total) * _count(nodes) / _count(told) if told else math.nan


def _count(nodes: Sequence[NodeCosts]) -> int:
    return sum(costs.nodes for costs in nodes)


def _max(values: Sequence[float]) -> float:
    """0 of none; nan when one is."""
    return math.nan if any(math.isnan(value) for value in values) else max(values, default=0.0)
