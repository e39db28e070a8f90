"""Who shares masks with whom: some neighbours of each, so that a round with hundreds of nodes stays cheap.

All stand in a circle, in an order that is drawn anew for every run, and everyone's neighbours are the nearest on both
sides: 4 log₂ n of them, or all where they are few (as in SecAgg+, Bell et al., 2020, but in a circle by chance in place
of a graph by chance). Who is absent is passed over, so that most keep their neighbours from round to round.
"""

import math
from collections.abc import Sequence

FEWEST = 3
"""Of two, each knows the other's part of the sum."""


def neighbours(circle: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Of each, in the order of names; whoever is somebody's neighbour has that one for a neighbour too.

    Args:
      circle: all, in the order in which they stand.
    """
    count = len(circle)
    reach = min(side_of(count), (count - 1) // 2)
    if 2 * reach + 1 >= count - 1:  # all, but for one at most
        return {
            name: tuple(sorted(other for other in circle if other != name))
            for name in circle
        }
    around = [*range(-reach, 0), *range(1, reach + 1)]
    return {
        name: tuple(sorted(circle[(at + way) % count] for way in around))
        for at, name in enumerate(circle)
    }


def side_of(count: int) -> int:
    """How many neighbours one of so many has on either side, unless these are all."""
    return 2 * math.ceil(math.log2(max(2, count)))


def needed(group: int, share: float) -> int:
    """How many of a group, a node and its neighbours, must stay for its masks to be opened: always more than half.

    >>> needed(3, 2 / 3), needed(5, 2 / 3), needed(10, 0.5), needed(25, 1.0)
    (3, 4, 6, 25)
    """
    return max(math.ceil(share * group - 1e-9), group // 2 + 1, FEWEST)


def sharers(fewest: int) -> int:
    """For how many nodes' noise a share is sized, where a sum of fewer than some is never opened: each of these knows
    its own share, and must not learn more of the others by that.
    """
    return fewest - 1


def most_sharers(group: int, threshold: int) -> int:
    """The same as far as a node can tell, from its group and how many of it are needed: small groups have all in them.

    >>> most_sharers(5, 4), most_sharers(33, 22)
    (3, 255)
    """
    everyone = 2 ** ((group - 1) // 4)  # as of `side_of`
    return sharers(everyone if everyone > group else threshold)
