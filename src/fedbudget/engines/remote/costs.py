"""What a round took at a node, as the node tells it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class NodeCosts:
    """What a round took at a node.

    Args:
      step_seconds, step_cpu, step_joules: of one local update.
      seconds, cpu: of the whole round.
      step_joules, joules: where energy was measured.
      host: whose energy that is; several nodes may be on one machine.
      here: in the aggregator's own process, whose clock has it already.
    """

    step_seconds: float
    seconds: float
    step_cpu: float | None = None
    cpu: float | None = None
    step_joules: float | None = None
    joules: float | None = None
    host: str = ""
    here: bool = False
