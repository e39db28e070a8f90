"""Step sizes: which η the next round has.

A step size is a value with pure steps, like a controller (control.py).

    FixedStep       the same η in every round
    FallingStep     a fixed η that falls at the end of the budget
    AutoStep        η from the smoothness that nodes measure
    SearchedStep    the same, with a search for the first η: the default method's step size

Gradient descent on a β-smooth loss is stable for η < 2/β and works best near 1/β. Every
node estimates its β anyway, so you need not set η. After each round `AutoStep` computes

    β̂ = max_i β̂_i
    β̄ = max(β̂, exp(mean of log β̂ + its mean deviation))
    η ← min(κ/β̄, 3η)

- κ = 1.3 for all problems. β̄ is an upper estimate of β, so η is about 1/β. A network
  trained this close to its stability limit moves to regions with a flatter loss, where η
  can grow. With κ = 1 it does not.
- β̂ is the maximum over nodes, because one diverging node spoils the average.
- β̂ is measured between two points on one line and on one mini-batch, so a single round
  can miss a steep direction. β̄ therefore stays above the upper end of recent values. Both
  running means weigh old and new equally. With smooth descent the deviation is small and η
  follows β̂. With mini-batches of one sample the deviation is large and η keeps a
  distance.
- η at most triples, because a β̂ between two nearly equal points is unreliable.
- η starts small and may grow tenfold per round until it settles. τ stays 1 until then,
  because local updates with a far too small η would be wasted.
- η falls towards 0 over the last third of the budget. The remaining loss is then mostly
  mini-batch noise, which shrinks with η. The fall follows the spent share of the resource
  nearest to its limit.
- If the loss becomes much worse (protocol/state.py defines when), the run returns to
  w^f with a quarter of η and half of κ.

docs/research/step-size.md has measurements, and the variants that did not help.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar

from fedbudget.errors import UserError


@dataclass(frozen=True)
class StepSizeState:
    """Step size of the coming round. A rule with more state subclasses it.

    Args:
      eta: η.
      settled: whether η has reached its proper size; τ stays 1 until then.
    """

    eta: float
    settled: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.eta < math.inf:
            raise ValueError(f"a step size must be 0 or a positive number, not {self.eta}")


@dataclass(frozen=True)
class StepSizeInputs:
    """Measurements that a step size may use.

    Args:
      beta: max_i β̂_i of the last round, if known.
      spent: spent share of the budget.
      mean_beta: mean of the β̂_i, if known.
      improved: whether the w at the start of the last round is significantly better than
        the best w before it.
      round_share: share of the budget spent on the last round.
    """

    beta: float | None
    spent: float
    mean_beta: float | None = None
    improved: bool = True
    round_share: float = 0.0


class StepSize(Protocol):
    """Chooses η before every round.

    Its state is a `StepSizeState`, or a frozen dataclass with at least the same fields.
    """

    @property
    def adapts(self) -> bool:
        """Whether nodes must estimate β, and the run returns to w^f if the loss gets much
        worse."""

    def first(self) -> StepSizeState:
        """Return the state for the first round."""

    def next(self, state: Any, inputs: StepSizeInputs) -> StepSizeState:
        """Choose η of the coming round.

        Args:
          state: the previous state.
          inputs: measurements of the last round.

        Returns:
          the next state.
        """

    def recover(self, state: Any, inputs: StepSizeInputs) -> StepSizeState:
        """Choose η of the coming round, after the run returned to w^f.

        Args:
          state: the previous state.
          inputs: measurements of the last round.

        Returns:
          the next state.
        """


@dataclass(frozen=True)
class FixedStep:
    """The same η in every round."""

    adapts: ClassVar[bool] = False
    eta: float

    def __post_init__(self) -> None:
        if not 0 < self.eta < math.inf:
            raise UserError(
                f"step-size must be auto or a positive number, not {self.eta:g}"
            )

    def first(self) -> StepSizeState:
        return StepSizeState(self.eta)

    def next(self, state: StepSizeState, inputs: StepSizeInputs) -> StepSizeState:
        return state

    def recover(self, state: StepSizeState, inputs: StepSizeInputs) -> StepSizeState:
        return state


@dataclass(frozen=True)
class AutoStepState(StepSizeState):
    """State of `AutoStep`.

    Args:
      steady: η without the fall at the end of the budget.
      kappa: κ.
      level: running mean of log β̂; None before the first β̂.
      deviation: mean absolute deviation of log β̂ from it.
    """

    steady: float = 0.0
    kappa: float = 1.0
    level: float | None = None
    deviation: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 <= self.steady < math.inf and 0 <= self.kappa < math.inf):
            raise ValueError(f"invalid state of a step size: {self}")


@dataclass(frozen=True)
class AutoStep:
    """η from the smoothness that nodes measure, see the top of this file.

    Args:
      kappa: κ; η is κ/β̄.
      start: η of the first round.
      growth: the next η is at most `growth` times the last.
      first_growth: the same until η has settled.
      fall: last share of the budget, over which η falls.

    >>> before = AutoStepState(eta=0.01, steady=0.01, kappa=0.5)
    >>> AutoStep(kappa=0.5).next(before, StepSizeInputs(beta=20.0, spent=0.1)).eta
    0.025
    """

    adapts: ClassVar[bool] = True
    kappa: float = 1.3
    start: float = 0.001
    growth: float = 3.0
    first_growth: float = 10.0
    fall: float = 0.35

    def first(self) -> AutoStepState:
        return AutoStepState(self.start, settled=False, steady=self.start, kappa=self.kappa)

    def next(self, state: AutoStepState, inputs: StepSizeInputs) -> AutoStepState:
        state = _with_beta(state, inputs.beta)
        if inputs.beta is not None:
            wanted = state.kappa / _upper(state, inputs.beta)
            most = (self.growth if state.settled else self.first_growth) * state.steady
            state = replace(
                state, steady=min(wanted, most), settled=state.settled or wanted <= most
            )
        return _fallen(state, state.steady, inputs.spent, self.fall)

    def recover(self, state: AutoStepState, inputs: StepSizeInputs) -> AutoStepState:
        state = _with_beta(state, inputs.beta)
        steady = state.steady / 4
        kappa = state.kappa / 2
        if inputs.beta is not None:
            steady = min(steady, kappa / _upper(state, inputs.beta))
        state = replace(state, kappa=kappa)
        return _fallen(state, steady, inputs.spent, self.fall)


@dataclass(frozen=True)
class FallingStep(FixedStep):
    """A fixed η that falls to a fiftieth over the last part of the budget.

    Args:
      eta: η before the fall.
      fall: last share of the budget, over which η falls.

    >>> rule = FallingStep(0.1, fall=0.5)
    >>> inputs = [StepSizeInputs(None, spent) for spent in (0.0, 0.5, 0.75, 1.0)]
    >>> [rule.next(rule.first(), each).eta for each in inputs]
    [0.1, 0.1, 0.05, 0.002]
    """

    fall: float = 0.35

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.fall <= 1:
            raise UserError(
                f"step-fall must be more than 0 and at most 1, not {self.fall:g}"
            )

    def next(self, state: StepSizeState, inputs: StepSizeInputs) -> StepSizeState:
        return StepSizeState(self.eta * _fall_factor(inputs.spent, self.fall))

    def recover(self, state: StepSizeState, inputs: StepSizeInputs) -> StepSizeState:
        return self.next(state, inputs)


@dataclass(frozen=True)
class SearchedStepState(AutoStepState):
    """State of `SearchedStep`.

    Args:
      least: lower limit of η: 1/β̂ of the search, lowered in each recovery; 0 before the
        search.
    """

    least: float = 0.0


@dataclass(frozen=True)
class SearchedStep:
    """η from a search in the first round, then from the smoothness that nodes measure: the
    default method's step size.

    In the first round every node searches for the smoothness of its own loss
    (features/estimates.py) and makes its updates with its own η_i. Then η = 1 / mean_i
    β̂_i, because the mean loss is at most as steep as the mean β̂_i. After each further
    round

        β̂ = √(mean_i β̂_i · max_i β̂_i)
        η ← max(least, min(1/β̄, 2η)),      β̄ as in `AutoStep`

    - η grows only after a round that began with a significantly better w than any before.
      With noise, every second w seems better. Also, long steps move nodes far apart, and
      the β̂ of a bounded gradient between distant points is small: η would drive its own
      growth.
    - η does not fall below `least`, 1/β̂ of the search, while that is stable, i.e. below 2
      over the running mean of β̂. The β̂ of a network rises during training until ηβ is
      near 2, and an η that follows it down gains nothing. With few classes per node β̂ may
      rise far beyond.
    - If the loss becomes much worse, η halves and its limits fall to 0.7. `AutoStep`
      reduces more. Here the update rule drops its momentum at the same time, which
      contributed.
    - η falls at the end of the budget as in `AutoStep`, but uses the value for the middle
      of the coming round. With few long rounds, the last one would otherwise have a far
      too large η.

    There is no proof that the searched η is optimal.

    Args:
      start: nominal η of the first round. Nodes use their own η_i, and scale their reports
        to this η.
      growth: the next η is at most `growth` times the last.
      fall: last share of the budget, over which η falls.

    >>> rule = SearchedStep()
    >>> rule.next(rule.first(), StepSizeInputs(beta=20.0, mean_beta=5.0, spent=0.1)).eta
    0.2
    """

    adapts: ClassVar[bool] = True
    start: float = 0.001
    growth: float = 2.0
    fall: float = 0.35

    def first(self) -> SearchedStepState:
        return SearchedStepState(self.start, steady=self.start)

    def next(self, state: SearchedStepState, inputs: StepSizeInputs) -> SearchedStepState:
        beta = _between(inputs)
        if state.least == 0:  # before the search
            if beta is None:
                return state
            mean = inputs.mean_beta or beta
            searched = replace(state, level=math.log(mean), least=1 / beta)
            return self._falling(searched, 1 / mean, inputs)
        state = _with_beta(state, beta)
        steady = state.steady
        if beta is not None:
            most = self.growth * state.steady if inputs.improved else state.steady
            assert state.level is not None
            least = min(state.least, 2 / math.exp(state.level))
            wanted = min(state.kappa / _upper(state, beta), most)
            steady = max(least, wanted)
        return self._falling(state, steady, inputs)

    def recover(
        self, state: SearchedStepState, inputs: StepSizeInputs
    ) -> SearchedStepState:
        state = _with_beta(state, _between(inputs))
        state = replace(state, least=0.7 * state.least, kappa=0.7 * state.kappa)
        return self._falling(state, state.steady / 2, inputs)

    def _falling(
        self, state: SearchedStepState, steady: float, inputs: StepSizeInputs
    ) -> SearchedStepState:
        """Set η for the middle of the coming round, if that costs as much as the last."""
        middle = min(1.0, inputs.spent + inputs.round_share / 2)
        return _fallen(state, steady, middle, self.fall)


def _fall_factor(spent: float, fall: float) -> float:
    """Factor on η: 1, then linearly falling over the last part of the budget, at least
    0.02."""
    return min(1.0, max(0.02, (1 - spent) / fall))


_S = TypeVar("_S", bound=AutoStepState)


def _fallen(state: _S, steady: float, spent: float, fall: float) -> _S:
    """Set η, with and without its fall at the end of the budget."""
    return replace(state, steady=steady, eta=steady * _fall_factor(spent, fall))


def _with_beta(state: _S, beta: float | None) -> _S:
    """Update both running means with a new β̂."""
    if beta is None:
        return state
    if state.level is None:
        return replace(state, level=math.log(beta))
    change = math.log(beta) - state.level
    return replace(
        state, level=state.level + change / 2, deviation=(state.deviation + abs(change)) / 2
    )


def _upper(state: AutoStepState, beta: float) -> float:
    """β̄, an upper estimate of β."""
    assert state.level is not None
    return max(beta, math.exp(state.level + state.deviation))


def _between(inputs: StepSizeInputs) -> float | None:
    """Geometric mean of the largest and the mean β̂_i."""
    if inputs.beta is None or inputs.mean_beta is None:
        return inputs.beta
    return math.sqrt(inputs.beta * inputs.mean_beta)
