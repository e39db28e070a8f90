"""Loss and accuracy at the end of the budget against fixed τ, in Cases 1-4, with adaptive τ and centralized descent."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from fedbudget.experiments.figures import paper_words
from fedbudget.experiments.figures.figure import CASES, FEW_TAUS, TAUS, Claim, Figure, GridSize, joined
from fedbudget.experiments.figures.rows import CaseLosses, Rows, by_fixed_tau, mean, where
from fedbudget.experiments.figures.style import ACCURACY, BASELINE, COLOURS, LOSS, case_line, finish, log_scale, picture
from fedbudget.experiments.sweep import Sweep
from fedbudget.settings import Settings

NEAR = 0.05
"""Of the way from the best to the worst fixed τ: as near to the best as this counts as near-optimal."""


@dataclass(frozen=True)
class LossAgainstTau(Figure):
    """The figure of one model and dataset.

    Args:
      taus, few: the fixed τ, and those for a first look.
      slower: with whole shards, Case 3 has more to do in a step than Case 1, and so ends with a higher loss.
    """

    taus: tuple[int, ...] = TAUS
    few: tuple[int, ...] = FEW_TAUS
    slower: bool = False

    def runs(self, base: Settings, size: GridSize) -> Sweep:
        taus = ["adaptive", *size.choose(self.taus, self.few)]
        federated = Sweep.of(base, {"method": ["paper"], "case": CASES, "tau": taus, "seeds": size.runs})
        return joined(federated, Sweep.of(base, {"method": ["centralized"], "seeds": size.runs}))

    def draw(self, rows: Rows) -> Picture:
        labels = {"loss": LOSS}
        if any(row["accuracy"] is not None for row in rows):
            labels["accuracy"] = ACCURACY
        drawn = picture(5.2 * len(labels), 4.2)
        for axis, (name, label) in zip(drawn.subplots(1, len(labels), squeeze=False)[0], labels.items(), strict=True):
            _panel(axis, rows, name)
            log_scale(axis, (1, 3, 10, 30, 100))
            finish(axis, "τ (fixed), or average τ* weighted by updates (adaptive)", label, legend=name == "loss")
        return drawn

    def claims(self, rows: Rows) -> list[Claim]:
        cases = {case: CaseLosses(rows, case) for case in CASES}
        losses = {case: cell.paper for case, cell in cases.items()}
        best = [cell.best_tau for cell in cases.values()]
        centralized = mean(where(rows, method="centralized"), "loss")
        better = [str(case) for case, loss in losses.items() if loss < centralized]
        claims = [
            self._near("loss", [cell.regret(cell.paper) for cell in cases.values()], paper_words.CLOSE),
            self.claim(
                "the best fixed τ differs from case to case",
                f"best τ {', '.join(best)} in Cases 1-4",
                len(set(best)) > 1,
                paper_words.DIFFERENT,
            ),
            self.claim(
                "adaptive τ is better than centralized descent in some case",
                f"loss {', '.join(f'{loss:.4f}' for loss in losses.values())} in Cases 1-4, {centralized:.4f} "
                f"centralized; lower in {_cases(better)}",
                bool(better),
                paper_words.DISTRIBUTED,
            ),
        ]
        if any(row["accuracy"] is not None for row in rows):
            regrets = [_accuracy_regret(rows, case) for case in CASES]
            claims.insert(1, self._near("accuracy", regrets, paper_words.CLOSE_ACCURACY))
        if self.slower:
            worse = "Case 3 is worse than Case 1, because a step takes longer"
            measured = f"loss {losses[3]:.4f} in Case 3, {losses[1]:.4f} in Case 1"
            claims.append(self.claim(worse, measured, losses[3] > losses[1], paper_words.CASE_3))
        return claims

    def _near(self, what: str, regrets: Sequence[float], quote: str) -> Claim:
        measured = f"regret {', '.join(f'{value:.3f}' for value in regrets)} in Cases 1-4; up to {NEAR} counts as near"
        text = f"adaptive τ's {what} is near the best fixed τ's in all cases"
        return self.claim(text, measured, max(regrets) <= NEAR, quote)


def _cases(numbers: Sequence[str]) -> str:
    return f"{'Case' if len(numbers) == 1 else 'Cases'} {', '.join(numbers)}" if numbers else "no case"


def _accuracy_regret(rows: Rows, case: int) -> float:
    """As of losses: 0 for as good as the best fixed τ, 1 for as bad as the worst."""
    fixed = by_fixed_tau(rows, case, "accuracy").values()
    best, worst = max(fixed), min(fixed)
    own = mean(where(rows, method="paper", case=case, tau="adaptive"), "accuracy")
    return (best - own) / (best - worst) if best > worst else 0.0


def _panel(axis: Axes, rows: Rows, name: str) -> None:
    for case in CASES:
        fixed = by_fixed_tau(rows, case, name)
        case_line(axis, case, list(map(float, fixed)), list(fixed.values()))
        adaptive = where(rows, method="paper", case=case, tau="adaptive")
        label = "adaptive τ, by case" if case == CASES[-1] else None
        star: dict[str, Any] = {"marker": "*", "markersize": 15, "markeredgecolor": "black", "linestyle": "none"}
        axis.plot(mean(adaptive, "update_weighted_tau"), mean(adaptive, name), color=COLOURS[case], label=label, **star)
    axis.axhline(mean(where(rows, method="centralized"), name), color=BASELINE, linewidth=1, label="centralized")
