"""What distinguishes models to compiled kernels: a NamedTuple for each, on whose type row functions are chosen."""

from typing import NamedTuple


class SquaredSvmTerms(NamedTuple):
    """Nothing: the loss has no constants but λ."""


class LinearTerms(NamedTuple):
    """Nothing: the loss has no constants."""


class SoftmaxTerms(NamedTuple):
    classes: int


class KMeansTerms(NamedTuple):
    clusters: int
