"""Which step size η next.

Gradient descent on a β-smooth loss is stable while η < 2/β and does its best near 1/β. Every node estimates its β
anyway, so nobody has to set η. After each round

    η ← min(κ/β̄, 3η),      β̄ = max(β̂, exp(mean of log β̂ + its mean deviation)),      β̂ = max_i β̂_i

- κ = 1.3, one value for everything. β̄ is at the upper end of β, so η is about 1/β; and a network that is trained so
  near to its limit finds its way to where the loss is flatter, which lets η grow, where with κ = 1 it does not.
- The maximum over nodes, because one node that diverges spoils the average of all.
- β̂ is measured between two points along one line, on one mini-batch: a single round can miss what is steep. So β̄ is
  not below the upper end of what was seen of late, both means half old and half new. With smooth descent the deviation
  is small, and η follows β̂; with mini-batches of one sample it is large, and η keeps its distance.
- At most 3η, because a β̂ from points that are hardly apart can be anything.
- A small η to start with, that may grow tenfold, with τ = 1 until it is what it should be: nothing is known yet, and
  local updates would be wasted.
- η falls to nothing over the last third of the budget, whose end is known: what is left of the loss then is noise of
  mini-batches, which goes away with η. The fall is planned by the share of the budget that is spent, of whichever
  resource is nearest to its limit.
- A guard: when the loss has become much worse (protocol/steps.py says when), the run goes back to w^f, with a quarter
  of η and half of κ.

docs/research/step-size.md has what this gives, and what was tried and did not help.

A step size is a value and a pure step, as a controller is (control.py).
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar

from fedbudget.errors import UserError


@dataclass(frozen=True)
class StepSizeState:
    """The step size of the coming round; a step size that must remember more has a class of its own with these two.

    Args:
      eta: η.
      settled: whether η is what it should be; until then τ stays 1.
    """

    eta: float
    settled: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.eta < math.inf:
            raise ValueError(f"a step size must be a number of 0 or more, not {self.eta}")


@dataclass(frozen=True)
class StepSizeInputs:
    """What a step size may look at.

    Args:
      beta: the last round's max_i β̂_i, if there was any.
      spent: the share of the budget spent.
      mean_beta: the mean of the β̂_i, if there was any.
      improved: whether the w that the last round began with is better than the best before it, by more than chance.
      round_share: the share of the budget that the last round took.
    """

    beta: float | None
    spent: float
    mean_beta: float | None = None
    improved: bool = True
    round_share: float = 0.0


class StepSize(Protocol):
    """Chooses η, round by round. Its state is a `StepSizeState`, or any frozen dataclass that has its fields too."""

    @property
    def adapts(self) -> bool:
        """Whether nodes must estimate β for it, and the run goes back to w^f from where the loss is much worse."""

    def first(self) -> StepSizeState:
        """For the first round."""

    def next(self, state: Any, inputs: StepSizeInputs) -> StepSizeState:
        """For the coming round, from the state that was returned last."""

    def recover(self, state: Any, inputs: StepSizeInputs) -> StepSizeState:
        """For the coming round, when the run has gone back to w^f."""


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
    """What the next η follows from.

    Args:
      steady: η before it falls towards the end of the budget.
      kappa: κ.
      level, deviation: the running mean of log β̂, once there is one, and its mean deviation.
    """

    steady: float = 0.0
    kappa: float = 1.0
    level: float | None = None
    deviation: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 <= self.steady < math.inf and 0 <= self.kappa < math.inf):
            raise ValueError(f"a step size cannot follow from {self}")


@dataclass(frozen=True)
class AutoStep:
    """η from the smoothness that nodes measure, see above.

    Args:
      kappa: κ; η is this share of 1/β̄.
      start: η of the first rounds.
      growth: how many times larger than the last η the next may be.
      first_growth: the same until η has settled.
      fall: the share of the budget, at its end, over which η falls.

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
        return self._falling(state, inputs.spent)

    def recover(self, state: AutoStepState, inputs: StepSizeInputs) -> AutoStepState:
        state = _with_beta(state, inputs.beta)
        steady = state.steady / 4
        kappa = state.kappa / 2
        if inputs.beta is not None:
            steady = min(steady, kappa / _upper(state, inputs.beta))
        return self._falling(replace(state, steady=steady, kappa=kappa), inputs.spent)

    def _falling(self, state: AutoStepState, spent: float) -> AutoStepState:
        """η as much below its steady value as the end of the budget is near, but never 0."""
        return replace(state, eta=state.steady * _at_the_end(spent, self.fall))


def _at_the_end(spent: float, fall: float) -> float:
    """What η is multiplied with as the end of the budget comes near: 1 until the last part, and never 0."""
    return min(1.0, max(0.02, (1 - spent) / fall))


_S = TypeVar("_S", bound=AutoStepState)


def _with_beta(state: _S, beta: float | None) -> _S:
    """Both means with one more β̂."""
    if beta is None:
        return state
    if state.level is None:
        return replace(state, level=math.log(beta))
    change = math.log(beta) - state.level
    return replace(
        state, level=state.level + change / 2, deviation=(state.deviation + abs(change)) / 2
    )


def _upper(state: AutoStepState, beta: float) -> float:
    """β̄."""
    assert state.level is not None
    return max(beta, math.exp(state.level + state.deviation))


@dataclass(frozen=True)
class FallingStep:
    """One η, which falls to a fiftieth over the last part of the budget, as the automatic one does.

    Args:
      eta: η until then.
      fall: the share of the budget, at its end, over which η falls.

    >>> step_size = FallingStep(0.1, fall=0.5)
    >>> [step_size.next(step_size.first(), StepSizeInputs(None, spent)).eta for spent in (0.0, 0.5, 0.75, 1.0)]
    [0.1, 0.1, 0.05, 0.002]
    """

    adapts: ClassVar[bool] = False
    eta: float
    fall: float = 0.35

    def __post_init__(self) -> None:
        FixedStep(self.eta)  # refuses what is no step size
        if not 0 < self.fall <= 1:
            raise UserError(
                f"step-fall must be more than 0 and at most 1, not {self.fall:g}"
            )

    def first(self) -> StepSizeState:
        return StepSizeState(self.eta)

    def next(self, state: StepSizeState, inputs: StepSizeInputs) -> StepSizeState:
        return StepSizeState(self.eta * _at_the_end(inputs.spent, self.fall))

    def recover(self, state: StepSizeState, inputs: StepSizeInputs) -> StepSizeState:
        return self.next(state, inputs)


@dataclass(frozen=True)
class SearchedStepState(AutoStepState):
    """What the next η follows from, and the least that it may be.

    Args:
      least: the η that the search gave, or what trouble has made of it.
    """

    least: float = 0.0


@dataclass(frozen=True)
class SearchedStep:
    """η by a search in the first round, and from the smoothness that nodes measure.

    In the first round every node searches for how steep its own loss is, and makes its updates with an η_i of its own
    (protocol/first_step.py, fleet.py), as if with a common one; then η = 1 / mean_i β̂_i is known: the mean of losses is
    no steeper than that. From there on

        η ← max(least, min(1/β̄, 2η)),      β̂ = √(mean_i β̂_i · max_i β̂_i),      β̄ as of `AutoStep`

    - It grows, where the loss becomes flatter, and only after a round that began with a w better than any before, by
      more than chance: in noise every second w seems to be. And the β̂ of nodes that long steps have taken far apart is
      small where gradients are bounded, however steep the loss is between them: η would follow its own length upwards.
    - It does not fall below `least`, 1/β̂ of the search, while that is stable: below 2 over the running mean of β̂. The β̂
      of a network rises as it is trained, until ηβ is near 2, and an η that follows it down gains nothing. But where
      nodes have few classes each it may rise far beyond.
    - Where the loss is much worse it halves, with 0.7 of its limits. That is less than with `AutoStep`, because the
      update rule's motion is given up at the same time, and had its part in it.
    - It falls as that of `AutoStep` at the end of the budget, but has in every round what it should have in the middle
      of it: with few long rounds, the last would otherwise begin and end with an η that is far too large.

    That the search's η is a good one is not proven.
    """

    adapts: ClassVar[bool] = True
    start: float = 0.001
    growth: float = 2.0
    fall: float = 0.35

    def first(self) -> SearchedStepState:
        return SearchedStepState(self.start, steady=self.start)

    def next(self, state: SearchedStepState, inputs: StepSizeInputs) -> SearchedStepState:
        beta = _between(inputs)
        if state.least == 0:  # nothing was found yet
            if beta is None:
                return state
            mean = inputs.mean_beta or beta
            return self._falling(
                replace(state, level=math.log(mean), steady=1 / mean, least=1 / beta),
                inputs,
            )
        state = _with_beta(state, beta)
        if beta is not None:
            most = self.growth * state.steady if inputs.improved else state.steady
            assert state.level is not None
            least = min(state.least, 2 / math.exp(state.level))
            state = replace(
                state, steady=max(least, min(state.kappa / _upper(state, beta), most))
            )
        return self._falling(state, inputs)

    def recover(
        self, state: SearchedStepState, inputs: StepSizeInputs
    ) -> SearchedStepState:
        state = _with_beta(state, _between(inputs))
        state = replace(
            state, steady=state.steady / 2, least=0.7 * state.least, kappa=0.7 * state.kappa
        )
        return self._falling(state, inputs)

    def _falling(
        self, state: SearchedStepState, inputs: StepSizeInputs
    ) -> SearchedStepState:
        """With what η should be in the middle of the coming round, if that is as long as the last."""
        middle = min(1.0, inputs.spent + inputs.round_share / 2)
        return replace(state, eta=state.steady * _at_the_end(middle, self.fall))


def _between(inputs: StepSizeInputs) -> float | None:
    """Between the largest β̂_i and the mean."""
    if inputs.beta is None or inputs.mean_beta is None:
        return inputs.beta
    return math.sqrt(inputs.beta * inputs.mean_beta)
