"""Usage of a hand-made round with 4 nodes and 10 updates."""

from fedbudget.resources.resource import Reading, Usage

TIME = Reading(0.5, 7.0, nodes=4)  # 5 of 7 seconds are local updates
CPU = Reading(0.75, 8.5, nodes=4)  # 7.5 of 8.5 CPU seconds are local updates


def usage(
    time: Reading | None = TIME,
    cpu: Reading | None = CPU,
    energy: Reading | None = None,
    *,
    updates: int = 10,
    nodes: int = 4,
    wire_bytes: int = 2_000_000,
) -> Usage:
    known = {"time": time, "cpu": cpu, "energy": energy}
    readings = {name: reading for name, reading in known.items() if reading is not None}
    return Usage(readings, nodes, wire_bytes, updates)


def node_costs(step_seconds: float, seconds: float, **others: tuple[float, float]) -> Usage:
    """Costs of a node from (step, total) of each resource."""
    readings = {"time": (step_seconds, seconds), **others}
    return Usage({name: Reading(step, whole) for name, (step, whole) in readings.items()})
