"""Models: a loss with a gradient over one flat vector w, for many nodes at once.

Fleets and engines use the `Model` protocol. It has three implementations:

- `KernelModel` for models with compiled row functions (compiled/kernels.py). Without numba
  it computes in numpy.
- `LoopModel` for any code that returns the loss and gradient of one batch.
- `TorchModel` for PyTorch modules (torch/model.py).
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from fedbudget.arrays import Float32, Float64, Int32, Int64
from fedbudget.data.sampling import BatchIndices
from fedbudget.data.shards import Shards, Table
from fedbudget.models.compiling import import_kernels

Target = Literal["auto", "binary", "classes", "real", "raw", "none"]
"""Meaning of y: class numbers if the data has classes and real numbers otherwise (`auto`),
±1, class numbers, real numbers, the values of the data unchanged (`raw`), or unused."""

Targets = Float32 | Int64
"""Targets of samples, [samples]. Integers are class numbers."""

ModelOptions = Mapping[str, int | float | str]
"""Options of a model by name, such as the number of clusters."""

Rows = NDArray[np.int32]
"""Row numbers of a table."""

_BLOCK = 1024
"""Rows per numpy operation. Bounds the memory for large shards."""

# Some threading layers of numba do not allow two threads to enter a kernel at once.
_KERNEL_LOCK = threading.Lock()


@dataclass(frozen=True)
class Descent:
    """Result of the local updates of one round.

    Args:
      w: w_i(t), [nodes, parameters].
      losses, gradients: F_i and ∇F_i before the first update, [nodes] and [nodes,
        parameters].
      best_losses: F_i at w^f on the samples of the first update, [nodes], if requested.
    """

    w: Float32
    losses: Float64
    gradients: Float32
    best_losses: Float64 | None


@dataclass(frozen=True)
class LastLayer:
    """A linear last layer, whose scores are the outputs of a model.

    Args:
      inputs: values that enter it, [samples, features].
      targets: y of the samples, [samples].
      weights, biases: positions in w of its parameters, [scores, features] and [scores].
      classes: whether the loss is the cross-entropy of class scores; otherwise it is the
        squared error of one number.
      class_weights: factor of the loss of each class's samples; empty for 1.
    """

    inputs: Float32
    targets: Float32
    weights: Int64
    biases: Int64
    classes: bool
    class_weights: tuple[float, ...] = ()


class Model(Protocol):
    """Loss function F_i(w) over shards.

    A w of shape [1, parameters] is shared by all nodes.
    """

    @property
    def name(self) -> str:
        """Name in records and messages."""

    @property
    def parameters(self) -> int:
        """Length of w."""

    @property
    def statistics(self) -> int:
        """Number of running statistics at the end of w.

        `descend` returns new values for them, and 0 as their gradient. The aggregator only
        averages them.
        """

    @property
    def target(self) -> Target:
        """Meaning of y."""

    def initial(self, seed: int) -> Float32:
        """Return w(0), [parameters]."""

    def losses(self, w: Float32, shards: Shards, indices: BatchIndices) -> Float64:
        """Return F_i on the first mini-batch, [nodes]."""

    def descend(
        self,
        w: Float32,
        shards: Shards,
        indices: BatchIndices,
        eta: float | Float32,
        best: Float32 | None = None,
        shift: Float32 | None = None,
    ) -> Descent:
        """Make one local update, eq. (4), for each mini-batch.

        Args:
          w: start of the updates, [nodes, parameters] or [1, parameters].
          shards: the samples of the nodes.
          indices: the mini-batches.
          eta: step size, one for all nodes or [nodes].
          best: w^f, [parameters], if its loss is needed too.
          shift: vector added to each gradient before the step, [nodes, parameters].
        """

    def outputs(self, w: Float32, table: Table) -> Float32 | None:
        """Return the output for each sample, [samples, outputs]; None if there is none.

        Classifiers return one score per class, or one score that is >= 0 for class +1.
        Regressions return a real number in the unit of the training data. Clusterings
        return one score per cluster, higher for nearer clusters.
        """

    def accuracy(self, w: Float32, table: Table) -> float | None:
        """Return the fraction of correct predictions; None for models without classes."""

    def metrics(self, w: Float32, table: Table) -> Mapping[str, float]:
        """Return metrics that only this model defines, by name.

        evaluation/metrics.py computes the standard metrics from the outputs.
        """


def with_dropout(model: Model, share: float) -> Model | None:
    """Return a model with dropout in its local updates; None if it has none.

    Args:
      model: the model; one that is not a `BaseModel` has no dropout.
      share: share of the hidden values that are set to 0.
    """
    return model.with_dropout(share) if isinstance(model, BaseModel) else None


class BaseModel(ABC):
    """Defaults for the optional parts of a model.

    Attributes:
      convex: whether the loss is convex in w, so that means of parameters are meaningful.
      smooth: whether gradients change continuously with w.
    """

    convex: ClassVar[bool] = False
    smooth: ClassVar[bool] = True
    _metrics: Mapping[str, Callable[..., Any]] = {}

    @property
    @abstractmethod
    def parameters(self) -> int: ...

    @property
    def statistics(self) -> int:
        return 0

    def with_dropout(self, share: float) -> "Model | None":
        """Return the model with dropout in its local updates; None if it has none.

        Args:
          share: share of the hidden values that are set to 0.
        """
        return None

    def last_layer(self, w: Float32, table: Table) -> LastLayer | None:
        """Return the last layer with its inputs, if it is linear; None otherwise.

        Args:
          w: [parameters].
          table: the samples.
        """
        return None

    def outputs(self, w: Float32, table: Table) -> Float32 | None:
        return None

    def outputs_and_targets(
        self, w: Float32, table: Table
    ) -> tuple[Float32 | None, Targets]:
        """Return the outputs, and the targets to compare them with, [samples]."""
        return self.outputs(w, table), table.y

    @property
    def own_metrics(self) -> tuple[str, ...]:
        """Names of the metrics that `metrics` returns."""
        return tuple(self._metrics)

    def metrics(self, w: Float32, table: Table) -> Mapping[str, float]:
        if not self._metrics:
            return {}
        predicted, y = self._predict(w, table)
        return {name: float(metric(predicted, y)) for name, metric in self._metrics.items()}

    def _predict(self, w: Float32, table: Table) -> tuple[Any, Any]:
        """Return what the functions in `_metrics` compare: predictions, and y."""
        raise NotImplementedError


class LoopModel(BaseModel):
    """A model that computes one batch of one node at a time."""

    @abstractmethod
    def batch_gradient(self, w: Float32, table: Table, rows: Rows) -> tuple[float, Float32]:
        """Return the mean loss over some rows of a table, and its gradient [parameters]."""

    def losses(self, w: Float32, shards: Shards, indices: BatchIndices) -> Float64:
        losses = np.empty(len(shards))
        for i in range(len(shards)):
            rows = batch_rows(shards, indices, i, 0)
            losses[i], _ = self.batch_gradient(w[i % len(w)], shards.table, rows)
        return losses

    def descend(
        self,
        w: Float32,
        shards: Shards,
        indices: BatchIndices,
        eta: float | Float32,
        best: Float32 | None = None,
        shift: Float32 | None = None,
    ) -> Descent:
        nodes = len(shards)
        out = np.empty((nodes, self.parameters), np.float32)
        losses = np.empty(nodes)
        gradients = np.empty_like(out)
        etas = np.full(nodes, eta, np.float32)
        updates = indices.updates_of

        for i in range(nodes):
            out[i] = w[i % len(w)]
            for update in range(updates[i]):
                rows = batch_rows(shards, indices, i, update)
                loss, gradient = self.batch_gradient(out[i], shards.table, rows)
                if update == 0:
                    losses[i] = loss
                    gradients[i] = gradient
                out[i] -= etas[i] * (gradient if shift is None else gradient + shift[i])

        best_losses = None if best is None else self.losses(best[None], shards, indices)
        return Descent(out, losses, gradients, best_losses)


class KernelModel(LoopModel):
    """A model with compiled row functions, see compiled/kernels.py; numpy without numba.

    `OPTIONS` has the options of the model with their defaults. Settings of the same names
    are passed to it, at every node. Declare a new option there and in
    settings/settings.py.
    """

    name: ClassVar[str]
    target: ClassVar[Target]
    OPTIONS: ClassVar[ModelOptions] = {}
    regularization: float = 0.0

    @property
    @abstractmethod
    def terms(self) -> tuple[Any, ...]:
        """The NamedTuple on whose type the row functions are overloaded."""

    @property
    def compiled(self) -> bool:
        """Whether the row functions compute the loss with all options of this model."""
        return True

    @abstractmethod
    def sums(self, w: Float32, x: Float32, y: Float32) -> tuple[float, Float32]:
        """Compute Σ f_j(w) and Σ ∇f_j(w) over rows in numpy, without regularization."""

    @abstractmethod
    def scores(self, w: Float32, x: Float32) -> Float32:
        """Return the outputs for some rows, [rows, outputs]; see `Model.outputs`."""

    def initial(self, seed: int) -> Float32:
        return np.zeros(self.parameters, np.float32)

    def losses(self, w: Float32, shards: Shards, indices: BatchIndices) -> Float64:
        kernels = compiled_kernels() if self.compiled else None
        if kernels is None:
            return super().losses(w, shards, indices)
        out = np.empty(len(shards.size))
        with _KERNEL_LOCK:
            kernels.losses(
                self.terms,
                np.float32(self.regularization),
                *_contiguous(w),
                *shards.kernel_arrays,
                indices.positions,
                indices.group,
                out,
            )
        return out

    def descend(
        self,
        w: Float32,
        shards: Shards,
        indices: BatchIndices,
        eta: float | Float32,
        best: Float32 | None = None,
        shift: Float32 | None = None,
    ) -> Descent:
        kernels = compiled_kernels() if self.compiled else None
        if kernels is None:
            return super().descend(w, shards, indices, eta, best, shift)
        nodes = len(shards.size)
        few = nodes < kernels.MOST_THREADS and nodes < kernels.get_num_threads()
        driver = kernels.descend_few if few else kernels.descend

        out = np.empty((nodes, self.parameters), np.float32)
        losses = np.empty(nodes)
        gradients = np.empty_like(out)
        best_losses = np.empty(nodes)
        with _KERNEL_LOCK:
            driver(
                self.terms,
                np.float32(self.regularization),
                *_contiguous(w, None if best is None else best[None], shift),
                *shards.kernel_arrays,
                indices.positions,
                indices.group,
                indices.updates_of,
                np.full(nodes, eta, np.float32),
                out,
                losses,
                gradients,
                best_losses,
            )
        return Descent(out, losses, gradients, None if best is None else best_losses)

    def outputs(self, w: Float32, table: Table) -> Float32:
        blocks = [slice(first, first + _BLOCK) for first in range(0, len(table), _BLOCK)]
        return np.concatenate([self.scores(w, table.scaled(rows)) for rows in blocks])

    def accuracy(self, w: Float32, table: Table) -> float | None:
        if self.target not in ("binary", "classes"):
            return None
        kernels = compiled_kernels()
        if kernels is not None:
            scale = np.float32(table.scale)
            with _KERNEL_LOCK:
                right = kernels.correct(
                    self.terms, *_contiguous(w), table.x, table.y, scale
                )
            return int(right) / len(table)

        scores = self.outputs(w, table)
        if self.target == "classes":
            correct = scores.argmax(axis=1) == table.y
        else:
            correct = (scores[:, 0] >= 0) == (table.y > 0)
        return int(correct.sum()) / len(table)

    def batch_gradient(self, w: Float32, table: Table, rows: Rows) -> tuple[float, Float32]:
        loss = 0.0
        total = np.zeros(self.parameters)
        for first in range(0, len(rows), _BLOCK):
            block = rows[first : first + _BLOCK]
            block_loss, block_total = self.sums(w, table.scaled(block), table.y[block])
            loss += block_loss
            total += block_total
        penalty = 0.5 * self.regularization * float(np.square(w, dtype=np.float64).sum())
        mean = np.asarray(total / len(rows), np.float32)
        return loss / len(rows) + penalty, mean + np.float32(self.regularization) * w


def loss_over(model: Model, w: Float32, table: Table, rows: Int32 | None = None) -> float:
    """Compute F(w) over a table.

    Args:
      model: defines the loss.
      w: [parameters].
      table: the samples.
      rows: numbers of the rows to use; all by default.

    Returns:
      The mean loss.
    """
    shards = Shards.whole(table) if rows is None else Shards.of(table, [rows])
    return float(model.losses(w[None], shards, BatchIndices.whole(1))[0])


def require_fit(
    model: Model, data: str, train: Table, batch: int | None, test: Table | None = None
) -> None:
    """Raise a `UserError` if the model cannot train on these samples.

    The model's own `require_fit` decides. A model without one is accepted.

    Args:
      data: name of the data, for messages.
      train: samples to train on.
      batch: samples in a mini-batch; None for all.
      test: samples to test on, if they are available.
    """
    check = getattr(model, "require_fit", None)
    if check is not None:
        check(data, train, batch, test)


def batch_rows(shards: Shards, indices: BatchIndices, node: int, update: int) -> Rows:
    """Return the rows of the mini-batch of one node and update."""
    return shards.rows_of(node)[indices.of(node, update, int(shards.size[node]))]


def first_alike(
    shards: Shards,
    indices: BatchIndices,
    *vectors: Float32 | None,
    eta: float | Float32 = 0.0,
) -> tuple[Int64, Int64]:
    """Return the first of all nodes that compute the same result.

    Such nodes have the same samples, mini-batches, vectors and step sizes.

    Args:
      vectors: [nodes, parameters], or [1, parameters] for one vector shared by all nodes.

    Returns:
      The first nodes, and the index among them of each node's, [nodes].
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    first = []
    keys = zip(
        shards.start,
        shards.size,
        indices.group,
        indices.updates_of,
        np.full(len(shards), eta, np.float32),
        strict=True,
    )
    own_vectors = [each for each in vectors if each is not None and len(each) > 1]
    for node, key in enumerate(keys):
        candidates = alike.setdefault(key, [])
        for other in candidates:
            if all(np.array_equal(each[other], each[node]) for each in own_vectors):
                first.append(other)
                break
        else:
            first.append(node)
            candidates.append(node)
    return np.unique(first, return_inverse=True)


compiled_kernels = partial(import_kernels, "fedbudget.models.compiled.kernels")
"""Returns the module of kernels; None without numba."""


def _contiguous(w: Float32, *others: Float32 | None) -> list[Float32]:
    """Return vectors in the one memory layout that kernels are compiled for.

    None becomes an array without rows.
    """
    arrays = []
    for each in (w, *others):
        vectors = np.empty((0, w.shape[-1]), np.float32) if each is None else each
        if vectors.dtype != np.float32 or not vectors.flags.carray:
            vectors = np.require(vectors, np.float32, ("C", "A", "W"))
        arrays.append(vectors)
    return arrays
