"""Speeds of simulated nodes.

The time of a local update is divided by the speed of its node. Speed 1 is that of the node
at which the simulated costs were measured. Aggregations take the same time for all nodes,
because most of it is network time. Every node waits for the node whose updates take
longest, and a round is charged with that time.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedbudget.arrays import Float64, Int64
from fedbudget.errors import UserError

LOGNORMAL = "lognormal:"
"""Prefix of random speeds: exp(σ x) with x standard Gaussian, and σ after the colon."""

_MAX_SPREAD = 5.0


@dataclass(frozen=True)
class Speeds:
    """Speeds by node number; nodes with larger numbers have speed 1.

    Args:
      values: [nodes].
    """

    values: Float64

    @classmethod
    def of(
        cls, setting: Sequence[float] | str, nodes: int, rng: np.random.Generator
    ) -> "Speeds":
        """Return the speeds of a setting.

        Args:
          setting: a number for each node, or `lognormal:1.0`.
          nodes: number of nodes.
          rng: generator for random speeds.

        >>> Speeds.of([4, 1], 2, np.random.default_rng(0)).values
        array([4., 1.])
        """
        if isinstance(setting, str):
            return cls(np.exp(spread_of(setting) * rng.standard_normal(nodes)))
        require_speeds(setting, nodes)
        return cls(np.array(setting, np.float64))

    def step_times(self, nodes: Int64) -> Float64:
        """Return the time of a local update at each node, relative to speed 1, [n]."""
        known = nodes < len(self.values)
        return np.where(known, 1 / self.values[np.where(known, nodes, 0)], 1.0)

    @property
    def slowest(self) -> float:
        """Time of a local update at the slowest node, relative to speed 1."""
        return float(1 / self.values.min())


def spread_of(text: str) -> float:
    """Return σ of random speeds; raise `UserError` for any other text.

    >>> spread_of("lognormal:0.5")
    0.5
    """
    match = re.fullmatch(LOGNORMAL + r"(\d+\.?\d*|\.\d+)", text.strip())
    if match is None or not float(match[1]) <= _MAX_SPREAD:
        raise UserError(
            "`speeds` must be a number for each node, such as 4,4,1,1,1, or "
            f"{LOGNORMAL}SPREAD with a spread of at most {_MAX_SPREAD:g}, not {text!r}"
        )
    return float(match[1])


def require_speeds(speeds: Sequence[float], nodes: int) -> None:
    """Raise `UserError` unless every node has a positive speed."""
    if len(speeds) != nodes:
        raise UserError(
            f"`speeds` needs one number for each of the {nodes} nodes, not {len(speeds)}"
        )
    for node, speed in enumerate(speeds):
        if not 0 < speed < math.inf:
            raise UserError(
                f"the speed of node {node} must be a positive number, not {speed:g}"
            )
