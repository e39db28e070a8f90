"""Where commands print their tables: on a terminal as wide as that is, elsewhere with nothing cut or wrapped."""

import sys
from collections.abc import Collection, Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

_WIDE = 1000  # columns; no table of ours is as wide


def console() -> Console:
    """A console on standard output."""
    return Console(width=None if sys.stdout.isatty() else _WIDE)


def plain_table(
    headings: Iterable[str], *, left: Collection[str] = (), **columns: Any
) -> Table:
    """A table without lines, whose columns are aligned to the right but for those on the `left`."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", **columns)
    return table
