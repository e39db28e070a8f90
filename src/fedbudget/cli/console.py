"""Console and tables of the commands: as wide as the terminal, unlimited elsewhere."""

import sys
from collections.abc import Collection, Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

_UNLIMITED = 1000  # columns, wider than any of the tables


def console() -> Console:
    """Return a console on standard output that cuts no line unless it is a terminal."""
    return Console(width=None if sys.stdout.isatty() else _UNLIMITED)


def plain_table(
    headings: Iterable[str], *, left: Collection[str] = (), **columns: Any
) -> Table:
    """Return a table without lines.

    Args:
      headings: one per column.
      left: headings of left-aligned columns; all others are right-aligned.
      columns: options of Rich for every column.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", **columns)
    return table
