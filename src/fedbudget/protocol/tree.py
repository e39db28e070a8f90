"""Sums over nodes that are the same bits however nodes are grouped.

Floating-point sums depend on their order. Here the order is that of a binary tree over node numbers, the same for every
run: nodes 2k and 2k+1 are added first, then pairs 4k and 4k+2, and so on; who is absent is passed over.

                 ┌───────┴───────┐
             ┌───┴───┐       ┌───┴───┐
            0 1     2 3     4 5     6 7

So whoever has all nodes of a branch can sum it, and whoever puts branches together gets what one sum over all nodes
would have been. A range of nodes is made up of few branches: `branches(3, 8)` are 3 and 4-7. A branch is known by its
first node, which is where it hangs in the tree, and so sums of branches add up by the same function as nodes do.

Sums along a tree are also more exact than one after the other: errors grow with the logarithm of the number of nodes.

Vectors that come one by one, in any order, are added as soon as both halves of a branch are there (`GrowingSum`).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.models.compiling import import_kernels

_MANY = 2**16  # columns: numpy is as quick from there on
_COLUMNS = 2**15  # at a time, so that what is added stays in the cache
_DEPTH = 65  # levels of a tree over numbers of 64 bits


def add_up(numbers: Int64, weights: Float64, values: Float32 | Float64) -> Float64:
    """Σ weight_i value_i over nodes, or over branches of them, [n, columns] to [columns].

    Args:
      numbers: of the nodes, or of the first in each branch, rising, [n].

    >>> add_up(np.array([0, 1, 2]), np.ones(3), np.array([[1e16], [1.0], [-1e16]]))  # not 1: the order is fixed
    array([0.])
    """
    kernel = None if values.shape[1] >= _MANY else _kernel()
    if kernel is None:
        return add_up_in_numpy(numbers, weights, values)
    total = np.zeros(values.shape[1])
    kernel.add_up(numbers, weights, np.require(values, requirements=("C", "A")), total)
    return total


def add_up_in_numpy(numbers: Int64, weights: Float64, values: Float32 | Float64) -> Float64:
    """The same bits, without numba. Partial sums wait on a stack until their other half is there."""
    total, own = np.zeros(values.shape[1]), numbers.tolist()
    for first in range(0, values.shape[1], _COLUMNS):
        columns = slice(first, first + _COLUMNS)
        partial: list[tuple[int, Float64]] = []  # each with where it is joined to the one before it
        for node, number in enumerate(own):
            joined = (number ^ own[node - 1]).bit_length() if node else 0
            _join(partial, joined)
            partial.append((joined, np.multiply(weights[node], values[node, columns], dtype=np.float64)))
        _join(partial, _DEPTH)
        if partial:
            total[columns] += partial[0][1]  # never -0, which a branch without nodes would change
    return total


def _join(partial: list[tuple[int, Float64]], level: int) -> None:
    """Adds up what is joined below a level of the tree."""
    while len(partial) > 1 and partial[-1][0] < level:
        _, last = partial.pop()
        np.add(partial[-1][1], last, out=partial[-1][1])


@dataclass
class _Branch:
    """A node's vector with its weight, or the sum over a branch."""

    values: Float32 | Float64
    weight: float

    def summed(self) -> Float64:
        if self.values.dtype == np.float64:
            return np.asarray(self.values, np.float64)
        return np.multiply(self.weight, self.values, dtype=np.float64)

    def add(self, other: "_Branch") -> "_Branch":
        """With the branch after it; both are used up."""
        total = self.summed()
        for first in range(0, total.size, _COLUMNS):
            columns = slice(first, first + _COLUMNS)
            total[columns] += np.multiply(other.weight, other.values[columns], dtype=np.float64)
        return _Branch(total, 1.0)


class GrowingSum:
    """What `add_up` gives, of vectors that come one by one, in any order.

    Of a branch whose nodes have all come one vector is held. So there are few: two for each level of the tree where
    nodes come in order, and 0.4 for each node, at most, where they come at random.
    """

    def __init__(self) -> None:
        self._branches: dict[tuple[int, int], _Branch] = {}  # by first node and size

    def __len__(self) -> int:
        """How many vectors are held."""
        return len(self._branches)

    def add_node(self, number: int, weight: float, values: Float32) -> None:
        self._add(number, 1, _Branch(values, weight))

    def add_branch(self, first: int, size: int, values: Float64) -> None:
        """The sum over all nodes of a branch, which is taken over."""
        self._add(first, size, _Branch(values, 1.0))

    def _add(self, first: int, size: int, branch: _Branch) -> None:
        while (other := self._branches.pop((first ^ size, size), None)) is not None:
            branch = other.add(branch) if first & size else branch.add(other)
            first, size = first & ~size, 2 * size
        self._branches[first, size] = branch

    def total(self) -> Float64:
        """Of all that came, at least one; nothing is held any more."""
        partial: list[tuple[int, Float64]] = []
        before = 0
        for first, size in sorted(self._branches):
            joined = (first ^ before).bit_length() if partial else 0
            _join(partial, joined)
            partial.append((joined, self._branches.pop((first, size)).summed()))
            before = first
        _join(partial, _DEPTH)
        total = partial[0][1]
        return np.add(total, 0.0, out=total)  # never -0, as above


def prepare() -> None:
    """Loads or compiles what `add_up` needs, so that no round waits for it."""
    _kernel()


def _kernel() -> Any | None:
    """The compiled loop, where numba is installed."""
    return import_kernels("fedbudget.protocol.tree_kernel")


def branches(first: int, end: int) -> Int64:
    """The branches that nodes first..end-1 are made up of, by where each begins, and `end` after the last.

    >>> branches(3, 8), branches(0, 6)
    (array([3, 4, 8]), array([0, 4, 6]))
    """
    begins = [first]
    while begins[-1] < end:
        at = begins[-1]
        size = (at & -at) or 1 << (end.bit_length())  # the largest branch that begins here
        while at + size > end:
            size >>= 1
        begins.append(at + size)
    return np.array(begins, np.int64)
