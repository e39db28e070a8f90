"""The paper's evaluation, repeated, and additional figures: runs, pictures and a report.

    OUT/NAME/results.parquet    the runs of a figure
    OUT/NAME/NAME.png, .svg     the figure
    OUT/NAME/made.json          a description of its runs
    OUT/report.md, report.html  all figures in OUT, and all claims

Finished runs are not made again. Without the real MNIST, figures of the SVM use `digits`,
as their titles state. Other figures without data are left out, with the reason. A figure
of many tasks uses those with data on this machine.

report.md links to the pictures; report.html contains them.
"""

import base64
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from fedbudget import __version__, durable_files
from fedbudget.data.published import DatasetMissing
from fedbudget.errors import UserError
from fedbudget.experiments.cells import Progress
from fedbudget.experiments.figures import FIGURES
from fedbudget.experiments.figures.figure import Claim, Figure, GridSize, Table
from fedbudget.experiments.sweep import RESULTS, read_rows
from fedbudget.launch.inputs import load_dataset
from fedbudget.settings.settings import Settings

_MADE = "made.json"
_TITLE = (
    "Adaptive Federated Learning in Resource Constrained Edge Computing Systems, reproduced"
)
_OWN_TITLE = "Figures of fedbudget"
_OWN_CLAIMS = "Claims of this project:"
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem;
  margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem;
  border-bottom: 1px solid #8884; }
td:last-child { white-space: nowrap; }
img { max-width: 100%; background: white; }
.no { font-weight: bold; }
.quote { padding-top: 1.2rem; font-weight: normal; font-style: italic; }
"""


@dataclass(frozen=True)
class FigureResult:
    """A finished figure.

    Args:
      name, title: of the figure.
      made_of: the number of runs, the data and the method.
      claims: evaluated on its runs.
      table: its numbers, if it has a table.
      picture: the PNG file.
    """

    name: str
    title: str
    made_of: str
    claims: tuple[Claim, ...]
    table: Table | None
    picture: Path


def choose(
    names: Sequence[str], *, with_cnn: bool, engine: str = "in-process"
) -> list[Figure]:
    """Return the figures with these names.

    Args:
      names: of figures; the first part of a name selects all that start with it, and `all`
        selects all.
      with_cnn: whether `all` includes figures that take hours.
      engine: the engine of the figures.
    """
    engines = sorted({figure.engine for figure in FIGURES.values()})
    if engine not in engines:
        raise UserError(f"engine must be one of {', '.join(engines)}, not {engine!r}")
    figures = [figure for figure in FIGURES.values() if figure.engine == engine]
    known = ", ".join(figure.name for figure in figures)
    if not names:
        raise UserError(f"which figures? all, or some of {known}")
    chosen: list[Figure] = []
    for name in names:
        matches = [each for each in figures if f"{each.name}-".startswith(f"{name}-")]
        if name == "all":
            matches = [each for each in figures if with_cnn or not each.long]
        if not matches:
            raise UserError(f"unknown figure {name!r}; use all, or some of {known}")
        chosen += matches
    return [figure for figure in figures if figure in chosen]


def grid_size(figure: Figure, *, runs: int | None = None, quick: bool = False) -> GridSize:
    """Return the size of a figure's grid.

    Args:
      runs: of each setting, if not the default.
      quick: use a small grid with few runs.
    """
    return GridSize(runs or figure.default_runs(quick=quick), quick)


def make(
    figure: Figure,
    out: Path,
    size: GridSize,
    *,
    data_dir: str | None = None,
    jobs: int | None = None,
    progress: Progress = lambda done, of, failed: None,
) -> None:
    """Make the runs and the picture of a figure.

    Args:
      out: the folder of all figures.

    Raises:
      DatasetMissing: the data are not on this machine.
    """
    settings, on = _data(figure, data_dir)
    folder = out / figure.name
    rows = figure.make(settings, size, folder, jobs=jobs, progress=progress)
    errors = [row["error"] for row in rows if row["error"] is not None]
    if errors:
        raise RuntimeError(
            f"{figure.name}: {len(errors)} of its runs failed, the first with: {errors[0]}"
        )
    made = {"of": figure.made_of(settings, size, on)}
    durable_files.replace(folder / _MADE, (json.dumps(made) + "\n").encode())
    picture = figure.draw(rows)
    # The panels of several tasks name their data.
    title = figure.title if len(settings) > 1 else f"{figure.title}, on {on}"
    picture.suptitle(title, fontsize="medium")
    for form in ("png", "svg"):
        with durable_files.replacing(folder / f"{figure.name}.{form}") as file:
            picture.savefig(file, format=form)


def read_figures(
    out: Path, figures: Iterable[Figure] = FIGURES.values()
) -> list[FigureResult]:
    """Return the figures in a folder, with their claims evaluated on the runs there.

    Args:
      figures: those to look for.
    """
    results = []
    for figure in figures:
        folder = out / figure.name
        if (folder / _MADE).is_file() and (folder / RESULTS).is_file():
            rows = read_rows(folder / RESULTS)
            result = FigureResult(
                figure.name,
                figure.title,
                json.loads((folder / _MADE).read_text(encoding="utf-8"))["of"],
                tuple(figure.claims(rows)),
                figure.table(rows),
                folder / f"{figure.name}.png",
            )
            results.append(result)
    return results


def write_report(made: Sequence[FigureResult], out: Path) -> tuple[Path, ...]:
    """Write both pages, and return their paths."""
    pages = {out / "report.md": markdown(made, out), out / "report.html": html(made)}
    for path, text in pages.items():
        durable_files.replace(path, text.encode())
    return tuple(pages)


def markdown(made: Sequence[FigureResult], out: Path) -> str:
    """Return the page, with links to pictures relative to `out`."""
    lines = [f"# {_title(made)}", "", _summary(made), "", "## Claims"]
    for quote, claims in _by_quote(made).items():
        table = [("claim", "measured", "holds", "figure")]
        for name, claim in claims:
            link = f"[{name}](#{name})"
            table.append((claim.text, claim.measured, _holds(claim), link))
        lines += ["", f"> {quote}" if quote else _OWN_CLAIMS, "", *_markdown_table(table)]
    lines += ["", "## Figures"]
    for each in made:
        picture = Path(os.path.relpath(each.picture, out)).as_posix()
        lines += ["", f"### {each.name}", "", f"{each.title}: {each.made_of}."]
        lines += ["", f"![{each.title}]({picture})"]
        if each.table is not None:
            lines += ["", *_markdown_table(each.table)]
    return "\n".join([*lines, ""])


def html(made: Sequence[FigureResult]) -> str:
    """Return the page as one file that contains everything."""
    rows = []
    for quote, claims in _by_quote(made).items():
        heading = escape(f"“{quote}”" if quote else _OWN_CLAIMS)
        rows.append(f'<tr><th class="quote" colspan="4">{heading}</th></tr>')
        for name, claim in claims:
            rows.append(
                f"<tr><td>{escape(claim.text)}</td><td>{escape(claim.measured)}</td>"
                f'<td><a href="#{name}">{name}</a></td>'
                f'<td class="{_holds(claim)}">{_holds(claim)}</td></tr>'
            )
    figures = []
    for each in made:
        encoded = base64.b64encode(each.picture.read_bytes()).decode()
        title = escape(each.title)
        figures.append(
            f'<section id="{each.name}"><h3>{title}</h3><p>{escape(each.made_of)}.</p>'
            f'<img alt="{title}" src="data:image/png;base64,{encoded}">'
        )
        if each.table is not None:
            head, *body = each.table
            cells = "".join(_html_row(row, "td") for row in body)
            heading = f"<thead>{_html_row(head, 'th')}</thead>"
            figures.append(f"<table>{heading}<tbody>{cells}</tbody></table>")
        figures.append("</section>")
    claims_head = _html_row(("claim", "measured", "figure", "holds"), "th")
    lines = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_title(made)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{_title(made)}</h1>\n<p>{escape(_summary(made))}</p>\n<h2>Claims</h2>",
        f"<table><thead>{claims_head}</thead><tbody>",
        *rows,
        "</tbody></table>\n<h2>Figures</h2>",
        *figures,
        "</body></html>\n",
    ]
    return "\n".join(lines)


def _data(figure: Figure, data_dir: str | None) -> tuple[list[Settings], str]:
    """Return the settings of a figure's tasks with data on this machine, and the data."""
    tasks = figure.settings(data_dir)
    if len(tasks) == 1:
        settings, on = _or_digits(tasks[0])
        return [settings], on
    available = []
    for settings in tasks:
        with suppress(DatasetMissing):
            load_dataset(settings)
            available.append(settings)
    return available, ", ".join(dict.fromkeys(settings.dataset for settings in available))


def _or_digits(settings: Settings) -> tuple[Settings, str]:
    """Return the settings and their data. The SVM uses digits if MNIST is missing."""
    try:
        dataset = load_dataset(settings)
    except DatasetMissing:
        if settings.model != "svm":
            raise
        # Digits have fewer test samples than the 1,000 of the paper: use all.
        digits = replace(settings, dataset="digits", test_samples=None)
        return digits, "digits in place of MNIST"
    note = f" ({dataset.note})" if dataset.note else ""
    return settings, f"{settings.dataset}{note}"


def _by_quote(made: Sequence[FigureResult]) -> dict[str, list[tuple[str, Claim]]]:
    """Return claims and the names of their figures by quote, those without one last."""
    quotes: dict[str, list[tuple[str, Claim]]] = {}
    for each in made:
        for claim in each.claims:
            quotes.setdefault(claim.quote, []).append((each.name, claim))
    return dict(sorted(quotes.items(), key=lambda item: not item[0]))


def _title(made: Sequence[FigureResult]) -> str:
    """Return the title of the page, which depends on whose claims it has."""
    of_the_paper = any(claim.quote for each in made for claim in each.claims)
    return _TITLE if of_the_paper else _OWN_TITLE


def _holds(claim: Claim) -> str:
    return "yes" if claim.holds else "no"


def _markdown_table(table: Table) -> Iterator[str]:
    head, *rows = table
    for cells in (head, ["---"] * len(head), *rows):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _html_row(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _summary(made: Sequence[FigureResult]) -> str:
    claims = [claim for each in made for claim in each.claims]
    held = sum(claim.holds for claim in claims)
    return (
        f"{held} of {len(claims)} claims hold, in {len(made)} figures; "
        f"made by fedbudget {__version__}."
    )
