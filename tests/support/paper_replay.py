"""A second implementation of the paper's Algorithms 2 and 3, to replay `--method paper`.

- It is written from the paper's text and uses no code under test: losses, mini-batches,
  costs, estimates, G(τ), the stop rule and w^f are plain loops over nodes. `A2.9` is line 9
  of Algorithm 2.
- Precision follows docs/research/theory.md: w is rounded to float32 when it is sent or
  stored; everything else is float64.
- A replay takes from a run only the inputs of the algorithms: each node's samples, and the
  bytes of every round.
- If the run's τ differs and both τ have the same G up to rounding, the replay continues
  with the run's τ (`ties`)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

DGD_SECONDS = {
    1: (0.020613052, 0.008154439, 0.137093837, 0.05548447),
    2: (0.021810727, 0.008042984, 0.12322071, 0.048079171),
    3: (0.095353094, 0.016688657, 0.157255906, 0.066722225),
    4: (0.022075891, 0.008528005, 0.108598094, 0.044627335),
}
SGD_SECONDS = (0.013015156, 0.006946299, 0.131604348, 0.053873234)
"""Mean and deviation of a local update, then of a global aggregation (appendix tables)."""

COSTS_STREAM, BATCHES_STREAM = 2, 0
SAME_W = 1e-10  # w_i(t) and w(t) at most this far apart count as equal
SAME_G = 1e-9  # relative difference of G up to which two τ are equally good


@dataclass(frozen=True)
class Inputs:
    """Inputs of the algorithms.

    Args:
      nodes: (x, y) of each node, [samples, features] and [samples].
      budget: R_m, by resource: time, energy or bytes.
      seconds: costs of this case in the appendix.
      aggregation_factor: factor on the appendix's aggregation time.
      batch: samples in a mini-batch; None for whole shards.
      tau: fixed τ of a baseline; None for adaptive.
      wire_bytes: bytes of every round of the run, the final loss last. Further rounds cost
        the same as the last round before the final loss.
      joules_per_second: power of all nodes together.
      joules_per_byte: energy per byte of all nodes together.
    """

    model: Literal["svm", "linear"]
    nodes: Sequence[tuple[Vector, Vector]]
    budget: dict[str, float]
    seconds: tuple[float, float, float, float]
    seed: int
    batch: int | None
    tau: int | None = None
    aggregation_factor: float = 1.0
    wire_bytes: Sequence[float] = (0.0, 0.0)
    eta: float = 0.01
    phi: float = 0.025
    gamma: float = 10.0
    tau_max: int = 100
    joules_per_second: float = 25.0
    joules_per_byte: float = 1e-6


@dataclass
class ReplayedRound:
    """Expected record of a round; estimates are None if they do not determine a τ."""

    tau: int
    loss: float
    best_loss: float
    estimates: tuple[float, float, float] | None
    c: Vector
    b: Vector
    spent: Vector


@dataclass
class Replay:
    """Expected course of a run.

    Args:
      ties: rounds, from 0, for which two τ had the same G up to rounding.
      w: w^f.
    """

    rounds: list[ReplayedRound] = field(default_factory=list)
    ties: list[int] = field(default_factory=list)
    w: Vector = field(default_factory=lambda: np.zeros(0))

    @property
    def taus(self) -> list[int]:
        return [round_.tau for round_ in self.rounds]


class Node:
    """Algorithm 3, at one node."""

    def __init__(self, inputs: Inputs, x: Vector, y: Vector) -> None:
        self.x, self.y, self.size = x, y, len(y)
        self.model, self.eta, self.batch = inputs.model, inputs.eta, inputs.batch
        self.estimates = inputs.tau is None
        # All nodes have the same initial seed.
        self.rng = np.random.default_rng([inputs.seed, BATCHES_STREAM])
        self.epoch: list[NDArray[np.int64]] = []
        self.rows = np.arange(self.size)  # the mini-batch of the latest iteration
        self.uses = 0  # number of iterations that used it
        self.w_i = np.zeros(x.shape[1])

    def loss(self, w: Vector) -> float:
        return self.loss_and_gradient(w)[0]

    def loss_and_gradient(self, w: Vector) -> tuple[float, Vector]:
        """F_i and ∇F_i on the current mini-batch, Table I."""
        x, y = self.x[self.rows], self.y[self.rows]
        score = x @ w
        if self.model == "linear":
            error = score - y
            return float(0.5 * np.mean(error**2)), x.T @ error / len(y)
        slack = np.maximum(0.0, 1 - y * score)
        gradient = 0.1 * w - x.T @ (y * slack) / len(y)
        return float(0.05 * (w @ w) + 0.5 * np.mean(slack**2)), gradient

    def new_mini_batch(self) -> None:
        """Draw without replacement within an epoch; skip a smaller rest."""
        if self.batch is None:
            return
        if not self.epoch:
            order, count = self.rng.permutation(self.size), self.size // self.batch
            self.epoch = [
                order[k * self.batch : (k + 1) * self.batch] for k in range(count)
            ]
        self.rows, self.uses = self.epoch.pop(0), 0

    def first_mini_batch(self, t: int, tau: int) -> None:
        """Section VI-C: reuse the last mini-batch after an aggregation; with τ=1, use each
        in two iterations.
        """
        if t == 0 or not self.estimates or (tau == 1 and self.uses >= 2):
            self.new_mini_batch()

    def round(self, t: int, w: Vector, best: Vector, tau: int) -> "NodeReport":
        """A3.3 to A3.17."""
        rho, beta = 0.0, 0.0
        self.first_mini_batch(t, tau)
        loss, gradient = self.loss_and_gradient(w)
        best_loss = self.loss(best)
        if t > 0 and self.estimates:  # A3.5
            distance = float(np.linalg.norm(self.w_i - w))
            if distance > SAME_W:
                own_loss, own_gradient = self.loss_and_gradient(self.w_i)
                rho = abs(own_loss - loss) / distance  # A3.6
                beta = float(np.linalg.norm(own_gradient - gradient)) / distance  # A3.7
        tilde = w  # A3.3
        for mu in range(1, tau + 1):  # A3.8
            if mu > 1:
                self.new_mini_batch()
            self.uses += 1
            self.w_i = rounded(
                tilde - self.eta * rounded(self.loss_and_gradient(tilde)[1])
            )  # A3.10
            tilde = self.w_i  # A3.12
        return NodeReport(self.w_i, loss, best_loss, rho, beta, gradient)  # A3.15, A3.17

    def final(self, w: Vector, best: Vector) -> tuple[float, float]:
        """A3.19 and A3.20: F_i(w(t)) and F_i(w^f) on the last mini-batch."""
        return self.loss(w), self.loss(best)


@dataclass(frozen=True)
class NodeReport:
    """A node's report after its local updates."""

    w: Vector
    loss: float
    best_loss: float
    rho: float
    beta: float
    gradient: Vector


def rounded(w: Vector) -> Vector:
    """Round to float32, as w is stored and sent."""
    return w.astype(np.float32).astype(np.float64)


class Costs:
    """Simulated costs: c is the mean of τ draws, b one draw; energy follows from both."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.rng = np.random.default_rng([inputs.seed, COSTS_STREAM])
        self.made = 0

    def draw(self, updates: int, *, final: bool = False) -> tuple[Vector, Vector]:
        """c_m and b_m of a round."""
        mean, deviation, b_mean, b_deviation = self.inputs.seconds
        factor = self.inputs.aggregation_factor
        c = (
            sum(max(self.rng.normal(mean, deviation), 1e-10) for _ in range(updates))
            / updates
        )
        b = max(self.rng.normal(factor * b_mean, factor * b_deviation), 1e-10)
        *rounds, last = self.inputs.wire_bytes
        sent = last if final else rounds[min(self.made, len(rounds) - 1)]
        self.made += 1
        joules, per_byte = self.inputs.joules_per_second, self.inputs.joules_per_byte
        by_name = {
            "time": (c, b),
            "energy": (joules * c, joules * b + per_byte * sent),
            "bytes": (0.0, sent),
        }
        pairs = [by_name[name] for name in self.inputs.budget]
        return np.array([pair[0] for pair in pairs]), np.array([pair[1] for pair in pairs])


def control_objective(
    tau: int, inputs: Inputs, estimates: tuple[float, float, float], c: Vector, b: Vector
) -> float:
    """G(τ), equation (18), with h(τ) of equation (11)."""
    rho, beta, delta = estimates
    eta, phi, limit = inputs.eta, inputs.phi, np.array(list(inputs.budget.values()))
    h = 0.0
    if beta > 0 and delta > 0:
        growth = tau * math.log1p(eta * beta)
        if growth > 700:
            return math.inf
        h = delta / beta * math.expm1(growth) - eta * delta * tau
    per_update = float(np.max((c * tau + b) / ((limit - b - c) * tau)))
    first = per_update / (2 * eta * phi)
    return first + math.sqrt(first**2 + rho * h / (eta * phi * tau)) + rho * h


def replay(inputs: Inputs, run_taus: Sequence[int] = ()) -> Replay:
    """Algorithm 2, with all nodes.

    Args:
      run_taus: τ of the replayed run, which decides between equally good τ.
    """
    limit, costs, done = np.array(list(inputs.budget.values())), Costs(inputs), Replay()
    nodes = [Node(inputs, x, y) for x, y in inputs.nodes]
    total = sum(node.size for node in nodes)

    def mean(values: Sequence[Any]) -> Any:
        """Mean of numbers or vectors, weighted with D_i."""
        return (
            sum(node.size * value for node, value in zip(nodes, values, strict=True))
            / total
        )

    tau, t, spent, stop = inputs.tau or 1, 0, np.zeros(len(limit)), False  # A2.1
    w = np.zeros(inputs.nodes[0][0].shape[1])  # A2.2
    best = w  # A2.3
    c, b = np.zeros(len(limit)), np.zeros(len(limit))
    # A2.4. If A2.25 finds that not even τ=1 fits, only the final loss follows.
    while tau > 0:
        t0, made, w0, estimates = t, tau, w, None  # A2.6
        reports = [node.round(t, w, best, tau) for node in nodes]  # A2.5, A2.8
        t += tau  # A2.7
        w = rounded(mean([report.w for report in reports]))  # A2.9
        loss, best_loss = (
            mean([report.loss for report in reports]),
            mean([report.best_loss for report in reports]),
        )
        if t0 > 0:  # A2.10 to A2.12
            if loss < best_loss:  # A2.13
                best, best_loss = w0, loss  # A2.14
            if inputs.tau is None and not stop:
                rho, beta = (
                    mean([report.rho for report in reports]),
                    mean([report.beta for report in reports]),
                )
                gradient = mean([report.gradient for report in reports])
                delta = mean(
                    [np.linalg.norm(report.gradient - gradient) for report in reports]
                )
                estimates = float(rho), float(beta), float(delta)  # A2.17, A2.18, A2.19
                # A2.20, with c and b of the previous round
                tau = _argmin(inputs, estimates, c, b, tau, done, run_taus)
        c, b = costs.draw(made)  # A2.22
        spent = spent + c * made + b  # A2.23
        done.rounds.append(
            ReplayedRound(made, float(loss), float(best_loss), estimates, c, b, spent)
        )
        if stop:  # A2.15, A2.16; the costs of the round count nevertheless
            break
        if np.any(spent + c * (tau + 1) + 2 * b >= limit):  # A2.24
            while tau > 0 and np.any(spent + c * (tau + 1) + 2 * b > limit):
                tau -= 1  # A2.25
            stop = True
    finals = [node.final(w, best) for node in nodes]  # A2.26, A2.27
    loss, best_loss = (
        mean([final[0] for final in finals]),
        mean([final[1] for final in finals]),
    )  # A2.28
    if loss < best_loss:  # A2.29
        best, best_loss = w, loss  # A2.30
    c, b = costs.draw(1, final=True)
    done.rounds.append(
        ReplayedRound(0, float(loss), float(best_loss), None, c, b, spent + c + b)
    )
    done.w = best
    return done


def _argmin(
    inputs: Inputs,
    estimates: tuple[float, float, float],
    c: Vector,
    b: Vector,
    tau: int,
    done: Replay,
    run_taus: Sequence[int],
) -> int:
    """A2.20: the smallest τ in 1, ..., min(γτ*, τ_max) whose G is smallest."""
    values = {
        each: control_objective(each, inputs, estimates, c, b)
        for each in range(1, min(int(inputs.gamma * tau), inputs.tau_max) + 1)
    }
    chosen = min(values, key=lambda each: values[each])
    following = len(done.rounds) + 1
    asked = run_taus[following] if following < len(run_taus) else 0
    if (
        asked != chosen
        and asked in values
        and values[asked] <= values[chosen] * (1 + SAME_G)
    ):
        done.ties.append(following)
        return asked
    return chosen


def loss_everywhere(inputs: Inputs, w: Vector, samples: tuple[Vector, Vector]) -> float:
    """F(w) on all training samples."""
    return Node(inputs, *samples).loss(w)
