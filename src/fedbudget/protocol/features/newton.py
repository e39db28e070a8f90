"""Newton's method for small convex models: the loss is solved, not descended.

**A round** (`CurvatureRound`): the nodes report F_i(w), the gradient and the Hessian of F_i
at w over whole shards, as numbers of their own. Their sums give the derivatives of F, in
the coordinates u of models/curvature.py. The aggregator solves

    (H + λD) p = -(∇F + λD u),    u ← u + s p

with D the diagonal of the first Hessian, which makes the ridge λ independent of the scale
of features (0 for biases), and the share s = 1. Directions in which H is singular stay.

**Damping.** The next round shows whether F fell. If not, w was no improvement: the next
candidate is half of the last step from w^f, at most `MOST_HALVINGS` times. So w^f always
has the lowest loss, and every step starts from it.

Where some directions are nearly flat, a Newton step may be far too long. No step changes
the scores of samples by more than `LONGEST`, measured with the Hessian at w(0).

**Ridge.** If nodes validate, the run first solves the problem with `PATH` · p/N as λ, for p
parameters and N samples, from strong to weak, and then without a ridge. Each solution is
a candidate for the validated w, which regularises as much as the data need. Along the path
F falls, and the first step is short.

**Linear regression** has the same Hessian everywhere. One exchange gives all solutions;
further rounds only evaluate them (`CandidateRound`), and without validation none is needed.

**End.** The run ends when a step without a ridge lowers F by less than `TOLERABLE` · F. The
final round evaluates the last step.

**Cost.** `Newton.cost` is the cost of a `CurvatureRound` beyond one local update and one
exchange, in local updates (launch/solver.py). It is charged if costs are simulated;
otherwise rounds are measured.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import numpy as np

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.budget.budget import Costs
from fedbudget.budget.control import Decision, Reason
from fedbudget.budget.solver import MOST_NUMBERS
from fedbudget.data.sampling import BatchIndices
from fedbudget.frozen import updated
from fedbudget.models.curvature import (
    Directions,
    curvature,
    directions_of,
    is_quadratic,
    packed,
    unpacked,
)
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.features.feature import (
    Feature,
    FeatureState,
    LocalRound,
    NodeTimes,
    Reported,
    RoundResult,
    final_layout,
    register_feature,
)
from fedbudget.protocol.features.validation import Validation, ValidationState
from fedbudget.protocol.messages import (
    Broadcast,
    CandidateRound,
    CurvatureRound,
    FinalRound,
    PeerError,
    Report,
    RoundPart,
    TrainRound,
)
from fedbudget.protocol.stages import (
    FilteredReports,
    filter_reports,
    watch_losses,
    with_losses,
)
from fedbudget.protocol.state import AggregatorState, Outcome, Round
from fedbudget.protocol.sums import NoisySums, Sums

PATH = (16.0, 4.0, 1.0, 0.25)
"""Ridges to validate, in multiples of p/N. The best one is p/N times the ratio of noise to
signal, in units of D."""
STRONGEST = 1.0
"""Strongest ridge: with λ = 1, half of a step."""
TOLERABLE = 1e-5
"""Relative decrease of F that is not worth a round; a hundredth of 0.1 %."""
NEGLIGIBLE = 1e-6
"""Share of F(w(0)) that counts as 0, for data that a model can separate."""
LONGEST = 2.0
"""Largest change of scores in a step. The loss of a step without improvement is therefore
below √2 · 2 plus the one before for softmax, and below ½ (1 + 2)² for svm: less than ten
times the loss of w(0) = 0."""
MOST_HALVINGS = 8
SINGULAR = 1e-10
"""Curvature relative to the largest, in units of D, below which a direction counts as
flat."""
SOLVED = "converged"
"""Why a run ends before its budget is spent."""

_State = AggregatorState[Any, Any]


@dataclass(frozen=True)
class NewtonPart(RoundPart):
    """Announces a round over whole shards.

    Args:
      extra: its cost beyond one local update and one exchange, in local updates.
    """

    in_header: ClassVar[bool] = True
    extra: float

    @property
    def extra_steps(self) -> float:
        return self.extra

    def require_possible(self) -> None:
        if not 0 <= self.extra < math.inf:
            raise ValueError(f"an extra cost of {self.extra}")


def _none() -> Float64:
    return np.empty(0)


@dataclass(frozen=True)
class NewtonState(FeatureState):
    """Newton's method at the aggregator.

    Args:
      base: w at which the derivatives are known, [parameters]; empty before.
      gradient: of F at `base`, [size].
      hessian: of F at `base`, lower triangle.
      first_hessian: of F at w(0), lower triangle.
      path: ridges of the run, from strong to weak.
      position: index in the path of the coming candidate; its length without a ridge.
      share: s of the coming candidate.
      halvings: number of steps in a row that did not improve F.
      solved: whether the coming candidate is the solution.
      extra: cost of the coming round beyond one local update and one exchange.
      known: whether the derivatives at the coming candidate follow from those at `base`.
    """

    base: Float32 = field(default_factory=lambda: np.empty(0, np.float32))
    gradient: Float64 = field(default_factory=_none)
    hessian: Float64 = field(default_factory=_none)
    first_hessian: Float64 = field(default_factory=_none)
    path: tuple[float, ...] = ()
    position: int = 0
    share: float = 1.0
    halvings: int = 0
    solved: bool = False
    extra: float = 0.0
    known: bool = False

    @property
    def ridge(self) -> float:
        """λ of the coming candidate."""
        return self.path[self.position] if self.position < len(self.path) else 0.0

    def require_possible(self, w: Float32) -> None:
        size = len(self.gradient)
        if self.base.size and self.base.shape != w.shape:
            raise ValueError("derivatives at a w of another length")
        triangle = size * (size + 1) // 2
        if {len(self.hessian), len(self.first_hessian)} != {triangle}:
            raise ValueError("a Hessian and a gradient of different lengths")
        if not 0 <= self.position <= len(self.path) or not 0 < self.share <= 1:
            raise ValueError(f"a Newton step of {self.share} at {self.position}")


@register_feature
@dataclass(frozen=True)
class Newton(Feature):
    """Newton's method at nodes.

    Args:
      outputs, inputs, bias: see `Directions`.
      quadratic: whether the Hessian is the same everywhere.
      cost: cost of a `CurvatureRound` beyond one local update and one exchange, in local
        updates.
      evaluation: the same of a round that only evaluates losses.
    """

    name: ClassVar[str] = "newton"
    types: ClassVar[tuple[type, ...]] = (NewtonPart, NewtonState)
    kinds: ClassVar[tuple[type[Broadcast], ...]] = (
        CurvatureRound,
        CandidateRound,
        FinalRound,
    )
    outputs: int
    inputs: int
    bias: bool
    quadratic: bool
    cost: float = 0.0
    evaluation: float = 0.0

    def __post_init__(self) -> None:
        if self.outputs < 1 or self.inputs < 1:
            raise ValueError(f"{self.outputs} scores of {self.inputs} parameters")
        size = self.directions.size
        if size + size * (size + 1) // 2 > MOST_NUMBERS:
            raise ValueError(f"a Hessian of {size} coordinates is too large")
        if not (0 <= self.cost < math.inf and 0 <= self.evaluation < math.inf):
            raise ValueError(f"a round that costs {self.cost} or {self.evaluation} more")

    @property
    def directions(self) -> Directions:
        """The coordinates of steps."""
        return Directions(self.outputs, self.inputs, self.bias)

    # Nodes.

    def reported_finally(self, kind: type[Broadcast] = FinalRound) -> Reported:
        names = (*self.slopes, *self.bends) if issubclass(kind, CurvatureRound) else ()
        return Reported(dict.fromkeys(names, math.inf))

    @property
    def slopes(self) -> list[str]:
        """Names of the entries of the gradient."""
        return [f"gradient_{at}" for at in range(self.directions.size)]

    @property
    def bends(self) -> list[str]:
        """Names of the entries of the Hessian's lower triangle."""
        size = self.directions.size
        return [f"hessian_{at}" for at in range(size * (size + 1) // 2)]

    def trial(self, number: int, w: Float32, eta: float) -> Broadcast:
        layout = final_layout((self,), CurvatureRound)
        part = NewtonPart(self.cost)
        return CurvatureRound(round=number, w=w, report=layout, parts=(part,))

    def measure(self, local: LocalRound) -> None:
        if directions_of(local.model) != self.directions:
            raise PeerError(f"{local.model.name} has no derivatives of these sizes")
        if is_quadratic(local.model) != self.quadratic:
            raise PeerError(f"{local.model.name} is another model")
        nodes = len(local.numbers)
        if local.broadcast.part(NewtonPart) is not None:
            local.indices = BatchIndices.whole(nodes)
        if not isinstance(local.broadcast, CurvatureRound):
            return
        table = local.shards.table
        w = local.broadcast.w
        rows = []
        for node in range(nodes):
            own = curvature(local.model, w, table, local.shards.rows_of(node))
            rows.append(np.concatenate([own.gradient, packed(own.hessian)]))
        local.scratch[self.name] = np.array(rows)

    def report(self, local: LocalRound) -> Mapping[str, Float64 | Float32]:
        if not isinstance(local.broadcast, CurvatureRound):
            return {}
        columns = np.ascontiguousarray(local.scratch[self.name].T)
        return dict(zip((*self.slopes, *self.bends), columns, strict=True))

    # Aggregator.

    def first(self, w: Float32) -> NewtonState:
        return NewtonState(extra=self.cost)

    def message(self, state: NewtonState) -> RoundPart:
        return NewtonPart(state.extra)

    def finish(self, state: NewtonState) -> NewtonState:
        return updated(state, extra=self.evaluation)

    def extended(self, state: NewtonState) -> NewtonState:
        return NewtonState(path=state.path, position=len(state.path), extra=self.cost)

    def with_derivatives(self, state: NewtonState, sums: Sums, w: Float32) -> NewtonState:
        """Return the state with the derivatives at w that nodes reported."""
        totals = sums.totals
        gradient = np.array([totals[name] for name in self.slopes]) / totals["data"]
        hessian = np.array([totals[name] for name in self.bends]) / totals["data"]
        begun = state.first_hessian
        return updated(
            state,
            base=w,
            gradient=gradient,
            hessian=hessian,
            first_hessian=begun if len(begun) else hessian,
        )

    def step(self, state: NewtonState) -> tuple[Float64, float]:
        """Return the step from `base`, [size], and the fall of F that a whole one promises.

        It is shorter if scores would change by more than `LONGEST`, the root of their mean
        square.
        """
        size = len(state.gradient)
        hessian = unpacked(state.hessian, size)
        begun = unpacked(state.first_hessian, size)
        penalty = state.ridge * np.where(self.directions.biases, 0.0, np.diag(begun))
        gradient = state.gradient + penalty * self.directions.of(state.base)
        step = solve(hessian + np.diag(penalty), -gradient)
        fall = -float(state.gradient @ step + step @ hessian @ step / 2)
        # Hessians at w(0) are products of features, divided by the number of classes.
        change = math.sqrt(max(0.0, self.outputs * float(step @ begun @ step)))
        if not self.quadratic and change > LONGEST:
            step = LONGEST / change * step
        return step, fall


def solve(matrix: Float64, right: Float64) -> Float64:
    """Solve a symmetric system with a matrix that may be singular.

    Args:
      matrix: positive semidefinite, [n, n].
      right: [n].

    Returns:
      the solution without flat directions, in units in which the diagonal is 1.

    >>> solve(np.diag([1e8, 0.0]), np.array([1e8, 0.0]))
    array([1., 0.])
    """
    diagonal = np.diag(matrix)
    units = 1 / np.sqrt(np.where(diagonal > 0, diagonal, 1.0))
    if not np.isfinite(matrix).all():
        return np.full_like(right, np.nan)
    values, vectors = np.linalg.eigh(units[:, None] * matrix * units)
    flat = values <= SINGULAR * max(values[-1], 0.0)
    inverse = np.where(flat, 0.0, 1 / np.where(flat, 1.0, values))
    return np.asarray(units * (vectors @ (inverse * (vectors.T @ (units * right)))))


class NewtonAggregator(Aggregator):
    """Runs Newton's method. Takes the arguments of `Aggregator`, with a Newton method."""

    def receive(
        self,
        reports: Report | Sums | NoisySums,
        costs: Costs,
        *,
        usual: bool = True,
        times: NodeTimes | None = None,
        peers: Int64 | None = None,
    ) -> Broadcast | Outcome:
        broadcast = self._require_pending(reports)
        if isinstance(broadcast, FinalRound):
            return super().receive(reports, costs, usual=usual, times=times, peers=peers)
        assert not isinstance(reports, NoisySums)
        state = self.state
        filtered = filter_reports(self.method, reports, broadcast, state, state.w, peers)
        ledger = state.ledger.charge(broadcast.steps, costs, usual=usual)
        state = updated(state, ledger=ledger)
        state, best = with_losses(state, filtered.sums)
        state = watch_losses(state, filtered, best=best, recover=False)
        state = updated(state, t=state.t + broadcast.steps)
        announced = _newton_of(state)
        state = self._with_candidate(state, broadcast, filtered.sums, best=best)
        state = self._follow(state, self._result(state, broadcast, filtered))
        record = self._newton_record(state, broadcast, filtered, announced)
        if _newton_of(state).solved and not state.stop:
            state = updated(state, stop=True, stopped_by=SOLVED)
        if state.stop:
            state = self._finish(state, best=best)
        else:
            state, decision = self._next_decision(state, recover=False)
            state = self._announce(state, decision, best=best)
        self.last = record
        return self._answer(state)

    @property
    def _newton(self) -> Newton:
        feature = self.method.newton
        assert isinstance(feature, Newton)
        return feature

    def _next_decision(self, state: _State, *, recover: bool) -> tuple[_State, Decision]:
        known = _newton_of(state).known
        return state, Decision(1, Reason.CANDIDATE if known else Reason.NEWTON)

    def _broadcast(self, state: _State) -> Broadcast:
        usual = super()._broadcast(state)
        if isinstance(usual, FinalRound):
            return usual
        kind = CandidateRound if _newton_of(state).known else CurvatureRound
        return kind(
            round=usual.round,
            w=usual.w,
            report=final_layout(self.method.features, kind),
            best=usual.best,
            parts=usual.parts,
            catch_up=usual.catch_up,
        )

    def _with_candidate(
        self, state: _State, broadcast: Broadcast, sums: Sums, *, best: bool
    ) -> _State:
        """Return the state with the next candidate as w.

        Args:
          state: the state with the losses of the round.
          broadcast: the round.
          sums: sums of its reports.
          best: whether its w improved F.
        """
        feature = self._newton
        newton = _newton_of(state)
        first = not newton.base.size
        if first and not newton.path and self.method.validates:
            data = sums.totals["data"]
            newton = updated(newton, path=self._path(state, data))
        if isinstance(broadcast, CurvatureRound) and (first or best):
            newton = feature.with_derivatives(newton, sums, broadcast.w)
        newton = self._advanced(newton, improved=first or best, first=first)

        tolerable = TOLERABLE * state.best_loss + NEGLIGIBLE * state.first_loss
        step, fall = feature.step(newton)
        while newton.ridge and fall < tolerable and not feature.quadratic:
            newton = updated(newton, position=newton.position + 1)
            step, fall = feature.step(newton)
        if not newton.ridge:
            enough = feature.quadratic or not fall > tolerable
            solved = enough or newton.halvings > MOST_HALVINGS
            newton = updated(newton, solved=solved)
        if not np.isfinite(step).all() or newton.halvings > MOST_HALVINGS:
            newton = updated(newton, solved=True)
            step = np.zeros_like(step)
        moved = feature.directions.parameters(newton.share * step)
        w = (newton.base + moved).astype(np.float32)
        newton = updated(
            newton,
            known=feature.quadratic,
            extra=feature.evaluation if feature.quadratic else feature.cost,
        )
        states = {**state.states, Newton.name: newton}
        return updated(state, w=self._received(w, state.w), states=states)

    def _advanced(self, newton: NewtonState, *, improved: bool, first: bool) -> NewtonState:
        """Return the state with the ridge and the share of the next candidate."""
        if improved or self._newton.quadratic:
            position = newton.position if first else newton.position + 1
            position = min(position, len(newton.path))
            return updated(newton, position=position, share=1.0, halvings=0)
        return updated(newton, share=newton.share / 2, halvings=newton.halvings + 1)

    def _path(self, state: _State, samples: float) -> tuple[float, ...]:
        """Return the ridges of the run, limited by the rounds that the budget allows."""
        size = self._newton.directions.size
        mean = state.ledger.statistics.mean
        left = state.ledger.budget.array - state.ledger.spent
        with np.errstate(divide="ignore"):
            rounds = float((left / (mean.step + mean.aggregation)).min())
        rounds = min(rounds, self._most_rounds - self._rounds_made(state))
        others = 1 if self._newton.quadratic else 4
        count = int(max(0.0, min(len(PATH), rounds - others)))
        ridges = [min(STRONGEST, each * size / samples) for each in PATH]
        return tuple(dict.fromkeys(ridges[len(ridges) - count :]))

    def _result(
        self, state: _State, broadcast: Broadcast, filtered: FilteredReports
    ) -> RoundResult:
        """Return what features need to follow: only validation does."""
        return RoundResult(
            cast(TrainRound, broadcast),
            filtered.sums,
            broadcast.w,
            combined=None,
            mean=state.w,
            w=state.w,
            slowdown=1.0,
            recover=False,
            capped=filtered.capped,
            times=None,
            quantize=self._quantize,
            statistics=0,
            last=False,
            ledger=state.ledger,
            states=dict(state.states),
        )

    def _follow(self, state: _State, result: RoundResult) -> _State:
        state = super()._follow(state, result)
        validation = state.states.get(Validation.name)
        if not isinstance(validation, ValidationState):
            return state
        # Each candidate is validated: there are few.
        states = {**state.states, Validation.name: updated(validation, due=True)}
        return updated(state, states=states)

    def _newton_record(
        self,
        state: _State,
        broadcast: Broadcast,
        filtered: FilteredReports,
        announced: NewtonState,
    ) -> Round:
        """Return the record of a round, which counts as one update.

        Args:
          state: the state after it.
          broadcast: its broadcast.
          filtered: its reports.
          announced: the state with which it was announced.
        """
        candidate = isinstance(broadcast, CandidateRound)
        return replace(
            self._round(state, broadcast, filtered, None),
            tau=broadcast.steps,
            reason=Reason.CANDIDATE if candidate else Reason.NEWTON,
            eta=announced.share,
            extra={"ridge": announced.ridge if announced.base.size else 0.0},
        )


def _newton_of(state: _State) -> NewtonState:
    newton = state.states[Newton.name]
    assert isinstance(newton, NewtonState)
    return newton
