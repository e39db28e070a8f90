"""What a model is: a loss with a gradient over one flat vector w, for many nodes at once.

`Model` is what fleets and engines ask for. There are three ways to make one: `KernelModel` for models with compiled row
functions (fast; see compiled/kernels.py; in numpy where numba is not installed), `LoopModel` for anything that can give
loss and gradient of a batch, and `TorchModel` for PyTorch's modules (torch_model.py).

What distinguishes models to compiled kernels: a NamedTuple for each, on whose type row functions are chosen.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.data.sampling import BatchIndices
from fedbudget.data.shards import Shards, Table
from fedbudget.models.compiling import import_kernels

Target = Literal["auto", "binary", "classes", "real", "raw", "none"]
"""What a model learns to predict: a class number where the data has classes and a real number otherwise, ±1, a class
number, a real number, whatever the data has, or nothing."""

Targets = Float32 | Int64
"""Of samples, [samples]: whole numbers are classes."""

ModelOptions = Mapping[str, int | float | str]
"""What may be chosen of a model besides its name, such as the number of clusters; by name."""

_ONE_AT_A_TIME = (
    threading.Lock()
)  # not every threading layer of numba may be entered by two threads at once
_BLOCK = 1024  # rows that are computed at once in numpy, so that memory does not grow with the shard


@dataclass(frozen=True)
class Descent:
    """A round's local updates.

    Args:
      w: w_i(t), [nodes, parameters].
      losses, gradients: F_i and ∇F_i before the first update, [nodes] and [nodes, parameters].
      best_losses: F_i at w^f on the samples of the first update, [nodes], where it was asked for.
    """

    w: Float32
    losses: Float64
    gradients: Float32
    best_losses: Float64 | None


class Model(Protocol):
    """A loss function F_i(w) over shards. A w of shape [1, parameters] stands for the same w at every node."""

    @property
    def name(self) -> str: ...

    @property
    def parameters(self) -> int:
        """The length of w."""

    @property
    def statistics(self) -> int:
        """How many of w's last numbers are no parameters but running statistics: `descend` gives new ones, and 0 for
        their gradient; they are averaged, and nothing else.
        """

    @property
    def target(self) -> Target: ...

    def initial(self, seed: int) -> Float32:
        """w(0), [parameters]."""

    def losses(self, w: Float32, shards: Shards, indices: BatchIndices) -> Float64:
        """F_i on the first mini-batch, [nodes]."""

    def descend(
        self,
        w: Float32,
        shards: Shards,
        indices: BatchIndices,
        eta: float | Float32,
        best: Float32 | None = None,
        shift: Float32 | None = None,
    ) -> Descent:
        """One local update, eq. (4), for each mini-batch.

        Args:
          eta: step size, of all nodes or of each, [nodes].
          best: w^f, [parameters], where its loss is wanted too.
          shift: added to each node's gradients before the step, [nodes, parameters].
        """

    def outputs(self, w: Float32, table: Table) -> Float32 | None:
        """What it gives for each sample, [samples, outputs]; None where it cannot tell. A score for each class, or one
        that is not negative for the class +1; a real number, in the unit it was trained on; for clusters, the higher
        the nearer.
        """

    def accuracy(self, w: Float32, table: Table) -> float | None:
        """The share of samples predicted right; None where that has no meaning."""

    def metrics(self, w: Float32, table: Table) -> Mapping[str, float]:
        """Figures of merit of its own on a table, by name; others follow from its outputs, see tally.py."""


class BaseModel(ABC):
    """What models have in common."""

    @property
    @abstractmethod
    def parameters(self) -> int: ...

    @property
    def statistics(self) -> int:
        return 0

    def outputs(self, w: Float32, table: Table) -> Float32 | None:
        return None

    def outputs_and_targets(
        self, w: Float32, table: Table
    ) -> tuple[Float32 | None, Targets]:
        """Its outputs, and what they are compared with, [samples]."""
        return self.outputs(w, table), table.y

    @property
    def own_metrics(self) -> tuple[str, ...]:
        """The names of what `metrics` gives."""
        return ()

    def metrics(self, w: Float32, table: Table) -> Mapping[str, float]:
        return {}


class LoopModel(BaseModel):
    """A model that is asked for one node's batch at a time."""

    @abstractmethod
    def loss_and_gradient(
        self, w: Float32, x: Float32, y: Float32
    ) -> tuple[float, Float32]:
        """Loss and gradient of one batch, x [samples, features], y [samples]."""

    def losses(self, w: Float32, shards: Shards, indices: BatchIndices) -> Float64:
        return np.array(
            [self._at(w[i % len(w)], shards, indices, i, 0)[0] for i in range(len(shards))],
            np.float64,
        )

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
        etas = step_sizes(eta, nodes)
        updates = indices.updates_of
        for i in range(nodes):
            out[i] = w[i % len(w)]
            for update in range(updates[i]):
                loss, gradient = self._at(out[i], shards, indices, i, update)
                if update == 0:
                    losses[i] = loss
                    gradients[i] = gradient
                out[i] -= etas[i] * (gradient if shift is None else gradient + shift[i])
        return Descent(
            out,
            losses,
            gradients,
            None if best is None else self.losses(best[None], shards, indices),
        )

    def _at(
        self, w: Float32, shards: Shards, indices: BatchIndices, node: int, update: int
    ) -> tuple[float, Float32]:
        rows = batch_rows(shards, indices, node, update)
        return self.loss_and_gradient(w, shards.table.scaled(rows), shards.table.y[rows])


class KernelModel(LoopModel):
    """A model whose row functions are compiled; see compiled/kernels.py. Without numba it is computed in numpy.

    OPTIONS are what may be chosen of it, with what is chosen otherwise; settings with these names are passed on to it,
    and to every node. So a new option is declared there, and in settings.py.
    """

    name: ClassVar[str]
    target: ClassVar[Target]
    OPTIONS: ClassVar[ModelOptions] = {}
    regularization: float = 0.0

    @property
    @abstractmethod
    def terms(self) -> tuple[Any, ...]:
        """The NamedTuple on which the row functions are overloaded."""

    @abstractmethod
    def sums(self, w: Float32, x: Float32, y: Float32) -> tuple[float, Float32]:
        """Σ f_j(w) and Σ ∇f_j(w) over some rows, without regularization: what the row functions add up, in numpy."""

    @abstractmethod
    def scores(self, w: Float32, x: Float32) -> Float32:
        """What it gives for some rows, [rows, outputs]; see `Model.outputs`."""

    def initial(self, seed: int) -> Float32:
        return np.zeros(self.parameters, np.float32)

    def losses(self, w: Float32, shards: Shards, indices: BatchIndices) -> Float64:
        kernels = compiled_kernels()
        if kernels is None:
            return super().losses(w, shards, indices)
        out = np.empty(len(shards))
        with _ONE_AT_A_TIME:
            kernels.losses(
                self.terms,
                np.float32(self.regularization),
                _plain(w),
                *_arrays(shards, indices),
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
        kernels = compiled_kernels()
        if kernels is None:
            return super().descend(w, shards, indices, eta, best, shift)
        nodes = len(shards)
        regularization = np.float32(self.regularization)
        driver = (
            kernels.descend if nodes >= kernels.get_num_threads() else kernels.descend_few
        )
        none = np.empty((0, self.parameters), np.float32)
        points = none if best is None else _plain(best[None])
        shifts = none if shift is None else _plain(shift)
        out = np.empty((nodes, self.parameters), np.float32)
        kept = np.empty(nodes), np.empty_like(out), np.empty(nodes)
        with _ONE_AT_A_TIME:
            arrays = _arrays(shards, indices)
            steps = (indices.updates_of, step_sizes(eta, nodes))
            driver(
                self.terms,
                regularization,
                _plain(w),
                points,
                shifts,
                *arrays,
                *steps,
                out,
                *kept,
            )
        losses, gradients, best_losses = kept
        return Descent(out, losses, gradients, None if best is None else best_losses)

    def outputs(self, w: Float32, table: Table) -> Float32:
        blocks = [slice(first, first + _BLOCK) for first in range(0, len(table), _BLOCK)]
        return np.concatenate([self.scores(w, table.scaled(rows)) for rows in blocks])

    def accuracy(self, w: Float32, table: Table) -> float | None:
        if self.target not in ("binary", "classes"):
            return None
        kernels = compiled_kernels()
        if kernels is None:
            scores = self.outputs(w, table)
            right = (
                scores.argmax(axis=1) == table.y
                if self.target == "classes"
                else (scores[:, 0] >= 0) == (table.y > 0)
            )
            return int(right.sum()) / len(table)
        with _ONE_AT_A_TIME:
            right = kernels.correct(
                self.terms, _plain(w), table.x, table.y, np.float32(table.scale)
            )
        return int(right) / len(table)

    def loss_and_gradient(
        self, w: Float32, x: Float32, y: Float32
    ) -> tuple[float, Float32]:
        return self._mean(w, *self.sums(w, x, y), len(y))

    def _at(
        self, w: Float32, shards: Shards, indices: BatchIndices, node: int, update: int
    ) -> tuple[float, Float32]:
        rows = batch_rows(shards, indices, node, update)
        table = shards.table
        loss = 0.0
        gradient = np.zeros(self.parameters)
        for first in range(0, len(rows), _BLOCK):
            some = rows[first : first + _BLOCK]
            block_loss, block_gradient = self.sums(w, table.scaled(some), table.y[some])
            loss += block_loss
            gradient += block_gradient
        return self._mean(w, loss, gradient, len(rows))

    def _mean(
        self, w: Float32, loss: float, gradient: Float32 | Float64, count: int
    ) -> tuple[float, Float32]:
        """F_i(w) and ∇F_i(w) from sums over rows."""
        penalty = 0.5 * self.regularization * float(np.square(w, dtype=np.float64).sum())
        mean = np.asarray(gradient / count, np.float32)
        return loss / count + penalty, mean + np.float32(self.regularization) * w


def step_sizes(eta: float | Float32, nodes: int) -> Float32:
    """Of each node, [nodes]."""
    return (
        np.full(nodes, eta, np.float32)
        if np.ndim(eta) == 0
        else np.asarray(eta, np.float32)
    )


def batch_rows(
    shards: Shards, indices: BatchIndices, node: int, update: int
) -> NDArray[np.int32]:
    """The rows that one node takes in one update."""
    return shards.rows_of(node)[indices.of(node, update, int(shards.size[node]))]


def first_alike(
    shards: Shards,
    indices: BatchIndices,
    *vectors: Float32 | None,
    eta: float | Float32 = 0.0,
) -> list[int]:
    """For each node the first that has the same samples, mini-batches, vectors and steps, and so the same result.

    Args:
      vectors: of all nodes, [nodes, parameters], or one for all, [1, parameters].
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    first = []
    steps = (indices.updates_of, step_sizes(eta, len(shards)))
    for node, key in enumerate(
        zip(shards.start, shards.size, indices.group, *steps, strict=True)
    ):
        known = alike.setdefault(key, [])
        same = (
            other
            for other in known
            if all(_equal_rows(each, other, node) for each in vectors)
        )
        first.append(next(same, node))
        if first[-1] == node:
            known.append(node)
    return first


def _equal_rows(vectors: Float32 | None, one: int, other: int) -> bool:
    return (
        vectors is None or len(vectors) == 1 or np.array_equal(vectors[one], vectors[other])
    )


def loss_over(model: Model, w: Float32, table: Table) -> float:
    """F(w) over a whole table."""
    shards = Shards.whole(table)
    return float(model.losses(w[None], shards, BatchIndices.whole(1))[0])


def require_fit(
    model: Model, data: str, train: Table, batch: int | None, test: Table | None = None
) -> None:
    """Refuses a model that cannot be trained on such samples, before anything is; a model says so by a method of this
    name, if it has one.

    Args:
      data: what samples are called.
      batch: samples in a mini-batch; None for all.
      test: the samples to test on, where they are at hand.
    """
    own = getattr(model, "require_fit", None)
    if own is not None:
        own(data, train, batch, test)


def _arrays(shards: Shards, indices: BatchIndices) -> tuple[Any, ...]:
    table = shards.table
    table.require_arrays()
    own = shards.rows, shards.start, shards.size
    return table.x, table.y, np.float32(table.scale), *own, indices.positions, indices.group


def compiled_kernels() -> Any | None:
    """The module of them, where numba is installed."""
    return import_kernels("fedbudget.models.compiled.kernels")


def _plain(vectors: Float32) -> Float32:
    """Vectors as kernels are compiled for them: whatever else numpy knows would be compiled for anew."""
    return np.require(vectors, np.float32, ("C", "A", "W"))


class SquaredSvmTerms(NamedTuple):
    """Nothing: the loss has no constants but λ."""


class LinearTerms(NamedTuple):
    """Nothing: the loss has no constants."""


class SoftmaxTerms(NamedTuple):
    classes: int


class KMeansTerms(NamedTuple):
    clusters: int
