"""Loss and accuracy at the end of the budget against fixed τ, in Cases 1-4, with adaptive τ and centralized descent."""

from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

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
      differs: no τ is the best in all cases.
      slower: with whole shards, Case 3 has more to do in a step than Case 1, and so ends with a higher loss.
    """

    taus: tuple[int, ...] = TAUS
    few: tuple[int, ...] = FEW_TAUS
    differs: bool = False
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
        regrets = [cell.regret(cell.paper) for cell in cases.values()]
        measured = f"{', '.join(f'{value:.3f}' for value in regrets)} in Cases 1-4; up to {NEAR} counts as near"
        near = "adaptive τ is near the best fixed τ in all cases"
        claims = [self.claim(near, f"regret {measured}", max(regrets) <= NEAR)]
        if self.differs:
            best = [cell.best_tau for cell in cases.values()]
            measured = f"best τ {', '.join(best)} in Cases 1-4"
            claims.append(self.claim("the best fixed τ differs from case to case", measured, len(set(best)) > 1))
        if self.slower:
            first, third = cases[1].paper, cases[3].paper
            worse = "Case 3 is worse than Case 1, because a step takes longer"
            claims.append(self.claim(worse, f"loss {third:.4f} in Case 3, {first:.4f} in Case 1", third > first))
        return claims


def _panel(axis: Axes, rows: Rows, name: str) -> None:
    for case in CASES:
        fixed = by_fixed_tau(rows, case, name)
        case_line(axis, case, list(map(float, fixed)), list(fixed.values()))
        adaptive = where(rows, method="paper", case=case, tau="adaptive")
        label = "adaptive τ, by case" if case == CASES[-1] else None
        star: dict[str, Any] = {"marker": "*", "markersize": 15, "markeredgecolor": "black", "linestyle": "none"}
        axis.plot(mean(adaptive, "update_weighted_tau"), mean(adaptive, name), color=COLOURS[case], label=label, **star)
    axis.axhline(mean(where(rows, method="centralized"), name), color=BASELINE, linewidth=1, label="centralized")
