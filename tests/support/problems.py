"""Small random problems, and a second implementation of the paper for comparison.

The second implementation is plain numpy in float64, written from Table I and Algorithm 1.
It shares only data types with the code under test."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.budget.budget import Budget, Costs
from fedbudget.budget.control import Controller
from fedbudget.budget.spending import PaperSpending
from fedbudget.budget.step_size import FixedStep, StepSize
from fedbudget.data.shards import Table
from fedbudget.models import KMeans, LinearRegression, Softmax, SquaredSvm
from fedbudget.models.base import Model
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.features.feature import Feature, NodeTimes
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import Broadcast, Report
from fedbudget.protocol.method import Method
from fedbudget.protocol.state import Outcome

Loss = Callable[[Float64, Float64, Float64], float]
"""Mean loss over the rows of x from (w, x, y); x is already scaled."""

Gradient = Callable[[Float64, Float64, Float64], Float64]

LocalGradient = Callable[[Float64], Float64]
"""∇F_i, from w."""

MODELS = ("svm", "linear", "kmeans", "softmax")
CLUSTERS = CLASSES = 3


@dataclass(frozen=True)
class Problem:
    """A model with data, and its loss and gradient in float64."""

    model: Model
    table: Table
    loss: Loss
    gradient: Gradient

    @property
    def x(self) -> Float64:
        """The features as numbers, [samples, features]."""
        return np.asarray(self.table.x, dtype=np.float64) * self.table.scale

    @property
    def y(self) -> Float64:
        return np.asarray(self.table.y, dtype=np.float64)

    def local(self, parts: Sequence[Int64]) -> list[LocalGradient]:
        """∇F_i of nodes with these rows."""

        def of(part: Int64) -> LocalGradient:
            return lambda w: self.gradient(w, self.x[part], self.y[part])

        return [of(part) for part in parts]

    def start(self, seed: int) -> Float32:
        """A random w, [parameters]."""
        return (
            np.random.default_rng(seed)
            .normal(0.2, 0.5, self.model.parameters)
            .astype(np.float32)
        )


def problem(
    name: str,
    seed: int,
    *,
    samples: int = 60,
    features: int = 5,
    dtype: type[np.generic] = np.float32,
    regularization: float = 0.1,
) -> Problem:
    """A random problem with features in about [-2, 2], or pixels in [0, 1] for uint8."""
    rng = np.random.default_rng(seed)
    x, scale = _features(rng, samples, features, dtype)
    hidden = rng.normal(size=features)
    score = (x * scale - np.mean(x * scale, axis=0)) @ hidden
    if name == "svm":
        y = np.where(score + 0.3 * rng.normal(size=samples) > 0, 1.0, -1.0)
        return Problem(
            SquaredSvm(features, regularization),
            Table(x, y.astype(np.float32), scale),
            lambda w, x, y: svm_loss(w, x, y, regularization),
            lambda w, x, y: svm_gradient(w, x, y, regularization),
        )
    if name == "linear":
        y = score + 0.3 * rng.normal(size=samples)
        return Problem(
            LinearRegression(features, regularization),
            Table(x, y.astype(np.float32), scale),
            lambda w, x, y: linear_loss(w, x, y, regularization),
            lambda w, x, y: linear_gradient(w, x, y, regularization),
        )
    if name == "kmeans":
        return Problem(
            KMeans(features, CLUSTERS, regularization),
            Table(x, np.zeros(samples, np.float32), scale),
            lambda w, x, y: kmeans_loss(w, x, regularization),
            lambda w, x, y: kmeans_gradient(w, x, regularization),
        )
    y = rng.integers(0, CLASSES, samples)
    return Problem(
        Softmax(features, CLASSES, regularization),
        Table(x, y.astype(np.float32), scale),
        lambda w, x, y: softmax_loss(w, x, y, regularization),
        lambda w, x, y: softmax_gradient(w, x, y, regularization),
    )


def _features(
    rng: np.random.Generator, samples: int, features: int, dtype: type[np.generic]
) -> tuple[NDArray[Any], float]:
    if dtype is np.uint8:
        return rng.integers(0, 256, (samples, features)).astype(np.uint8), 1 / 255
    return (4 * rng.normal(size=(samples, features))).astype(dtype), 0.25


# Table I, and softmax regression with a bias per class.


def svm_loss(w: Float64, x: Float64, y: Float64, regularization: float) -> float:
    return float(
        regularization / 2 * (w @ w) + np.mean(np.maximum(0.0, 1 - y * (x @ w)) ** 2) / 2
    )


def svm_gradient(w: Float64, x: Float64, y: Float64, regularization: float) -> Float64:
    slack = np.maximum(0.0, 1 - y * (x @ w))
    return np.asarray(regularization * w - (slack * y) @ x / len(x))


def linear_loss(w: Float64, x: Float64, y: Float64, regularization: float) -> float:
    return float(regularization / 2 * (w @ w) + np.mean((y - x @ w) ** 2) / 2)


def linear_gradient(w: Float64, x: Float64, y: Float64, regularization: float) -> Float64:
    return np.asarray(regularization * w + (x @ w - y) @ x / len(x))


def kmeans_distances(w: Float64, x: Float64) -> Float64:
    """‖x_j - w_(l)‖², [samples, clusters]."""
    centres = w.reshape(-1, x.shape[1])
    return np.asarray(((x[:, None, :] - centres[None]) ** 2).sum(axis=2))


def kmeans_loss(w: Float64, x: Float64, regularization: float) -> float:
    return float(
        regularization / 2 * (w @ w) + np.mean(kmeans_distances(w, x).min(axis=1)) / 2
    )


def kmeans_gradient(w: Float64, x: Float64, regularization: float) -> Float64:
    centres = w.reshape(-1, x.shape[1])
    nearest = kmeans_distances(w, x).argmin(axis=1)
    gradient = np.zeros_like(centres)
    for row, centre in zip(x, nearest, strict=True):
        gradient[centre] += (centres[centre] - row) / len(x)
    return regularization * w + gradient.ravel()


def softmax_loss(w: Float64, x: Float64, y: Float64, regularization: float) -> float:
    chosen = _probabilities(w, x)[np.arange(len(x)), y.astype(int)]
    return float(regularization / 2 * (w @ w) - np.mean(np.log(chosen)))


def softmax_gradient(w: Float64, x: Float64, y: Float64, regularization: float) -> Float64:
    error = _probabilities(w, x)
    error[np.arange(len(x)), y.astype(int)] -= 1
    with_bias = np.column_stack([x, np.ones(len(x))])
    return np.asarray(regularization * w + (error.T @ with_bias / len(x)).ravel())


def _probabilities(w: Float64, x: Float64) -> Float64:
    powers = np.exp(np.column_stack([x, np.ones(len(x))]) @ w.reshape(-1, x.shape[1] + 1).T)
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def finite_differences(
    loss: Callable[[Float64], float], w: Float64, step: float = 1e-5
) -> Float64:
    """∇F(w) by central differences."""
    gradient = np.empty_like(w)
    for j in range(w.size):
        ahead, behind = w.copy(), w.copy()
        ahead[j] += step
        behind[j] -= step
        gradient[j] = (loss(ahead) - loss(behind)) / (2 * step)
    return gradient


# Algorithm 1, and the centralized descents that its analysis compares it with.


@dataclass(frozen=True)
class Trajectory:
    """Points of Algorithm 1.

    Args:
      w: w(t) for t = 0..T.
      v: v_[k]((k-1)τ + x) for every interval k and x = 0..τ.
    """

    tau: int
    w: Float64
    v: Float64

    @property
    def aggregated(self) -> Float64:
        """w(kτ) for k = 0..K."""
        return self.w[:: self.tau]


def algorithm_1(
    local: Sequence[Callable[[Float64], Float64]],
    sizes: Sequence[int],
    w: Float64,
    *,
    tau: int,
    rounds: int,
    eta: float,
) -> Trajectory:
    """Distributed gradient descent over the nodes' gradients ∇F_i, with its v_[k]."""
    share = np.asarray(sizes) / sum(sizes)
    visited, centralized = [w], []
    for _ in range(rounds):
        nodes = [w] * len(local)
        v = [w]
        for _ in range(tau):
            nodes = [
                own - eta * gradient(own)
                for own, gradient in zip(nodes, local, strict=True)
            ]
            visited.append(share @ np.array(nodes))
            v.append(
                v[-1] - eta * (share @ np.array([gradient(v[-1]) for gradient in local]))
            )
        w = visited[-1]
        centralized.append(np.array(v))
    return Trajectory(tau, np.array(visited), np.array(centralized))


def corrected_descent(
    local: Sequence[LocalGradient],
    sizes: Sequence[int],
    w: Float64,
    *,
    taus: Sequence[int],
    eta: float,
    present: Sequence[Sequence[int]],
    correct: Sequence[bool],
    own_taus: Sequence[Sequence[int]] | None = None,
    effective: Sequence[float] | None = None,
) -> list[Float64]:
    """The w of all aggregations with drift correction.

    c is the mean of the c_i of all nodes that ever took part. A new node has c_i = c. A
    round without correction starts with c_i = 0 for all nodes.

    Args:
      taus: τ of each round.
      present: nodes of each round.
      correct: whether each round is corrected.
      own_taus: τ of every node in each round, if they differ.
      effective: τ_eff of each round, if τ differs between nodes.
    """
    own_taus = own_taus or [[tau] * len(local) for tau in taus]
    own: dict[int, Float64] = {}
    visited = [w]
    for tau_of, tau, here, on in zip(
        own_taus, effective or taus, present, correct, strict=True
    ):
        known = list(own)
        c = sum((sizes[i] * own[i] for i in known), np.zeros_like(w)) / max(
            1, sum(sizes[i] for i in known)
        )
        own |= {i: c for i in here if i not in own}
        if not on:
            own, c = dict.fromkeys(own, np.zeros_like(w)), np.zeros_like(w)
        ends = {}
        for i in here:
            ends[i], along = w, []
            for _ in range(tau_of[i]):
                along.append(local[i](ends[i]))
                ends[i] = ends[i] - eta * (along[-1] - own[i] + c)
            ends[i] = w - eta * tau * (np.mean(along, axis=0) - own[i] + c)
            own[i] = np.mean(along, axis=0)
        w = sum((sizes[i] * ends[i] for i in here), np.zeros_like(w)) / sum(
            sizes[i] for i in here
        )
        visited.append(w)
    return visited


def unequal_parts(samples: int, nodes: int, seed: int) -> list[Int64]:
    """Split all rows into non-empty parts of different sizes, one per node."""
    rng = np.random.default_rng(seed)
    ends = np.sort(rng.choice(np.arange(1, samples), nodes - 1, replace=False))
    return [np.sort(part) for part in np.split(rng.permutation(samples), ends)]


# Runs.


def costs(step: Sequence[float], aggregation: Sequence[float]) -> Costs:
    return Costs(np.array(step, dtype=np.float64), np.array(aggregation, dtype=np.float64))


CHEAP = costs([0.01], [0.01])


def run_rounds(
    fleets: Sequence[Fleet],
    controller: Controller,
    *,
    eta: float | StepSize,
    rounds: int,
    w: Float32,
    seconds: float = 1e6,
    present: Sequence[Sequence[int]] | None = None,
    transform: Callable[[Report], Report] = lambda report: report,
    times: Float64 | None = None,
    **method: Any,
) -> Iterator[tuple[Broadcast, Report, Aggregator]]:
    """Run with negligible costs; yield each broadcast, its report and the aggregator.

    Args:
      fleets: new fleets; those without features take the features of the method.
      present: the fleets that take part in each round; in later rounds, all of them.
      transform: changes each report before the aggregator receives it.
      times: seconds of a local update at each node, by its number.
      method: other fields of `Method`.
    """
    rules = Method(
        controller,
        FixedStep(eta) if isinstance(eta, float) else eta,
        **{"spending": PaperSpending(), **method},
    )
    if rules.features and not fleets[0]._features:
        fleets = [with_features(fleet, rules.features) for fleet in fleets]
    aggregator = Aggregator(
        w,
        method=rules,
        budget=Budget({"time": seconds}),
        expected=CHEAP,
        rounds=rounds,
    )
    broadcast: Broadcast | Outcome = aggregator.start()
    while isinstance(broadcast, Broadcast):
        here = fleets
        if present is not None and broadcast.round <= len(present):
            here = [fleets[index] for index in present[broadcast.round - 1]]
        report = Report.merge([fleet.answer(broadcast.to(fleet.numbers)) for fleet in here])
        took = None if times is None else NodeTimes(report.nodes, times[report.nodes])
        answer = aggregator.receive(transform(report), CHEAP, times=took)
        yield broadcast, report, aggregator
        broadcast = answer


def with_features(fleet: Fleet, features: Sequence[Feature]) -> Fleet:
    """A fleet of the same nodes with features; the fleet must be new."""
    twin = Fleet(
        fleet.model,
        fleet.shards,
        batch=None,
        seed=0,
        features=features,
        numbers=fleet.numbers.tolist(),
    )
    twin.sampler = fleet.sampler
    return twin
