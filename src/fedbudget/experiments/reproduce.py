"""The paper's evaluation, repeated: each figure with the runs behind it, and a report with all claims.

    OUT/NAME/results.parquet    the runs of a figure
    OUT/NAME/NAME.png, .svg     the figure
    OUT/NAME/made.json          what it was made of
    OUT/report.md, report.html  all figures in OUT, and all claims

Runs that are there already are not made again. Without the real MNIST, figures of the SVM are made of `digits`, and say
so; others are left out, with the reason.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedbudget.data.published.find import NotHere
from fedbudget.errors import UserError
from fedbudget.experiments import sweep
from fedbudget.experiments.figures import FIGURES
from fedbudget.experiments.figures.figure import Claim, Figure, Scope
from fedbudget.experiments.table import read_rows
from fedbudget.plan import load_dataset
from fedbudget.runs.settings import Settings

RUNS, QUICK_RUNS = 15, 2
_MADE = "made.json"


@dataclass(frozen=True)
class Made:
    """A figure that was made.

    Args:
      name, title: of the figure.
      of: what it was made of: how many runs, on which data, by which method.
      claims: the paper's, judged by it.
      picture: the PNG.
    """

    name: str
    title: str
    of: str
    claims: tuple[Claim, ...]
    picture: Path


def choose(names: Sequence[str], *, with_cnn: bool) -> list[Figure]:
    """The figures of some names, or of `all`."""
    if not names:
        raise UserError(f"which figures? all, or some of {', '.join(FIGURES)}")
    unknown = [name for name in names if name not in FIGURES and name != "all"]
    if unknown:
        raise UserError(f"unknown figure {unknown[0]!r}; use all, or some of {', '.join(FIGURES)}")
    return [
        figure
        for figure in FIGURES.values()
        if figure.name in names or ("all" in names and (with_cnn or not figure.long))
    ]


def make(
    figure: Figure,
    out: Path,
    scope: Scope,
    *,
    data_dir: str | None = None,
    jobs: int | None = None,
    progress: sweep.Progress = lambda done, of, failed: None,
) -> None:
    """Makes a figure's runs and its picture.

    Raises:
      NotHere: its data are not on this machine.
    """
    settings, on = _data(figure.settings(data_dir))
    folder = out / figure.name
    table = sweep.run(figure.sweep(settings, scope), folder, jobs=jobs, progress=progress)
    rows = table.to_pylist()
    errors = [row["error"] for row in rows if row["error"] is not None]
    if errors:
        raise RuntimeError(f"{figure.name}: {len(errors)} of its runs failed, the first with: {errors[0]}")
    made = {"of": f"{_runs(figure, settings, scope)}, on {on}, method {settings.method}"}
    (folder / _MADE).write_text(json.dumps(made) + "\n", encoding="utf-8")
    picture = figure.draw(rows)
    picture.suptitle(f"{figure.title}, on {on}", fontsize="medium")
    for form in ("png", "svg"):
        drawn = io.BytesIO()
        picture.savefig(drawn, format=form)
        (folder / f"{figure.name}.{form}").write_bytes(drawn.getvalue())


def made_in(out: Path) -> list[Made]:
    """All figures that a folder has, with their claims judged by the runs there."""
    found = []
    for figure in FIGURES.values():
        folder = out / figure.name
        if (folder / _MADE).is_file() and (folder / sweep.RESULTS).is_file():
            rows = read_rows(folder / sweep.RESULTS)
            of = json.loads((folder / _MADE).read_text(encoding="utf-8"))["of"]
            claims = tuple(figure.claims(rows))
            found.append(Made(figure.name, figure.title, of, claims, folder / f"{figure.name}.png"))
    return found


def _data(settings: Settings) -> tuple[Settings, str]:
    """Settings with data that are here, and what these are."""
    try:
        dataset = load_dataset(settings)
    except NotHere:
        if settings.model != "svm":
            raise
        # No sample of the test data, which are fewer than the paper's 1,000.
        return replace(settings, dataset="digits", test_samples=None), "digits in place of MNIST"
    return settings, f"{settings.dataset} ({dataset.note})" if dataset.note else settings.dataset


def _runs(figure: Figure, settings: Settings, scope: Scope) -> str:
    seeds = len({cell.seed for cell in figure.sweep(settings, scope).cells})
    quick = ", a small grid for a first look" if scope.quick else ""
    return f"{'one run' if seeds == 1 else f'mean of {seeds} runs'} of each setting{quick}"
