"""Console and tables of the commands: as wide as the terminal, unlimited elsewhere.

Rich is imported by the functions, so that commands without a table start fast.
"""

import math
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_UNLIMITED = 1000  # columns, wider than any of the tables


def print_table(
    headings: Iterable[str],
    rows: Iterable[Sequence[str]],
    *,
    spare: Sequence[str] = (),
    **columns: Any,
) -> None:
    """Print a table to standard output.

    Args:
      headings: one per column.
      rows: texts by column.
      spare: headings of columns that are left out, in this order, in a narrow terminal.
      columns: further arguments of `plain_table`.
    """
    target = console()
    shown = [*headings]
    texts = [[*row] for row in rows]
    table = plain_table(shown, texts, **columns)
    for heading in spare:
        if table.__rich_measure__(target, target.options).maximum <= target.width:
            break
        index = shown.index(heading)
        del shown[index]
        for row in texts:
            del row[index]
        table = plain_table(shown, texts, **columns)
    target.print(table)


def decimals(value: float | None, form: str = ".4f") -> str:
    """Return the formatted number; an empty text for None."""
    return "" if value is None else format(value, form)


def loss_text(value: float | None) -> str:
    """Return a loss in at most nine characters; an empty text for None.

    >>> loss_text(0.24341), loss_text(0.0000084), loss_text(41856957.4)
    ('0.2434', '8.40e-06', '4.19e+07')
    """
    if value is None:
        return ""
    usual = value == 0 or 1e-3 <= abs(value) < 1e4 or math.isnan(value)
    return f"{value:.4f}" if usual else f"{value:.2e}"


def console() -> "Console":
    """Return a console on standard output that cuts no line unless it is a terminal.

    Texts in square brackets are no markup: names of data may contain them.
    """
    from rich.console import Console

    width = None if sys.stdout.isatty() else _UNLIMITED
    return Console(width=width, highlight=False, markup=False)


def plain_table(
    headings: Iterable[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Collection[str] = (),
    **columns: Any,
) -> "Table":
    """Return a table without lines.

    Args:
      headings: one per column.
      rows: texts by column.
      left: headings of left-aligned columns; all others are right-aligned.
      columns: options of Rich for every column.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", **columns)
    for row in rows:
        table.add_row(*row)
    return table
