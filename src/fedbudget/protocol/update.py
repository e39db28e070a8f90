"""How the mean update moves w: the aggregator's own step, after local updates have been averaged.

An update rule is a value and a pure step, as a controller is (control.py). Its state is whatever it must remember from
round to round: None, or a frozen dataclass of numbers and arrays, which is saved with the aggregator's.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np

from fedbudget.arrays import Float32
from fedbudget.errors import UserError


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
            raise UserError(f"momentum must be at least 0 and below 1, not {self.momentum:g}")
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
        with np.errstate(over="ignore", invalid="ignore"):  # of a run that diverges, and then goes back
            step, velocity = mean - w, state.velocity
            agree = np.sign(velocity) * np.sign(step)
            factor = np.select([agree > 0, agree < 0], [np.float32(self.rise), np.float32(self.fall)], np.float32(1))
            gains = np.clip(state.gains * factor, np.float32(1), np.float32(self.most))
            velocity = np.where(agree < 0, np.float32(self.kept) * velocity, velocity)
            velocity = np.float32(self.momentum) * velocity + gains * step
            return replace(state, velocity=velocity, gains=gains), w + velocity

    def trust(self, state: Motion, rate: float) -> tuple[Motion, float]:
        taken = min(rate, self.growth * state.rate) if state.rate else rate
        return replace(state, rate=max(taken, self.memory * state.rate)), taken / rate

    def retreat(self, state: Motion) -> Motion:
        kept = np.float32(self.kept)
        return replace(state, velocity=kept * state.velocity, gains=1 + kept * (state.gains - 1))

    def paced(self, state: Motion, ratio: float) -> Motion:
        return replace(state, velocity=np.float32(min(1.0, ratio)) * state.velocity)
