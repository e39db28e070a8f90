"""The masking graph: which nodes share pairwise masks.

Each node masks with a few neighbours only, so a round with hundreds of nodes stays cheap.
All nodes form a ring, in an order that is drawn once for every run. A node's neighbours are
the nearest nodes on both sides: 4 log₂ n of them, or all nodes if there are few. SecAgg+
(Bell et al., 2020) uses a random graph instead of a random ring. Absent nodes are skipped,
so most nodes keep their neighbours from round to round.

Every node receives the whole ring, and computes its neighbours and thresholds itself.

A node and its neighbours are a group of n members. Each of its two secrets needs t shares.
An honest member reveals one of the two, and c colluding members both. So both are opened
only if 2(t - c) ≤ n - c, and the condition 2t > n + c excludes it.
"""

import math
from collections.abc import Sequence

FEWEST = 3
"""Smallest group: in a sum of two, each node could compute the other's part."""

THRESHOLD = 2 / 3
"""Default share of a group that must stay, at aggregators and at nodes."""
MOST_NODES = 5_000
"""Most nodes in a run, and most nodes of one member."""


def neighbours(circle: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Neighbours of each node, sorted by name. The relation is symmetric.

    Args:
      circle: names of all nodes, in ring order.
    """
    return {name: neighbours_at(circle, at) for at, name in enumerate(circle)}


def neighbours_at(circle: Sequence[str], at: int) -> tuple[str, ...]:
    """Neighbours of the node at a place of the ring, sorted by name."""
    count = len(circle)
    reach = min(2 * math.ceil(math.log2(max(2, count))), (count - 1) // 2)
    if 2 * reach + 1 >= count - 1:  # all other nodes, or all but one
        offsets = list(range(1, count))
    else:
        offsets = [*range(-reach, 0), *range(1, reach + 1)]
    return tuple(sorted([circle[(at + offset) % count] for offset in offsets]))


def needed(group: int, share: float) -> int:
    """Threshold t of a group: how many members must stay to open its masks.

    A group is a node and its neighbours. However small the share, 2t > n + 1: one member
    may collude with the aggregator.

    >>> needed(3, 2 / 3), needed(5, 2 / 3), needed(9, 0.5), needed(25, 1.0)
    (3, 4, 6, 25)
    """
    return max(math.ceil(share * group - 1e-9), (group + 3) // 2, FEWEST)


def tolerated(group: int, threshold: int) -> int:
    """Largest number c of colluding members for which 2t > n + c.

    >>> tolerated(3, 3), tolerated(5, 4), tolerated(7, 5), tolerated(25, 17)
    (2, 2, 2, 8)
    """
    return 2 * threshold - group - 1


def sharers(fewest: int) -> int:
    """Number m of nodes whose noise shares together are as large as the noise paid for.

    Args:
      fewest: nodes in the smallest sum that is ever opened. A node can subtract its own
        share of the noise, so the other `fewest - 1` shares must suffice.
    """
    return fewest - 1
