"""The models that need no PyTorch. w(0) = 0 unless stated otherwise.

- Squared-SVM, Table I: f_j(w) = λ/2 ‖w‖² + ½ max{0, 1 - y_j wᵀx_j}², labels ±1, no bias.
- Linear regression, Table I: f_j(w) = ½ ‖y_j - wᵀx_j‖².
- Softmax regression: f_j(w) = -log softmax(W x_j + bias)[y_j]. w has the weights and then
  the bias of the first class, then those of the second class, and so on.
- K-means, Table I: f_j(w) = ½ min_l ‖x_j - w_(l)‖², with the centres w_(l) one after the
  other.

The type of a model's `terms` selects its row functions in compiled/rows.py.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fedbudget.arrays import Float32, Float64
from fedbudget.data.shards import Table
from fedbudget.errors import UserError
from fedbudget.models.base import KernelModel, ModelOptions, Rows, Target
from fedbudget.models.description import TensorDescription
from fedbudget.models.per_sample import OuterGradients, features


class SquaredSvmTerms(NamedTuple):
    """Empty: λ is the only constant of the loss, and a separate argument."""


class LinearTerms(NamedTuple):
    """Empty: the loss has no constants."""


class SoftmaxTerms(NamedTuple):
    """Constants of softmax regression."""

    classes: int


class KMeansTerms(NamedTuple):
    """Constants of K-means."""

    clusters: int


@dataclass(frozen=True)
class ScoreModel(KernelModel):
    """A model with one score wᵀx per sample and one parameter per feature."""

    convex: ClassVar[bool] = True
    features: int
    regularization: float = 0.0

    @cached_property
    def parameters(self) -> int:
        return self.features

    @property
    def tensors(self) -> tuple[TensorDescription, ...]:
        return (TensorDescription("weight", (self.features,)),)

    def scores(self, w: Float32, x: Float32) -> Float32:
        return np.asarray(x @ w, np.float32)[:, None]

    @abstractmethod
    def slopes(self, scores: Float64, y: Float32) -> Float64:
        """Derivative of the loss by the score, [rows]."""

    @abstractmethod
    def second_slopes(self, scores: Float64, y: Float32) -> Float64:
        """Second derivative of the loss by the score, [rows]."""

    def score_derivatives(
        self, w: Float32, x: Float64, y: Float32
    ) -> tuple[Float64, Float64]:
        """Return first and second derivatives of the loss by the scores, for each row.

        Args:
          w: [parameters].
          x: features, [rows, features].
          y: targets, [rows].

        Returns:
          arrays [rows, scores] and [rows, scores, scores].
        """
        scores = x @ w.astype(np.float64)
        seconds = self.second_slopes(scores, y)
        return self.slopes(scores, y)[:, None], seconds[:, None, None]

    def sample_gradients(self, w: Float32, table: Table, rows: Rows) -> OuterGradients:
        """Gradients of single samples, without regularization."""
        x = features(table, rows)
        slopes = self.slopes(x @ w.astype(np.float64), table.y[rows])
        return OuterGradients(slopes[:, None], x)


@dataclass(frozen=True)
class LinearRegression(ScoreModel):
    """Linear prediction of a real number.

    Center features and target: it has no intercept.
    """

    name: ClassVar[str] = "linear"
    target: ClassVar[Target] = "real"
    terms: ClassVar[LinearTerms] = LinearTerms()

    def sums(self, w: Float32, x: Float32, y: Float32) -> tuple[float, Float32]:
        errors = np.asarray(x @ w - y, np.float32)
        return 0.5 * float(np.square(errors, dtype=np.float64).sum()), errors @ x

    def slopes(self, scores: Float64, y: Float32) -> Float64:
        return np.asarray(scores - y)

    def second_slopes(self, scores: Float64, y: Float32) -> Float64:
        return np.ones_like(scores)


@dataclass(frozen=True)
class SquaredSvm(ScoreModel):
    """Linear classifier of two classes."""

    name: ClassVar[str] = "svm"
    target: ClassVar[Target] = "binary"
    terms: ClassVar[SquaredSvmTerms] = SquaredSvmTerms()
    regularization: float = 0.1

    def sums(self, w: Float32, x: Float32, y: Float32) -> tuple[float, Float32]:
        slack = np.maximum(np.float32(1) - y * (x @ w), np.float32(0))
        return 0.5 * float(np.square(slack, dtype=np.float64).sum()), -(y * slack) @ x

    def slopes(self, scores: Float64, y: Float32) -> Float64:
        return np.asarray(-y * np.maximum(1 - y * scores, 0))

    def second_slopes(self, scores: Float64, y: Float32) -> Float64:
        return np.asarray(y * scores < 1, np.float64)


@dataclass(frozen=True)
class Softmax(KernelModel):
    """Linear classifier of any number of classes.

    Args:
      weights: factor of the loss of each class's samples; 1 for all by default.
    """

    name: ClassVar[str] = "softmax"
    target: ClassVar[Target] = "classes"
    convex: ClassVar[bool] = True
    features: int
    classes: int
    regularization: float = 0.0
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.weights and len(self.weights) != self.classes:
            raise UserError(
                f"`class_weights` has {len(self.weights)} numbers, but there are "
                f"{self.classes} classes"
            )

    @cached_property
    def parameters(self) -> int:
        return (self.features + 1) * self.classes

    @property
    def tensors(self) -> tuple[TensorDescription, ...]:
        weight = TensorDescription("weight", (self.classes, self.features))
        return weight, TensorDescription("bias", (self.classes,))

    @property
    def rows(self) -> int:
        return self.classes

    @cached_property
    def terms(self) -> SoftmaxTerms:
        return SoftmaxTerms(self.classes)

    @cached_property
    def compiled(self) -> bool:
        return not self.weights

    def sums(self, w: Float32, x: Float32, y: Float32) -> tuple[float, Float32]:
        row = np.arange(len(y))
        labels = y.astype(np.int64)
        logits = self.scores(w, x).astype(np.float64)
        highest = logits.max(axis=1, keepdims=True)
        log_sums = np.log(np.exp(logits - highest).sum(axis=1, keepdims=True)) + highest
        errors = np.exp(logits - log_sums).astype(np.float32)
        errors[row, labels] -= 1
        losses = log_sums[:, 0] - logits[row, labels]
        if self.weights:
            weights = np.array(self.weights, np.float32)[labels]
            errors *= weights[:, None]
            losses = losses * weights
        gradient = np.column_stack([errors.T @ x, errors.sum(axis=0)])
        return float(losses.sum()), gradient.ravel()

    def scores(self, w: Any, x: Any) -> Any:
        weights = w.reshape(self.classes, -1)
        return x @ weights[:, :-1].T + weights[:, -1]

    def score_derivatives(
        self, w: Float32, x: Float64, y: Float32
    ) -> tuple[Float64, Float64]:
        """Return first and second derivatives of the loss by the scores, for each row.

        Args:
          w: [parameters].
          x: features and a 1 for the bias, [rows, features + 1].
          y: class numbers, [rows].

        Returns:
          arrays [rows, classes] and [rows, classes, classes].
        """
        shares = _softmax(x @ w.astype(np.float64).reshape(self.classes, -1).T)
        seconds = shares[:, :, None] * (np.eye(self.classes) - shares[:, None, :])
        slopes, weights = self._slopes(shares, y)
        return slopes, seconds if weights is None else weights[:, None, None] * seconds

    def sample_gradients(self, w: Float32, table: Table, rows: Rows) -> OuterGradients:
        """Gradients of single samples, without regularization."""
        x = features(table, rows)
        shares = _softmax(self.scores(w.astype(np.float64), x))
        return OuterGradients(self._slopes(shares, table.y[rows])[0], x, bias=True)

    def _slopes(self, shares: Float64, y: Float32) -> tuple[Float64, Float64 | None]:
        """Return the derivatives by the scores, and the weight of each row if there are
        weights."""
        labels = y.astype(np.int64)
        slopes = shares.copy()
        slopes[np.arange(len(labels)), labels] -= 1
        if not self.weights:
            return slopes, None
        weights = np.array(self.weights)[labels]
        return slopes * weights[:, None], weights


def _softmax(scores: Float64) -> Float64:
    """Return the probability of each class, [rows, classes]."""
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(shares / shares.sum(axis=1, keepdims=True))


@dataclass(frozen=True)
class KMeans(KernelModel):
    """Clusters without targets.

    w(0) is uniform in [0, 1), because equal centres would stay equal. The gradient jumps
    where a sample changes its centre.
    """

    name: ClassVar[str] = "kmeans"
    smooth: ClassVar[bool] = False
    target: ClassVar[Target] = "none"
    OPTIONS: ClassVar[ModelOptions] = {"clusters": 4}
    features: int
    clusters: int = 4
    regularization: float = 0.0

    def __post_init__(self) -> None:
        if self.clusters < 1:
            raise UserError(f"clusters must be at least 1, not {self.clusters}")

    @cached_property
    def parameters(self) -> int:
        return self.features * self.clusters

    @property
    def tensors(self) -> tuple[TensorDescription, ...]:
        return (TensorDescription("centres", (self.clusters, self.features)),)

    @cached_property
    def terms(self) -> KMeansTerms:
        return KMeansTerms(self.clusters)

    def initial(self, seed: int) -> Float32:
        return np.random.default_rng(seed).random(self.parameters, dtype=np.float32)

    def sums(self, w: Float32, x: Float32, y: Float32) -> tuple[float, Float32]:
        scores = self.scores(w, x)
        nearest = scores.argmax(axis=1)
        gradient = [
            (centre - x[nearest == cluster]).sum(axis=0)
            for cluster, centre in enumerate(w.reshape(self.clusters, -1))
        ]
        return -float(scores.max(axis=1).sum(dtype=np.float64)), np.concatenate(gradient)

    def scores(self, w: Float32, x: Float32) -> Float32:
        centres = w.reshape(self.clusters, -1)
        return np.stack(
            [-0.5 * np.square(x - centre).sum(axis=1) for centre in centres], axis=1
        )
