"""Fleets of the nodes of a problem."""

from collections.abc import Sequence

import numpy as np

from fedbudget.arrays import Int64
from fedbudget.data.shards import Shards
from fedbudget.protocol.features.feature import Feature
from fedbudget.protocol.fleet import Fleet
from support.problems import Problem


def single_node_fleets(
    case: Problem,
    parts: Sequence[Int64],
    batch: int | None = None,
    features: Sequence[Feature] = (),
) -> list[Fleet]:
    """One fleet for each node."""
    return [
        Fleet(
            case.model,
            Shards.of(case.table, [part]),
            batch=batch,
            seed=9,
            features=features,
            numbers=[node],
        )
        for node, part in enumerate(parts)
    ]


def one_fleet(
    case: Problem,
    parts: Sequence[Int64],
    batch: int | None = None,
    features: Sequence[Feature] = (),
) -> Fleet:
    shards = Shards.of(case.table, parts)
    return Fleet(case.model, shards, batch=batch, seed=9, features=features)


def sorted_parts(case: Problem, nodes: int) -> list[Int64]:
    """Rows sorted by target and split into equal parts, so that nodes differ."""
    return list(np.array_split(np.argsort(case.y, kind="stable"), nodes))
