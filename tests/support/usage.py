"""Usage of a hand-made round with 4 nodes and 10 updates."""

from fedbudget.resources.resource import CombinedReading, NodeCosts, Reading, RoundUsage

TIME = CombinedReading(0.5, 7.0, nodes=4)  # 5 of 7 seconds are local updates
CPU = CombinedReading(0.75, 8.5, nodes=4)  # 7.5 of 8.5 CPU seconds are local updates


def usage(
    time: CombinedReading | None = TIME,
    cpu: CombinedReading | None = CPU,
    energy: CombinedReading | None = None,
    *,
    updates: int = 10,
    nodes: int = 4,
    wire_bytes: int = 2_000_000,
) -> RoundUsage:
    known = {"time": time, "cpu": cpu, "energy": energy}
    readings = {name: reading for name, reading in known.items() if reading is not None}
    return RoundUsage(updates, nodes, wire_bytes, readings)


def node_costs(
    step_seconds: float, seconds: float, **others: tuple[float, float]
) -> NodeCosts:
    """Costs of a node from (step, total) of each resource."""
    readings = {"time": (step_seconds, seconds), **others}
    return NodeCosts(
        {name: Reading(step, whole) for name, (step, whole) in readings.items()}
    )
