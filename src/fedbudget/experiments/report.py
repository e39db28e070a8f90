"""The report of a reproduction: a page in Markdown beside the pictures, and one in HTML with the pictures inside."""

import base64
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from fedbudget import __version__, atomic_file
from fedbudget.experiments.figures.figure import Claim, FigureTable
from fedbudget.experiments.reproduce import FigureResult

_TITLE = "Adaptive Federated Learning in Resource Constrained Edge Computing Systems, reproduced"
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
        atomic_file.replace(path, text.encode())
    return tuple(pages)


def markdown(made: Sequence[FigureResult], out: Path) -> str:
    """The page, with pictures by their paths from `out`."""
    lines = [f"# {_TITLE}", "", _summary(made), "", "## Claims"]
    for quote, judged in _by_quote(made).items():
        lines += ["", f"> {quote}" if quote else _OURS, ""]
        lines += ["| claim | measured | holds | figure |", "|---|---|---|---|"]
        for name, claim in judged:
            lines.append(_line((claim.text, claim.measured, _verdict(claim), f"[{name}](#{name})")))
    lines += ["", "## Figures"]
    for each in made:
        picture = Path(os.path.relpath(each.picture, out)).as_posix()
        lines += ["", f"### {each.name}", "", f"{each.title}: {each.made_of}.", "", f"![{each.title}]({picture})"]
        if each.table is not None:
            lines += ["", *(_line(row) for row in (each.table.head, ["---"] * len(each.table.head), *each.table.rows))]
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
