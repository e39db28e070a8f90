"""Adaptive τ against fixed τ, over cases and seeds: how much is lost by not knowing the best fixed τ beforehand."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from fedbudget.errors import UserError
from fedbudget.experiments.cells import uninterrupted
from fedbudget.launch.execute import execute
from fedbudget.launch.inputs import load_dataset
from fedbudget.launch.prepared import Overrides
from fedbudget.launch.simulate import simulate
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
    )
)
"""The settings of updates as they are, and their average."""


@dataclass(frozen=True)
class MeanResult:
    """The mean over seeds of one τ, or of adaptive τ, in one case."""

    tau: float
    loss: float
    accuracy: float | None

    @classmethod
    def mean(cls, results: Sequence[Result], tau: float | None = None) -> "MeanResult":
        accuracies = [result.accuracy for result in results if result.accuracy is not None]
        return cls(
            tau=_mean([result.average_tau for result in results]) if tau is None else tau,
            loss=_mean([result.loss for result in results]),
            accuracy=_mean(accuracies) if accuracies else None,
        )


@dataclass(frozen=True)
class CaseComparison:
    """One case: adaptive τ, and every fixed τ."""

    case: int
    adaptive: MeanResult
    fixed: tuple[MeanResult, ...]

    @property
    def best(self) -> MeanResult:
        return min(self.fixed, key=lambda result: result.loss)

    @property
    def worst(self) -> MeanResult:
        return max(self.fixed, key=lambda result: result.loss)

    @property
    def regret(self) -> float | None:
        """(F_adaptive - F_best fixed) / (F_worst fixed - F_best fixed); None where all fixed τ are equally good."""
        spread = self.worst.loss - self.best.loss
        return (self.adaptive.loss - self.best.loss) / spread if spread > 0 else None

    def to_json(self) -> dict[str, Any]:
        own = self.adaptive
        return {
            "case": self.case,
            "adaptive": {
                "loss": own.loss,
                "accuracy": own.accuracy,
                "average_tau": own.tau,
            },
            "fixed": [
                {"tau": each.tau, "loss": each.loss, "accuracy": each.accuracy}
                for each in self.fixed
            ],
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
    """Runs adaptive τ and, by the plain protocol, every fixed τ, in every case with every seed.

    Args:
      settings: of all runs; their τ, partition and seed are replaced.
      progress: told how many runs are done, of how many.
    """
    if not (cases and taus and seeds):
        raise UserError("compare needs at least one case, one tau and one seed")
    require_losses(settings)
    data = Overrides(dataset=load_dataset(settings))
    choices: list[Tau] = ["adaptive", *taus]
    own = None if settings.step_size == "auto" else settings.step_size
    plain = replace(
        settings,
        method="paper",
        drift_correction=None,
        delta=None,
        step_size=own,
        **PLAIN_UPDATE,
    )
    grid = list(product(cases, choices, seeds))
    results: dict[tuple[int, Tau], list[Result]] = {}
    for done, (case, tau, seed) in enumerate(grid, start=1):
        base = settings if tau == "adaptive" else plain
        variant = replace(base, partition=f"case:{case}", tau=tau, seed=seed)
        results.setdefault((case, tau), []).append(
            uninterrupted(execute(simulate(variant, data)))
        )
        progress(done, len(grid))
    means = {
        key: MeanResult.mean(own, None if key[1] == "adaptive" else key[1])
        for key, own in results.items()
    }
    return [
        CaseComparison(
            case, means[case, "adaptive"], tuple(means[case, tau] for tau in taus)
        )
        for case in cases
    ]


def require_losses(settings: Settings) -> None:
    """Refuses runs that cannot be compared."""
    if settings.limits().by_noise is not None:
        raise UserError(
            "runs are compared by their loss, which private ones do not tell: leave privacy out of `budget`"
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
