"""Held-out quality in natural federations, of one model for all sites and of others.

`default`, `personal`, `alone` and `pooled` are those of experiments/federations.py. FedAvg,
FedAdam and SCAFFOLD have the default's budget. Each cell of a rival's grid is run with each
seed, and the cell with the lowest validation loss of that seed counts. The validation rows
are those of the default, and tuning itself is free.

Federations whose data are not on this machine are left out, and the description of the
figure has the command that fetches them. The small grid leaves out those in `LARGE`, and
the full grid has only the rivals' small grid for them.

A federation's score is the mean over its test rows. "Worst" and "median" are over sites
with at least `FEWEST` test rows; all numbers are means over seeds.

**Published figures.** FLamby (Ogier du Terrail et al., NeurIPS Datasets and Benchmarks,
2022) reports accuracies for heart disease, with another split, other features and 740 of
the 920 patients, so they are no target. For TCGA-BRCA it reports the concordance of a
survival model with 1,088 patients, which cannot be compared with the accuracy of a class.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import pyarrow
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from fedbudget.experiments.cells import CellStore, Progress
from fedbudget.experiments.federations import MODELS, measure
from fedbudget.experiments.figures.figure import (
    BASELINE,
    COLOURS,
    Claim,
    Figure,
    GridSize,
    Row,
    Rows,
    Table,
    distinct,
    draw_tasks,
    finish,
    grouped,
    listed,
    where,
)
from fedbudget.experiments.rivals import Rival
from fedbudget.experiments.sweep import RESULTS, Sweep, write
from fedbudget.settings.settings import Settings

FEWEST = 5
"""Fewest test rows of a site for the worst and the median site."""

LARGE = ("omniglot", "shakespeare")
"""Federations with tens of thousands of parameters."""

NEAR = 0.005
"""Largest deficit of a score that counts as equal."""

WORST = 0.01
"""The same, for the score of the worst site."""

_RUNS = 5
_QUICK_RUNS = 2
_BUDGET = "time=5s"
_SOURCE = "published, another split; github.com/owkin/FLamby at 638efb66"
_FLAMBY = "FLamby, 254 test rows: "
PUBLISHED: Mapping[str, Mapping[str, float]] = {
    "heart-disease": {
        "pooled": 0.7756,
        "SCAFFOLD, 100 local updates": 0.6969,
        "FedAvg, 100 local updates": 0.6535,
        "FedAdam, 100 local updates": 0.5827,
    }
}
"""Accuracies on the pooled test rows, from the authors' repository: owkin/FLamby at commit
638efb66, flamby/results/results_benchmark_fed_heart_disease.csv."""

_HEAD: tuple[str, ...] = (
    "federation",
    "model",
    "score",
    "standard error",
    "worst site",
    "median site",
    "tuned to",
)
_TYPES = {
    **dict.fromkeys(("dataset", "model", "site", "knobs", "error"), pyarrow.string()),
    **dict.fromkeys(("seed", "rows"), pyarrow.int64()),
    "score": pyarrow.float64(),
}


class Natural(Figure):
    """Models of natural federations, on held-out rows."""

    def default_runs(self, *, quick: bool) -> int:
        return _QUICK_RUNS if quick else _RUNS

    def settings(self, data_dir: str | None) -> list[Settings]:
        common: Any = {"budget": (_BUDGET,), "evaluations": 1, "data_dir": data_dir}
        return [Settings(dataset=name, personal=True, **common) for name in self.tasks]

    def rivals(self, size: GridSize, dataset: str) -> Sequence[Rival]:
        """Return the rivals with their grids for a federation."""
        size = replace(size, quick=size.quick or dataset in LARGE)
        local = {
            "tau": size.choose((1, 10, 30), (1, 10)),
            "step_size": size.choose((0.01, 0.03, 0.1, 0.3, 1.0), (0.03, 0.3)),
        }
        server = {"server_step_size": size.choose((0.01, 0.03, 0.1), (0.03,))}
        average = {"update": "average", "personal": False}
        return (
            Rival("FedAvg", average, local),
            Rival("FedAdam", {"update": "fedadam", "personal": False}, {**local, **server}),
            Rival("SCAFFOLD", {**average, "drift_correction": True}, local),
        )

    def runs(self, base: Settings, size: GridSize) -> Sweep:
        cells = []
        for seed in range(size.runs):
            own = replace(base, seed=seed)
            cells.append(own)
            for rival in self.rivals(size, base.dataset):
                cells += rival.cells(own)
        return Sweep(base, ("seed",), tuple(cells))

    def sweep(self, settings: Sequence[Settings], size: GridSize) -> Sweep:
        return super().sweep(_chosen(settings, size), size)

    def make(
        self,
        settings: Sequence[Settings],
        size: GridSize,
        folder: Path,
        *,
        jobs: int | None,
        progress: Progress,
    ) -> Rows:
        store = CellStore(folder, "run", measure=measure)
        cells = self.sweep(settings, size).cells
        failures = store.make(cells, progress, jobs=jobs)
        rows: list[Row] = []
        for base in _chosen(settings, size):
            for seed in range(size.runs):
                own = replace(base, seed=seed)
                about = {"dataset": base.dataset, "seed": seed, "knobs": "", "error": None}
                if own in failures:
                    rows.append({**_EMPTY, **about, "error": failures[own].error})
                    continue
                rows += [{**about, **row} for row in _rows(store, own)]
                for rival in self.rivals(size, base.dataset):
                    made = [each for each in rival.cells(own) if each not in failures]
                    if not made:
                        continue
                    best = min(made, key=lambda cell: _validation(store, cell))
                    knobs = {name: getattr(best, name) for name in rival.grid}
                    about["knobs"] = ", ".join(f"{k}={v:g}" for k, v in knobs.items())
                    given = _rows(store, best)
                    rows += [{**row, **about, "model": rival.name} for row in given]
        columns = {name: [row[name] for row in rows] for name in _TYPES}
        write(pyarrow.table(columns, pyarrow.schema(_TYPES)), folder / RESULTS)
        return rows

    def made_of(self, settings: Sequence[Settings], size: GridSize, on: str) -> str:
        small = " over a small grid" if size.quick else ""
        seeds = "one seed" if size.runs == 1 else f"mean of {size.runs} seeds"
        used = ", ".join(each.dataset for each in _chosen(settings, size))
        text = f"{seeds}, rivals tuned{small}, on {used}"
        available = [each.dataset for each in settings]
        large = [name for name in LARGE if name in available and size.quick]
        if large:
            text += f"; without {' and '.join(large)}, which take minutes"
        missing = [name for name in self.tasks if name not in available]
        if missing:
            commands = ", ".join(f"`fedbudget data get {name}`" for name in missing)
            text += f"; not on this machine, fetch with: {commands}"
        return text

    def draw(self, rows: Rows) -> Picture:
        return draw_tasks(grouped(rows, itemgetter("dataset")), _draw_models, columns=3)

    def claims(self, rows: Rows) -> list[Claim]:
        claims: list[Claim] = []
        above = []
        by_federation = grouped(rows, itemgetter("dataset"))
        for name, own in by_federation.items():
            totals = {model: _totals(own, model) for model in _models(own)}
            better = max(_mean(totals["default"]), _mean(totals["alone"]))
            above.append(_mean(totals["personal"]) > better)
            rivals = [each for each in totals if each not in MODELS]
            claims += _compared(name, totals, "default", rivals)
            claims += _compared(name, totals, "default", ["pooled"])
            claims += _compared(name, totals, "personal", ["default", "alone"])
            worst = {
                model: _mean(_over_sites(own, model, min))
                for model in ("default", "personal")
            }
            claims.append(
                Claim(
                    f"{name}: the worst site of personal is not below that of the default "
                    f"by more than {WORST}",
                    f"{worst['personal']:.3f}, default {worst['default']:.3f}",
                    worst["personal"] >= worst["default"] - WORST,
                )
            )
        claims.append(
            Claim(
                "personal is above the default and alone on at least half of the "
                "federations",
                f"{sum(above)} of {len(above)}",
                2 * sum(above) >= len(above),
            )
        )
        return claims

    def table(self, rows: Rows) -> Table:
        lines = [_HEAD]
        for name, own in grouped(rows, itemgetter("dataset")).items():
            for model in _models(own):
                totals = _totals(own, model)
                knobs = [row["knobs"] for row in where(own, model=model) if row["knobs"]]
                line = (
                    name,
                    model,
                    f"{_mean(totals):.3f}",
                    f"{_error(totals):.3f}" if len(totals) > 1 else "",
                    f"{_mean(_over_sites(own, model, min)):.3f}",
                    f"{_mean(_over_sites(own, model, median)):.3f}",
                    "; ".join(dict.fromkeys(knobs)),
                )
                lines.append(line)
            for model, score in PUBLISHED.get(name, {}).items():
                text = f"{_FLAMBY}{model}"
                lines.append((name, text, f"{score:.3f}", "", "", "", _SOURCE))
        return lines


def _chosen(settings: Sequence[Settings], size: GridSize) -> list[Settings]:
    """Return the settings of the federations that a grid has."""
    return [each for each in settings if not (size.quick and each.dataset in LARGE)]


_EMPTY: Row = {"model": None, "site": None, "rows": 0, "score": None}


def _compared(
    name: str, totals: Mapping[str, list[float]], model: str, others: Sequence[str]
) -> Iterable[Claim]:
    """Yield the claim that a model is not worse than the best of others.

    The error of the difference is that of the differences of each seed.

    Args:
      totals: scores of each seed, by model.
    """
    if others:
        best = max(others, key=lambda other: _mean(totals[other]))
        own = totals[model]
        pairs = zip(own, totals[best], strict=False)
        gaps = [first - second for first, second in pairs]
        yield Claim(
            f"{name}: {model} is at most {NEAR} below {listed(others)}",
            f"{_mean(own):.3f}, {best} {_mean(totals[best]):.3f}, {_difference(gaps)}",
            _mean(own) >= _mean(totals[best]) - NEAR,
        )


def _rows(store: CellStore, cell: Settings) -> list[Row]:
    """Return a row for each model and site."""
    columns = store.read(cell)
    names = ("model", "site", "rows", "score")
    return [
        dict(zip(names, values, strict=True))
        for values in zip(*(columns[name] for name in names), strict=True)
    ]


def _validation(store: CellStore, cell: Settings) -> float:
    loss = store.read(cell)["validation"][0]
    return math.inf if loss is None else float(loss)


def _models(rows: Rows) -> list[Any]:
    return distinct(rows, "model")


def _seeds(rows: Rows, model: str) -> list[list[Row]]:
    """Return the rows of a model with test rows, by seed."""
    scored = [row for row in where(rows, model=model) if row["score"] is not None]
    return list(grouped(scored, lambda row: str(row["seed"])).values())


def _totals(rows: Rows, model: str) -> list[float]:
    """Return the score over all test rows, for each seed."""
    return [
        sum(row["rows"] * row["score"] for row in own) / sum(row["rows"] for row in own)
        for own in _seeds(rows, model)
    ]


def _over_sites(rows: Rows, model: str, choose: Any) -> list[float]:
    """Return the chosen score of sites with enough test rows, for each seed."""
    result = []
    for own in _seeds(rows, model):
        enough = [row["score"] for row in own if row["rows"] >= FEWEST]
        result.append(float(choose(enough or [row["score"] for row in own])))
    return result


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def _error(values: Sequence[float]) -> float:
    """Return the standard error of the mean; NaN of one value."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def _difference(gaps: Sequence[float]) -> str:
    """Describe the mean difference, with its error if there are several seeds."""
    text = f"difference {_mean(gaps):+.3f}"
    return f"{text} ± {_error(gaps):.3f}" if len(gaps) > 1 else text


def _draw_models(axis: Axes, rows: Rows) -> None:
    """Draw the score of each model with its error, and that of its worst site."""
    models = _models(rows)
    totals = {model: _totals(rows, model) for model in models}
    scores = [_mean(totals[model]) for model in models]
    errors = [_error(totals[model]) for model in models]
    finite = [0.0 if math.isnan(each) else each for each in errors]
    worst = [_mean(_over_sites(rows, model, min)) for model in models]
    axis.axvline(scores[0], color=BASELINE, linewidth=1)
    axis.errorbar(scores, models, xerr=finite, fmt="o", color=COLOURS[1], label="all rows")
    axis.scatter(worst, models, marker="|", s=60, color=COLOURS[2], label="worst site")
    low = min(worst)
    if low < -0.5:  # a failing site must not hide the rest
        axis.set_xlim(left=-0.5)
    axis.locator_params(axis="x", nbins=4)
    axis.invert_yaxis()
    finish(axis, "held-out accuracy or R²", "")
