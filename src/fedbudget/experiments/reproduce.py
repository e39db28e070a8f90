"""The paper's evaluation, repeated, and what goes past it: each figure with its runs, and a report with all claims.

    OUT/NAME/results.parquet    the runs of a figure
    OUT/NAME/NAME.png, .svg     the figure
    OUT/NAME/made.json          what it was made of
    OUT/report.md, report.html  all figures in OUT, and all claims

Runs that are there already are not made again. Without the real MNIST, figures of the SVM are made of `digits`, and say
so; others are left out, with the reason. A figure of many tasks has those whose data are here.

The report of a reproduction: a page in Markdown beside the pictures, and one in HTML with the pictures inside.
"""

import base64
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from fedbudget import __version__, durable_files
from fedbudget.data.published import DatasetMissing
from fedbudget.errors import UserError
from fedbudget.experiments import sweep
from fedbudget.experiments.cells import CellStore, expected_seconds
from fedbudget.experiments.figures import FIGURES
from fedbudget.experiments.figures.figure import Claim, Figure, FigureTable, GridSize
from fedbudget.experiments.pool import workers
from fedbudget.experiments.sweep import read_rows
from fedbudget.launch.inputs import load_dataset
from fedbudget.settings.settings import Settings

_RUNS = 15
_QUICK_RUNS = 2
_MADE = "made.json"

Expect = Callable[[int, float], None]
"""Told how many runs are to be made, and about how many seconds that will take."""


@dataclass(frozen=True)
class FigureResult:
    """A figure that was made.

    Args:
      name, title: of the figure.
      made_of: how many runs, on which data, by which method.
      claims: judged by it.
      table: its numbers, where it has a table.
      picture: the PNG.
    """

    name: str
    title: str
    made_of: str
    claims: tuple[Claim, ...]
    table: FigureTable | None
    picture: Path


def choose(
    names: Sequence[str], *, with_cnn: bool, engine: str = "in-process"
) -> list[Figure]:
    """The figures of some names, or of `all`; the first part of a name stands for all that begin with it."""
    engines = sorted({figure.engine for figure in FIGURES.values()})
    if engine not in engines:
        raise UserError(f"engine must be one of {', '.join(engines)}, not {engine!r}")
    figures = {name: figure for name, figure in FIGURES.items() if figure.engine == engine}
    if not names:
        raise UserError(f"which figures? all, or some of {', '.join(figures)}")
    for asked in names:
        if asked != "all" and not any(_is_called(name, asked) for name in figures):
            raise UserError(
                f"unknown figure {asked!r}; use all, or some of {', '.join(figures)}"
            )
    return [
        figure
        for name, figure in figures.items()
        if any(_is_called(name, asked) for asked in names)
        or ("all" in names and (with_cnn or not figure.long))
    ]


def grid_size(figure: Figure, *, runs: int | None = None, quick: bool = False) -> GridSize:
    """How much to make of a figure: as many runs of each setting as are asked for, or as it has time for."""
    return GridSize(runs or (1 if figure.long else _QUICK_RUNS if quick else _RUNS), quick)


def _is_called(name: str, asked: str) -> bool:
    return name == asked or name.startswith(f"{asked}-")


def make(
    figure: Figure,
    out: Path,
    size: GridSize,
    *,
    data_dir: str | None = None,
    jobs: int | None = None,
    progress: sweep.Progress = lambda done, of, failed: None,
    expect: Expect = lambda runs, seconds: None,
) -> None:
    """Makes a figure's runs and its picture.

    Args:
      expect: told of a figure that takes hours, before it is made.

    Raises:
      DatasetMissing: its data are not on this machine.
    """
    settings, on = _data(figure, data_dir)
    folder = out / figure.name
    if figure.long:
        grid = figure.sweep(settings, size)
        missing = CellStore(folder, grid.each, figure.engine, grid.testbed).missing(
            grid.cells
        )
        if missing:
            expect(len(missing), expected_seconds(missing) / workers(jobs, len(missing)))
    rows = figure.make(settings, size, folder, jobs=jobs, progress=progress)
    errors = [row["error"] for row in rows if row["error"] is not None]
    if errors:
        raise RuntimeError(
            f"{figure.name}: {len(errors)} of its runs failed, the first with: {errors[0]}"
        )
    made = {"of": figure.made_of(settings, size, on)}
    durable_files.replace(folder / _MADE, (json.dumps(made) + "\n").encode())
    picture = figure.draw(rows)
    picture.suptitle(f"{figure.title}, on {on}", fontsize="medium")
    for form in ("png", "svg"):
        with durable_files.replacing(folder / f"{figure.name}.{form}") as file:
            picture.savefig(file, format=form)


def read_figures(out: Path) -> list[FigureResult]:
    """All figures that a folder has, with their claims judged by the runs there."""
    results = []
    for figure in FIGURES.values():
        folder = out / figure.name
        if (folder / _MADE).is_file() and (folder / sweep.RESULTS).is_file():
            rows = read_rows(folder / sweep.RESULTS)
            made_of = json.loads((folder / _MADE).read_text(encoding="utf-8"))["of"]
            claims = tuple(figure.claims(rows))
            picture = folder / f"{figure.name}.png"
            results.append(
                FigureResult(
                    figure.name, figure.title, made_of, claims, figure.table(rows), picture
                )
            )
    return results


def _data(figure: Figure, data_dir: str | None) -> tuple[list[Settings], str]:
    """The settings of a figure's tasks with data that are here, and what these are."""
    asked = figure.settings(data_dir)
    if len(asked) == 1:
        settings, on = _or_digits(asked[0])
        return [settings], on
    available = []
    for settings in asked:
        with suppress(DatasetMissing):
            load_dataset(settings)
            available.append(settings)
    return available, ", ".join(dict.fromkeys(settings.dataset for settings in available))


def _or_digits(settings: Settings) -> tuple[Settings, str]:
    """Settings with data that are here, and what these are."""
    try:
        dataset = load_dataset(settings)
    except DatasetMissing:
        if settings.model != "svm":
            raise
        # No sample of the test data, which are fewer than the paper's 1,000.
        return replace(
            settings, dataset="digits", test_samples=None
        ), "digits in place of MNIST"
    return (
        settings,
        f"{settings.dataset} ({dataset.note})" if dataset.note else settings.dataset,
    )


_TITLE = (
    "Adaptive Federated Learning in Resource Constrained Edge Computing Systems, reproduced"
)
_OURS = "Claims of our own:"
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem; border-bottom: 1px solid #8884; }
td:last-child { white-space: nowrap; }
img { max-width: 100%; background: white; }
.no { font-weight: bold; }
.quote { padding-top: 1.2rem; font-weight: normal; font-style: italic; }
"""


def write_report(made: Sequence[FigureResult], out: Path) -> tuple[Path, ...]:
    """Writes both pages, and gives where they are."""
    pages = {out / "report.md": markdown(made, out), out / "report.html": html(made)}
    for path, text in pages.items():
        durable_files.replace(path, text.encode())
    return tuple(pages)


def markdown(made: Sequence[FigureResult], out: Path) -> str:
    """The page, with pictures by their paths from `out`."""
    lines = [f"# {_TITLE}", "", _summary(made), "", "## Claims"]
    for quote, judged in _by_quote(made).items():
        lines += ["", f"> {quote}" if quote else _OURS, ""]
        lines += ["| claim | measured | holds | figure |", "|---|---|---|---|"]
        for name, claim in judged:
            lines.append(
                _line((claim.text, claim.measured, _verdict(claim), f"[{name}](#{name})"))
            )
    lines += ["", "## Figures"]
    for each in made:
        picture = Path(os.path.relpath(each.picture, out)).as_posix()
        lines += [
            "",
            f"### {each.name}",
            "",
            f"{each.title}: {each.made_of}.",
            "",
            f"![{each.title}]({picture})",
        ]
        if each.table is not None:
            lines += [
                "",
                *(
                    _line(row)
                    for row in (
                        each.table.head,
                        ["---"] * len(each.table.head),
                        *each.table.rows,
                    )
                ),
            ]
    return "\n".join([*lines, ""])


def html(made: Sequence[FigureResult]) -> str:
    """The page as one file that needs nothing else."""
    rows = "\n".join(
        f'<tr><th class="quote" colspan="4">{escape(f"“{quote}”" if quote else _OURS)}</th></tr>'
        + "".join(
            f"<tr><td>{escape(claim.text)}</td><td>{escape(claim.measured)}</td>"
            f'<td><a href="#{name}">{name}</a></td><td class="{_verdict(claim)}">{_verdict(claim)}</td></tr>'
            for name, claim in judged
        )
        for quote, judged in _by_quote(made).items()
    )
    figures = "\n".join(
        f'<section id="{each.name}"><h3>{escape(each.title)}</h3><p>{escape(each.made_of)}.</p>'
        f'<img alt="{escape(each.title)}" src="data:image/png;base64,{_encoded(each.picture)}">'
        f"{_html_table(each.table)}</section>"
        for each in made
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_TITLE}</title><style>{_STYLE}</style></head><body>
<h1>{_TITLE}</h1>
<p>{escape(_summary(made))}</p>
<h2>Claims</h2>
<table><thead><tr><th>claim</th><th>measured</th><th>figure</th><th>holds</th></tr></thead><tbody>
{rows}
</tbody></table>
<h2>Figures</h2>
{figures}
</body></html>
"""


def _by_quote(made: Sequence[FigureResult]) -> dict[str, list[tuple[str, Claim]]]:
    """Claims with the names of their figures, by the paper's words for them; those of ours last."""
    judged: dict[str, list[tuple[str, Claim]]] = {}
    for each in made:
        for claim in each.claims:
            judged.setdefault(claim.quote, []).append((each.name, claim))
    return dict(sorted(judged.items(), key=lambda item: not item[0]))


def _verdict(claim: Claim) -> str:
    return "yes" if claim.holds else "no"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _html_table(table: FigureTable | None) -> str:
    if table is None:
        return ""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in table.rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody></table>"


def _summary(made: Sequence[FigureResult]) -> str:
    claims = [claim for each in made for claim in each.claims]
    held = sum(claim.holds for claim in claims)
    return f"{held} of {len(claims)} claims hold, in {len(made)} figures; made by fedbudget {__version__}."


def _encoded(picture: Path) -> str:
    return base64.b64encode(picture.read_bytes()).decode()
