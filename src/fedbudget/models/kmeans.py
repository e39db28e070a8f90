"""K-means, Table I: f_j(w) = ½ min_l ‖x_j - w_(l)‖², with the centres w_(l) one after the other in w."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numba.extending import register_jitable

from fedbudget.arrays import Float32
from fedbudget.errors import UserError
from fedbudget.models.base import KernelModel, ModelOptions, Target
from fedbudget.models.by_row import by_row, row_gradient, row_loss
from fedbudget.models.kernels import FAST, implements


class KMeansTerms(NamedTuple):
    clusters: int


@dataclass(frozen=True)
class KMeans(KernelModel):
    """Clusters, learned without any target; w(0) is uniform in [0, 1), because equal centres would stay equal."""

    name: ClassVar[str] = "kmeans"
    target: ClassVar[Target] = "none"
    OPTIONS: ClassVar[ModelOptions] = {"clusters": 4}
    features: int
    clusters: int = 4
    regularization: float = 0.0

    def __post_init__(self) -> None:
        if self.clusters < 1:
            raise UserError(f"clusters must be at least 1, not {self.clusters}")

    @property
    def parameters(self) -> int:
        return self.features * self.clusters

    @property
    def terms(self) -> KMeansTerms:
        return KMeansTerms(self.clusters)

    def initial(self, seed: int) -> Float32:
        return np.random.default_rng(seed).random(self.parameters, dtype=np.float32)


@register_jitable(fastmath=FAST, forceinline=True)
def _nearest(clusters, w, x, scale):
    """The nearest centre and the square of its distance; the first one on ties."""
    features = x.size
    best, smallest = 0, np.float32(np.inf)
    for cluster in range(clusters):
        distance = np.float32(0)
        for j in range(features):
            difference = w[cluster * features + j] - np.float32(x[j]) * scale
            distance += difference * difference
        if distance < smallest:
            best, smallest = cluster, distance
    return best, smallest


@implements(row_loss, KMeansTerms)
def loss(terms, w, x, y, scale, scratch):
    _, distance = _nearest(terms.clusters, w, x, scale)
    return 0.5 * np.float64(distance)


@implements(row_gradient, KMeansTerms)
def add(terms, w, x, y, scale, scratch, gradient):
    cluster, distance = _nearest(terms.clusters, w, x, scale)
    offset = cluster * x.size
    for j in range(x.size):
        gradient[offset + j] += w[offset + j] - np.float32(x[j]) * scale
    return 0.5 * np.float64(distance)


by_row(KMeansTerms)
