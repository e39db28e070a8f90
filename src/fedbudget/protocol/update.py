"""What of w is no parameter: running statistics, such as those of batch normalization, which are w's last numbers.

They travel with w, and are averaged by samples as parameters are, eq. (5). But they are measured, and not found by
steps along a gradient: so no update rule moves them, drift is not corrected in them, and no distance between two w
counts them. Wherever two w are compared, one is first given the statistics of the other.

How the mean update moves w: the aggregator's own step, after local updates have been averaged.

An update rule is a value and a pure step, as a controller is (control.py). Its state is whatever it must remember from
round to round: None, or a frozen dataclass of numbers and arrays, which is saved with the aggregator's.

Update rules that others have published, by the names that they are known by.

With Δ = mean - w(t₀), which stands for a step along the negative gradient, all of it per parameter:

    average     w(t) = w(t₀) + Δ                                               FedAvg, McMahan et al., AISTATS 2017
    fedavgm     v ← m v + s Δ,                  w(t) = w(t₀) + v               Hsu et al., 2019
    fedadam     v ← β₂ v + (1-β₂) Δ²                                           Reddi et al., ICLR 2021, Algorithm 2
    fedyogi     v ← v - (1-β₂) Δ² sign(v - Δ²)                                 the same
                m ← β₁ m + (1-β₁) Δ,            w(t) = w(t₀) + s m / (√v + ε)  of both

m starts with 0, and v of the last two with ε², the least that Algorithm 2 allows. There is no correction of the bias
that m and v have at first: Algorithm 2 has none, while some programs that bear its name do. ε is τ in their paper, and
s is η, which here are local updates and the nodes' step size. SCAFFOLD, FedProx and FedNova, which change local
updates, are in drift.py, proximal.py and fednova.py.

How w of K-means moves: to the mean, and centres that have nothing to do are put where there is something.

The first centres are drawn without a look at samples, which stay with the nodes. So one of them may be the nearest to
nearly all: it moves into their midst, and the others, which have no samples, have a gradient of 0 for good. Then there
is one cluster, however many were asked for. So centres begin few and are split (Linde, Buzo and Gray, 1980):

- After the first round those count that have moved more than half as far as the one that moved furthest; after any
  other, those that have moved at all. Who has counted once counts for good: it may stay because that is right.
- Each of the others is put beside one that has moved, off by a hundredth of that one's way, so that they share its
  samples, and part. One that moves is split once in a round, the one that moved furthest first: so in every round there
  may be twice as many, until there are all. Nobody was nearest to where such a centre was, but perhaps in the first
  round, so that the loss does not rise by it.

FedProx: local updates that are held near where they started (Li et al., MLSys 2020).

A node descends on F_i(w) + μ/2 ‖w - w(t₀)‖² in place of F_i(w), so that an update is

    w ← w - η (∇F_i(w) + s_i + μ (w - w(t₀)))

with s_i whatever else is added to its gradients. The pull changes with every update, while a model adds the same to all
of a round's: so updates are asked for one at a time, each for all nodes at once. Losses and gradients that a round
tells of are those of F_i itself; at w(t₀), where they are taken, the pull is 0.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fedbudget.arrays import Float32
from fedbudget.data.sampling import BatchIndices
from fedbudget.errors import UserError
from fedbudget.models.base import Descent
from fedbudget.protocol.estimates import one_of


def with_statistics_of(other: Float32, w: Float32, statistics: int) -> Float32:
    """w, [parameters] or [nodes, parameters], with another's statistics; the other itself, where all else is the same.

    Args:
      statistics: how many of w's last numbers are; with none it is w itself.
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
    """The parameters alone."""
    return w[..., : w.shape[-1] - statistics]


def scaled_from(start: Float32, w: Float32, scale: Float32, statistics: int) -> Float32:
    """Where nodes would be who have come from `start` to w, [nodes, parameters], had they gone so many times as far.

    Args:
      scale: [nodes]; statistics stay as they are.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # of a node that diverged
        scaled: Float32 = w - start
        scaled *= scale[:, None]
        scaled += start
    return with_statistics_of(w, scaled, statistics)


class UpdateRule(Protocol):
    """Moves w, round by round."""

    def first(self, w: Float32) -> Any:
        """The state to begin with, and after the run went back to w^f, but for a `RestartingRule`.

        Args:
          w: where the run is, [parameters].
        """

    def next(self, state: Any, w: Float32, mean: Float32) -> tuple[Any, Float32]:
        """The next state, and w of the next round.

        Args:
          w: w(t₀), from which the round started, [parameters].
          mean: what the nodes' w_i(t) were combined to, [parameters].
        """


@runtime_checkable
class MovingRule(UpdateRule, Protocol):
    """A rule whose w goes on by itself. It is told how fast and where less, and its last round ends at the mean.

    Nodes make a part of the coming motion (messages.py, `momentum`): `next` is given what their gradients alone have
    made of w(t₀).
    """

    @property
    def carried(self) -> float:
        """The share of the last move of w that nodes make once more, while η stays what it is; at most 1."""

    def trust(self, state: Any, rate: float) -> tuple[Any, float]:
        """The state to go on with, and which share of a mean update to take.

        Args:
          rate: how long it is, over the η τ that it was made with, which is how long gradients are; more than 0.
        """

    def retreat(self, state: Any) -> Any:
        """The state to go on with after a round that began with a w worse than one before, by more than chance."""

    def paced(self, state: Any, ratio: float) -> Any:
        """The state to go on with where η of the coming round is so many times that of the last."""


@runtime_checkable
class RestartingRule(UpdateRule, Protocol):
    """A rule that remembers something beyond where a run goes back."""

    def restart(self, state: Any, w: Float32) -> Any:
        """The state to go on with after the run went back to w^f.

        Args:
          w: w^f, [parameters].
        """


def restarted(rule: UpdateRule, state: Any, w: Float32) -> Any:
    """The rule's state after the run went back to w^f."""
    return rule.restart(state, w) if isinstance(rule, RestartingRule) else rule.first(w)


_MOVES: dict[type, bool] = {}


def moves(rule: UpdateRule) -> TypeGuard[MovingRule]:
    """Whether it is a `MovingRule`: of each class looked at once, for every round asks several times."""
    kind = type(rule)
    if kind not in _MOVES:
        _MOVES[kind] = isinstance(rule, MovingRule)
    return _MOVES[kind]


@dataclass(frozen=True)
class Average:
    """w is the mean itself, eq. (5)."""

    def first(self, w: Float32) -> None:
        return None

    def next(self, state: None, w: Float32, mean: Float32) -> tuple[None, Float32]:
        return None, mean


@dataclass(frozen=True)
class Velocity:
    """What a rule with momentum remembers: the steps so far, [parameters]."""

    v: Float32


@dataclass(frozen=True)
class ServerMomentum:
    """v ← m v + s (mean - w(t₀)), w(t) ← w(t₀) + v (FedAvgM, Hsu et al., 2019); m = 0 and s = 1 is the average.

    Args:
      momentum: m, how much of the last step is made again.
      step_size: s, of the aggregator.

    >>> rule, w = ServerMomentum(0.5), np.zeros(1, np.float32)
    >>> state, w = rule.next(rule.first(w), w, w + 1)
    >>> rule.next(state, w, w + 1)[1]
    array([2.5], dtype=float32)
    """

    momentum: float = 0.9
    step_size: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise UserError(
                f"momentum must be at least 0 and below 1, not {self.momentum:g}"
            )
        if not 0 < self.step_size < math.inf:
            raise UserError(f"step_size must be a positive number, not {self.step_size:g}")

    def first(self, w: Float32) -> Velocity:
        return Velocity(np.zeros_like(w))

    def next(self, state: Velocity, w: Float32, mean: Float32) -> tuple[Velocity, Float32]:
        v = np.float32(self.momentum) * state.v + np.float32(self.step_size) * (mean - w)
        return Velocity(v), w + v


@dataclass(frozen=True)
class Motion:
    """What `Accelerate` remembers: where w is moving, and the gain of each parameter, [parameters].

    Args:
      rate: how long mean gradients were of late, at most; 0 where none is known.
    """

    velocity: Float32
    gains: Float32
    rate: float = 0.0


@dataclass(frozen=True)
class Accelerate:
    """Goes on where rounds agree on the way, parameter by parameter, without a scale that anyone must set.

        Δ = mean - w(t₀) - a v,      g ← 1.4 g where vΔ > 0,  0.5 g where vΔ < 0,  within [1, 100]
        v ← 0.95 v' + g Δ,           v' = v, halved where vΔ < 0,                  w(t) ← w(t₀) + v

    Successive mean updates that point the same way say that they are too short, and those that point back that w went
    too far; by their signs alone, so that nothing depends on how large parameters are. (Gains as in the delta-bar-delta
    rule, Jacobs, 1988, and momentum that is given up softly.) Where the loss has become worse all the same, by more
    than chance, half of v and of g - 1 is given up (`retreat`). v is a sum of steps of length η, and so
    falls with η (`paced`), or noise of long steps would outlast them; it does not rise with η, as longer steps have not
    agreed yet. The last round moves w to the mean, without more.

    A mean update whose gradients are more than half as long again as any of late comes from where the loss has become
    steep all of a sudden, as where a network leaves a flat start. η and gains are of before: so it is shortened to that
    (`trust`), and takes some rounds in which both can follow.

    Most of the motion, a v with a = 0.95 · 0.7, is made by nodes, a part of it with each local update: then gradients
    are those of where w is going, and where the loss is steep they take back what goes too far within the round, as
    Nesterov's do. Where it is flat they leave it be. (Momentum in local updates: Karimireddy et al., Mime, 2020; Xu et
    al., FedCM, 2021.)

    Args:
      momentum: how much of the last step is made again.
      carry: how much of that nodes make.
      rise, fall: what a gain is multiplied with where a parameter goes on, and where it turns back.
      most: the largest gain.
      kept: how much of its velocity a parameter keeps that turns back, and of all motion what is kept in a retreat.
      growth: how many times longer than those of late a mean gradient may be.
      memory: how much of the longest is remembered from round to round.

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
    kept: float = 0.5
    growth: float = 1.5
    memory: float = 0.9

    @property
    def carried(self) -> float:
        return self.momentum * self.carry

    def first(self, w: Float32) -> Motion:
        return Motion(np.zeros_like(w), np.ones_like(w))

    def next(self, state: Motion, w: Float32, mean: Float32) -> tuple[Motion, Float32]:
        with np.errstate(
            over="ignore", invalid="ignore"
        ):  # of a run that diverges, and then goes back
            step = mean - w
            velocity = state.velocity
            agree = np.sign(velocity) * np.sign(step)
            factor = np.select(
                [agree > 0, agree < 0],
                [np.float32(self.rise), np.float32(self.fall)],
                np.float32(1),
            )
            gains = np.clip(state.gains * factor, np.float32(1), np.float32(self.most))
            velocity = np.where(agree < 0, np.float32(self.kept) * velocity, velocity)
            velocity = np.float32(self.momentum) * velocity + gains * step
            return replace(state, velocity=velocity, gains=gains), w + velocity

    def trust(self, state: Motion, rate: float) -> tuple[Motion, float]:
        taken = min(rate, self.growth * state.rate) if state.rate else rate
        return replace(state, rate=max(taken, self.memory * state.rate)), taken / rate

    def retreat(self, state: Motion) -> Motion:
        kept = np.float32(self.kept)
        return replace(
            state, velocity=kept * state.velocity, gains=1 + kept * (state.gains - 1)
        )

    def paced(self, state: Motion, ratio: float) -> Motion:
        return replace(state, velocity=np.float32(min(1.0, ratio)) * state.velocity)


@dataclass(frozen=True)
class UpdateMoments:
    """What an adaptive rule remembers: running means of Δ and of its square, both [parameters]."""

    m: Float32
    v: Float32


@dataclass(frozen=True)
class _AdaptiveRule(ABC):
    """What FedAdam and FedYogi share."""

    step_size: float = 0.1
    momentum: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("momentum", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(
                    f"{name} must be at least 0 and below 1, not {getattr(self, name):g}"
                )
        for name in ("step_size", "epsilon"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(
                    f"{name} must be a positive number, not {getattr(self, name):g}"
                )

    def first(self, w: Float32) -> UpdateMoments:
        return UpdateMoments(np.zeros_like(w), np.full_like(w, self.epsilon**2))

    def next(
        self, state: UpdateMoments, w: Float32, mean: Float32
    ) -> tuple[UpdateMoments, Float32]:
        with np.errstate(
            over="ignore", invalid="ignore"
        ):  # of a run that diverges, and then goes back
            delta = mean - w
            m = np.float32(self.momentum) * state.m + np.float32(1 - self.momentum) * delta
            v = self._second_moment(state.v, np.square(delta))
            scale: Float32 = np.float32(self.step_size) / (
                np.sqrt(v) + np.float32(self.epsilon)
            )
            return UpdateMoments(m, v), w + scale * m

    @abstractmethod
    def _second_moment(self, v: Float32, square: Float32) -> Float32:
        """The next v, from Δ²."""


@dataclass(frozen=True)
class FedAdam(_AdaptiveRule):
    """Parameters that move little move further, by a running mean of Δ² (Reddi et al., 2021).

    Args:
      step_size: s; about the length of a step of each parameter.
      momentum: β₁, of the running mean of Δ.
      beta2: β₂, of the running mean of Δ².
      epsilon: ε; larger is less adaptive.

    >>> rule, w = FedAdam(step_size=1.0, momentum=0.5, beta2=0.75, epsilon=1.0), np.zeros(1, np.float32)
    >>> rule.next(rule.first(w), w, w + 3)[1].round(3)  # m = 1.5, v = 0.75 + 0.25 * 9 = 3
    array([0.549], dtype=float32)
    """

    def _second_moment(self, v: Float32, square: Float32) -> Float32:
        return np.float32(self.beta2) * v + np.float32(1 - self.beta2) * square


@dataclass(frozen=True)
class FedYogi(_AdaptiveRule):
    """As FedAdam, with v that changes by no more than a share of Δ², however large it has become (Reddi et al., 2021).

    Args:
      step_size: s; about the length of a step of each parameter.
      momentum: β₁, of the running mean of Δ.
      beta2: β₂; v changes by 1-β₂ of Δ².
      epsilon: ε; larger is less adaptive.

    >>> rule, w = FedYogi(step_size=1.0, momentum=0.5, beta2=0.75, epsilon=1.0), np.zeros(1, np.float32)
    >>> rule.next(rule.first(w), w, w + 4)[1].round(3)  # m = 2, v = 1 + 0.25 * 16 = 5
    array([0.618], dtype=float32)
    """

    def _second_moment(self, v: Float32, square: Float32) -> Float32:
        change: Float32 = np.float32(1 - self.beta2) * square * np.sign(v - square)
        return v - change


UPDATE_RULES: Mapping[str, type[Any]] = {
    "average": Average,
    "accelerate": Accelerate,
    "fedavgm": ServerMomentum,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
}
"""By the names that settings have; the fields of each are its options."""


_FIRST = 0.5
_LATER = 1e-3
"""Shares of the longest way; what is below the second is rounding."""
_OFF = np.float32(0.01)


@dataclass(frozen=True)
class CentresState:
    """What is known of the centres.

    Args:
      counted: which have had samples, [clusters].
      rounds: how many there were.
    """

    counted: NDArray[np.bool_]
    rounds: int = 0


@dataclass(frozen=True)
class SplitCentres:
    """w is the mean, but for centres that have no samples, see above.

    Args:
      clusters: how many centres there are, one after the other in w.

    >>> rule, w = SplitCentres(2), np.array([0, 9], np.float32)
    >>> rule.next(rule.first(w), w, np.array([1, 9], np.float32))[1]  # the second is put beside the first
    array([1.  , 1.01], dtype=float32)
    """

    clusters: int

    def first(self, w: Float32) -> CentresState:
        return CentresState(np.zeros(self.clusters, bool))

    def restart(self, state: CentresState, w: Float32) -> CentresState:
        """Back at a w that was good: all its centres stay."""
        return replace(state, counted=np.ones(self.clusters, bool))

    def next(
        self, state: CentresState, w: Float32, mean: Float32
    ) -> tuple[CentresState, Float32]:
        centres = mean.reshape(self.clusters, -1)
        ways = centres - w.reshape(self.clusters, -1)
        lengths = np.linalg.norm(ways, axis=1)
        moving = lengths > (_LATER if state.rounds else _FIRST) * lengths.max()
        state = CentresState(state.counted | moving, state.rounds + 1)
        idle = np.flatnonzero(~state.counted)
        furthest = np.argsort(-lengths, kind="stable")[: moving.sum()]
        pairs = min(len(idle), len(furthest))
        if pairs == 0:
            return state, mean
        idle, beside = idle[:pairs], furthest[:pairs]
        centres = centres.copy()
        centres[idle] = centres[beside] + _OFF * ways[beside]
        return state, centres.reshape(-1)


OneUpdate = Callable[[Float32, BatchIndices, Float32 | None, bool], Descent]
"""One update of all nodes, from their w and a mini-batch, with what is added to gradients; whether it is the first."""


def descend_near(
    update: OneUpdate,
    w: Float32,
    indices: BatchIndices,
    proximal: float,
    shift: Float32 | None,
    statistics: int,
) -> Descent:
    """The updates of a round.

    Args:
      w: w(t₀), [parameters].
      proximal: μ.
      shift: what else is added to gradients, [nodes, parameters].
      statistics: how many of w's last numbers are running statistics, which nothing pulls at.
    """
    first = last = update(w[None], one_of(indices, 0), shift, True)
    for number in range(1, indices.updates):
        with np.errstate(over="ignore", invalid="ignore"):  # of a node that diverged
            pull = np.float32(proximal) * (with_statistics_of(w, last.w, statistics) - w)
        fresh = update(
            last.w, one_of(indices, number), pull if shift is None else pull + shift, False
        )
        makes = indices.updates_of > number
        last = (
            fresh
            if makes.all()
            else replace(fresh, w=np.where(makes[:, None], fresh.w, last.w))
        )
    return replace(first, w=last.w)
