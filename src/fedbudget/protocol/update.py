"""Update rules: how the combined local updates move w.

An update rule is a value with pure steps, like a controller (budget/control.py). Its state
is None, or a frozen dataclass of numbers and arrays, which is saved with the aggregator's
state.

With Δ = mean - w(t₀), which acts as a step along the negative gradient, per parameter:

    average     w(t) = w(t₀) + Δ                            McMahan et al., AISTATS 2017
    fedavgm     v ← m v + s Δ                               Hsu et al., 2019
                w(t) = w(t₀) + v
    fedadam     v ← β₂ v + (1-β₂) Δ²                        Reddi et al., ICLR 2021
    fedyogi     v ← v - (1-β₂) Δ² sign(v - Δ²)              Reddi et al., ICLR 2021
                m ← β₁ m + (1-β₁) Δ                         (both)
                w(t) = w(t₀) + s m / (√v + ε)               (both)
    fedexp      w(t) = w(t₀) + max(1, ‖Δ_i‖² on average / 2 (‖Δ‖² + ε)) Δ
                                                            Jhunjhunwala et al., ICLR 2023
    prodigy     see `Prodigy`                               Mishchenko & Defazio, ICML 2024
    accelerate  see `Accelerate`; the default method's rule

In FedAdam and FedYogi m starts at 0 and v at ε², the smallest value that Algorithm 2 of
Reddi et al. allows. m and v have no bias correction: Algorithm 2 has none, although some
implementations add it. Their paper writes τ for ε and η for s; both letters have other
meanings here. Features change local updates: SCAFFOLD (features/drift.py), FedNova
(features/workload.py), FedProx (features/proximal.py), Δ-SGD and DoG
(features/local_step.py).

**K-means** (`KMeansSplit`). The first centres are drawn without access to samples, which
stay at the nodes. One of them may be the nearest to almost all samples. It moves into
their middle, and the others have no samples and a gradient of 0 forever: one cluster
remains. The rule therefore starts with few centres and splits them (Linde, Buzo and Gray,
1980):

- A centre is active if it moved more than half as far as the one that moved furthest in
  the first round, or if it moved at all in a later round. An active centre stays active: a
  centre at its final position does not move.
- Each inactive centre is placed next to a moving one, at a hundredth of that one's last
  step, so that they share its samples and separate. A moving centre is split at most once
  per round, the furthest moved first. The number of active centres at most doubles per
  round. Except perhaps in the first round, an inactive centre has no samples, so placing
  it elsewhere does not raise the loss.

**Running statistics**, such as those of batch normalization, are the last numbers of w.
They are sent with w and averaged by samples like parameters, eq. (5). They are measured,
not learned: no update rule moves them, drift is not corrected in them, and distances
between two w ignore them. Before two w are compared, one receives the statistics of the
other.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fedbudget.arrays import Float32
from fedbudget.errors import UserError
from fedbudget.frozen import updated

_MOVED_FIRST = 0.5  # share of the longest step above which a centre is active in round 1
_MOVED = 1e-3  # the same in later rounds; shorter steps are rounding errors
SQUARED_STEP = "squared_step"
"""Name of ‖w_i(t) - w(t₀)‖² in reports."""

_OFFSET = np.float32(0.01)  # distance of a split centre, as a share of the other's step


class UpdateRule(Protocol):
    """Moves w after every round."""

    def first(self, w: Float32) -> Any:
        """Create the initial state.

        It is also the state after a return to w^f, except for a `RestartingRule`.

        Args:
          w: current w, [parameters].

        Returns:
          None, or a frozen dataclass of numbers and arrays.
        """

    def next(self, state: Any, w: Float32, mean: Float32) -> tuple[Any, Float32]:
        """Move w.

        Args:
          state: the previous state.
          w: w(t₀), the start of the round, [parameters].
          mean: the combined w_i(t) of the nodes, [parameters].

        Returns:
          the next state, and the w of the next round, [parameters].
        """


@runtime_checkable
class MovingRule(UpdateRule, Protocol):
    """An update rule with momentum, which nodes partly apply in their local updates.

    Nodes start from a w that is extrapolated along its last step (features/momentum.py).
    `next` receives the part of the mean that their gradients contributed. The last round of
    a run ends at the mean, without momentum. A wrapper of such a rule must define all of
    its methods; otherwise nodes do not apply the momentum.
    """

    @property
    def carried(self) -> float:
        """Share of the last step of w that nodes repeat if η is unchanged; at most 1."""

    def trust(self, state: Any, rate: float) -> tuple[Any, float]:
        """Limit the mean update of a round.

        Args:
          state: the previous state.
          rate: length of the mean update over its η τ, i.e. of a mean gradient; positive.

        Returns:
          the next state, and the share of the mean update to apply.
        """


@runtime_checkable
class RestartingRule(UpdateRule, Protocol):
    """An update rule whose state survives a return to w^f."""

    def restart(self, state: Any, w: Float32) -> Any:
        """Create the state after the run returned to w^f.

        Args:
          state: the previous state.
          w: w^f, [parameters].

        Returns:
          the next state.
        """


def restarted(rule: UpdateRule, state: Any, w: Float32) -> Any:
    """Return the state of a rule after the run returned to w^f."""
    return rule.restart(state, w) if isinstance(rule, RestartingRule) else rule.first(w)


def moves(rule: UpdateRule) -> TypeGuard[MovingRule]:
    """Whether a rule is a `MovingRule`. Cached by class, because every round asks
    repeatedly."""
    kind = type(rule)
    if kind not in _MOVES:
        _MOVES[kind] = isinstance(rule, MovingRule)
    return _MOVES[kind]


_MOVES: dict[type, bool] = {}


@dataclass(frozen=True)
class Average:
    """FedAvg: w is the mean itself, eq. (5)."""

    def first(self, w: Float32) -> None:
        return None

    def next(self, state: None, w: Float32, mean: Float32) -> tuple[None, Float32]:
        return None, mean


@dataclass(frozen=True)
class Velocity:
    """State of `ServerMomentum`: decayed sum of all steps, [parameters]."""

    v: Float32


@dataclass(frozen=True)
class ServerMomentum:
    """FedAvgM: v ← m v + s (mean - w(t₀)), w(t) ← w(t₀) + v (Hsu et al., 2019).

    With m = 0 and s = 1 it is the average.

    Args:
      momentum: m, share of the last step that is repeated.
      step_size: s, step size of the aggregator.

    >>> rule, w = ServerMomentum(0.5), np.zeros(1, np.float32)
    >>> state, w = rule.next(rule.first(w), w, w + 1)
    >>> rule.next(state, w, w + 1)[1]
    array([2.5], dtype=float32)
    """

    momentum: float = 0.9
    step_size: float = 1.0

    def __post_init__(self) -> None:
        _require_decay("momentum", self.momentum)
        _require_positive("step_size", self.step_size)

    def first(self, w: Float32) -> Velocity:
        return Velocity(np.zeros_like(w))

    def next(self, state: Velocity, w: Float32, mean: Float32) -> tuple[Velocity, Float32]:
        v = np.float32(self.momentum) * state.v + np.float32(self.step_size) * (mean - w)
        return Velocity(v), w + v


@dataclass(frozen=True)
class Motion:
    """State of `Accelerate`.

    Args:
      velocity: velocity of w, [parameters].
      gains: gain of each parameter, [parameters].
      rate: largest recent length of a mean gradient; 0 before the first.
    """

    velocity: Float32
    gains: Float32
    rate: float = 0.0


@dataclass(frozen=True)
class Accelerate:
    """Adds momentum in parameters whose successive updates agree: the default method's
    rule.

        Δ = mean - w(t₀) - a v
        g ← 1.4 g if vΔ > 0,  0.5 g if vΔ < 0,  within [1, 100]
        v ← 0.95 v' + g Δ,    v' = v, halved if vΔ < 0
        w(t) ← w(t₀) + v

    **Gains.** Successive updates in the same direction are too short. An update in the
    opposite direction means that w went too far. Only signs count, so the scale of a
    parameter does not matter. The gains follow the delta-bar-delta rule (Jacobs, 1988).

    The last round ends at the mean, without momentum.

    **Sudden steepness.** A mean gradient more than 1.5 times as long as all recent ones
    comes from a region in which the loss suddenly became steep, for example when a network
    leaves a flat start. η and the gains are from before, so the update is shortened to
    that length (`trust`). Both can follow within some rounds.

    **Momentum at nodes.** Nodes apply most of the momentum, a v with a = 0.95 · 0.7, in
    equal parts with their local updates. Their gradients are then taken near the next w,
    as Nesterov's are: if the loss is steep there, they correct an overshoot within the
    round. (Momentum in local updates: Karimireddy et al., Mime, 2020; Xu et al., FedCM,
    2021.)

    Args:
      momentum: share of the last step that is repeated.
      carry: share of the momentum that nodes apply.
      rise: factor on the gain of a parameter that keeps its direction.
      fall: factor on the gain and on the velocity of a parameter that reverses.
      most: the largest gain.
      growth: longest accepted mean gradient, as a multiple of recent ones.
      memory: decay of the longest recent mean gradient per round.

    >>> rule, w = Accelerate(), np.zeros(1, np.float32)
    >>> state, w = rule.next(rule.first(w), w, w + 1)
    >>> rule.next(state, w, w + 1)[1]  # 1, then 0.95 + 1.4 more
    array([3.35], dtype=float32)
    """

    momentum: float = 0.95
    carry: float = 0.7
    rise: float = 1.4
    fall: float = 0.5
    most: float = 100.0
    growth: float = 1.5
    memory: float = 0.9

    @property
    def carried(self) -> float:
        return self.momentum * self.carry

    def first(self, w: Float32) -> Motion:
        return Motion(np.zeros_like(w), np.ones_like(w))

    def next(self, state: Motion, w: Float32, mean: Float32) -> tuple[Motion, Float32]:
        with np.errstate(over="ignore", invalid="ignore"):  # a diverged run recovers later
            step = mean - w
            velocity = state.velocity
            agree = np.sign(velocity) * np.sign(step)
            reversed_ = agree < 0
            factor = np.where(reversed_, np.float32(self.fall), np.float32(1))
            factor = np.where(agree > 0, np.float32(self.rise), factor)
            gains = np.clip(state.gains * factor, np.float32(1), np.float32(self.most))
            velocity = np.where(reversed_, np.float32(self.fall) * velocity, velocity)
            velocity = np.float32(self.momentum) * velocity + gains * step
            return updated(state, velocity=velocity, gains=gains), w + velocity

    def trust(self, state: Motion, rate: float) -> tuple[Motion, float]:
        taken = min(rate, self.growth * state.rate) if state.rate else rate
        return updated(state, rate=max(taken, self.memory * state.rate)), taken / rate


@dataclass(frozen=True)
class UpdateMoments:
    """State of FedAdam and FedYogi: running means of Δ and of Δ², both [parameters]."""

    m: Float32
    v: Float32


@dataclass(frozen=True)
class _AdaptiveRule(ABC):
    """Common part of FedAdam and FedYogi."""

    step_size: float = 0.1
    momentum: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-3

    def __post_init__(self) -> None:
        _require_decay("momentum", self.momentum)
        _require_decay("beta2", self.beta2)
        _require_positive("step_size", self.step_size)
        _require_positive("epsilon", self.epsilon)

    def first(self, w: Float32) -> UpdateMoments:
        return UpdateMoments(np.zeros_like(w), np.full_like(w, self.epsilon**2))

    def next(
        self, state: UpdateMoments, w: Float32, mean: Float32
    ) -> tuple[UpdateMoments, Float32]:
        with np.errstate(over="ignore", invalid="ignore"):  # a diverged run recovers later
            delta = mean - w
            m = np.float32(self.momentum) * state.m + np.float32(1 - self.momentum) * delta
            v = self._second_moment(state.v, np.square(delta))
            denominator = np.sqrt(v) + np.float32(self.epsilon)
            scale: Float32 = np.float32(self.step_size) / denominator
            return UpdateMoments(m, v), w + scale * m

    @abstractmethod
    def _second_moment(self, v: Float32, square: Float32) -> Float32:
        """Return the next v from Δ²."""


@dataclass(frozen=True)
class FedAdam(_AdaptiveRule):
    """Scales each parameter's step by a running mean of Δ² (Reddi et al., 2021).

    Args:
      step_size: s; about the length of a step of each parameter.
      momentum: β₁, decay of the running mean of Δ.
      beta2: β₂, decay of the running mean of Δ².
      epsilon: ε; a larger value is less adaptive.

    >>> rule = FedAdam(step_size=1.0, momentum=0.5, beta2=0.75, epsilon=1.0)
    >>> w = np.zeros(1, np.float32)
    >>> rule.next(rule.first(w), w, w + 3)[1].round(3)  # m = 1.5, v = 0.75 + 0.25 * 9 = 3
    array([0.549], dtype=float32)
    """

    def _second_moment(self, v: Float32, square: Float32) -> Float32:
        return np.float32(self.beta2) * v + np.float32(1 - self.beta2) * square


@dataclass(frozen=True)
class FedYogi(_AdaptiveRule):
    """FedAdam with a v that changes by at most a share of Δ² per round (Reddi et al.,
    2021).

    Args:
      step_size: s; about the length of a step of each parameter.
      momentum: β₁, decay of the running mean of Δ.
      beta2: β₂; v changes by (1-β₂) Δ².
      epsilon: ε; a larger value is less adaptive.

    >>> rule = FedYogi(step_size=1.0, momentum=0.5, beta2=0.75, epsilon=1.0)
    >>> w = np.zeros(1, np.float32)
    >>> rule.next(rule.first(w), w, w + 4)[1].round(3)  # m = 2, v = 1 + 0.25 * 16 = 5
    array([0.618], dtype=float32)
    """

    def _second_moment(self, v: Float32, square: Float32) -> Float32:
        change: Float32 = np.float32(1 - self.beta2) * square * np.sign(v - square)
        return v - change


@dataclass(frozen=True)
class StepSquares:
    """State of `FedExP`: mean of ‖Δ_i‖² over the nodes of the last round."""

    mean: float = 0.0


@dataclass(frozen=True)
class FedExP:
    """Extrapolates the mean update while nodes disagree (Jhunjhunwala et al., 2023).

        w(t) = w(t₀) + max(1, Σ_i ‖Δ_i‖² / 2m (‖Δ‖² + ε)) Δ

    with Δ_i = w_i(t) - w(t₀) of m nodes. Here nodes count by their samples, as in Δ. They
    report ‖Δ_i‖² (features/local_step.py); without reports the rule averages. The
    authors' code multiplies ε by m, and evaluates the mean of the last two w.

    Args:
      epsilon: ε; a larger value extrapolates less.

    >>> rule, w = FedExP(epsilon=1.0), np.zeros(2, np.float32)
    >>> state = rule.measured(rule.first(w), 40.0)
    >>> rule.next(state, w, w + 2)[1]  # 40 / 2 (8 + 1) = 2.22
    array([4.4444447, 4.4444447], dtype=float32)
    """

    epsilon: float = 1e-3

    def __post_init__(self) -> None:
        _require_positive("epsilon", self.epsilon)

    def first(self, w: Float32) -> StepSquares:
        return StepSquares()

    def measured(self, state: StepSquares, mean: float) -> StepSquares:
        """Return the state for the coming step.

        Args:
          state: the previous state.
          mean: mean of ‖Δ_i‖²; NaN if no node reported it.
        """
        return StepSquares(mean)

    def next(
        self, state: StepSquares, w: Float32, mean: Float32
    ) -> tuple[StepSquares, Float32]:
        with np.errstate(over="ignore", invalid="ignore"):  # a diverged run recovers later
            delta = mean - w
            square = float(np.square(delta, dtype=np.float64).sum())
            factor = max(1.0, state.mean / (2 * (square + self.epsilon)))
            return state, mean if factor == 1 else w + np.float32(factor) * delta


@dataclass(frozen=True)
class Travel:
    """State of `Prodigy`.

    Args:
      origin: w(0), [parameters].
      s, m, v: decayed sums of gradients, gradients and squares, [parameters] each.
      r: decayed sum of ⟨g, w(0) - w⟩.
      d: estimated distance from w(0) to the optimum.
    """

    origin: Float32
    s: Float32
    m: Float32
    v: Float32
    r: float
    d: float


@dataclass(frozen=True)
class Prodigy:
    """Adam with a step size that follows from the estimated distance to the optimum.

    Mishchenko and Defazio (2024), at the aggregator, with g = -Δ as the gradient and
    β₃ = √β₂:

        r ← β₃ r + (d²/d₀) ⟨g, w(0) - w⟩        s ← β₃ s + (d²/d₀) g
        m ← β₁ m + (1-β₁) d g                   v ← β₂ v + (1-β₂) d² g²
        d' = max(d, r / ‖s‖₁)
        w ← w - d m / (√v + d' ε)               d ← d'

    Args:
      momentum: β₁.
      beta2: β₂.
      epsilon: ε.
      first_distance: d₀, less than the distance to any optimum.

    >>> rule, w = Prodigy(momentum=0.0, first_distance=0.5), np.zeros(1, np.float32)
    >>> state, w = rule.next(rule.first(w), w, w + 1)  # m = -d, √v = 0.0316 d
    >>> w.round(2), rule.next(state, w, w + 1)[0].d.__round__(2)
    (array([15.81], dtype=float32), 7.91)
    """

    momentum: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    first_distance: float = 1e-6

    def __post_init__(self) -> None:
        _require_decay("momentum", self.momentum)
        _require_decay("beta2", self.beta2)
        _require_positive("epsilon", self.epsilon)
        _require_positive("first_distance", self.first_distance)

    def first(self, w: Float32) -> Travel:
        nothing = np.zeros_like(w)
        return Travel(w, nothing, nothing, nothing, 0.0, self.first_distance)

    def next(self, state: Travel, w: Float32, mean: Float32) -> tuple[Travel, Float32]:
        d = state.d
        beta3 = math.sqrt(self.beta2)
        weight = d / self.first_distance * d
        with np.errstate(over="ignore", invalid="ignore"):  # a diverged run recovers later
            g = w - mean
            back = (state.origin - w).astype(np.float64)
            r = beta3 * state.r + weight * float(g @ back)
            s = np.float32(beta3) * state.s + np.float32(weight) * g
            m = (
                np.float32(self.momentum) * state.m
                + np.float32((1 - self.momentum) * d) * g
            )
            v = np.float32(self.beta2) * state.v
            v += np.float32((1 - self.beta2) * d * d) * np.square(g)
            length = float(np.abs(s).sum(dtype=np.float64))
            if length == 0:
                return state, w
            grown = max(d, r / length)
            step = np.float32(d) * m / (np.sqrt(v) + np.float32(grown * self.epsilon))
        return Travel(state.origin, s, m, v, r, grown), w - step


def _require_decay(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise UserError(f"{name} must be at least 0 and below 1, not {value:g}")


def _require_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise UserError(f"{name} must be a positive number, not {value:g}")


UPDATE_RULES: Mapping[str, type[Any]] = {
    "average": Average,
    "accelerate": Accelerate,
    "fedavgm": ServerMomentum,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedexp": FedExP,
    "prodigy": Prodigy,
}
"""Update rules by the names in settings; the fields of each are its options."""


@dataclass(frozen=True)
class KMeansSplitState:
    """State of `KMeansSplit`.

    Args:
      counted: which centres are active, [clusters].
      rounds: number of rounds so far.
    """

    counted: NDArray[np.bool_]
    rounds: int = 0


@dataclass(frozen=True)
class KMeansSplit:
    """Splits centres of K-means that move: the default method's rule for K-means.

    w is the mean, except for inactive centres. A centre k is active from the first round in
    which ‖s_k‖ > c max_j ‖s_j‖, with s_k its step, c = 0.5 in round 1 and 0.001 later. Each
    inactive centre moves next to one that moves, j, and they share its samples:

        w_k ← mean_j + 0.01 s_j

    A moving centre is split at most once per round, the furthest moved first. After a
    return to w^f all centres are active.

    Args:
      clusters: number of centres; w is their concatenation.

    >>> rule, w = KMeansSplit(2), np.array([0, 9], np.float32)
    >>> rule.next(rule.first(w), w, np.array([1, 9], np.float32))[1]  # splits the first
    array([1.  , 1.01], dtype=float32)
    """

    clusters: int

    def first(self, w: Float32) -> KMeansSplitState:
        return KMeansSplitState(np.zeros(self.clusters, bool))

    def restart(self, state: KMeansSplitState, w: Float32) -> KMeansSplitState:
        """Keep all centres of w^f."""
        return replace(state, counted=np.ones(self.clusters, bool))

    def next(
        self, state: KMeansSplitState, w: Float32, mean: Float32
    ) -> tuple[KMeansSplitState, Float32]:
        centres = mean.reshape(self.clusters, -1)
        steps = centres - w.reshape(self.clusters, -1)
        lengths = np.linalg.norm(steps, axis=1)
        threshold = _MOVED if state.rounds else _MOVED_FIRST
        moving = lengths > threshold * lengths.max()
        state = KMeansSplitState(state.counted | moving, state.rounds + 1)

        idle = np.flatnonzero(~state.counted)
        furthest = np.argsort(-lengths, kind="stable")[: moving.sum()]
        pairs = min(len(idle), len(furthest))
        if pairs == 0:
            return state, mean
        split = furthest[:pairs]
        centres = centres.copy()
        centres[idle[:pairs]] = centres[split] + _OFFSET * steps[split]
        return state, centres.reshape(-1)


def with_statistics_of(other: Float32, w: Float32, statistics: int) -> Float32:
    """Return w with the running statistics of another; the other itself if they then
    agree.

    Args:
      other: [parameters] or [nodes, parameters].
      w: [parameters] or [nodes, parameters].
      statistics: how many of w's last numbers are statistics; with 0 the result is w
        itself.
    """
    if not statistics:
        return w
    if w.shape == other.shape and np.array_equal(
        w[..., :-statistics], other[..., :-statistics]
    ):
        return other
    alike = w.copy()
    alike[..., -statistics:] = other[..., -statistics:]
    return alike


def without_statistics(w: Float32, statistics: int) -> Float32:
    """Return the parameters of w without its running statistics."""
    return w[..., : w.shape[-1] - statistics]


def scaled_from(start: Float32, w: Float32, scale: Float32, statistics: int) -> Float32:
    """Scale the steps of nodes from `start` to w, [nodes, parameters].

    Args:
      start: [parameters].
      w: w_i of the nodes, [nodes, parameters].
      scale: factor for each node, [nodes]; running statistics stay. A node with factor 1
        keeps its bits, so they do not depend on the other nodes of its fleet.
      statistics: how many of w's last numbers are running statistics.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # diverged nodes
        scaled: Float32 = w - start
        scaled *= scale[:, None]
        scaled += start
    np.copyto(scaled, w, where=(scale == 1)[:, None])
    return with_statistics_of(w, scaled, statistics) if statistics else scaled
