"""Whether a run solves a small convex problem by Newton's method, or descends.

Both are compared by one flat cost, in local updates. A local update is a pass over a
mini-batch of B samples; an exchange is everything else in a round, and costs `exchange`
updates.

    descend   DESCENT rounds of sqrt(10 exchange) updates and one exchange each
    solve     STEPS rounds with a curvature pass and a larger exchange each; 1 for a
              quadratic loss. With validation, one more candidate for each ridge

- A curvature pass over n samples with d inputs and K scores, of which k = max(1, K - 1)
  count, takes 4 n d K operations for the gradient and n d² k (k + 1) for the Hessian; a
  local update takes 4 B d K. The losses of w and of w^f add half a pass each.
- A Hessian adds p (p + 1) / 2 + p numbers of 64 bits to the report, with p = d k. The
  exchange of the paper's prototype carries 784 numbers of 32 bits in both directions, and
  counts as transmission alone. So 6,272 more bytes cost a further exchange.
- With limited bytes or money, both must also send no more than descent.
- The largest shard counts: the round waits for it.

The comparison assumes that descent needs 50 rounds. That is few: on the natural federations
it needs 40 to 2,000 (docs/research/newton.md). So Newton's method is chosen where it
is cheaper by a margin.
"""

import math
from dataclasses import dataclass

DESCENT = 50
"""Rounds that descent needs at least."""
STEPS = 6
"""Newton steps to the optimum of a loss that is not quadratic."""
RIDGES = 4
"""Candidates for validation on the way."""
EXCHANGE = 10.0
"""Cost of an exchange in local updates, if it is not known: as in the paper's prototype."""
EXCHANGE_BYTES = 2 * 784 * 4
"""Bytes of an exchange of the paper's prototype."""
MOST_NUMBERS = 20_000
"""Numbers of a report, at most: 199 coordinates."""

_HEADER = 64  # bytes of the headers of a broadcast and a report


@dataclass(frozen=True)
class LinearProblem:
    """Sizes of a model with linear scores, and of the data of its nodes.

    Args:
      outputs: K, number of scores.
      inputs: d, parameters of each score.
      quadratic: whether the loss is quadratic.
      rows: samples of the largest shard.
      batch: samples in a mini-batch.
      validates: whether nodes validate.
    """

    outputs: int
    inputs: int
    quadratic: bool
    rows: int
    batch: int
    validates: bool

    @property
    def scores(self) -> int:
        """k, number of scores that count."""
        return max(1, self.outputs - 1)

    @property
    def numbers(self) -> int:
        """Numbers of a gradient and of half a Hessian."""
        size = self.scores * self.inputs
        return size + size * (size + 1) // 2

    @property
    def passes(self) -> float:
        """Local updates that take as long as one pass over the largest shard."""
        return self.rows / self.batch

    @property
    def curvature(self) -> float:
        """Work of a curvature pass, with the losses, in local updates.

        >>> LinearProblem(1, 10, True, 500, 100, False).curvature
        35.0
        """
        hessian = self.inputs * self.scores * (self.scores + 1) / (4 * self.outputs)
        return self.passes * (2 + hessian)

    def extra(self, exchange: float) -> float:
        """Cost of a curvature round beyond one local update and one exchange."""
        transmission = exchange * 8 * self.numbers / EXCHANGE_BYTES
        return max(0.0, self.curvature - 1) + transmission

    @property
    def evaluation(self) -> float:
        """The same of a round that only evaluates losses."""
        return max(0.0, self.passes - 1)

    @property
    def rounds(self) -> tuple[int, int]:
        """Rounds with curvature, and rounds without."""
        ridges = RIDGES if self.validates else 0
        return (1, 1 + ridges) if self.quadratic else (STEPS + ridges, 1)

    def solving(self, exchange: float) -> float:
        """Cost of solving, in local updates."""
        curved, evaluated = self.rounds
        each = 1 + exchange
        return curved * (each + self.extra(exchange)) + evaluated * (each + self.evaluation)

    @property
    def solving_bytes(self) -> float:
        """Bytes of a node."""
        curved, evaluated = self.rounds
        w = 4 * self.outputs * self.inputs
        return (curved + evaluated) * (w + _HEADER) + curved * 8 * self.numbers

    @property
    def descent_bytes(self) -> float:
        """The same with descent: w in both directions, and a mean or a correction."""
        return DESCENT * (3 * 4 * self.outputs * self.inputs + _HEADER)


def descending(exchange: float) -> float:
    """Return the cost of descent, in local updates.

    >>> descending(10.0)
    1000.0
    """
    return DESCENT * (math.sqrt(10 * exchange) + exchange)


@dataclass(frozen=True)
class SolverChoice:
    """Which solver a run uses.

    Args:
      newton: whether it uses Newton's method.
      reason: why, as a part of a sentence.
    """

    newton: bool
    reason: str


def choose(
    problem: LinearProblem,
    *,
    exchange: float = EXCHANGE,
    updates: float = math.inf,
    rounds: float = math.inf,
    counts_bytes: bool = False,
) -> SolverChoice:
    """Choose the solver of a run.

    Args:
      problem: the sizes.
      exchange: cost of an exchange, in local updates.
      updates: the budget in local updates, if it is known.
      rounds: maximum number of rounds.
      counts_bytes: whether the budget limits something that bytes cost.
    """
    if problem.numbers > MOST_NUMBERS:
        return SolverChoice(
            False,
            f"its Hessian has {problem.numbers:,} numbers, and at most {MOST_NUMBERS:,} "
            "are sent",
        )
    solving = problem.solving(exchange)
    descent = descending(exchange)
    costs = (
        f"solving costs about as much as {solving:,.0f} local updates of "
        f"{problem.batch} samples, and descent {descent:,.0f} or more"
    )
    if solving > descent:
        return SolverChoice(False, costs)
    if counts_bytes and problem.solving_bytes > problem.descent_bytes:
        return SolverChoice(
            False,
            f"a node would send and receive {problem.solving_bytes:,.0f} bytes, and with "
            f"descent {problem.descent_bytes:,.0f}",
        )
    if solving > updates:
        return SolverChoice(False, f"{costs}; the budget buys {updates:,.0f}")
    if sum(problem.rounds) > rounds:
        return SolverChoice(False, f"it needs {sum(problem.rounds)} rounds")
    return SolverChoice(True, costs)
