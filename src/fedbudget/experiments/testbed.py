"""Node processes of several speeds on this machine, and a network between them that is slower than its own."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Testbed:
    """What stands for a fleet of other machines.

    Args:
      paces: how many times as long as it could a local update takes, at each node.
      delay: seconds that every message between a node and the aggregator takes longer, each way.
    """

    paces: tuple[float, ...]
    delay: float


PROTOTYPE = Testbed(paces=(125.0, 125.0, 500.0, 500.0, 500.0), delay=0.065)
"""Two laptops and three Raspberry Pis at a quarter of their speed, with an aggregation of about 130 ms over Wi-Fi. A
step of the SVM takes some 0.02 to 0.04 ms on a processor of today, and 13 to 22 ms on the paper's prototype."""
