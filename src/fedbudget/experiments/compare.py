"""Adaptive τ against fixed τ, over cases and seeds: how much is lost by not knowing the best fixed τ beforehand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedbudget.data.dataset import Dataset
from fedbudget.errors import UserError
from fedbudget.launch.inputs import load_dataset
from fedbudget.launch.prepared import Overrides
from fedbudget.launch.simulate import simulate
from fedbudget.settings import Settings, Tau
from fedbudget.training import Result, execute


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
        return {
            "case": self.case,
            "adaptive": {
                "loss": self.adaptive.loss,
                "accuracy": self.adaptive.accuracy,
                "average_tau": self.adaptive.tau,
            },
            "fixed": [{"tau": each.tau, "loss": each.loss, "accuracy": each.accuracy} for each in self.fixed],
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
    dataset = load_dataset(settings)
    choices: list[Tau] = ["adaptive", *taus]
    own = None if settings.step_size == "auto" else settings.step_size
    plain = replace(settings, method="paper", drift_correction=None, delta=None, step_size=own)
    grid = [
        (case, tau, replace(settings if tau == "adaptive" else plain, partition=f"case:{case}", tau=tau, seed=seed))
        for case in cases
        for tau in choices
        for seed in seeds
    ]
    results: dict[tuple[int, Tau], list[Result]] = {}
    for done, (case, tau, variant) in enumerate(grid, start=1):
        results.setdefault((case, tau), []).append(_run(variant, dataset))
        progress(done, len(grid))
    return [
        CaseComparison(
            case,
            MeanResult.mean(results[case, "adaptive"]),
            tuple(MeanResult.mean(results[case, tau], tau) for tau in taus),
        )
        for case in cases
    ]


def _run(settings: Settings, dataset: Dataset) -> Result:
    result = execute(simulate(settings, Overrides(dataset=dataset)))
    if result.stopped_by == "interrupted":
        raise KeyboardInterrupt
    return result


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
