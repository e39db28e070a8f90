"""Adaptive τ against fixed τ, over cases and seeds.

The regret is the cost of not knowing the best fixed τ beforehand.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean
from typing import Any

from fedbudget.errors import UserError
from fedbudget.experiments.cells import run_in_process
from fedbudget.result import Result
from fedbudget.settings.settings import Settings
from fedbudget.settings.types import Tau

PLAIN_UPDATE: Mapping[str, Any] = dict.fromkeys(
    (
        "update",
        "server_step_size",
        "server_momentum",
        "server_beta2",
        "server_epsilon",
        "proximal",
        "local_step",
    )
)
"""The settings of plain averaging."""


@dataclass(frozen=True)
class MeanResult:
    """The mean over seeds of one fixed τ, or of adaptive τ, in one case.

    Args:
      tau: the fixed τ, or the average of adaptive τ.
      loss: at the end of the budget.
      accuracy: on the test samples; None if the model has none.
    """

    tau: float
    loss: float
    accuracy: float | None

    @classmethod
    def mean(cls, results: Sequence[Result]) -> "MeanResult":
        """Return the means of some runs."""
        accuracies = [result.accuracy for result in results if result.accuracy is not None]
        return cls(
            fmean(result.average_tau for result in results),
            fmean(result.loss for result in results),
            fmean(accuracies) if accuracies else None,
        )


@dataclass(frozen=True)
class CaseComparison:
    """Adaptive τ and every fixed τ in one case."""

    case: int
    adaptive: MeanResult
    fixed: tuple[MeanResult, ...]

    @property
    def best(self) -> MeanResult:
        """The fixed τ with the lowest loss."""
        return min(self.fixed, key=lambda result: result.loss)

    @property
    def worst(self) -> MeanResult:
        """The fixed τ with the highest loss."""
        return max(self.fixed, key=lambda result: result.loss)

    @property
    def regret(self) -> float | None:
        """(F_adaptive - F_best) / (F_worst - F_best); None if all fixed τ are equal."""
        spread = self.worst.loss - self.best.loss
        return (self.adaptive.loss - self.best.loss) / spread if spread > 0 else None

    def to_json(self) -> dict[str, Any]:
        """Return all means and the regret."""
        adaptive = dict(vars(self.adaptive))
        adaptive["average_tau"] = adaptive.pop("tau")
        return {
            "case": self.case,
            "adaptive": adaptive,
            "fixed": [dict(vars(each)) for each in self.fixed],
            "regret": self.regret,
        }


def compare(
    settings: Settings,
    *,
    cases: Sequence[int],
    taus: Sequence[int],
    seeds: Sequence[int],
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[CaseComparison]:
    """Run adaptive τ, and every fixed τ with plain averaging, in every case and seed.

    Args:
      settings: of all runs; τ, partition and seed are replaced.
      cases: the cases of the paper, 1 to 4.
      taus: the fixed values of τ.
      seeds: the random seeds.
      progress: receives the number of finished runs and of all runs.

    Returns:
      One comparison per case.
    """
    if not (cases and taus and seeds):
        raise UserError("compare needs at least one case, one tau and one seed")
    require_losses(settings)
    plain = replace(
        settings,
        method="paper",
        drift_correction=None,
        delta=None,
        step_size=None if settings.step_size == "auto" else settings.step_size,
        **PLAIN_UPDATE,
    )
    choices: list[Tau] = ["adaptive", *taus]
    grid = list(product(cases, choices, seeds))
    results: dict[tuple[int, Tau], list[Result]] = {}
    for done, (case, tau, seed) in enumerate(grid, start=1):
        base = settings if tau == "adaptive" else plain
        variant = replace(base, partition=f"case:{case}", tau=tau, seed=seed)
        results.setdefault((case, tau), []).append(run_in_process(variant))
        progress(done, len(grid))
    means = {key: MeanResult.mean(each) for key, each in results.items()}
    return [
        CaseComparison(
            case,
            means[case, "adaptive"],
            tuple(replace(means[case, tau], tau=tau) for tau in taus),
        )
        for case in cases
    ]


def require_losses(settings: Settings) -> None:
    """Refuse private runs, which report no loss to compare."""
    if settings.limits().by_noise is not None:
        raise UserError(
            "runs are compared by their loss, which private runs do not report: leave "
            "privacy out of `budget`"
        )
