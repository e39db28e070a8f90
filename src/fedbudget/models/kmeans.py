"""K-means, Table I: f_j(w) = ½ min_l ‖x_j - w_(l)‖², with the centres w_(l) one after the other in w."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedbudget.arrays import Float32
from fedbudget.errors import UserError
from fedbudget.models.base import KernelModel, ModelOptions, Target
from fedbudget.models.description import TensorDescription
from fedbudget.models.terms import KMeansTerms


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
    def tensors(self) -> tuple[TensorDescription, ...]:
        return (TensorDescription("centres", (self.clusters, self.features)),)

    @property
    def terms(self) -> KMeansTerms:
        return KMeansTerms(self.clusters)

    def initial(self, seed: int) -> Float32:
        return np.random.default_rng(seed).random(self.parameters, dtype=np.float32)

    def sums(self, w: Float32, x: Float32, y: Float32) -> tuple[float, Float32]:
        scores = self.scores(w, x)
        centres, nearest = w.reshape(self.clusters, -1), scores.argmax(axis=1)
        members = [x[nearest == cluster] for cluster in range(self.clusters)]
        gradient = [(centre - own).sum(axis=0) for centre, own in zip(centres, members, strict=True)]
        return -float(scores.max(axis=1).sum(dtype=np.float64)), np.concatenate(gradient)

    def scores(self, w: Float32, x: Float32) -> Float32:
        centres = w.reshape(self.clusters, -1)
        return np.stack([-0.5 * np.square(x - centre).sum(axis=1) for centre in centres], axis=1)
