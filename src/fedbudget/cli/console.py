"""Console and tables of the commands: as wide as the terminal, unlimited elsewhere.

Rich is imported by the functions, so that commands without a table start fast.
"""

import sys
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_UNLIMITED = 1000  # columns, wider than any of the tables


def print_table(*arguments: Any, **columns: Any) -> None:
    """Print a table to standard output; arguments as of `plain_table`."""
    console().print(plain_table(*arguments, **columns))


def decimals(value: float | None, form: str = ".4f") -> str:
    """Return the formatted number; an empty text for None."""
    return "" if value is None else format(value, form)


def console() -> "Console":
    """Return a console on standard output that cuts no line unless it is a terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _UNLIMITED, highlight=False)


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
