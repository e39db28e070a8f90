"""The masking graph: which nodes share pairwise masks.

Each node masks with a few neighbours only, so a round with hundreds of nodes stays cheap.
All nodes form a ring, in an order that is drawn once for every run. A node's neighbours are
the nearest nodes on both sides: 4 log₂ n of them, or all nodes if there are few. SecAgg+
(Bell et al., 2020) uses a random graph instead of a random ring. Absent nodes are skipped,
so most nodes keep their neighbours from round to round.
"""

import math
from collections.abc import Sequence

FEWEST = 3
"""Smallest group: in a sum of two, each node could compute the other's part."""


def neighbours(circle: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Neighbours of each node, sorted by name. The relation is symmetric.

    Args:
      circle: names of all nodes, in ring order.
    """
    count = len(circle)
    reach = min(2 * math.ceil(math.log2(max(2, count))), (count - 1) // 2)
    if 2 * reach + 1 >= count - 1:  # all other nodes, or all but one
        offsets = list(range(1, count))
    else:
        offsets = [*range(-reach, 0), *range(1, reach + 1)]
    return {
        name: tuple(sorted(circle[(at + offset) % count] for offset in offsets))
        for at, name in enumerate(circle)
    }


def needed(group: int, share: float) -> int:
    """Threshold of a group: how many members must stay to open its masks.

    A group is a node and its neighbours. More than half of it are always needed.

    >>> needed(3, 2 / 3), needed(5, 2 / 3), needed(10, 0.5), needed(25, 1.0)
    (3, 4, 6, 25)
    """
    return max(math.ceil(share * group - 1e-9), group // 2 + 1, FEWEST)


def sharers(fewest: int) -> int:
    """Number m of nodes whose noise shares together are as large as the noise paid for.

    Args:
      fewest: nodes in the smallest sum that is ever opened. A node can subtract its own
        share of the noise, so the other `fewest - 1` shares must suffice.
    """
    return fewest - 1


def most_sharers(group: int, threshold: int) -> int:
    """Largest plausible `sharers`, computed by a node from its group.

    Args:
      group: nodes in the group, with this node.
      threshold: of the group.

    >>> most_sharers(5, 4), most_sharers(33, 22)
    (3, 255)
    """
    everyone = 2 ** ((group - 1) // 4)  # inverse of 4 log₂ n neighbours
    # A group of few nodes contains all of them.
    return sharers(everyone if everyone > group else threshold)
