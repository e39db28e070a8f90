"""How fast simulated nodes are, where they differ: what a local update takes is divided by a node's speed.

A speed of 1 is that of the node which the simulated costs were measured at. What an aggregation takes is the same for
all: it is mostly the network. All wait for the node whose updates take longest, and a round is charged with that.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedbudget.arrays import Float64, Int64
from fedbudget.errors import UserError

LOGNORMAL = "lognormal:"
"""What speeds that are drawn begin with: exp(σ x), x from a standard Gaussian, σ behind the colon."""

_WIDEST = 5.0


@dataclass(frozen=True)
class Speeds:
    """Of all nodes, by their numbers; one that has a larger number has a speed of 1.

    Args:
      values: [nodes].
    """

    values: Float64

    @classmethod
    def of(
        cls, setting: Sequence[float] | str, nodes: int, rng: np.random.Generator
    ) -> "Speeds":
        """As a person gives them: a number for each node, or `lognormal:1.0`.

        Args:
          rng: to draw them from.

        >>> Speeds.of([4, 1], 2, np.random.default_rng(0)).values
        array([4., 1.])
        """
        if isinstance(setting, str):
            return cls(np.exp(spread_of(setting) * rng.standard_normal(nodes)))
        require_speeds(setting, nodes)
        return cls(np.array(setting, np.float64))

    def step_times(self, nodes: Int64) -> Float64:
        """What a local update takes at each of these, as a multiple of what it takes at a node of speed 1, [n]."""
        known = nodes < len(self.values)
        return np.where(known, 1 / self.values[np.where(known, nodes, 0)], 1.0)

    @property
    def slowest(self) -> float:
        """What a local update takes at the slowest, as a multiple."""
        return float(1 / self.values.min())


def spread_of(text: str) -> float:
    """σ of speeds that are drawn; refuses what is no such text.

    >>> spread_of("lognormal:0.5")
    0.5
    """
    found = re.fullmatch(LOGNORMAL + r"(\d+\.?\d*|\.\d+)", text.strip())
    if found is None or not float(found[1]) <= _WIDEST:
        raise UserError(
            f"`speeds` must be a number for each node, as 4,4,1,1,1, or {LOGNORMAL}SPREAD with a spread of at most "
            f"{_WIDEST:g}, not {text!r}"
        )
    return float(found[1])


def require_possible(setting: Sequence[float] | str, method: str, costs: str) -> None:
    """Refuses speeds where they have no meaning, or are no speeds."""
    if isinstance(setting, str):
        spread_of(setting)
    if method == "centralized":
        raise UserError("centralized descent has no nodes, and no `speeds`")
    if costs != "simulated":
        raise UserError(
            "`speeds` are of simulated `costs`; where these are measured, nodes are as fast as they are"
        )


def require_speeds(speeds: Sequence[float], nodes: int) -> None:
    """Refuses what is not a speed of every node."""
    if len(speeds) != nodes:
        raise UserError(
            f"every node needs a speed: {len(speeds)} are given for {nodes} nodes"
        )
    for node, speed in enumerate(speeds):
        if not 0 < speed < math.inf:
            raise UserError(
                f"the speed of node {node} must be a positive number, not {speed:g}"
            )
