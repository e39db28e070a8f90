"""The nodes of a problem as fleets."""

from collections.abc import Sequence

import numpy as np

from fedbudget.arrays import Int64
from fedbudget.data.shards import Shards
from fedbudget.protocol.fleet import Fleet
from support.problems import Problem


def alone(case: Problem, parts: Sequence[Int64], batch: int | None = None) -> list[Fleet]:
    """Each node as a fleet of its own."""
    return [
        Fleet(
            case.model, Shards.of(case.table, [part]), batch=batch, seed=9, numbers=[node]
        )
        for node, part in enumerate(parts)
    ]


def together(case: Problem, parts: Sequence[Int64], batch: int | None = None) -> Fleet:
    return Fleet(case.model, Shards.of(case.table, parts), batch=batch, seed=9)


def sorted_parts(case: Problem, nodes: int) -> list[Int64]:
    """Data of its own kind on each node: rows in the order of what is to be predicted."""
    return list(np.array_split(np.argsort(case.y, kind="stable"), nodes))
